"""The tests on the pretend device, in a process of their own (tests/accelerator/conftest.py says why)."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from tests.support.rank_processes import run_apart

ROOT = Path(__file__).parent.parent
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "accelerator").glob("test_*.py"))


def run_tests(marked):
    """pytest's exit code, and what it printed."""
    for name in [name for name in os.environ if name.startswith("PYTEST")]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    # This process is a fork of one that has imported plugins of pytest.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported", "-m", marked]
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        status = pytest.main([*options, *(str(ROOT / file) for file in FILES)])
    return int(status), printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("marked", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_on_the_pretend_device(marked):
    status, printed = run_apart(run_tests, marked, timeout=900)
    assert status == 0, printed[-6000:]
    assert " passed" in printed


def test_no_other_test_has_the_pretend_device():
    """compressed-tensors asks every device for its memory; the search for doctests imports each file of the tests."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
