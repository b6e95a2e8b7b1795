"""What a module is: how its weight is a matrix, and which axis of its data holds the channels of a token."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.model.kinds import KINDS, ModuleKind, from_matrix, kind_of, to_matrix
from lightning_obs.report.layer_errors import measure_layer_errors

STATIC = "INT8_STATIC"

#: module, shape of its input
MODULES = {
    "Linear": (lambda: nn.Linear(6, 8), (2, 5, 6)),
    "transformers' Conv1D": (lambda: Conv1D(8, 6), (2, 5, 6)),
    "Conv1d": (lambda: nn.Conv1d(6, 8, 3), (2, 6, 9)),
    "Conv2d": (lambda: nn.Conv2d(6, 8, 3, groups=2), (2, 6, 9, 7)),
    "Conv3d": (lambda: nn.Conv3d(6, 8, 2), (2, 6, 4, 5, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 8, 3), (2, 6, 9)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(6, 8, 3), (2, 6, 9, 7)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(6, 8, 2), (2, 6, 4, 5, 3)),
    "an image without a batch": (lambda: nn.Conv2d(6, 8, 3), (6, 9, 7)),
    "channels last in memory": (lambda: nn.Conv2d(6, 8, 3), (2, 6, 9, 7)),
}


def per_token(quantized_value, value, channels):
    """Mean over tokens of the ratio of signal to noise [dB]."""
    signal, noise = (
        t.movedim(channels, -1).reshape(-1, t.shape[channels]).square().sum(1).double()
        for t in (value, quantized_value - value)
    )
    eps = torch.finfo(torch.float32).eps
    return (10 * torch.log10((signal + eps) / (noise + eps))).mean().item()


@pytest.mark.parametrize("name", MODULES)
def test_the_signal_to_noise_of_a_token_is_over_its_channels(name):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module = make()
    model, channels = nn.Sequential(module), shape.index(6)
    # Some channels are loud, and some positions: the mean over rows of an image would be another number.
    x = torch.randn(shape) * torch.logspace(-1, 1, 6).view([6 if size == 6 else 1 for size in shape])
    x = x * torch.rand([1 if size == 6 else size for size in shape])
    if name == "channels last in memory":
        x = x.to(memory_format=torch.channels_last)
    with CalibrationSession(model, STATIC, targets=["re:0"]):
        model(x)
    with torch.no_grad():
        plain = model(x)
        with quantized(model):
            rounded = model(x)
    (error,) = measure_layer_errors(model, [x])
    scale = module.input_scale
    read = (x / scale).round().clamp(-128, 127) * scale
    outputs = channels - len(shape)  # from behind: as many dimensions come out
    assert error.output.sqnr == pytest.approx(per_token(rounded, plain, outputs), abs=1e-3)
    assert error.input.sqnr == pytest.approx(per_token(read, x, channels), abs=1e-3)


def test_a_token_of_an_embedding_is_a_row_that_it_looks_up():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(20, 6)), torch.randint(0, 20, (2, 5))
    scheme = {"embedding": {"targets": ["Embedding"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    with CalibrationSession(model, scheme):
        pass
    with torch.no_grad(), quantized(model):
        rounded = model(x)
    (error,) = measure_layer_errors(model, [x])
    assert error.output.sqnr == pytest.approx(per_token(rounded, model(x), -1), abs=1e-3)


@pytest.mark.parametrize("make", [lambda: nn.Conv1d(4, 8, 1), lambda: nn.ConvTranspose1d(4, 8, 1)])
def test_a_token_mask_takes_positions_out_of_a_convolution_not_channels(make):
    model, x = nn.Sequential(make()), torch.ones(2, 4, 4)  # as many channels as tokens
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    x[:, :, 3] = x[0, :, 2] = 50.0
    x[:, 3, 0] = 3.0  # of the last channel, which counts
    with CalibrationSession(model, STATIC, targets=["re:0"]) as session:
        session.mask_tokens(mask)
        model(x)
    torch.testing.assert_close(model[0].input_scale, torch.tensor([3 / 127.5]))


def test_a_mask_of_patches_takes_pixels_out_and_another_one_is_refused():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1)), torch.ones(2, 3, 4, 4)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[:, 5], x[:, :, 1, 1] = 0, 50.0
    with CalibrationSession(model, STATIC, targets=["re:0"]) as session:
        session.mask_tokens(mask)
        model(x)
    torch.testing.assert_close(model[0].input_scale, torch.tensor([1 / 127.5]))
    with CalibrationSession(model, STATIC, targets=["re:0"]) as session:
        session.mask_tokens(mask[:, 2:6])  # as long as an image is high
        with pytest.raises(CalibrationError, match="which rows are padding cannot be told"):
            model(x)
        session.mask_tokens(None)
        model(x)


def test_every_kind_of_torch_has_a_row():
    for make, _ in MODULES.values():
        assert kind_of(make()) is not KINDS[-1]
    assert kind_of(nn.Bilinear(2, 3, 4)) is KINDS[-1]


@pytest.mark.parametrize("name", MODULES)
def test_a_matrix_has_a_row_for_each_output_channel_and_goes_back(name):
    module = MODULES[name][0]()
    weight = module.weight.detach()
    matrix = to_matrix(module, weight)
    assert matrix.shape == (8, weight.numel() // 8)
    assert torch.equal(from_matrix(module, matrix, weight.shape), weight)


# ---------------------------------------------------------------------- a kind of one's own, as CONTRIBUTING shows it


class Gather(nn.Module):
    """A weight (in, out) that multiplies channels in the middle: (batch, channels, tokens)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        return torch.einsum("bit,io->bot", x, self.weight)


def test_a_new_kind_of_module_is_calibrated_exported_and_loaded(monkeypatch, tmp_path):
    kind = ModuleKind("Gather", lambda module: isinstance(module, Gather), rows=1, positions=1)
    monkeypatch.setattr("lightning_obs.model.kinds.KINDS", [kind, *KINDS])
    model, x = nn.Sequential(Gather()), torch.randn(2, 6, 5)
    with CalibrationSession(model, STATIC, targets=["Gather"]):
        model(x)
    loaded = load_checkpoint(nn.Sequential(Gather()), export_checkpoint(model, tmp_path / "out"))
    with torch.no_grad(), quantized(model):
        assert torch.equal(loaded(x), model(x))
        rounded = model(x)
    assert model[0].weight_scale.shape == (8, 1)
    assert to_matrix(model[0], model[0].weight).shape == (8, 6)
    assert measure_layer_errors(model, [x])[0].sqnr == pytest.approx(per_token(rounded, model(x), 1), abs=1e-3)
