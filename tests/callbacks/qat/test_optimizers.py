"""Optimizers with states in 8 bits, as users pass them; each runs where its package is installed."""

import warnings

import pytest
import torch

from lightning_obs import CalibrationWarning, QuantizationAwareTraining
from tests.callbacks.qat_modules import W4, Regression, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of these packages


OPTIMIZERS = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}


class Wide(Regression):
    """Large enough for states in 8 bits: these packages keep those of small parameters whole."""

    def __init__(self, name, dtype=torch.float32, **options):
        self.name = name
        self.options = options
        self.dtype_of_weights = dtype
        super().__init__()

    def build(self):
        net = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))
        return net.to(self.dtype_of_weights)

    def forward(self, x):
        return self.net(x.to(self.dtype_of_weights)).float()

    def configure_optimizers(self):
        return pytest.importorskip(OPTIMIZERS[self.name]).AdamW8bit(self.parameters(), **self.options)


@pytest.mark.parametrize("train", ["weights", "all"])
@pytest.mark.parametrize("name", ["torchao", "bitsandbytes"])
def test_the_loss_falls_with_states_in_8_bits(name, train):
    torch.manual_seed(0)
    module = Wide(name, lr=1e-3)
    callback = QuantizationAwareTraining(W4, train=train)
    fitting = trainer(callback, max_epochs=8)
    fitting.fit(module, loader(), loader())
    dtypes = set()
    for state in fitting.optimizers[0].state.values():
        for value in state.values():
            dtypes.add(getattr(getattr(value, "codes", value), "dtype", None))
    assert torch.uint8 in dtypes
    assert sum(module.losses[-4:]) < 0.7 * sum(module.losses[:4])


def test_stochastic_rounding_moves_weights_in_bfloat16_at_a_rate_that_otherwise_loses_all():
    pytest.importorskip("torchao")
    moved = {}
    for rounds in (False, True):
        torch.manual_seed(0)
        module = Wide("torchao", torch.bfloat16, lr=1e-5, bf16_stochastic_round=rounds)
        with torch.no_grad():
            module.net[2].weight.add_(0.1)
        before = module.net[2].weight.detach().clone()
        callback = QuantizationAwareTraining(W4)
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always", CalibrationWarning)
            trainer(callback, max_epochs=8).fit(module, loader(), loader())
        named = any("first step" in str(warning.message) for warning in record)
        assert named is not rounds
        moved[rounds] = float((module.net[2].weight != before).float().mean())
    assert moved[False] < 0.05
    assert moved[True] > 0.2
