"""A power of small numbers by one square root and a polynomial.

``d ** 2.4`` costs an exponential and a logarithm, and is most of the time of a search for the least error. Written as
``d ** a * (c0 + c1 * s + ... + c8 * s ** 8)`` with ``s = sqrt(d)`` and ``a`` the multiple of 1/2 just below the
exponent, it is a handful of multiplications: a fifth of the time where they are compiled into one loop. (Run one by one
they cost as much as the logarithm.) The coefficients are fitted for the least largest error on ``[0, most]`` (Lawson's
iteration of weighted least squares), and the error that is left, measured in float32, comes with them: who compares two
sums knows when they are too close.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

TERMS = 9
_POINTS, _ITERATIONS = 2000, 80


def halves_of(norm: float) -> int:
    """Twice the exponent of the first term: the multiple of 1/2 just below the exponent."""
    return math.ceil(2 * norm) - 1


class PowerFit(NamedTuple):
    """``abs(evaluate_power(d) - d ** norm) <= error * (d ** norm + usual)`` for d in ``[0, most]``."""

    coefficients: tuple[float, ...]
    most: float
    usual: float
    error: float


@functools.lru_cache(maxsize=64)
def fit_power(norm: float, most: float, usual_error: float) -> PowerFit:
    """Fit ``d ** norm`` on ``[0, most]``.

    Args:
        norm: the exponent, positive.
        most: largest d.
        usual_error: values between 0 and this are the many: half of the error allowed to each is relative to their mean
            power, ``usual``.

    Reference:
        Lawson's algorithm: Rice and Usow, The Lawson Algorithm and Extensions, 1968.
    """
    halves = halves_of(norm)
    usual = usual_error**norm / (norm + 1)
    steps = torch.arange(1, _POINTS + 1, dtype=torch.float64, device="cpu") / _POINTS
    points = torch.cat([steps, 10.0 ** (-5 * steps)]) * most
    exact = points**norm
    allowed = (exact + usual).reciprocal()
    exponents = halves / 2 + torch.arange(TERMS, dtype=torch.float64, device="cpu") / 2
    terms = (points / most).unsqueeze(-1) ** exponents * allowed.unsqueeze(-1)
    weight = torch.ones_like(points)
    for _ in range(_ITERATIONS):
        root = weight.sqrt()
        found = torch.linalg.lstsq(terms * root.unsqueeze(-1), (exact * allowed * root).unsqueeze(-1)).solution
        off = ((terms @ found).squeeze(-1) - exact * allowed).abs()
        weight = weight * (off / off.amax() + 1e-9)
        weight = weight / weight.mean()
    coefficients = tuple((found.squeeze(-1) / most**exponents).tolist())
    fit = PowerFit(coefficients, most, usual, 0.0)
    # Between the points it may be a little more than on them.
    measured = (
        evaluate_power(points.float(), halves, coefficients).double() - points.float().double() ** norm
    ).abs() * allowed
    return fit._replace(error=measured.amax().item() * 1.1 + 1e-6)


def evaluate_power(value: torch.Tensor, halves: int, coefficients: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """``value ** norm``, approximately; for values that are not negative.

    Args:
        value: any shape.
        halves, coefficients: of the fit; the coefficients may be tensors.
    """
    root = value.sqrt()
    total = root * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        total = total * root + coefficient
    if halves % 2:
        total = total * root
    for _ in range(halves // 2):
        total = total * value
    return total
