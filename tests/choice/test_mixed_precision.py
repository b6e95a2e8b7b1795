"""One scheme for each layer, within a budget."""

import ctypes
import io
import itertools
import os
import random
import time

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from rich.console import Console
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    export_checkpoint,
    mixed_precision,
    quantized,
    sensitivity,
)
from lightning_obs.choice.mixed_precision import (
    budget_in_bytes,
    choose_schemes,
    config_of,
    frontier,
    plan_of,
)
from lightning_obs.choice.sensitivity import Group, Sensitivity
from lightning_obs.report.summary import frontier_table

INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
INT8 = {"weights": {"num_bits": 8, "strategy": "channel"}}


def table(groups, names=("a", "b", "c"), seed=0):
    """Random losses and sizes: the first scheme is the smallest."""
    generator = random.Random(seed)
    found = []
    for number in range(groups):
        weights = generator.randrange(100, 1000)
        losses = sorted((generator.expovariate(1e4) for _ in names), reverse=True)
        sizes = [weights * (place + 1) // 2 for place in range(len(names))]
        found.append(
            Group(
                (f"layer{number}",),
                weights,
                dict(zip(names, losses, strict=True)),
                dict(zip(names, sizes, strict=True)),
            )
        )
    return Sensitivity(found, {}, {}, [])


def test_the_solver_prints_nothing_and_what_was_printed_before_stays(capfd):
    generator, names = random.Random(28), ("a", "b", "c")  # this one it prints for
    groups = []
    for number in range(8):
        weights, loss = 576 * 576 * generator.choice([1, 3, 8, 85]), 10 ** generator.uniform(-6, 1)
        losses = {name: loss * 16**-place * generator.uniform(0.5, 1.5) for place, name in enumerate(names)}
        sizes = {name: int(weights * (4 + 4 * place) / 8 * 1.03) for place, name in enumerate(names)}
        groups.append(Group((str(number),), weights, losses, sizes))
    os.write(1, b"before\n")
    choose_schemes(Sensitivity(groups, {}, {name: {} for name in names}), 8)
    ctypes.CDLL(None).fflush(None)
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_within_the_budget_loses_less(seed):
    measured = table(6, seed=seed)
    budget = 6.0
    limit = budget_in_bytes(budget, measured.weights)
    plan = choose_schemes(measured, budget)
    assert plan.size <= limit
    every = (list(zip(measured.groups, choice, strict=True)) for choice in itertools.product("abc", repeat=6))
    fitting = (pairs for pairs in every if sum(g.sizes[s] for g, s in pairs) <= limit)
    best = min(sum(g.losses[s] for g, s in pairs) for pairs in fitting)
    assert plan.loss == pytest.approx(best, rel=1e-3)


def test_of_schemes_that_lose_alike_the_smaller_is_taken():
    measured = Sensitivity([Group(("x",), 10, {"a": 0.0, "b": 0.0}, {"a": 20, "b": 10})], {}, {}, [])
    assert choose_schemes(measured).schemes == {"x": "b"}


def test_without_a_budget_every_layer_gets_what_loses_least():
    assert set(choose_schemes(table(5)).schemes.values()) == {"c"}


def test_a_scheme_gets_at_most_its_share_of_the_weights():
    measured = table(40)
    plan = choose_schemes(measured, at_most={"c": 0.1})
    by_name = {group.names[0]: group.weights for group in measured.groups}
    share = sum(by_name[name] for name, scheme in plan.schemes.items() if scheme == "c") / measured.weights
    assert 0.05 < share <= 0.1
    assert "a" not in plan.schemes.values()


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_would():
    with pytest.raises(
        CalibrationError, match=r"no choice of schemes fits the budget\. Got budget 3\.0, expected at le"
    ):
        choose_schemes(table(5), 3.0)


@pytest.mark.parametrize("budget", ["4.5 bits", "many", "", -1, 0, "5 PB"])
def test_a_budget_that_cannot_be_read_is_refused(budget):
    with pytest.raises(CalibrationError, match=r"budget\. Got .*, expected bits per weight"):
        choose_schemes(table(2), budget)


def test_shares_of_what_is_no_candidate_or_no_share_are_refused():
    with pytest.raises(CalibrationError, match="at_most names no candidate: d"):
        choose_schemes(table(2), at_most={"d": 0.5})
    with pytest.raises(CalibrationError, match=r"at_most takes shares of the weights, 0 to 1: a \(1\.5\)"):
        choose_schemes(table(2), at_most={"a": 1.5})


def test_the_frontier_loses_less_the_more_it_may_take():
    plans = frontier(table(30), points=12)
    assert len(plans) > 6
    assert [p.bits for p in plans] == sorted(p.bits for p in plans)
    assert [p.loss for p in plans] == sorted((p.loss for p in plans), reverse=True)
    assert plans[0].counts == {"a": 30}
    assert plans[-1].counts == {"c": 30}
    assert [plan.row()["modules"] for plan in plans] == [plan.counts for plan in plans]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(frontier_table(plans))
    assert f"{plans[3].bits:.3f}" in console.export_text()


def test_no_uniform_scheme_of_the_same_size_loses_less():
    measured = table(30)
    for name in "abc":
        same = plan_of(measured, name)
        assert choose_schemes(measured, same.bits + 1e-9).loss <= same.loss * (1 + 1e-4)


def test_a_plan_can_be_given_and_is_checked():
    measured = table(3)
    schemes = {"layer0": "a", "layer1": "b", "layer2": "a"}
    assert plan_of(measured, schemes).schemes == schemes
    with pytest.raises(CalibrationError, match=r"no scheme for modules: layer2\. Got None, expected one of a, b, c"):
        plan_of(measured, {"layer0": "a", "layer1": "b"})
    with pytest.raises(CalibrationError, match=r"no scheme for modules: layer0\. Got 'd'"):
        plan_of(measured, "d")


def test_a_numbered_label_is_not_the_label_of_another_group():
    schemes = [QuantizationScheme(targets=[], weights=QuantizationArgs(num_bits=bits)) for bits in (4, 6, 8)]
    names = dict(zip(["m0", "m1", "m2"], zip(["a", "a", "a_1"], schemes, strict=True), strict=True))
    config = config_of(names, [])
    assert {scheme.targets[0]: scheme.weights.num_bits for scheme in config.config_groups.values()} == {
        "m0": 4,
        "m1": 6,
        "m2": 8,
    }


def test_a_plan_for_210_layers_and_4_schemes_takes_less_than_two_seconds():
    measured = table(210, names=("a", "b", "c", "d"))
    started = time.process_time()
    choose_schemes(measured, 8.3, at_most={"b": 0.4})
    assert time.process_time() - started < 2


# ---------------------------------------------------------------------- on a model


@pytest.fixture
def mixed(tiny_llama, batches):
    """A tiny Llama and a plan that gives its layers two schemes and full precision."""
    model = tiny_llama()
    candidates = {"int4": INT4, "static": "INT8_STATIC", "none": None}
    return model, sensitivity(model, batches, candidates, ignore=["lm_head"])


def test_the_plan_calibrates_exports_and_loads_back(mixed, batches, tmp_path):
    model, measured = mixed
    plan = choose_schemes(measured, 12.0, at_most={"static": 0.5})
    assert set(plan.counts) == {"int4", "static", "none"}
    with CalibrationSession(model, plan.config) as session, torch.no_grad():
        for batch in batches:
            model(**batch)
    assert set(session.result.modules) == {name for name, scheme in plan.schemes.items() if scheme != "none"}
    folder = export_checkpoint(model, tmp_path / "mixed")
    with torch.no_grad(), quantized(model):
        expected = model(**batches[0]).logits
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(**batches[0]).logits, expected)


