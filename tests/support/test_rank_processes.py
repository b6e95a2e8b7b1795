"""The processes that tests of several ranks run in."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.support.rank_processes import run_ranks


def on_abort(rank, folder, times):
    dist.barrier()  # all have connected; else the run counts as one that did not, and is repeated
    runs = len(list(folder.glob(f"{rank}.*")))
    (folder / f"{rank}.{runs}").touch()
    if rank == 0 and runs < times:
        os.abort()
    return runs


def test_a_rank_that_aborts_once_gets_another_run(tmp_path, capfd):
    assert run_ranks(on_abort, 2, tmp_path, 1)[0] == 1
    assert "a rank aborted; running once more" in capfd.readouterr().err


def test_a_rank_that_aborts_again_is_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match="rank 0:\\ndied, exit code -6"):
        run_ranks(on_abort, 2, tmp_path, 2)
    assert len(list(tmp_path.glob("0.*"))) == 2


def on_death_before_its_child(rank):
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_noticed_while_its_child_lives():
    with pytest.raises(RuntimeError, match="died, exit code -9"):
        run_ranks(on_death_before_its_child, 1, timeout=15)
