"""SIGTERM ends a run, wherever it is."""

import os
import signal
import subprocess
import sys
import time

import pytest

#: a Python module that the command line imports: each rank writes its process id, and observes slowly
SLOW = """
import os, time
from pathlib import Path
from lightning_obs.observers import StaticMinMaxObserver
from lightning_obs import Observer

@Observer.register("slow")
class Slow(StaticMinMaxObserver):
    def update_statistics_from_observed(self, observed):
        Path(f"{os.getpid()}.pid").touch()
        time.sleep(0.1)
        return super().update_statistics_from_observed(observed)
"""


def ended(command, folder, processes):
    """Start a command, send SIGTERM as soon as so many processes of it observe, and wait for its end."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        deadline = time.monotonic() + 240
        while len(list(folder.glob("*.pid"))) < processes and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=120)
    return run.returncode, output, [int(path.stem) for path in folder.glob("*.pid")]


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_sigterm_ends_a_run_without_a_report_and_with_all_its_ranks(tiny_overrides, tmp_path, devices):
    (tmp_path / "slow.py").write_text(SLOW)
    overrides = ["scheme=int8_static", "imports=[slow]", "observer.name=slow", "output_dir=run", "evaluate=false"]
    if devices > 1:
        overrides += [f"trainer.devices={devices}", "trainer.strategy=ddp"]
    command = [sys.executable, "-W", "ignore", "-m", "lightning_obs", *tiny_overrides, *overrides]
    code, output, processes = ended(command, tmp_path, devices)
    assert len(processes) == devices, output
    assert code == 143, output
    assert not list(tmp_path.glob("run/**/*")), output
    deadline = time.monotonic() + 20
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, processes))
