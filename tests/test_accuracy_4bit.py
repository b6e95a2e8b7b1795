"""benchmarks/accuracy_4bit.py on a tiny model: a row for each observer and rounding."""

import re
from pathlib import Path

import pytest

from tests.in_process import run_script
from tests.tiny_model import save_tiny_llama

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "accuracy_4bit.py"


@pytest.mark.slow
def test_fewer_bits_lose_more_and_rounding_loses_less(tmp_path):
    tiny = save_tiny_llama(tmp_path / "tiny")
    small = ("--model", str(tiny), "--group", "16", "--batches", "2", "--eval-batches", "1")
    lost = {}
    for bits in ("2", "4"):
        observers = ("memoryless_minmax", "hessian(signed=True) + gptq")
        done = run_script(SCRIPT, *small, "--bits", bits, "--observer", *observers, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        for name, kl in re.findall(r"^(\S.*): -?\d\.\d{4}  (\d\.\d{4}) ", done.stderr, flags=re.MULTILINE):
            lost[name, bits] = float(kl)
    nearest, rounded = "memoryless_minmax", "hessian(signed=True) + gptq"
    assert lost[nearest, "4"] < lost[nearest, "2"]
    assert lost[rounded, "2"] < lost[nearest, "2"]
