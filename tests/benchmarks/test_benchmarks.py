"""The benchmark of fine-tuning, on a tiny model: what it prints, and when it fails."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.in_process import run_command_line, run_script
from tests.support.tiny_model import save_tiny_llama

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "qat_recovery.py"
SMALL = [
    "trainer=cpu",
    "data.tokens=32",
    "data.batches=2",
    "data.train_batches=24",
    "data.eval_batches=12",
    "export.verify=false",
]
GOOD = {"recovered": 0.5, "perplexity": [20.0, 25.0], "perplexity_reloaded": 25.0, "seconds_trained": 600.0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def recovery(folder, tiny, *arguments):
    words = [f"model.path={tiny}", *SMALL, *arguments]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess, "run", in_this_process)  # each run of the application
        return run_script(SCRIPT, *words, folder=folder)


in_a_new_process = subprocess.run


def in_this_process(command, **options):
    if command[0] == "git":  # for the commit on the page
        return in_a_new_process(command, **options)
    assert command[:3] == [sys.executable, "-m", "lightning_obs"]
    done = run_command_line(*command[3:], folder=Path.cwd())
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_every_recipe_prints_its_four_perplexities(tiny, tmp_path):
    done = recovery(tmp_path, tiny, "trainer.max_steps=24", "model.learning_rate=1e-3")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", done.stdout, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["qat_w4a16", "qat_w4a8", "qat_nvfp4"]
    for _, cells in rows:
        *figures, recovered, minutes = cells.split(" | ")
        full, calibrated, tuned, reloaded = map(float, figures)
        assert tuned < calibrated
        assert reloaded == tuned
        if calibrated - full < 1e-3 * full:  # a model of random weights may gain
            assert recovered == "nothing lost"
        else:
            share = min(1.0, max(0.0, (calibrated - tuned) / (calibrated - full)))
            assert float(recovered.rstrip("%")) == pytest.approx(100 * share, abs=1)
        assert float(minutes) < 10


@pytest.mark.slow
def test_a_recipe_that_brings_nothing_back_fails(tiny, tmp_path):
    nothing = ("trainer.max_steps=1", "model.learning_rate=1e-12")
    done = recovery(tmp_path, tiny, "--scheme", "w4a16", *nothing)
    assert done.returncode == 1
    assert "qat_w4a16: brought back 0%, less than half" in done.stderr


@pytest.mark.slow
def test_the_control_trains_in_full_precision(tiny, tmp_path):
    small = ("trainer.max_steps=24", "model.learning_rate=1e-3", "scheme.weights.num_bits=2", "export=none")
    done = recovery(tmp_path, tiny, "--scheme", "w4a16", "--control", *small)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `qat_w4a16`")]
    through, control = (float(line.split(" | ")[3]) for line in rows)
    assert "trained in full precision" in rows[1]
    assert through < control


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"recovered": None}, []),
        ({"recovered": 0.49}, ["brought back 49%, less than half"]),
        ({"perplexity_reloaded": 25.0000001}, ["the reloaded checkpoint has another perplexity"]),
        ({"seconds_trained": 630.0}, ["fine-tuning took 10.5 minutes"]),
    ],
)
def test_what_counts_as_a_failure(change, found):
    assert runpy.run_path(str(SCRIPT))["shortcomings"]({**GOOD, **change}) == found
