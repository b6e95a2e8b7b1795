"""Whole runs as a user starts them: Lightning's launcher, torchrun, two nodes of torchrun. All under a time limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_obs import load_checkpoint
from tests.support.lightning_ranks import Module as TheModule
from tests.support.lightning_ranks import Net, calibration, loader, samples, trainer

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "support" / "ddp_script.py")
#: CI runs it on two nodes
TORCHRUN_ON_ONE = pytest.param("torchrun", marks=pytest.mark.nightly)
#: CI runs it as the command line does (tests/app/test_cli.py)
LIGHTNING = pytest.param("lightning", marks=pytest.mark.nightly)
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]


def start(*command: str) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
                             start_new_session=True)]  # fmt: skip


def finish(processes: list[subprocess.Popen[str]], limit: float = 480) -> list[tuple[int, str]]:
    """Exit code and output of each; what does not end in time is killed, with what it started, and fails the test."""
    end = time.monotonic() + limit
    try:
        return [(p.returncode, text) for p in processes for text in (p.communicate(timeout=end - time.monotonic())[0],)]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(how: str, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    tail = [SCRIPT, str(folder), *arguments]
    if how == "lightning":
        return finish(start(sys.executable, "-W", "ignore", *tail, "--devices", "2"))
    if how == "torchrun":
        return finish(start(*TORCHRUN, "--standalone", "--nproc_per_node=2", *tail, "--devices", "2"))
    nodes = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    processes = [p for rank in range(2) for p in start(*TORCHRUN, *nodes, f"--node_rank={rank}", *tail, "--nodes", "2")]
    return finish(processes)


@pytest.fixture(scope="module")
def expected():
    callback = calibration(input="histogram", weight="memoryless_mse")
    trainer(callback).validate(TheModule(), loader(samples(24, experts=(0, 1, 2))), verbose=False)
    return callback.result.qparams


@pytest.mark.parametrize("how", [LIGHTNING, TORCHRUN_ON_ONE, "two nodes"])
def test_every_launcher_gives_the_qparams_of_one_device_and_one_checkpoint(how, tmp_path, expected):
    for code, output in launch(how, tmp_path):
        assert code == 0, output
    for rank in range(2):
        qparams = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert qparams.keys() == expected.keys()
        assert all(torch.equal(qparams[name], expected[name]) for name in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt", "out"]
    load_checkpoint(Net(), tmp_path / "out")


@pytest.mark.parametrize("how", ["lightning", TORCHRUN_ON_ONE])
def test_an_unreached_expert_ends_every_process_with_the_error(how, tmp_path):
    ((code, output),) = launch(how, tmp_path, "--unreached")
    assert code != 0
    assert "no data reached 1 of 5 observers: experts.2 (input)" in output
    assert list(tmp_path.iterdir()) == []
