"""The reckoning of large models in the docs is what its script prints."""

from pathlib import Path

from tests.support.in_process import run_script
from tests.support.markdown import page

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cost" / "reckoning.py"


def test_the_table_of_the_page_is_what_the_script_prints(tmp_path):
    done = run_script(SCRIPT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout in page("docs/evidence/memory.md")


def test_a_faster_disk_and_more_cores_take_less_time(tmp_path):
    done = run_script(SCRIPT, "--disk", "20", "--cores", "64", folder=tmp_path)
    assert "| read [GB] | 16 | 141 | 812 |" in done.stdout
    assert "1 / 64 workers [min] | 0.8 / 0.0 |" in done.stdout
