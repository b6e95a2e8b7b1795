"""Every example runs, on a tiny model."""

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
    "04_own_observer": "two_sigma {'0': '[",
    "05_ddp": "14 modules on 2 ranks in 5 collectives",
    "06_fsdp2": "14 modules on 2 ranks",
}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES} == set(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path):
    arguments = []
    if "--model" in path.read_text():
        arguments += ["--model", str(save_tiny_llama(tmp_path / "tiny"))]
    if "--out" in path.read_text():
        arguments += ["--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(path), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[path.stem] in done.stdout
