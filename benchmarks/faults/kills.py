"""Kill a process while it overwrites a name, and look what is under the name afterwards.

    python benchmarks/faults/kills.py [--kills 200]

A child overwrites a checkpoint, or a file, and kills itself (SIGKILL) at its n-th call to the file system, as Python's
audit hooks count them; if it has fewer calls than there are kills, the other kills come after a random time. The name
must then load, as the old or the new checkpoint, and the next overwrite must leave nothing beside it. `two renames` is
the way of file systems that cannot exchange two names: there, whoever loads puts the replaced folder back.

Then two processes overwrite one checkpoint as fast as they can, and a third counts how often the name is absent.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from lightning_obs import CalibrationSession, export_checkpoint, load_checkpoint
from lightning_obs.files.write import write_text

KINDS = ("folder", "two renames", "file")
_CALLS = ("os.", "open", "shutil.", "tempfile.", "fcntl.", "ctypes.dlsym")


def write(kind: str, name: Path, number: int) -> None:
    """Put something with a number under a name."""
    if kind == "file":
        write_text(name, f"{number}" * 10_000)
        return
    model = nn.Linear(4, 4)
    nn.init.constant_(model.bias, number)
    with CalibrationSession(model, "W8A8"):
        pass
    export_checkpoint(model, name, overwrite=True)


def read(kind: str, name: Path) -> int:
    """The number of what is under the name; an error if it is not whole."""
    if kind == "file":
        text = name.read_text()
        assert len(text) == 10_000
        assert len(set(text)) == 1
        return int(text[0])
    bias = load_checkpoint(nn.Linear(4, 4), name).bias
    assert isinstance(bias, torch.Tensor)
    return int(bias[0])


def trial(kind: str, folder: Path, at: int | None = None, after: float | None = None) -> tuple[bool, str]:
    """Overwrite, killed at a call or after a time in seconds.

    Returns:
        Whether it was killed before its end; "old", "new", or what is wrong.
    """
    name = folder / "out"
    no_exchange = mock.patch("lightning_obs.files.write._exchange", return_value=False)
    with no_exchange if kind == "two renames" else nullcontext():
        write(kind, name, 1)
        killed = _killed(lambda: write(kind, name, 2), at, after)
        try:
            found = {1: "old", 2: "new"}[read(kind, name)]
            if not killed and found == "old":
                found = "the old, although nothing was killed"
            write(kind, name, 3)
            if read(kind, name) != 3 or os.listdir(folder) != ["out"]:
                found = f"left beside it: {os.listdir(folder)}"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    return killed, found


def _killed(work: Callable[[], None], at: int | None, after: float | None) -> bool:
    child = os.fork()
    if child == 0:
        calls = 0

        def count(event: str, _: object) -> None:
            nonlocal calls
            calls += event.startswith(_CALLS)
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def looks(folder: Path, seconds: float) -> tuple[int, int]:
    """Look at a name that two processes overwrite: how often, and how often nothing was there."""
    name, writers = folder / "out", []
    write("folder", name, 1)
    for number in (2, 3):
        child = os.fork()
        if child == 0:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                write("folder", name, number)
            os._exit(0)
        writers.append(child)
    looked, absent, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        looked, absent = looked + 1, absent + (not (name / "config.json").exists())
        time.sleep(0.0005)
    assert all(os.waitpid(child, 0)[1] == 0 for child in writers)
    return looked, absent


def main() -> int:
    """Return 0 if every kill left the old or the new, whole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of each kind")
    kills = parser.parse_args().kills
    torch.set_num_threads(1)
    wrong = 0
    for kind in KINDS:
        found: Counter[str] = Counter()
        at, ended = 0, False
        while sum(found.values()) < kills:
            at += 1
            with tempfile.TemporaryDirectory() as folder:
                when = {"after": random.uniform(0, 0.1)} if ended else {"at": at}
                killed, what = trial(kind, Path(folder), **when)  # type: ignore[arg-type]
                ended = ended or not killed
                if killed or what not in ("old", "new"):
                    found[what] += 1
        wrong += sum(number for what, number in found.items() if what not in ("old", "new"))
        print(f"{kind}: {kills} kills, {dict(found)}")
    with tempfile.TemporaryDirectory() as folder:
        looked, absent = looks(Path(folder), 5.0)
    print(f"two writers: {looked} looks, the name absent in {absent}")
    return min(1, wrong + absent)


if __name__ == "__main__":
    sys.exit(main())
