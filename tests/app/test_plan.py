"""``task=plan``: schemes chosen by layer, calibrated, exported, and written for a later run."""

import json

import pytest
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError
from lightning_obs.app.data.module import TextData
from lightning_obs.app.main import run

W4 = "weights: {num_bits: 4, strategy: group, group_size: 32}"
SMALL = ("task=plan", "task.candidates.int4.scheme.weights.group_size=32", "task.batches=1", "task.frontier=4")


def test_a_plan_is_chosen_calibrated_exported_and_verified(composed, tmp_path, capsys, verified_here):
    row = run(composed(*SMALL, "budget=7"))
    output = capsys.readouterr().out
    assert "estimated divergence against size" in output
    assert "bits per weight, " in output
    assert "largest difference of logits 0.0" in output
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint").config.quantization_config
    assert len(config.quantization_config.config_groups) == 2
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["bits"] <= 7
    assert set(plan["schemes"].values()) == {"int4", "int8"}
    assert len(plan["frontier"]) > 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["frontier"][:-1] == plan["frontier"]
    marked = {point["mark"]: point for point in report["frontier"] if "mark" in point}
    assert (marked["chosen"]["loss"], marked["measured"]["loss"]) == (plan["loss"], report["divergence"])
    assert marked["full precision"]["bits_per_weight"] == 32
    counts = ", ".join(f"{count} {name}" for name, count in marked["chosen"]["modules"].items())
    assert report["title"].startswith(f"plan of {plan['bits']:.3f} bits per weight, {counts} \N{MIDDLE DOT} ")
    assert {layer["name"]: layer["choice"] for layer in report["layers"]} == plan["schemes"]
    assert all(layer["sensitivity"] > 0 for layer in report["layers"])
    assert row["perplexity"][0] != row["perplexity"][1]


@pytest.mark.slow
def test_a_later_run_takes_the_plan_from_its_file(composed, command_line, tmp_path):
    first = run(composed(*SMALL, "budget=7", "export=none"))
    again = command_line(
        f"--config-dir={tmp_path / 'run' / 'configs'}", "scheme=plan", "export=none", "output_dir=again"
    )
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "again" / "report.json").read_text())["perplexity"] == list(first["perplexity"])


def test_candidates_can_be_presets_with_a_limit(composed, tmp_path):
    presets = ("+task.candidates.static=INT8_STATIC", "+task.candidates.dynamic=W8A8", "+task.at_most.dynamic=0.2")
    others = ("~task.candidates.int4", "~task.candidates.int8", "budget=null", "task.batches=1")
    run(composed("task=plan", *others, *presets, "export=none", "evaluate=false"))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert set(plan["schemes"].values()) == {"static", "dynamic"}


def test_a_budget_that_nothing_fits_is_an_error(composed):
    with pytest.raises(CalibrationError, match="no choice of schemes fits the budget"):
        run(composed(*SMALL, "budget=3", "export=none", "evaluate=false"))


def test_several_devices_are_refused(composed):
    with pytest.raises(CalibrationError, match=r"task=plan runs on one device\. Got 2 devices"):
        run(composed(*SMALL, "trainer.devices=2", "trainer.strategy=ddp", "export=none", "evaluate=false"))


@pytest.mark.slow
def test_observers_are_chosen_calibrated_and_written_for_a_later_run(composed, command_line, tmp_path, capsys):
    candidates = "task.candidates={input: [minmax, histogram]}"
    first = run(composed("task=observers", "scheme=int8_static", candidates, "export=none"))
    title = json.loads((tmp_path / "run" / "report.json").read_text())["title"]
    assert title.startswith("INT8_STATIC with observers chosen by measurement \N{MIDDLE DOT} ")
    printed = capsys.readouterr().out
    assert "(chosen)" in printed
    assert "on the batch that was scored, too" in printed  # two batches: one is observed
    folder = f"--config-dir={tmp_path / 'run' / 'configs'}"
    again = command_line(folder, "scheme=observers", "export=none", "output_dir=again")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "again" / "report.json").read_text())["perplexity"] == list(first["perplexity"])


@pytest.mark.slow
def test_candidates_with_observers_and_rounding_are_planned_exported_and_taken_again(
    composed, command_line, tmp_path, capsys, verified_here
):
    scheme = f"scheme: {{{W4}}}"
    candidates = (
        f"+task.candidates.hessian={{{scheme}, observers: {{weight: {{name: hessian, signed: true}}}}}}",
        f"+task.candidates.rounded={{{scheme}, observers: {{weight: memoryless_mse}}, rounding: gptq}}",
        "+task.at_most={rounded: 0.4, int8: 0.2, int4: 0.0}",
    )
    first = run(composed(*SMALL, "budget=null", *candidates))
    output = capsys.readouterr().out
    assert "largest difference of logits 0.0" in output
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert set(plan["schemes"].values()) == {"hessian", "rounded", "int8"}
    assert all(name in output for name in ("hessian", "rounded"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {layer["name"]: layer["choice"] for layer in report["layers"]} == plan["schemes"]
    folder = f"--config-dir={tmp_path / 'run' / 'configs'}"
    again = command_line(folder, "scheme=plan", "export=none", "output_dir=again")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "again" / "report.json").read_text())["perplexity"] == list(first["perplexity"])


@pytest.mark.slow
def test_observers_with_rounding_are_chosen_and_exported(composed, capsys, verified_here):
    candidates = "task.candidates={weight: [imatrix_mse, {name: hessian, signed: true, rounding: gptq}]}"
    run(composed("task=observers", "scheme=w4a16", "group_size=32", candidates))
    output = capsys.readouterr().out
    assert "hessian(signed=True, rounding=gptq)" in output
    assert "largest difference of logits 0.0" in output


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("task=plan", "+task.candidates.x={scheme: NVFP4A16, rounding: gtpq}"), "rounding"),
        (("task=observers", "scheme=fp8", "task.candidates={weight: [{name: hessian, signed: true}]}"), "signed"),
    ],
)
def test_candidates_that_cannot_be_are_refused_before_data(composed, words, match, monkeypatch):
    monkeypatch.setattr(TextData, "val_dataloader", lambda self: pytest.fail("data were read"))
    with pytest.raises(CalibrationError, match=match):
        run(composed(*words, "export.engines=vllm", "evaluate=false"))
