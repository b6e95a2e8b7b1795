"""Experts observe the tokens that the router sends them; those without tokens borrow ranges."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, CalibrationWarning, Observer, linearize_experts
from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.moe.experts import expert_containers
from lightning_obs.observers.min_max import MemorylessMinMaxObserver, StaticMinMaxObserver
from lightning_obs.observers.statistic import Statistic
from lightning_obs.report.facts import Report
from lightning_obs.report.summary import summary

#: expert 3 gets no token, expert 2 one
from tests.calibration.expert_blocks import BLOCKS, INDEX, assert_ranges, linear_block, list_block, routed
from tests.support.moe_models import EXPERTS, HIDDEN, by_hand, tiny_moe
from tests.support.versions import converted_weights

# ---------------------------------------------------------------------- the watch over experts


def test_experts_that_are_the_whole_model_are_quantized_together():
    session = CalibrationSession(linear_block().experts, "FP8_DYNAMIC")
    assert session.observation.inseparable[-1] == [target.name for target in session.plan.targets]


@pytest.mark.filterwarnings("ignore:.*no data reached")
def test_calls_are_not_kept_that_nobody_will_check(x):
    block = list_block()
    with CalibrationSession(block, "INT8_STATIC", on_missing="warn") as session:
        block(x, INDEX)
    assert session.observation.experts._faults_of_calls == {"experts": []}


def test_no_more_than_the_limit_waits_and_a_shared_activation_counts_once(monkeypatch):
    block = linear_block()
    watch = ExpertWatch(block, expert_containers(block))
    value = torch.empty(4, HIDDEN, device="meta")
    monkeypatch.setattr("lightning_obs.calibration.expert_tokens._MOST_WAITING_BYTES", 2 * value.nbytes)
    observed = []
    monkeypatch.setattr("lightning_obs.calibration.expert_tokens._observe_together", observed.extend)
    waiting = []
    for expert in range(EXPERTS):
        measured = {}
        for projection in ("gate_proj", "up_proj"):
            observer = StaticMinMaxObserver("input", QuantizationArgs())
            watch.wait(f"experts.{expert}.{projection}", [observer], value.clone(), None, measured)
        waiting.append((watch._waiting_bytes // value.nbytes, len(observed)))
    assert waiting == [(1, 0), (2, 0), (1, 4), (2, 4)]


# ---------------------------------------------------------------------- what the router sends


@BLOCKS
def test_an_expert_observes_the_tokens_that_it_gets(make, x):
    block = make()
    with (
        pytest.warns(CalibrationWarning, match="no data reached"),
        CalibrationSession(block, "INT8_STATIC", on_missing="warn") as session,
    ):
        block(x, INDEX)
    if make is linear_block:  # engines take a layer's experts as a whole
        assert session.result.skipped == sorted(t.name for t in session.plan.targets)
    for expert in (0, 1, 2):
        assert_ranges(session.result.input_ranges, block, expert, x.flatten(0, 1)[routed(INDEX, expert)])


@BLOCKS
def test_tokens_are_counted_as_the_router_sent_them(make, x):
    block = make()
    with (
        pytest.warns(CalibrationWarning, match="no token reached"),
        CalibrationSession(block, "INT8_STATIC", on_missing="siblings") as session,
    ):
        block(torch.cat([x, x]), torch.cat([INDEX, INDEX]))
    assert session.result.expert_tokens == {"experts": [14, 16, 2, 0]}


@converted_weights
def test_counts_are_those_of_transformers_own_router():
    model = tiny_moe("qwen3_moe")
    linearize_experts(model)
    sent = {f"model.layers.{n}.mlp.experts": torch.zeros(EXPERTS, dtype=torch.long) for n in (0, 1)}
    for name, counts in sent.items():
        gate = model.get_submodule(name.removesuffix("experts") + "gate")

        def count(module, args, output, counts=counts):
            counts += torch.bincount(output[2].flatten(), minlength=EXPERTS)

        gate.register_forward_hook(count)
    session = CalibrationSession(model, "FP8", ignore=["lm_head"], engines="unchecked", on_missing="siblings")
    with session:
        for _ in range(2):
            model(torch.randint(3, 128, (2, 16)))
    assert session.result.expert_tokens == {name: counts.tolist() for name, counts in sent.items()}


# ---------------------------------------------------------------------- padding

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def test_padding_is_kept_out_of_what_an_expert_observes_and_counts(x):
    block = linear_block()
    index = torch.arange(16).view(8, 2) % EXPERTS
    x[MASK == 0] *= 100
    with CalibrationSession(block, "INT8_STATIC", token_mask="attention_mask") as session:
        block(x, index, attention_mask=MASK)
    real = MASK.flatten().bool()
    for expert in range(EXPERTS):
        chosen = routed(index, expert) & real
        assert_ranges(session.result.input_ranges, block, expert, x.flatten(0, 1)[chosen])
        assert session.result.expert_tokens["experts"][expert] == int(chosen.sum())


def test_padding_of_tokens_that_a_foreign_block_selects_cannot_be_told(x):
    block = list_block()
    with (
        pytest.raises(CalibrationError, match=r"which rows are padding cannot be told.*experts\.0\.gate_proj"),
        CalibrationSession(block, "INT8_STATIC", token_mask="attention_mask"),
    ):
        block(x, INDEX, attention_mask=MASK)


@BLOCKS
def test_padding_is_kept_out_of_all_experts(make, x):
    block = make()
    x[MASK == 0] *= 100
    with CalibrationSession(block, "INT8_STATIC", token_mask="attention_mask", calibrate_all_experts=True) as session:
        block(x, INDEX, attention_mask=MASK)
    for expert in range(EXPERTS):
        assert_ranges(session.result.input_ranges, block, expert, x[MASK == 1])


def test_a_mask_of_another_size_than_the_layer_s_tokens_is_refused(x):
    block = linear_block()
    with (
        pytest.raises(CalibrationError, match="which rows are padding cannot be told"),
        CalibrationSession(block, "INT8_STATIC", token_mask="attention_mask"),
    ):
        block(x, INDEX, attention_mask=MASK[:, :3])


# ---------------------------------------------------------------------- experts without tokens


@BLOCKS
def test_an_expert_without_tokens_takes_the_union_of_its_siblings_ranges(make, x):
    block = make()
    with (
        pytest.warns(CalibrationWarning, match=r"no token reached these modules.*experts\.3\.down_proj"),
        CalibrationSession(block, "INT8_STATIC", on_missing="siblings") as session,
    ):
        block(x, INDEX)
    result = session.result
    assert result.fallback == [f"experts.3.{p}_proj" for p in ("down", "gate", "up")]
    assert not result.skipped
    for projection in ("gate_proj", "down_proj"):
        ranges = [by_hand(block, expert, x.flatten(0, 1)[routed(INDEX, expert)])[projection] for expert in (0, 1, 2)]
        low, high = min(0.0, *(r[0] for r in ranges)), max(0.0, *(r[1] for r in ranges))
        found = block.experts.get_submodule("3")._modules[projection]
        assert found.input_scale.item() == pytest.approx(max(-low, high) / 127.5, rel=1e-5)
        torch.testing.assert_close(found.weight_scale.flatten(), found.weight.abs().amax(1) / 127.5)


def test_borrowed_global_scales_are_one_for_gate_and_up(x):
    block = linear_block().to(torch.bfloat16)
    with (
        pytest.warns(CalibrationWarning, match="no token reached"),
        CalibrationSession(block, "NVFP4", on_missing="siblings"),
    ):
        block(x.to(torch.bfloat16), INDEX)
    for expert in block.experts.experts:
        assert torch.equal(expert.gate_proj.input_global_scale, expert.up_proj.input_global_scale)
        assert torch.equal(expert.gate_proj.weight_global_scale, expert.up_proj.weight_global_scale)
    narrowest = min(e.gate_proj.input_global_scale for e in block.experts.experts[:3])  # a divisor: the widest range
    assert torch.equal(block.experts.experts[3].gate_proj.input_global_scale, narrowest)


def test_gate_and_up_of_one_expert_share_global_scales_and_experts_do_not(x):
    block = linear_block().to(torch.bfloat16)
    index = torch.arange(16).view(8, 2) % EXPERTS
    with CalibrationSession(block, "NVFP4"):
        block(x.to(torch.bfloat16), index)
    for kind in ("input_global_scale", "weight_global_scale"):
        gates = [getattr(e.gate_proj, kind).item() for e in block.experts.experts]
        assert gates == [getattr(e.up_proj, kind).item() for e in block.experts.experts]
        assert len(set(gates)) > 1
    widest = max(
        block.experts.experts[0].gate_proj.weight.abs().max(), block.experts.experts[0].up_proj.weight.abs().max()
    )
    assert block.experts.experts[0].gate_proj.weight_global_scale.item() == pytest.approx(
        6 * 448 / widest.item(), rel=1e-2
    )


def test_siblings_that_saw_nothing_either_are_an_error(x):
    block = linear_block()
    model = nn.ModuleDict({"block": block, "head": nn.Linear(HIDDEN, 4)})
    with (
        pytest.raises(CalibrationError, match=r"no data reached 12 of 13 observers.*calibrate_all_experts=True"),
        CalibrationSession(model, "INT8_STATIC", on_missing="siblings"),
    ):
        model["head"](x)


def test_what_is_no_expert_has_no_siblings(x):
    block = linear_block()
    model = nn.ModuleDict({"block": block, "head": nn.Linear(HIDDEN, 4)})
    with (
        pytest.raises(CalibrationError, match=r"no data reached 1 of 13 observers: head \(input\)"),
        CalibrationSession(model, "INT8_STATIC", on_missing="siblings"),
    ):
        block(x, torch.arange(16).view(8, 2) % EXPERTS)


def test_a_weight_whose_observer_wants_inputs_goes_without_them(x, own_registry):
    @Observer.register("wanting")
    class Wanting(MemorylessMinMaxObserver):
        statistics = (*MemorylessMinMaxObserver.statistics, Statistic("seen", of_inputs=True))

        def observe_inputs(self, value, measured=None):
            self.seen = True

    block = linear_block()
    scheme = {"weights": QuantizationArgs(num_bits=8, strategy="channel").model_dump()}
    with (
        pytest.warns(CalibrationWarning, match="no token reached"),
        CalibrationSession(block, scheme, observers={"weight": "wanting"}, on_missing="siblings") as session,
    ):
        block(x, INDEX)
    assert session.result.fallback == [f"experts.3.{p}_proj" for p in ("down", "gate", "up")]
    weight = block.experts.get_submodule("3").up_proj
    torch.testing.assert_close(weight.weight_scale.flatten(), weight.weight.abs().amax(1) / 127.5)


@pytest.mark.parametrize("name", ["local_hessian", "hessian"])
def test_the_hessian_of_an_expert_is_of_the_tokens_that_it_gets(x, name):
    block = linear_block()
    scheme = {"weights": {"num_bits": 4, "strategy": "channel", "observer": name}}
    with (
        pytest.warns(CalibrationWarning, match="no token reached"),
        CalibrationSession(block, scheme, on_missing="siblings") as session,
    ):
        block(x, INDEX)
    for expert in (0, 1, 2):
        observer = session.observers[f"experts.{expert}.up_proj", "weight"]
        seen = x.flatten(0, 1)[routed(INDEX, expert)]
        torch.testing.assert_close(observer.input_hessian.reshape(HIDDEN, HIDDEN), seen.T @ seen)
        assert observer.input_count.item() == len(seen)
    assert session.result.fallback == [f"experts.3.{p}_proj" for p in ("down", "gate", "up")]


def test_borrowing_does_not_outlast_the_calibration(x):
    block = linear_block()
    session = CalibrationSession(block, "INT8_STATIC", on_missing="siblings")
    with pytest.warns(CalibrationWarning, match="no token reached"), session:
        block(x, INDEX)
    borrowed = block.experts.get_submodule("3").up_proj.input_scale.clone()
    with session:
        block(x / 100, torch.full((8, 1), 3))
        block(x / 100, INDEX)
    assert session.result.fallback == []
    assert block.experts.get_submodule("3").up_proj.input_scale < borrowed / 50


def test_the_report_says_how_many_tokens_experts_got(x):
    from rich.console import Console

    block = linear_block()
    with pytest.warns(CalibrationWarning), CalibrationSession(block, "INT8_STATIC", on_missing="siblings") as session:
        block(x, INDEX)
    console = Console(width=200, record=True)
    console.print(summary(Report("", session.result)))
    text = console.export_text()
    assert "tokens per expert: 0 to 8, median 1; 1 of 4 experts got none: experts.3" in text
    assert "with the activations' range of their siblings: experts.3.down_proj" in text


# ---------------------------------------------------------------------- fused sets of the user's


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.alone = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        with torch.no_grad():
            self.right.weight.mul_(10)

    def forward(self, x):
        return self.left(x) + self.right(3 * x) + self.alone(x)


def test_a_fused_set_of_one_s_own_shares_global_scales(x):
    model = Pair().to(torch.bfloat16)
    with CalibrationSession(model, "NVFP4", fused_sets=[["left", "right", "missing"]]):
        model(x.to(torch.bfloat16))
    for kind in ("input_global_scale", "weight_global_scale"):
        assert getattr(model.left, kind) == getattr(model.right, kind)
        assert getattr(model.left, kind) != getattr(model.alone, kind)


def test_a_fused_set_of_one_s_own_with_two_schemes_is_refused():
    groups = {
        "a": {"targets": ["left"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "b": {"targets": ["right"], "weights": {"num_bits": 4, "strategy": "channel"}},
    }
    CalibrationSession(Pair(), {"config_groups": groups})
    with pytest.raises(CalibrationError, match=r"different schemes: left, right"):
        CalibrationSession(Pair(), {"config_groups": groups}, fused_sets=[["left", "right"]])
