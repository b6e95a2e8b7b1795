"""Held-out pictures for the rows of a vision transformer: unseen ones, and two kinds of changed ones.

scikit-learn has 1,797 pictures of handwritten digits. The model (``digits_model.py``) is trained, calibrated or
measured on each, never two of these. Held out are

- ``same kind``: pictures as they are;
- ``turned``: the same pictures, turned by 15 degrees;
- ``noisy``: the same pictures with 0.7 of the contrast and with Gaussian noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from held_out_texts import SAME_KIND
from torch.nn import functional as F

TRAINING, CALIBRATION = 1_200, 128
DEGREES, CONTRAST, DEVIATION = 15.0, 0.7, 0.1


@dataclass(frozen=True)
class Pictures:
    """Pictures and what they show.

    Attributes:
        values: ``(pictures, 1, height, width)``, from -1 to 1.
        labels: the digits, ``(pictures,)``.
    """

    values: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Digits:
    """The pictures by use.

    Attributes:
        training, calibration: pictures as they are.
        held_out: pictures by the name of their kind.
    """

    training: Pictures
    calibration: Pictures
    held_out: dict[str, Pictures]


def digits() -> Digits:
    """scikit-learn's pictures, the same for each use each time."""
    from sklearn.datasets import load_digits

    data = load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data.target), generator=generator)
    values = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 8 - 1
    labels = torch.tensor(data.target)[order]
    end = TRAINING + CALIBRATION
    held_out = Pictures(values[end:], labels[end:])
    count = len(held_out.labels)
    noise = torch.randn(held_out.values.shape, generator=generator)
    of_kinds = {
        SAME_KIND: held_out.values,
        "turned": turned(held_out.values, torch.full((count,), DEGREES), torch.zeros(count, 2)),
        "noisy": CONTRAST * (held_out.values + 1) - 1 + DEVIATION * noise,
    }
    return Digits(
        training=Pictures(values[:TRAINING], labels[:TRAINING]),
        calibration=Pictures(values[TRAINING:end], labels[TRAINING:end]),
        held_out={name: Pictures(pictures, held_out.labels) for name, pictures in of_kinds.items()},
    )


def turned(values: torch.Tensor, degrees: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Pictures turned about their middle and shifted; what comes in from outside is background.

    Args:
        values: ``(pictures, 1, height, width)``, in which -1 is background.
        degrees: of each picture, ``(pictures,)``.
        pixels: to the right and down, ``(pictures, 2)``.
    """
    angles = degrees * math.pi / 180
    cosines, sines = angles.cos(), angles.sin()
    shifts = -2 * pixels / values.shape[-1]
    rows = [
        torch.stack([cosines, -sines, shifts[:, 0]], dim=-1),
        torch.stack([sines, cosines, shifts[:, 1]], dim=-1),
    ]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(values.shape), align_corners=False)
    return F.grid_sample(values + 1, grid, align_corners=False) - 1
