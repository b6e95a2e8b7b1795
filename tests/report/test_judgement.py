"""The verdict of a run and its next steps, from made-up numbers; commands are composed as Hydra composes them."""

import json
import math
import shlex
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_obs.__main__ import config_dir
from lightning_obs.app.main import refuse_unread
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.engines import Verdict
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.facts import LayerFacts, Report
from lightning_obs.report.judgement import judge, layer_losses
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.metrics import TensorError
from lightning_obs.report.predictions import Moved
from lightning_obs.schemes.config import resolve_config


def layer(name, sqnr, weight=40.0, read=40.0, high=1.0):
    read = TensorError(read, clipped=0.0, low=-1.0, high=high, bits=1.3)
    return LayerError(name, TensorError(weight), read, TensorError(sqnr))


def run(scheme="INT8_STATIC", words=("scheme=int8_static",), errors=None, **parts):
    """A run that two of twenty layers have spoilt, by single inputs of up to 2,571."""
    spoilt = [layer(f"layers.{i}.down_proj", 2.0, 40.0, 2.0, 2571.0) for i in (1, 11)]
    errors = [*spoilt, *(layer(f"layers.{i}.up_proj", 40.0) for i in range(18))] if errors is None else errors
    names = [error.name for error in errors]
    facts = LayerFacts("int8", 8, 8, "", "", 4 << 20, 1 << 20, 0, [], None)
    known = {
        "result": CalibrationResult(scheme, names, 2, 2, 2, 1.0, {}),
        "config": resolve_config(scheme, ignore=["lm_head"]),
        "layers": dict.fromkeys(names, facts),
        "metrics": {"perplexity": (14.80, 33.01)},
        "words": words,
    }
    return Report("a run", errors=errors, **{**known, **parts})


def test_the_cause_is_named_by_layers_kind_and_fault():
    counts = {"layers.11.down_proj": Support(torch.tensor([-2571.0, -0.5, 0.25, 1.0]), torch.tensor([1, 2, 3, 2]))}
    judgement = judge(run(counts=counts))
    assert judgement.grade == "broken"
    assert judgement.cause == (
        "2 of 20 layers hold 100 % of the noise: all down_proj. 100 % of it comes from their inputs: single values of "
        "up to 2,571 (half of all in that layer are below 0.5) stretch the scale that all values share, and their "
        "median layer uses 1.3 of its 8 bits."
    )


def test_the_cause_and_the_step_that_leaves_layers_out_speak_of_the_same_layers():
    poor = [layer(f"layers.{i}.down_proj", 12.0, 40.0, 2.0) for i in (1, 11)]
    errors = [*poor, layer("layers.3.v_proj", 14.0), *(layer(f"layers.3.{x}_proj", 30.0) for x in "qko")]
    errors += [layer(f"layers.{i}.up_proj", 17.0) for i in range(3)]
    report = run(errors=errors)
    report.result.fused = [[f"layers.3.{x}_proj" for x in "qkv"]]
    judgement = judge(report)
    assert judgement.cause.startswith(
        "5 of 9 layers hold 73 % of the noise: 2 down_proj, layers.3.v_proj, 2 fused with these. "
    )
    errors += [layer(f"layers.{i}.up_proj", 40.0) for i in range(3, 9)]
    without = next(step for step in judge(replace(report, errors=errors)).steps if step.key == "without")
    assert without.what == "Leave the 5 worst layers in full precision"
    assert without.why.startswith("removes 73 % of the noise")


def test_the_share_of_the_weights_is_named_where_they_make_most_of_the_noise():
    errors = [layer("layers.0.down_proj", 9.0, 10.0, 15.0), *(layer(f"layers.{i}.up_proj", 40.0) for i in range(9))]
    # 10 ** -1 of 10 ** -1 + 10 ** -1.5
    assert judge(run(errors=errors)).cause.endswith("% of the noise. 76 % of it comes from their weights.")


def test_noise_that_is_spread_over_layers_is_said_of_the_fewest_that_hold_four_fifths():
    errors = [layer(f"layers.{i}.{kind}", 18.0) for i in range(5) for kind in ("up_proj", "down_proj")]
    errors += [layer("layers.7.up_proj", 14.5), layer("layers.8.up_proj", 40.0)]
    assert judge(run(errors=errors)).cause.startswith("9 of 12 layers hold 84 % of the noise: 5 up_proj, 4 down_proj")


