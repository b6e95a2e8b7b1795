from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    linearize_experts,
)
from lightning_obs.moe.experts import fused_experts, hub_names, routers
from tests.support.moe_models import EXPERTS, HIDDEN, StackedBlock, StackedExperts, tiny_moe
from tests.support.versions import converted_weights

pytestmark = converted_weights

KINDS = ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3"]


@pytest.fixture
def tokens():
    return torch.randint(3, 128, (2, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_stay_those_of_the_eager_experts_to_the_bit(kind, tokens):
    model = tiny_moe(kind)
    with torch.no_grad():
        before = model(tokens).logits
        replaced = linearize_experts(model)
        after = model(tokens).logits
    assert replaced
    assert torch.equal(before, after)


def test_interleaved_transposed_experts_with_biases_stay_what_they_are_but_for_rounding(tokens):
    model = tiny_moe("gpt_oss")
    with torch.no_grad():
        before = model(tokens).logits
        assert linearize_experts(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_outputs_stay_those_of_other_implementations_but_for_rounding(implementation, tokens):
    model = tiny_moe("qwen3_moe", num_experts_per_tok=3)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        before = model(tokens).logits
        linearize_experts(model)
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_linearized_model_is_saved_under_the_names_of_the_hub(kind, tmp_path):
    model = tiny_moe(kind)
    model.save_pretrained(tmp_path / "stacked")  # transformers itself takes the stacks apart here
    linearize_experts(model)
    model.save_pretrained(tmp_path / "linear")
    expected = load_file(tmp_path / "stacked" / "model.safetensors")
    found = load_file(tmp_path / "linear" / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_dtype_requires_grad_and_mode_are_kept(dtype, training):
    model = StackedBlock().to(dtype).train(training)
    model.experts.down_proj.requires_grad_(False)
    linearize_experts(model)
    expert = model.experts.get_submodule("1")
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert expert.gate_proj.weight.requires_grad
    assert expert.up_proj.weight.requires_grad
    assert not expert.down_proj.weight.requires_grad
    assert all(module.training == training for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("mixtral", ["w1", "w3", "w2"]),
        ("nemotron_h", ["up_proj", "down_proj"]),
        ("gpt_oss", ["gate_proj", "up_proj", "down_proj"]),  # transformers knows no names
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_names_of_projections_are_those_of_transformers_own_mapping(kind, names, wrapped):
    model = tiny_moe(kind)
    found = hub_names(nn.ModuleDict({"model": nn.ModuleDict({"inner": model})}) if wrapped else model)
    assert list(found) == [f"model.inner.{name}" if wrapped else name for name in fused_experts(model)]
    assert [list(roles.values()) for roles in found.values()] == [names] * len(found)


def test_names_of_a_block_of_one_s_own_are_the_usual_ones():
    assert hub_names(StackedBlock()) == {"experts": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}}


@pytest.mark.filterwarnings("ignore:no token reached")
def test_experts_of_llama_4_compute_and_observe_the_tokens_that_they_are_sent(tokens):
    model = tiny_moe("llama4_text")
    with torch.no_grad():
        before = model(tokens).logits
        assert linearize_experts(model) == [f"model.layers.{i}.feed_forward.experts" for i in range(2)]
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    options = {"token_mask": "attention_mask", "on_missing": "siblings"}
    with CalibrationSession(model, "FP8", ignore=["re:.*router"], **options) as session:
        model(tokens, attention_mask=mask)
    assert [sum(counts) for counts in session.result.expert_tokens.values()] == [mask.sum(), mask.sum()]


def test_experts_of_llama_4_cannot_observe_tokens_of_others(tokens):
    model = tiny_moe("llama4_text")
    linearize_experts(model)
    with (
        pytest.raises(CalibrationError, match="already multiplied by the router's weight"),
        CalibrationSession(model, "FP8", ignore=["re:.*router"], calibrate_all_experts=True),
    ):
        model(tokens)


def test_linearizing_twice_is_fine():
    model = StackedBlock()
    assert linearize_experts(model) == ["experts"]
    before = dict(model.named_modules())
    assert linearize_experts(model) == []
    assert dict(model.named_modules()) == before


def test_experts_under_two_names_stay_one():
    model = nn.ModuleDict({"a": StackedBlock(), "b": StackedBlock()})
    model["b"].experts = model["a"].experts
    assert linearize_experts(model) == ["a.experts"]
    assert model["b"].experts is model["a"].experts
    assert fused_experts(model) == {}


def test_experts_alone_are_refused():
    with pytest.raises(CalibrationError, match=r"the model itself is the module of stacked experts\. Remedy: wrap it"):
        linearize_experts(StackedExperts())


def test_weights_are_copies_and_the_stack_is_gone():
    model = StackedBlock()
    stack = model.experts.gate_up_proj.detach().clone()
    linearize_experts(model)
    names = [f"experts.{i}.{p}.weight" for i in range(EXPERTS) for p in ("gate_proj", "up_proj", "down_proj")]
    assert sorted(model.state_dict()) == sorted(names)
    assert torch.equal(
        torch.cat([model.experts.get_submodule("2")._modules[p].weight for p in ("gate_proj", "up_proj")]), stack[2]
    )
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 3 * EXPERTS


def test_gradients_stay_what_they_are():
    model = StackedBlock()
    x, index = torch.randn(1, 8, HIDDEN), torch.arange(16).view(8, 2) % EXPERTS
    linear = copy.deepcopy(model)
    linearize_experts(linear)
    for each in (model, linear):
        each(x, index).square().sum().backward()
    experts = linear.experts.experts
    found = torch.stack([torch.cat([e.gate_proj.weight.grad, e.up_proj.weight.grad]) for e in experts])
    torch.testing.assert_close(found, model.experts.gate_up_proj.grad)
    found = torch.stack([e.down_proj.weight.grad for e in experts])
    torch.testing.assert_close(found, model.experts.down_proj.grad)


def test_a_copy_of_a_linearized_model_is_independent():
    model = StackedBlock()
    linearize_experts(model)
    other = copy.deepcopy(model)
    x, index = torch.randn(1, 4, HIDDEN), torch.zeros(4, 1, dtype=torch.long)
    before = model(x, index)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(model(x, index), before)


def test_no_random_number_is_drawn():
    model = StackedBlock()
    state = torch.get_rng_state()
    linearize_experts(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_index_past_the_last_expert_is_no_expert():
    model = StackedBlock()
    linearize_experts(model)
    index = torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS]])
    output = model(torch.randn(1, 2, HIDDEN), index)
    assert output[0, 0].any()
    assert not output[0, 1].any()


class Unknown(StackedExperts):
    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(EXPERTS, 1, 1))


class Deceptive(StackedExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


class Removing(StackedExperts):
    """Its outputs are finite although its projections give NaN, which the module removes."""

    def __init__(self):
        super().__init__()
        self.act_fn = NotANumber()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights).nan_to_num(1.0)


class NotANumber(nn.Module):
    def forward(self, value):
        return value * torch.nan


class Quantized(StackedExperts):
    def __init__(self):
        super().__init__()
        self.down_proj = nn.Parameter(self.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (Unknown, r"a layout that is not known: experts \(Unknown\).*scales.*`ignore`"),
        (Deceptive, r"do not compute what their parameters' names say: experts \(Deceptive\).*`ignore`"),
        (Removing, r"do not compute what their parameters' names say: experts \(Removing\).*`ignore`"),
        (Quantized, r"quantized, sharded or offloaded.*experts.down_proj.*load the model in full precision"),
    ],
)
def test_experts_that_cannot_be_taken_apart_are_refused_and_left(experts, message):
    model = StackedBlock()
    model.experts = experts()
    with pytest.raises(CalibrationError, match=message):
        linearize_experts(model)
    assert isinstance(model.experts, experts)
    assert list(fused_experts(model)) == ["experts"]


def test_routers_are_found():
    model = tiny_moe("deepseek_v3")
    linearize_experts(model)
    assert routers(model) == ["model.layers.1.mlp.gate"]
