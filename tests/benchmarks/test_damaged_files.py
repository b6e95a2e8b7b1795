"""A damaged file or state is refused by name, or is read as it was written: a fast part of the benchmark."""

import runpy
from pathlib import Path

import pytest

#: what kinds of files are written with, beside the package's own dependencies
NEEDS = {"texts: parquet": "pyarrow", "texts: saved": "datasets"}
DAMAGED = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "faults" / "damaged_files.py"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", DAMAGED["KINDS"], ids=lambda kind: kind.name)
def test_nothing_damaged_is_wrong_in_silence_or_raw(kind):
    if kind.name in NEEDS:
        pytest.importorskip(NEEDS[kind.name])
    for _, counted, faults in DAMAGED["damages"](8, 1, [kind]):
        assert not faults
        assert counted["refused"]