def test_remedies_are_ordered_by_what_they_bring_back(tmp_path):
    steps = judge(run(), tmp_path).steps
    assert [step.key for step in steps] == ["without", "dynamic", "observers"]
    assert [round(step.share, 2) for step in steps] == [1.0, 1.0, 0.66]
    assert steps[0].why == "removes 100 % of the noise, costs 6 MiB"
    assert steps[1].why.startswith("removes up to 100 % of the noise")
    assert f"ignore_from={tmp_path}/report.json" in steps[0].command


GOOD = {"metrics": {"perplexity": (14.80, 15.10)}, "moved": Moved(0.02, 0.95, 100)}


def test_a_good_run_without_a_checkpoint_is_told_to_write_one():
    judgement = judge(run(words=["scheme=fp8", "export=none"], **GOOD))
    assert (judgement.grade, judgement.cause) == ("good", "")
    assert [step.command for step in judgement.steps] == ["python -m lightning_obs scheme=fp8 export=checkpoint"]


@pytest.mark.parametrize(
    ("takes", "kind", "keys", "python"),
    [
        (("transformers", "vLLM"), "LlamaForCausalLM", ["serve", "load"], "transformers.LlamaForCausalLM"),
        (("transformers", "vLLM"), "BertModel", ["load"], "transformers.BertModel"),
        (("vLLM",), "LlamaForCausalLM", ["serve", "load"], "load_checkpoint"),
        ((), None, ["load"], "load_checkpoint"),
    ],
)
def test_a_good_run_is_told_what_takes_its_checkpoint(tmp_path, monkeypatch, takes, kind, keys, python):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a run").mkdir()
    if kind:
        (tmp_path / "a run/config.json").write_text(json.dumps({"architectures": [kind]}))
    report = run(checkpoint=tmp_path / "a run", **GOOD)
    report.result.engines = {name: Verdict(True, "CPU") for name in takes}
    steps = {step.key: step for step in judge(report).steps}
    assert list(steps) == keys
    assert python in steps["load"].python
    assert all(step.command == "vllm serve 'a run'" for key, step in steps.items() if key == "serve")


@pytest.mark.parametrize(
    ("parts", "grade"),
    [
        ({"metrics": {"perplexity": (10.0, 10.4)}}, "good"),
        ({"metrics": {"perplexity": (10.0, 12.0)}}, "usable"),
        ({"metrics": {"perplexity": (10.0, 14.0)}}, "broken"),
        ({"metrics": {"perplexity": (10.0, math.inf)}}, "broken"),
        ({"metrics": {"perplexity": (10.0, math.nan)}}, "broken"),
        ({"metrics": {"accuracy": (0.90, 0.895)}, "higher_is_better": True}, "good"),
        ({"metrics": {"accuracy": (0.90, 0.87)}}, "usable"),
        ({"metrics": {"val_loss": (2.0, 2.01)}}, "good"),
        ({"metrics": {"val_loss": (2.0, 3.0)}}, "broken"),
        ({"metrics": {"mine": (2.0, 3.0)}, "higher_is_better": False}, "broken"),
        ({"metrics": {"val_MSE": (0.15, 0.13)}}, "good"),
        ({"metrics": {"power": (0.15, 0.13)}}, "broken"),
        ({"metrics": {"perplexity": (10.0, 10.0)}, "moved": Moved(0.1, 0.95, 9)}, "usable"),
        ({"metrics": {"perplexity": (10.0, 10.0)}, "moved": Moved(0.01, 0.5, 9)}, "broken"),
        ({"metrics": {"perplexity": (10.0, 10.0)}, "moved": Moved(0.9, 0.5, 9), "was_trained": True}, "good"),
        ({"metrics": {}}, "not measured"),
    ],
)
def test_a_run_is_as_good_as_its_worst_sign(parts, grade):
    assert judge(run(**parts)).grade == grade


def test_layers_whose_error_is_not_known_or_not_finite_have_no_part_of_the_loss():
    errors = [layer("a", math.nan), replace(layer("b", 10.0), input=None), layer("c", -5.0), layer("d", math.inf)]
    losses = {one.name: one.loss for one in layer_losses(run(errors=errors))}
    assert losses == {"a": 0.0, "b": pytest.approx(0.1), "c": 1.0, "d": 0.0}


