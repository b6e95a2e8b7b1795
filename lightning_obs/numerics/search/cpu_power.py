"""The power of an error for the compiled loops.

An exponential and a logarithm would be most of the time of a search; one square root and a polynomial are a handful of
multiplications. How far off they are is measured in float32: who compares two sums knows when they are too close.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

_TERMS, _POINTS, _ITERATIONS = 9, 2000, 80


class Power(NamedTuple):
    """``(c0 + c1 * s + ... + c8 * s ** 8) * d``, once more times d ``from_square``, ``s = sqrt(d)``, for ``d ** norm``.

    On ``[0, most]`` it is off by no more than ``error * (d ** norm + usual)``. All numbers are float32.
    """

    c: tuple[Any, ...]
    from_square: bool
    norm: Any
    error: Any
    usual: Any

    def __call__(self, d: Any) -> Any:
        """The power of ``d``, by Estrin's scheme: its chain of multiplications is half as long as Horner's."""
        c, root, square = self.c, np.sqrt(d), d * d
        low = (c[3] * root + c[2]) * d + (c[1] * root + c[0])
        high = (c[7] * root + c[6]) * d + (c[5] * root + c[4])
        return ((c[8] * square + high) * square + low) * (square if self.from_square else d)


@functools.lru_cache(maxsize=64)
def fit_power(norm: float, most: float, usual_error: float) -> Power:
    """Fit ``d ** norm`` on ``[0, most]``: the least largest error, by an iteration of weighted least squares.

    Args:
        norm: the exponent, at least 1.
        most: largest d.
        usual_error: values between 0 and this are the many: half of the error allowed to each is relative to their mean
            power, ``usual``.

    Reference:
        Lawson's algorithm: Rice and Usow, The Lawson Algorithm and Extensions, 1968.
    """
    usual = usual_error**norm / (norm + 1)
    steps = torch.arange(1, _POINTS + 1, dtype=torch.float64, device="cpu") / _POINTS
    points = torch.cat([steps, 10.0 ** (-5 * steps)]) * most
    exact = points**norm
    allowed = (exact + usual).reciprocal()
    exponents = (2 if norm >= 2 else 1) + torch.arange(_TERMS, dtype=torch.float64, device="cpu") / 2
    terms = (points / most).unsqueeze(-1) ** exponents * allowed.unsqueeze(-1)
    weight = torch.ones_like(points)
    for _ in range(_ITERATIONS):
        root = weight.sqrt()
        fitted = torch.linalg.lstsq(terms * root.unsqueeze(-1), (exact * allowed * root).unsqueeze(-1)).solution
        off = ((terms @ fitted).squeeze(-1) - exact * allowed).abs()
        weight = weight * (off / off.amax() + 1e-9)
        weight = weight / weight.mean()
    c = tuple(np.float32(one) for one in (fitted.squeeze(-1) / most**exponents).tolist())
    power = Power(c, norm >= 2, *(np.float32(one) for one in (norm, 0.0, usual)))
    single = points.numpy().astype(np.float32)
    # Between the points it may be a little more than on them.
    off = np.abs(power(single) - single.astype(np.float64) ** norm) * allowed.numpy()
    return power._replace(error=np.float32(off.max() * 1.1 + 1e-6))
