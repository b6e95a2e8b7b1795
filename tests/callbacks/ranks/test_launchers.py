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
from tests.support.lightning_ranks import Net, calibration, like_torchrun, loader, same, samples, trainer
from tests.support.rank_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "support" / "ddp_script.py")
#: CI runs ranks as torchrun starts them, without torchrun: below, and in the other files of this folder
TORCHRUN_ON_ONE = pytest.param("torchrun", marks=pytest.mark.nightly)
TWO_NODES = pytest.param("two nodes", marks=pytest.mark.nightly)
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


def launch(how: str, folder: Path) -> list[tuple[int, str]]:
    tail = [SCRIPT, str(folder)]
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


@pytest.mark.parametrize("how", ["lightning", TORCHRUN_ON_ONE, TWO_NODES])
def test_every_launcher_gives_the_qparams_of_one_device_and_one_checkpoint_and_ends_all_with_an_error(
    how, tmp_path, expected
):
    """The script calibrates a second time, where no data reaches an expert."""
    results = launch(how, tmp_path)
    outputs = "".join(output for _, output in results)
    assert all(code != 0 for code, _ in results), outputs
    assert "no data reached 1 of 5 observers: experts.2 (input)" in outputs, outputs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt", "out"]
    for rank in range(2):
        qparams = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert qparams.keys() == expected.keys()
        assert all(torch.equal(qparams[name], expected[name]) for name in expected)
    load_checkpoint(Net(), tmp_path / "out")


def on_node(rank):
    """As torchrun starts one rank on each of two nodes."""
    like_torchrun(rank, 2)
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
    callback = calibration(input="histogram", weight="memoryless_mse")
    with_trainer = trainer(callback, ranks=1, num_nodes=2, strategy="ddp")
    with_trainer.validate(TheModule(), loader(samples(24, experts=(0, 1, 2))), verbose=False)
    return with_trainer.node_rank, callback.result.qparams


def test_two_nodes_give_the_qparams_of_one_device(expected):
    for rank, (node, qparams) in enumerate(run_ranks(on_node, 2)):
        assert node == rank
        assert same(qparams, expected)
