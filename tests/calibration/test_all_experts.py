"""With ``calibrate_all_experts`` every expert observes all tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, Observer, linearize_experts
from lightning_obs.observers.min_max import StaticMinMaxObserver

#: expert 3 gets no token, expert 2 one
from tests.calibration.expert_blocks import BLOCKS, INDEX, assert_ranges
from tests.support.moe_models import EXPERTS, HIDDEN, GatedMLP, ListBlock, tiny_moe
from tests.support.versions import converted_weights

pytestmark = converted_weights


@BLOCKS
def test_every_expert_observes_all_tokens(make, x):
    block = make()
    with CalibrationSession(block, "INT8_STATIC", calibrate_all_experts=True) as session:
        block(x, INDEX)
        block(x + 1, INDEX)
    seen = torch.cat([x, x + 1]).flatten(0, 1)
    for expert in range(EXPERTS):
        assert_ranges(session.result.input_ranges, block, expert, seen)
    assert session.result.expert_tokens == {"experts": [14, 16, 2, 0]}


@BLOCKS
def test_outputs_and_random_numbers_stay_what_they_are(make, x):
    block = make().train()  # the ModuleList's experts have dropout
    torch.manual_seed(5)
    expected = block(x, INDEX)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with CalibrationSession(block, "INT8_STATIC", calibrate_all_experts=True):
        found = block(x, INDEX)
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


@BLOCKS
def test_gradients_flow_as_before(make, x):
    block = make()
    expected = torch.autograd.grad(block(x, INDEX).sum(), block.experts.get_submodule("0").down_proj.weight)[0]
    with CalibrationSession(block, "INT8_STATIC", calibrate_all_experts=True):
        found = torch.autograd.grad(block(x, INDEX).sum(), block.experts.get_submodule("0").down_proj.weight)[0]
    assert torch.equal(found, expected)


@BLOCKS
def test_no_token_is_observed_twice(make, x, own_registry):
    @Observer.register("counting")
    class Counting(StaticMinMaxObserver):
        def update_statistics_from_observed(self, observed):
            self.seen = getattr(self, "seen", 0) + len(observed)
            super().update_statistics_from_observed(observed)

    block = make()
    session = CalibrationSession(block, "INT8_STATIC", observers={"input": "counting"}, calibrate_all_experts=True)
    with session:
        block(x, INDEX)
    seen = {name: o.seen for (name, base), o in session.observers.items() if base == "input"}
    assert seen == dict.fromkeys(seen, 8)
    assert len(seen) == 3 * EXPERTS


@BLOCKS
def test_no_hook_is_left(make, x):
    block = make()
    with CalibrationSession(block, "INT8_STATIC", calibrate_all_experts=True):
        block(x, INDEX)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())


def test_transformers_own_models_can_show_all_tokens_to_all_experts():
    model = tiny_moe("mixtral")
    linearize_experts(model)
    tokens, seen = torch.randint(3, 128, (2, 16)), []
    experts = model.model.layers[1].mlp.experts
    handle = experts.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    with torch.no_grad():
        before = model(tokens).logits
    handle.remove()
    with (
        CalibrationSession(
            model, "INT8_STATIC", ignore=["lm_head"], engines="unchecked", calibrate_all_experts=True
        ) as session,
        torch.inference_mode(),
    ):
        assert torch.equal(model(tokens).logits, before)
    for expert in range(EXPERTS):
        found = session.result.input_ranges[f"model.layers.1.mlp.experts.{expert}.w3"]
        assert found == (seen[0].min().item(), seen[0].max().item())


class WithContext(ListBlock):
    def forward(self, x, index):
        return sum(expert(x, context=x) for expert in self.experts)


class TakesContext(GatedMLP):
    def forward(self, x, context):
        return super().forward(x + context)


class Elsewhere(nn.Module):
    """Calls experts that another module holds."""

    def __init__(self):
        super().__init__()
        self.block = ListBlock()

    def forward(self, x, index):
        self.block(x, index * 0 + EXPERTS)
        return self.block.experts[0](x)


def test_experts_that_take_more_than_their_tokens_cannot_be_run_on_all(x):
    block = WithContext()
    block.experts = nn.ModuleList(TakesContext() for _ in range(EXPERTS))
    with (
        pytest.raises(CalibrationError, match=r"cannot run these experts.*: experts\. Got expert 0 called with 2 arg"),
        CalibrationSession(block, "INT8_STATIC", calibrate_all_experts=True),
    ):
        block(x, INDEX)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())


def test_experts_that_their_parent_does_not_call_cannot_be_run_on_all(x):
    model = Elsewhere()
    with (
        pytest.raises(CalibrationError, match=r"block\.experts\. Got ListBlock ran without calling any of them"),
        CalibrationSession(model, "INT8_STATIC", calibrate_all_experts=True),
    ):
        model(x, INDEX)


def test_experts_of_another_width_than_the_layer_cannot_be_run_on_all(x):
    class Narrow(ListBlock):
        def forward(self, x, index):
            return super().forward(x[..., :HIDDEN], index)

    block = Narrow()
    with (
        pytest.raises(CalibrationError, match=r"cannot run these experts.*expert 0 on \(8, 64\)"),
        CalibrationSession(block, "INT8_STATIC", calibrate_all_experts=True),
    ):
        block(torch.cat([x, x], -1), INDEX)


def test_all_experts_of_a_model_without_experts_is_refused(mlp):
    with pytest.raises(CalibrationError, match=r"no experts were found.*Remedy: leave calibrate_all_experts out"):
        CalibrationSession(mlp, "INT8_STATIC", calibrate_all_experts=True)
