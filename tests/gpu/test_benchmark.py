"""benchmarks/cost/gpu.py and gpu_model.py, on the CPU and where there is one on a CUDA device."""

import re
import runpy
from pathlib import Path

from tests.support.in_process import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cost" / "gpu.py"


def test_every_observer_has_a_time_and_a_share_of_the_bandwidth(device, tmp_path):
    done = run_script(SCRIPT, "--device", device.type, "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if line.count("│") > 8]
    names = [row[1] for row in rows]
    assert names == [name for name, *_ in runpy.run_path(str(SCRIPT))["ROWS"]]
    for row in rows:
        assert re.fullmatch(r"[\d.]+", row[4]), row
        assert re.fullmatch(r"[\d.]+", row[5]), row


def test_a_model_has_a_time_for_batches_and_for_the_search(device, tmp_path):
    options = ["--device", device.type, "--size", "tiny", "--batches", "2", "--tokens", "64", "--repeats", "1"]
    script = SCRIPT.with_name("gpu_model.py")
    done = run_script(script, *options, "--no-peer", "--export", "--only", "INT8_STATIC mse", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"export: [\d.]+ s, \d+ MiB", done.stdout)
    assert re.search(r"│ INT8_STATIC mse │ [\d.]+ +│ [\d.]+ ", done.stdout), done.stdout
