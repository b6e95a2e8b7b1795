"""benchmarks/accuracy/accuracy_4bit.py on a tiny model: a row for each observer and rounding."""

import re
from pathlib import Path

import pytest

from tests.support.in_process import run_script
from tests.support.tiny_model import save_tiny_llama

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "accuracy_4bit.py"


def lost_by(tmp_path, *options, observers):
    """KL divergence by row."""
    tiny = tmp_path / "tiny"
    if not tiny.exists():
        save_tiny_llama(tiny)
    small = ("--model", str(tiny), "--group", "16", "--batches", "2", "--eval-batches", "1")
    done = run_script(SCRIPT, *small, *options, "--observer", *observers, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    return {
        n: float(kl) for n, kl in re.findall(r"^(\S.*): -?\d\.\d{4}  (\d\.\d{4}) ", done.stderr, flags=re.MULTILINE)
    }


@pytest.mark.slow
def test_fewer_bits_lose_more_and_rounding_loses_less(tmp_path):
    nearest, rounded = "memoryless_minmax", "hessian(signed=True) + gptq"
    two, four = (lost_by(tmp_path, "--bits", bits, observers=[nearest, rounded]) for bits in "24")
    assert four[nearest] < two[nearest]
    assert two[rounded] < two[nearest]


@pytest.mark.slow
def test_block_by_block_on_inputs_in_full_precision_loses_what_a_session_in_memory_loses(tmp_path):
    observers = ["hessian + gptq"]
    in_memory, as_before, quantized = (
        lost_by(tmp_path, "--bits", "2", *inputs, observers=observers)
        for inputs in ([], ["--inputs", "full_precision"], ["--inputs", "quantized"])
    )
    assert as_before == in_memory
    assert quantized != in_memory


@pytest.mark.slow
def test_the_text_measured_on_is_the_one_named(tmp_path):
    text = tmp_path / "other.txt"
    text.write_text(" ".join(f"{number} bottles of beer on the wall." for number in range(999)))
    own, other = (
        lost_by(tmp_path, *path, observers=["memoryless_minmax"]) for path in ([], ["--eval-path", str(text)])
    )
    assert own != other
