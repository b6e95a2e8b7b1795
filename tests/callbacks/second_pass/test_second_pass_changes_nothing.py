"""evaluate=True changes no number that the user logs, and nothing that module and loader do later."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback
from tests.callbacks.calibration_modules import trainer
from tests.callbacks.second_pass.kinds.arrays import array_kinds, random_kinds
from tests.callbacks.second_pass.kinds.containers import container_kinds
from tests.callbacks.second_pass.kinds.loaders import LOADER_KINDS, SAMPLES
from tests.callbacks.second_pass.kinds.metrics import metric_kinds
from tests.callbacks.second_pass.kinds.modules import module_kinds
from tests.support.lightning_package import L

MODULE_KINDS = dict([*metric_kinds(), *container_kinds(), *array_kinds(), *random_kinds(), *module_kinds()])

OPTIONS = {
    "limit_val_batches 1": {"limit_val_batches": 1},
    "limit_val_batches half": {"limit_val_batches": 0.5},
    "two validations in an epoch": {"val_check_interval": 0.5},
    "sanity check": {"num_sanity_val_steps": 1},
    "loaders reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "overfit": {"overfit_batches": 1},
    "fast_dev_run": {"fast_dev_run": 2},
    "no inference mode": {"inference_mode": False},
}


class Told(L.Callback):
    """What is logged in each validation."""

    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        metrics = {n: v for n, v in trainer.callback_metrics.items() if "_quantized" not in n}
        self.values.append({name: float(value) for name, value in metrics.items()})


def story(make_module, make_loader, evaluate, **options):
    """All that is logged in a fit, a validation and a plain one, and the state of module, loader and random numbers."""
    L.seed_everything(3, verbose=False)
    module, loader, told = make_module(), make_loader(), Told()
    calibration = CalibrationCallback("INT8_STATIC", module="net", evaluate=evaluate, show=False)
    plain = DataLoader(SAMPLES, batch_size=4)
    fits = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    with torch.random.fork_rng():
        trainer(calibration, told, **fits).fit(module, plain, loader)
    drawn = [float(torch.rand(())), np.random.rand(), random.random()]
    trainer(calibration, told).validate(module, loader, verbose=False)
    trainer(told).validate(module, loader, verbose=False)
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    return told.values, drawn, state


def check(make_module, make_loader, **options):
    without, with_it = (story(make_module, make_loader, evaluate, **options) for evaluate in (False, True))
    assert len(with_it[0]) >= 3
    torch.testing.assert_close(with_it, without, rtol=0, atol=0, equal_nan=True)


pytestmark = pytest.mark.filterwarnings(
    "ignore:.*sampler has shuffling enabled", "ignore:.*num_workers", "ignore:.*fork"
)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", MODULE_KINDS)
def test_a_module_that_keeps_state(kind):
    check(MODULE_KINDS[kind], LOADER_KINDS["plain"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", LOADER_KINDS)
def test_a_loader_that_moves_on(kind):
    check(MODULE_KINDS["list of outputs"], LOADER_KINDS[kind])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", OPTIONS)
def test_a_trainer_with_options(options):
    check(MODULE_KINDS["metric MeanMetric in plain dict"], LOADER_KINDS["dataset that counts"], **OPTIONS[options])