def test_a_plan_with_other_observers_and_rounding_by_layer_loads_back(tiny_llama, batches, tmp_path):
    model, signed = tiny_llama(), {"name": "local_hessian", "signed": True}
    candidates = {
        "nearest": {"scheme": INT4, "observers": {"weight": signed}},
        "rounded": {"scheme": INT4, "observers": {"weight": "memoryless_mse"}, "rounding": "gptq"},
        "in order": {"scheme": INT4, "rounding": {"name": "gptq", "act_order": False}},
        "int8": INT8,
    }
    shares = {"rounded": 0.3, "in order": 0.3, "int8": 0.3}
    measured = sensitivity(model, batches, candidates, ignore=["lm_head"])
    plan = choose_schemes(measured, at_most=shares)
    assert set(plan.counts) == set(candidates)
    assert QuantizationConfig.model_validate_json(plan.config.model_dump_json()) == plan.config
    with CalibrationSession(model, plan.config) as session, torch.no_grad():
        for batch in batches:
            model(**batch)
    rounded = {name for name, scheme in plan.schemes.items() if scheme in ("rounded", "in order")}
    assert {name for name, module in model.named_modules() if hasattr(module, "weight_rounded")} == rounded
    assert {name for (name, _), observer in session.observers.items() if observer.rounding} == rounded
    folder = export_checkpoint(model, tmp_path / "mixed")
    with torch.no_grad(), quantized(model):
        expected = model(**batches[0]).logits
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(**batches[0]).logits, expected)


def test_modules_that_are_fused_have_one_scheme_at_every_budget(mixed):
    _, measured = mixed
    for plan in frontier(measured):
        for layer in ("model.layers.0.", "model.layers.1."):
            for members in (
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ("mlp.gate_proj", "mlp.up_proj"),
            ):
                assert len({plan.schemes[layer + member] for member in members}) == 1


