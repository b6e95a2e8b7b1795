"""``task=plan``: schemes chosen by layer, calibrated, exported, and written for a later run."""

import json

import pytest
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError
from lightning_obs.app.main import run

SMALL = ("task=plan", "task.candidates.int4.weights.group_size=32", "task.batches=1", "task.frontier=4")


def test_a_plan_is_chosen_calibrated_exported_and_verified(composed, tmp_path, capsys, verified_here):
    row = run(composed(*SMALL, "budget=7"))
    output = capsys.readouterr().out
    assert "estimated divergence against size" in output
    assert "bits per weight (" in output
    assert "largest difference of logits 0.0" in output
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint").config.quantization_config
    assert len(config.quantization_config.config_groups) == 2
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["bits"] <= 7
    assert set(plan["schemes"].values()) == {"int4", "int8"}
    assert len(plan["frontier"]) > 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["frontier"] == plan["frontier"]
    assert {layer["name"]: layer["choice"] for layer in report["layers"]} == plan["schemes"]
    assert all(layer["sensitivity"] > 0 for layer in report["layers"])
    assert row["perplexity"][0] != row["perplexity"][1]


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


def test_observers_are_chosen_calibrated_and_written_for_a_later_run(composed, command_line, tmp_path, capsys):
    candidates = "task.candidates={input: [minmax, histogram]}"
    first = run(composed("task=observers", "scheme=int8_static", candidates, "export=none"))
    assert "chosen by tensor" in capsys.readouterr().out
    folder = f"--config-dir={tmp_path / 'run' / 'configs'}"
    again = command_line(folder, "scheme=observers", "export=none", "output_dir=again")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "again" / "report.json").read_text())["perplexity"] == list(first["perplexity"])
