"""The estimated divergence is the true one, of Linears and convolutions, up to its noise and its third order."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, sensitivity
from lightning_obs.choice.divergence import BLOCK, _square, _sum_of_channels
from lightning_obs.forward.quantized_forward import quantize_forward

SCHEME = {
    "group": {"targets": ["Linear", "Conv1d", "Conv2d"], "weights": {"num_bits": 6, "strategy": "channel"}},
}
#: each batch is measured with so many draws of signs
SEEDS = 8


def of_vectors() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10)), torch.randn(512, 16)


def bright(*shape: int) -> torch.Tensor:
    """Images or signals with a brightness, as photographs have one: errors of weights then agree at many positions."""
    brightness = torch.rand(shape[0], *[1] * (len(shape) - 1))
    return 2 * brightness + 0.3 * torch.randn(shape)


def of_images() -> tuple[nn.Module, torch.Tensor]:
    """A classifier: 64 and 16 pixels of a sample decide about one prediction."""
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GELU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(*convolutions, *head), bright(512, 3, 8, 8)


def of_signals() -> tuple[nn.Module, torch.Tensor]:
    convolutions = [nn.Conv1d(4, 8, 5, padding=2), nn.GELU(), nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.GELU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 20, 10)), bright(512, 4, 40)


def of_channels_last() -> tuple[nn.Module, torch.Tensor]:
    """A Linear that reads images ``(samples, height, width, channels)``."""

    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2))

    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), Pooled(), nn.Linear(16, 10)), bright(512, 6, 6, 8)


def of_pixels() -> tuple[nn.Module, torch.Tensor]:
    """A segmentation of images with :data:`BLOCK` pixels, which are one block."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 5, 3, padding=1))
    return net, bright(512, 3, 4, BLOCK // 4)


def true_divergences(model: nn.Module, x: torch.Tensor, layer: str) -> tuple[torch.Tensor, float]:
    """Of each prediction, the divergence with one layer quantized; and the largest change of a logit."""
    calibrated = copy.deepcopy(model)
    with CalibrationSession(calibrated, SCHEME):
        pass
    with torch.no_grad():
        plain = model(x).double()
        undo = quantize_forward(calibrated.get_submodule(layer))
        moved = calibrated(x).double()
        undo()
    change = moved - plain
    largest = change.sub(change.mean(1, keepdim=True)).abs().max().item()
    divergences = nn.functional.kl_div(moved.log_softmax(1), plain.log_softmax(1), log_target=True, reduction="none")
    return divergences.sum(1).flatten(1).sum(1) if divergences.ndim > 2 else divergences.sum(1), largest


@pytest.mark.parametrize("make", [of_vectors, of_images, of_signals, of_channels_last, of_pixels])
def test_the_estimate_is_the_true_divergence(make):
    """Tolerance: noise and third order.

    ``(v^T J d)^2`` of a sample has at most twice its squared mean as variance, whatever J and d are, because its signs
    are independent. Samples and draws of signs are independent, too. The second-order term of a sample's divergence is
    off by a share of the order of its largest change of a logit.
    """
    torch.manual_seed(0)
    model, x = make()
    model.eval()
    measured = sensitivity(model, [x] * SEEDS, {"it": SCHEME})
    for layer, estimate in measured.layers["it"].items():
        of_samples, largest = true_divergences(model, x, layer)
        predictions = measured.tokens / SEEDS
        deviation = math.sqrt(2 * of_samples.square().sum().item() / SEEDS) / of_samples.sum().item()
        tolerance = 4 * deviation + largest
        assert tolerance < 0.2
        assert estimate == pytest.approx(of_samples.sum().item() / predictions, rel=tolerance), layer


def test_an_image_alone_is_one_sample():
    convolution = nn.Conv2d(3, 4, 3)
    assert _sum_of_channels(convolution, torch.ones(2, 4, 5, 6)).shape == (2, 30)
    assert _sum_of_channels(convolution, torch.ones(4, 5, 6)).shape == (1, 30)
    assert _sum_of_channels(nn.Linear(3, 4), torch.ones(7, 4)).shape == (7,)
    assert _sum_of_channels(nn.Linear(3, 4), torch.ones(4)).shape == ()


@pytest.mark.parametrize(
    ("predictions", "blocks"),
    [
        (2 * 4 * BLOCK, 4),  # one for each position, as in a language model
        (2 * 2 * BLOCK, 2),  # one for two positions
        (2, 1),  # one for a sample
        (2 * 64 * BLOCK, 4),  # 16 for each position, as of a feature map of a segmentation
    ],
)
def test_a_block_has_the_positions_of_so_many_predictions(predictions, blocks):
    changes = torch.ones(2, 4 * BLOCK)
    positions_of_block = 4 * BLOCK // blocks
    assert _square([[changes]], predictions) == 2 * blocks * positions_of_block**2
