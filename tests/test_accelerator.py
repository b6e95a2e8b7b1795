"""The tests on the pretend device, in a process of their own (tests/accelerator/conftest.py says why)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "accelerator").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("marked", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_on_the_pretend_device(marked):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *FILES]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_no_other_test_has_the_pretend_device():
    """compressed-tensors asks every device for its memory; the search for doctests imports each file of the tests."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
