"""Strategies that Lightning does not have: those that hold the whole model calibrate, others are refused by name."""

from __future__ import annotations

import pytest
import torch

from lightning_obs import CalibrationError
from lightning_obs.callbacks.strategies import collectives_of
from tests.callbacks.ranks.test_ranks import alone
from tests.support.lightning_package import LightningEnvironment, strategies
from tests.support.lightning_ranks import Module, calibration, like_torchrun, loader, same, samples, trainer
from tests.support.rank_processes import run_ranks

EVERY = samples(12, experts=(0, 1, 2))


class Patient(strategies.DDPStrategy):
    """As one writes it to change a detail of DDP."""


class Unconnected(strategies.DDPStrategy):
    """Of ranks that talk by other means than torch.distributed."""

    def setup_distributed(self):
        self.set_world_ranks()

    def setup(self, trainer):
        self.model_to_device()


class StartedElsewhere(LightningEnvironment):
    """Lightning starts no further process."""

    creates_processes_externally = True


class OwnDevice(strategies.SingleDeviceStrategy):
    """One device."""


class ColossalAIStrategy(strategies.DDPStrategy):
    """As ``lightning_colossalai`` has it: of DDP's family, with a part of the weights on each rank."""


class Pipeline(strategies.ParallelStrategy):
    """Of no family that is known."""

    root_device = torch.device("cpu")

    def set_world_ranks(self):
        self.cluster_environment.set_world_size(len(self.parallel_devices))

    def all_gather(self, tensor, group=None, sync_grads=False):
        return tensor

    def barrier(self, name=None):
        pass

    def broadcast(self, obj, src=0):
        return obj

    def model_to_device(self):
        pass

    def reduce(self, tensor, *args, **kwargs):
        return tensor


def on_share(rank, ranks):
    like_torchrun(rank, ranks)
    callback = calibration()
    trainer(callback, ranks=ranks, strategy=Patient()).validate(Module(), loader(EVERY), verbose=False)
    return callback.result.qparams, callback.result.ranks


def test_a_subclass_of_ddp_writes_the_qparams_of_one_device():
    for qparams, ranks in run_ranks(on_share, 2, 2):
        assert ranks == 2
        assert same(qparams, alone(EVERY))


def test_a_strategy_of_one_device_is_one_rank():
    callback = calibration()
    trainer(callback, strategy=OwnDevice("cpu")).validate(Module(), loader(EVERY, 3), verbose=False)
    assert same(callback.result.qparams, alone(EVERY))


@pytest.mark.parametrize("strategy", [ColossalAIStrategy, Pipeline])
def test_a_strategy_whose_ranks_may_hold_a_part_of_the_model_is_refused_by_its_name(strategy):
    with_trainer = trainer(ranks=2, strategy=strategy(parallel_devices=[torch.device("cpu")] * 2))
    with pytest.raises(CalibrationError, match=rf"under {strategy.__name__} is not supported.*strategy='ddp'"):
        collectives_of(with_trainer)


def test_ranks_without_a_process_group_are_refused_before_each_writes_scales_of_its_own():
    callback = calibration()
    strategy = Unconnected(cluster_environment=StartedElsewhere())
    with_trainer = trainer(callback, ranks=2, strategy=strategy, use_distributed_sampler=False)
    with pytest.raises(CalibrationError, match=r"ranks of Unconnected cannot reach each other.*and no process group"):
        with_trainer.validate(Module(), loader(EVERY), verbose=False)
    assert callback.result is None
