"""Every example runs, on a tiny model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import save_tiny_llama

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
EXPECTED = {
    "01_weights_only": "14 modules",
    "02_fp8_in_validate": "largest difference of logits after reloading: 0.0",
    "03_own_module": "largest difference after loading: 0.0",
    "07_fine_tune": "largest difference after loading: 0.0",
    "08_fine_tune_images": "largest difference of logits after loading: 0.0",
    "09_lora": "difference after loading: 0.0",
    "04_own_observer": "two_sigma {'0': '[",
    "05_ddp": "14 modules on 2 ranks in 5 collectives",
    "06_fsdp2": "14 modules on 2 ranks",
}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES} == set(EXPECTED)


SMALL = {"--epochs": "3", "--steps": "3", "--tokens": "32"}


def run(path, folder, *arguments):
    text = path.read_text()
    if '"--model"' in text:
        arguments += ("--model", str(save_tiny_llama(folder / "tiny")))
    if '"--out"' in text:
        arguments += ("--out", str(folder / "out"))
    done = subprocess.run(
        [sys.executable, str(path), *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path):
    small = [word for pair in SMALL.items() if f'"{pair[0]}"' in path.read_text() for word in pair]
    assert EXPECTED[path.stem] in run(path, tmp_path, *small)


@pytest.mark.slow
def test_fine_tuning_on_images_brings_back_most_of_what_calibration_lost(tmp_path):
    (path,) = (path for path in EXAMPLES if path.stem == "08_fine_tune_images")
    line = next(line for line in run(path, tmp_path).splitlines() if line.startswith("accuracy on"))
    full, calibrated, tuned, again = (float(number) for number in re.findall(r"[a-z] (\d[.]\d+)", line))
    assert full - calibrated > 0.1
    assert full - tuned < 0.03
    assert again == tuned
