"""The benchmark of fine-tuning, on a tiny model: what it prints."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_obs.app.config_files import config_dir
from tests.support.in_process import run_script
from tests.support.tiny_model import save_tiny_llama

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "qat_recovery.py"
TEXTS = ["same kind", "descriptions", "questions", "trained on"]
SMALL = ["data.tokens=32", "data.batches=2", "data.train_batches=24", "trainer.max_steps=24"]


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("lm_eval")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import qat_recovery

    return qat_recovery


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def recovery(folder, tiny, *rows):
    small = ("--eval-batches", "4", "--overrides", *SMALL)
    return run_script(SCRIPT, "--model", str(tiny), *small, "--rows", *rows, folder=folder)


def growths(done, row):
    """How far the loss is above the original model's on each text after training, in the row's last line."""
    *_, cells = re.findall(rf"^\| `{re.escape(row)}`, \d+ steps \| (.*) \|$", done.stdout, flags=re.MULTILINE)
    return [float(cell.split()[0]) for cell in cells.split(" | ")[: len(TEXTS)]]


@pytest.mark.slow
@pytest.mark.usefixtures("script")
def test_training_through_two_bits_loses_less_than_training_in_full_precision(tiny, tmp_path):
    through = "w4a16 model.learning_rate=1e-3 scheme.weights.num_bits=2"
    control = f"{through} +task.callback.start_step=1000000"
    done = recovery(tmp_path, tiny, through, control)
    assert done.returncode == 0, done.stderr
    header = done.stdout.splitlines()[0].strip("| ").split(" | ")
    assert header[1 : 1 + len(TEXTS)] == TEXTS
    assert growths(done, through)[-1] < growths(done, control)[-1]


@pytest.mark.slow
def test_every_recipe_runs_and_a_goal_that_is_missed_is_printed_and_no_error(script, tiny, tmp_path):
    names = {path.stem.removeprefix("qat_") for path in (config_dir() / "experiment").glob("qat_*.yaml")}
    assert names - set(script.RECIPES) == {"lora_packed"}  # tests/app/test_lora.py
    small = ("--eval-batches", "2", "--overrides", *SMALL, "trainer.max_steps=1")
    done = run_script(SCRIPT, "--model", str(tiny), *small, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for row in script.RECIPES:
        assert len(growths(done, row)) == len(TEXTS)
    assert re.search(r"^w4a16: the goal is 90% .*; missed: ", done.stdout, flags=re.MULTILINE)


def recovery_of(script, recovered):
    """Losses of which training brings back these shares of 0.4 nats, by text."""
    original = dict.fromkeys(TEXTS, torch.tensor([1.0, 3.0]))
    tuned = {text: original[text] + 0.4 * (1 - share) for text, share in zip(TEXTS, recovered, strict=True)}
    calibrated = {text: losses + 0.4 for text, losses in original.items()}
    return script.Recovery(original, calibrated, None, tuned, (1.0, 2.0), 3)


def test_a_row_with_smooth_inputs_has_a_line_for_them(script):
    recovery = recovery_of(script, (1.0, 1.0, 1.0, 1.0))
    half = {text: losses - 0.2 for text, losses in recovery.calibrated.items()}
    calibrated, smoothed, _ = replace(recovery, smoothed=half).lines("int8_static")
    assert calibrated.startswith("| `int8_static`, calibrated | 0.4000 ± 0.0000 | ")
    assert smoothed.startswith("| `int8_static`, smoothed | 0.2000 ± 0.0000 (50%) | ")


def test_a_share_is_of_what_calibration_lost(script):
    shares = (0.5, -0.25, 0.0, 1.5)
    recovery = recovery_of(script, shares)
    assert [recovery.recovered(recovery.tuned, text) for text in TEXTS] == pytest.approx(shares, abs=1e-6)
    calibrated, tuned = recovery.lines("w4a16")
    assert calibrated.startswith("| `w4a16`, calibrated | 0.4000 ± 0.0000 | ")
    assert tuned.startswith("| `w4a16`, 3 steps | 0.2000 ± 0.0000 (50%) | 0.5000 ± 0.0000 (-25%) | ")


@pytest.mark.parametrize(
    ("recovered", "verdict"),
    [
        ((0.9, 0.0, 0.1, 0.9), "reached"),
        ((0.89, 0.0, 0.1, 0.9), "missed: 89% on same kind, less than 90%"),
        ((0.95, -0.1, 0.1, 0.5), "missed: -10% on descriptions, less than 0%; 50% on trained on, less than 90%"),
    ],
)
def test_the_goal_of_a_recipe_is_said_and_where_it_is_missed(script, recovered, verdict):
    goal = "w4a16: the goal is 90% on text of the kind trained on and 0% on other kinds"
    assert script.verdict_of("w4a16", recovery_of(script, recovered)) == f"{goal}; {verdict}"
