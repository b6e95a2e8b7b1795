"""SIGTERM ends a run of the command line."""

import signal
import subprocess
import sys
import time

import pytest

#: a Python module that the command line imports: it tells that data are observed, and observes slowly
SLOW = """
import time
from pathlib import Path
from lightning_obs.observers import StaticMinMaxObserver
from lightning_obs import Observer

@Observer.register("slow")
class Slow(StaticMinMaxObserver):
    def update_statistics_from_observed(self, observed):
        Path("observing").touch()
        time.sleep(0.1)
        return super().update_statistics_from_observed(observed)
"""


@pytest.mark.nightly
def test_sigterm_in_the_middle_of_the_data_ends_a_run_with_nothing_written(tiny_overrides, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    overrides = ["scheme=int8_static", "imports=[slow]", "observer.name=slow", "output_dir=run", "evaluate=false"]
    command = [sys.executable, "-W", "ignore", "-m", "lightning_obs", *tiny_overrides, *overrides]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        deadline = time.monotonic() + 240
        while not (tmp_path / "observing").exists() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 143, output
    assert not list(tmp_path.glob("run/**/*")), output
