"""Models to run quantized, and how compressed-tensors itself would run them."""

import copy

import torch
from compressed_tensors.quantization import set_forward_quantized
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.forward.quantized_forward import quantize_training_forward
from lightning_obs.forward.quantized_module import Switch
from lightning_obs.model.module_qparams import calibrated_modules, get_scheme

INT8 = {"num_bits": 8, "strategy": "tensor"}


class Everything(nn.Module):
    """An Embedding, convolutions both ways, transformers' Conv1D, a Linear, a Linear subclass with its own forward."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embedding = nn.Embedding(10, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(16, 8, 2, stride=2)
        self.conv1d = Conv1D(32, 8)
        self.linear = nn.Linear(32, 16)
        self.own = Doubling(16, 4)

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        x = self.up(self.conv(x).relu()).transpose(1, 2).contiguous()
        return self.own(self.linear(self.conv1d(x).relu()).relu())


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


TYPES = ["Conv1d", "ConvTranspose1d", "Conv1D", "Linear"]
EVERYTHING = {
    "config_groups": {
        "embedding": {"targets": ["Embedding"], "weights": {"num_bits": 4, "strategy": "channel"}},
        "others": {
            "targets": TYPES,
            "weights": {"num_bits": 4, "strategy": "channel"},
            "input_activations": {**INT8, "symmetric": False},
            "output_activations": INT8,
        },
    }
}


def tokens():
    return torch.randint(0, 10, (3, 7), generator=torch.Generator().manual_seed(1))


def calibrated(model, scheme, x, **options):
    with CalibrationSession(model, scheme, **options) as session:
        if session.needs_data:
            model(x)
    return model


def calibrated_everything():
    torch.manual_seed(0)
    return calibrated(Everything(), EVERYTHING, tokens())


def two_layers(width=128):
    return nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 128))


def train_quantized(model, switch=None):
    """Let every calibrated module of the model train through fake quantization; returns the undo of all."""
    switch = switch or Switch()
    undos = [
        quantize_training_forward(module, switch, output=get_scheme(module).output_activations is not None)
        for _, module in calibrated_modules(model)
    ]
    return lambda: [undo() for undo in undos]


def as_compressed_tensors_runs(model):
    """A copy of a calibrated model whose Linear and Embedding modules run compressed-tensors' own quantized forward."""
    model = copy.deepcopy(model)
    for _, module in calibrated_modules(model):
        set_forward_quantized(module)
    return model
