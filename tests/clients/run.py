"""Run the clients, and print a table of what works: ``make clients``, or some of them by name.

    .venv-clients/bin/python -m tests.clients.run timm_client lightly_client

Each client is a process of its own, with a time limit; the exit code is 1 if a step of one fails. With ``--gallery``
their pages in docs/gallery are written anew, and their rows in docs/evidence/clients.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from tests.clients import gallery
from tests.clients.row import COLUMNS, MARK

FOLDER = Path(__file__).parent
#: a client's longest time, its imports included [s]
LIMIT = float(os.environ.get("CLIENT_SECONDS", "600"))
#: clients that import torchvision, which the environment keeps in a folder of its own
SEE_PICTURES = ("lightly_client", "segmentation_models_client", "timm_client")
#: runs a client; torchvision's operators are built for CUDA, and its Python files only ask that two are declared
LAUNCH = """
import runpy, sys
import torch
client, folder = sys.argv[1:]
if folder:
    sys.path.append(folder)
    try:
        torch.ops.load_library(folder + "/torchvision/_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
runpy.run_module(f"tests.clients.{client}", run_name="__main__")
"""


def clients() -> list[str]:
    """The names of all clients."""
    return sorted(path.stem for path in FOLDER.glob("*_client.py"))


def run(client: str) -> tuple[dict[str, dict[str, str]], str, bool]:
    """Run one client: the entries of its rows, by row and column, what it printed, and whether it failed."""
    pictures = str(Path(sys.prefix) / "vision") if client in SEE_PICTURES else ""
    command = [sys.executable, "-u", "-W", "ignore", "-c", LAUNCH, client, pictures]
    paths = os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    try:
        with tempfile.TemporaryDirectory() as folder:  # for what a package writes where it is run
            options = {"cwd": folder, "timeout": LIMIT, "env": surroundings}
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        output, failed = done.stdout, done.returncode != 0
    except subprocess.TimeoutExpired as error:
        output, failed = f"{(error.stdout or b'').decode()}\nno end after {LIMIT:.0f} s", True
    rows: dict[str, dict[str, str]] = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            name, column, text = json.loads(line.removeprefix(MARK))
            rows.setdefault(name, {})[column] = text
    return rows or {client: {}}, output, failed


def main() -> int:
    """Print the table, and the errors below it."""
    names = [name for name in sys.argv[1:] if name != "--gallery"] or clients()
    failures = {}
    print("| client |", " | ".join(COLUMNS), "| seconds |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for client in names:
        began = time.perf_counter()
        rows, output, failed = run(client)
        for name, entries in rows.items():
            cells = [entries.get(column, "**failed**") for column in COLUMNS]
            seconds = f"{time.perf_counter() - began:.0f}" if name == list(rows)[-1] else ""
            print("|", " | ".join([name, *cells, seconds]), "|", flush=True)
            if "**failed**" in cells:
                failed = True
        if failed:
            failures[client] = output
        elif "--gallery" in sys.argv:
            gallery.write(client, rows, output)
    versions = {name: metadata.version(name) for name in ("torch", "lightning", "pytorch-lightning")}
    print("\n" + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for client, output in failures.items():
        print(f"\n{client} failed:\n{output[-3000:]}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
