"""The first tensors of ``benchmarks/equality/search_equality.py``, which ``make nightly`` runs whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.in_process import run_script

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "equality" / "search_equality.py"


@pytest.mark.parametrize("tensors", [180, pytest.param(6000, marks=pytest.mark.nightly)])
def test_loops_find_ranges_as_good_as_torchs_in_every_dtype_and_format(tensors, tmp_path):
    done = run_script(SCRIPT, "--tensors", str(tensors), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{tensors:,} tensors, ")
    assert done.stdout.splitlines()[-1].endswith(" have another range, 0 lose more by it")