def test_inputs_in_full_precision_have_no_part_of_the_loss():
    error = replace(layer("a", 10.0, 12.0), input=None)
    facts = LayerFacts("int4", 4, None, "", "", 8, 2, 0, [], None)
    (loss,) = layer_losses(run(errors=[error], layers={"a": facts}))
    assert (loss.weight, loss.input) == (1.0, 0.0)


def test_a_plan_is_told_another_budget_and_never_to_leave_out_what_it_gave_few_bits():
    points = [("", 4.0, 2.0), ("chosen", 5.0, 1.0), ("", 5.4, 0.6)]
    frontier = [{"name": n, "bits_per_weight": b, "loss": loss} for n, b, loss in points]
    frontier[1]["mark"] = "chosen"
    names = [error.name for error in run().errors]
    report = run("W4A16", ["task=plan", "budget=5"], choices=dict.fromkeys(names, "int4"), frontier=frontier)
    steps = judge(report).steps
    assert [step.key for step in steps] == ["wider", "tuned"]
    assert steps[0].command == "python -m lightning_obs task=plan budget=5.50"
    assert steps[0].share == pytest.approx(0.4)


def test_a_choice_of_observers_is_trained_with_what_it_chose_and_told_what_its_formats_need():
    words, score = ["task=observers", "scheme=int8_static"], {"of": "input", "observer": "mse", "loss": 1, "tensors": 9}
    errors = [layer(f"layers.{i}.down_proj", 16.0, 40.0, 16.0) for i in range(9)]
    report = run("INT8_STATIC", words, errors, scores=[score])
    report.result.scheme = "int8 channel weights, int8 tensor inputs"
    steps = {step.key: step.command for step in judge(report, "out").steps}
    assert steps["dynamic"] == "python -m lightning_obs scheme=w8a8"
    assert steps["tuned"] == "python -m lightning_obs --config-dir=out/configs task=finetune scheme=observers"
    assert "observers" not in steps


WORDS = {
    "INT8_STATIC": ["scheme=int8_static", "observer=minmax", "observer.averaging_constant=0.05", "output_dir=out/a"],
    "INT8_STATIC_ASYM": ["scheme=int8_static_asym", "export.folder=out/b", "ignore_from=old/report.json"],
    "FP8": ["++trainer.accelerator=cpu", "data.batches=2"],
    "W4A16": ["scheme=w4a16", "group_size=64", "weight_observer=memoryless_mse"],
    "W4A8": ["experiment=qat_w4a8", "data.train_batches=2"],
}


@pytest.mark.parametrize("scheme", WORDS)
def test_every_proposed_command_composes_and_its_task_reads_it(scheme, tmp_path):
    folder = tmp_path / "a folder with 'quotes'"
    low = [layer(f"layers.{i}.down_proj", 2.0, 4.0, 3.0) for i in range(4)]
    errors = [*low, *(layer(f"layers.{i}.up_proj", 40.0) for i in range(18))]
    steps = judge(run(scheme, [*WORDS[scheme]], errors), folder).steps
    assert steps
    for step in steps:
        head, words = shlex.split(step.command)[:3], shlex.split(step.command)[3:]
        assert head == ["python", "-m", "lightning_obs"]
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            config = compose("config", overrides=words)
        refuse_unread(config.task, words)
        assert str(config.get("ignore_from")) in ("None", "old/report.json", str(folder / "report.json"))
        assert "out/a" not in words
        assert "export.folder=out/b" not in words


def test_training_is_the_last_step_and_a_trained_run_is_not_told_to_choose_observers_without_it():
    errors = [layer(f"layers.{i}.down_proj", 16.0, 18.0, 19.0) for i in range(9)]
    keys = [step.key for step in judge(run("W4A16", ["scheme=w4a16"], errors)).steps]
    assert keys == ["hessian", "tuned"]
    trained = judge(run(words=["task=finetune", "scheme=int8_static"], was_trained=True)).steps
    assert [step.key for step in trained] == ["without", "dynamic", "asym"]


def test_a_run_that_no_command_made_is_told_python_alone():
    steps = judge(run(words=None)).steps
    assert all(step.command is None and step.python for step in steps)
