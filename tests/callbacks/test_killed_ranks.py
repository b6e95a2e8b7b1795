"""A validation on several ranks that was killed, and goes on. Each `on_*` function runs on every rank."""

from __future__ import annotations

import contextlib
import os

import pytest
from torch import distributed as dist

from tests.callbacks.test_ranks import EVERY, caught, on_share, run
from tests.lightning_ranks import Module, calibration, like_torchrun, loader, same, trainer
from tests.rank_processes import run_ranks


class Dies(Module):
    def __init__(self, at=None):
        super().__init__()
        self.at, self.ran = at, 0

    def validation_step(self, batch, batch_idx):
        if self.ran == self.at:
            raise RuntimeError("killed")
        self.ran += 1
        super().validation_step(batch, batch_idx)


def on_killed(rank, ranks, folder, places, again, options):
    """Die at each of ``places``, then go on; ``again`` is how many ranks the next run has."""
    like_torchrun(rank, ranks)
    saves = {"save_every": 2, "save_to": folder}
    with contextlib.suppress(RuntimeError):
        callback = calibration(**saves, **options)
        module = Dies(places[rank])
        module.logs = False  # ranks wait for each other nowhere
        trainer(callback, ranks=ranks).validate(module, loader(EVERY, 1), verbose=False)
    dist.barrier()
    if again < ranks:
        if rank:
            return None
        like_torchrun(0, 1)
    callback, module = calibration(**saves, **options), Dies()
    error, said = caught(run, "validate", trainer(callback, ranks=again), module, loader(EVERY, 1))
    if again == ranks:
        dist.barrier()
    return callback.result and callback.result.qparams, module.ran, error, said, sorted(os.listdir(folder.parent))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("places", "ran"), [((5, 6), (8, 8)), ((2, 4), (10, 10)), ((3, 11), (10, 2)), ((1, 9), (12, 4))]
)
def test_ranks_that_were_killed_go_on_behind_the_last_save_that_all_have(tmp_path, places, ran):
    options = {"input": "histogram", "weight": "imatrix_mse"}
    found = run_ranks(on_killed, 2, 2, tmp_path / "saves", places, 2, options)
    whole = run_ranks(on_share, 2, 2, "validate", EVERY, options)
    assert tuple(one[1] for one in found) == ran
    for one in found:
        assert one[2] is None
        assert same(one[0], whole[0][0])
        assert one[4] == []


def test_saves_of_another_number_of_ranks_are_refused(tmp_path):
    found, _ = run_ranks(on_killed, 2, 2, tmp_path / "saves", (5, 5), 1, {})
    assert "holds the save of another run: ranks: 2 -> 1" in found[2]
