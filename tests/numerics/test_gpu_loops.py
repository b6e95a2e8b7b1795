"""The loops for a GPU without one: interpreted on the CPU, and compiled for two generations of GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_loops_apart.py")
#: where the Makefile puts it: compressed-tensors and torch's compiler import what they find
TRITON = Path(sys.prefix, "triton")

pytestmark = pytest.mark.skipif(not TRITON.is_dir(), reason="Triton has no package for this system")


def lines(what: str) -> dict[str, str]:
    """The lines that the script prints, by their names."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), str(TRITON)]),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, SCRIPT, what]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return {name: value for name, _, value in (line.rpartition(": ") for line in run.stdout.splitlines())}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """How far each case is off in Triton's interpreter."""
    return {name: float(value) for name, value in lines("interpret").items()}


@pytest.mark.slow
def test_loops_find_what_torchs_operations_find(interpreted):
    off = {name: value for name, value in interpreted.items() if name != "before the first use"}
    assert len(off) == 16
    assert max(off.values()) < 2e-6, off


@pytest.mark.slow  # with the test above: the interpreter runs once
def test_loops_that_round_ranges_otherwise_are_noticed_before_their_first_use(interpreted):
    assert interpreted["before the first use"] > 1e-3  # the interpreter cuts what a GPU rounds to bfloat16


@pytest.mark.slow
def test_loops_compile_for_gpus_and_keep_every_rounding():
    found = {name: value.split() for name, value in lines("compile").items()}
    assert len(found) == 18
    for name, instructions in found.items():
        if name.startswith(("counts", "moments")):  # neither divides nor rounds
            assert instructions == []
            continue
        rounds = ["cvt.rn.bf16"] if "bf16" in name and "scales" not in name else []
        assert instructions == ["div.rn.f32", *rounds], name  # and no product is fused with a sum