def test_the_size_of_the_plan_is_that_of_the_checkpoint(mixed, batches, tmp_path):
    model, measured = mixed
    plan = choose_schemes(measured, 12.0, at_most={"static": 0.5})
    with CalibrationSession(model, plan.config), torch.no_grad():
        model(**batches[0])
    folder = export_checkpoint(model, tmp_path / "mixed")
    with safe_open(folder / "model.safetensors", "pt") as file:
        planned = [key for key in file.keys() if key.rpartition(".")[0] in plan.schemes]  # noqa: SIM118
        assert plan.size == sum(file.get_tensor(key).nbytes for key in planned)


def test_the_config_survives_a_file(mixed):
    _, measured = mixed
    config = choose_schemes(measured, 12.0, at_most={"static": 0.5}).config
    assert QuantizationConfig.model_validate_json(config.model_dump_json()) == config


def test_one_call_gives_a_config(tiny_llama, batches):
    model = tiny_llama()
    config = mixed_precision(model, batches, {"int4": INT4, "int8": INT8}, 6.0, ignore=["lm_head"])
    assert set(config.config_groups) == {"int4", "int8"}
    assert config.ignore == ["lm_head"]
    with CalibrationSession(model, config) as session:
        pass
    assert len(session.result.modules) == 14


def test_without_data_weights_decide(tiny_llama):
    config = mixed_precision(tiny_llama(), None, {"int4": INT4, "int8": INT8}, 6.0, ignore=["lm_head"])
    assert set(config.config_groups) == {"int4", "int8"}


def test_a_candidate_with_several_groups_of_its_own_stays_so():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    two = {"a": {**INT4, "targets": ["0"]}, "b": {**INT8, "targets": ["1"]}}
    measured = sensitivity(model, None, {"two": two, "int8": {"all": {**INT8, "targets": ["Linear"]}}})
    config = plan_of(measured, "two").config
    assert {name: group.targets for name, group in config.config_groups.items()} == {"two_0": ["0"], "two_1": ["1"]}
    assert config.ignore == ["2"]


def test_what_one_candidate_ignores_another_may_quantize():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    some = {"config_groups": {"g": {**INT4, "targets": ["Linear"]}}, "ignore": ["0"]}
    measured = sensitivity(model, None, {"some": some, "int8": {"all": {**INT8, "targets": ["Linear"]}}})
    config = plan_of(measured, {"0": "int8", "1": "some"}).config
    with CalibrationSession(model, config) as session:
        pass
    assert sorted(session.result.modules) == ["0", "1"]


def test_nothing_to_quantize_is_an_error():
    model = nn.Sequential(nn.Linear(32, 8))
    with pytest.raises(CalibrationError, match="every module is best left in full precision"):
        mixed_precision(model, [torch.randn(4, 32)], {"int4": INT4, "none": None})


INT4 = {"weights": {"num_bits": 4, "group_size": 32}}
INT8 = {"weights": {"num_bits": 8, "group_size": 32}}


def test_a_plan_keeps_to_what_all_engines_take(tiny_llama, batches):
    model, ids = tiny_llama(), [batches[0]]
    schemes = {"int4": INT4, "int8": INT8, "channel": {"weights": {"num_bits": 8, "strategy": "channel"}}}
    free = mixed_precision(model, ids, schemes, budget=6.5, ignore="lm_head")
    assert len(free.config_groups) > 1
    with pytest.warns(CalibrationWarning, match=r"channel is not a candidate: llama\.cpp.* nothing that loads"):
        kept = mixed_precision(
            model, ids, {**schemes, "none": None}, budget=6.5, ignore="lm_head", engines=["vllm", "llama.cpp"]
        )
    (group,) = kept.config_groups.values()  # one scheme is all that llama.cpp reads
    assert group.weights.num_bits in (4, 8)
    verdicts = CalibrationSession(model, kept, engines=["vllm", "llama.cpp"]).engines
    assert verdicts["vLLM"].loads
    assert verdicts["llama.cpp"].loads
    with pytest.raises(CalibrationError, match=r"llama\.cpp's converter"):
        CalibrationSession(model, free, engines="llama.cpp")


def test_candidates_of_which_no_engine_takes_one_are_refused(tiny_llama, batches):
    with (
        pytest.warns(CalibrationWarning, match="int8 is not a candidate"),
        pytest.raises(CalibrationError, match="no candidate is taken by all engines"),
    ):
        mixed_precision(tiny_llama(), [batches[0]], {"int8": "INT8_STATIC"}, ignore="lm_head", engines="llama.cpp")
    with pytest.raises(CalibrationError, match=r"engines\. Got 'vlm' \(did you mean `vllm`\?\)"):
        mixed_precision(tiny_llama(), [batches[0]], {"int8": "W8A8"}, ignore="lm_head", engines="vlm")
