"""The hyperparameters of a range search, and the candidates that follow from them.

``memoryless_mse``, ``mse``, ``imatrix_mse``, ``local_hessian`` and ``hessian`` have these hyperparameters, each with
its own defaults; ``histogram`` has all but ``expand``. The search itself is :mod:`lightning_obs.numerics.search`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import covered_by_scale
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.observers.observer import Observer, require


@dataclass(frozen=True)
class SearchOptions:
    """The hyperparameters of a range search; :func:`options_of` makes one for each search of an observer.

    A candidate is the observed range times ``expand`` times a factor.

    Args:
        maxshrink: how much of the range may be given up, in [0, 1]: factors go from 1 down to ``1 - maxshrink``.
        grid: number of factors per unit.
        patience: the search ends after this many candidates in a row without an improvement of any scale; None: it
            visits all candidates.
        norm: exponent of the error.
        expand: factor on the observed range before the search, at least 1.
        signed: whether scales may be negative.
        to_the_end: whether the last step that is not below ``1 - maxshrink`` is a factor, too (:attr:`factors`).
    """

    maxshrink: float
    grid: float
    patience: int | None
    norm: float
    expand: float = 1.0
    signed: bool = False
    to_the_end: bool = False

    @property
    def factors(self) -> list[float]:
        """The factors to try, in this order: 1, 1 - 1/grid, ..., all above ``1 - maxshrink``. For :meth:`search_on`.

        With ``to_the_end``, the last step that is not below ``1 - maxshrink`` is tried, too, and always at least one
        step: with maxshrink=0.64 and grid=36 the factors end at 1 - 23/36 = 0.361.
        """
        if not self.to_the_end:
            return shrink_factors(self.maxshrink, self.grid)
        steps = max(1, int(self.maxshrink * self.grid))
        return [1 - step / self.grid for step in range(steps + 1)]

    def widest(self, num_bits: int) -> float:
        """The widest candidate, as a factor on the observed range, for a format of so many bits.

        For :meth:`search_on`, and for the observer ``local_hessian``, which needs a global scale before its search.
        With signed scales, it is wider by ``codes / (codes - 1)``, so that its scale has the magnitude of the widest
        candidate's positive scale (:func:`~lightning_obs.numerics.qparams.signed_scale`).
        """
        codes = 2**num_bits
        if not self.signed:
            return self.expand
        return self.expand * codes / (codes - 1)

    def search_on(self, numbers: NumberGrid) -> GridSearch:
        """The search with these options for a number format, as ``numerics/search`` takes it; observers call it."""
        expand = self.widest(numbers.args.num_bits)
        return GridSearch(numbers, self.factors, self.patience, self.norm, expand)


def options_of(observer: Any, to_the_end: bool = False) -> SearchOptions:
    """The search options in an observer's hyperparameters. Observers call it before each search.

    Args:
        observer: has the hyperparameters as attributes.
        to_the_end: True for observers that search by inputs: try the last step, too, and visit all candidates if
            patience is 0. llm-compressor's ``imatrix_mse`` does so.
    """
    options = {}
    for field in fields(SearchOptions):
        if hasattr(observer, field.name):  # histogram has no hyperparameter `expand`
            options[field.name] = getattr(observer, field.name)
    if to_the_end and not observer.patience:
        options["patience"] = None
    return SearchOptions(**options, to_the_end=to_the_end)


def check_options(observer: Observer) -> None:
    """Raise a CalibrationError for a search hyperparameter outside its limits.

    The constructors of ``memoryless_mse``, ``imatrix_mse``, ``local_hessian`` and their subclasses call it. That of
    ``histogram``, which has no ``expand``, has checks of its own.
    """
    positive = (sys.float_info.min, sys.float_info.max, "a positive number")
    limits = {
        "maxshrink": (0.0, 1.0, "a value in [0, 1]"),
        "patience": (0, sys.maxsize, "a whole number, at least 0"),
        "grid": positive,
        "norm": positive,
        "expand": (1.0, sys.float_info.max, "at least 1"),
    }
    for name, (least, most, expected) in limits.items():
        value = getattr(observer, name)
        kinds = int if name == "patience" else (int, float)
        is_valid = isinstance(value, kinds) and least <= value <= most
        require(observer, name, is_valid, expected)


def divides_in_blocks(value: torch.Tensor, args: QuantizationArgs) -> bool:
    """Whether a weight has a scale for each block of rows and columns, and divides into whole blocks.

    Observers ask before they search: such a weight is searched block by block without a copy; any other weight is
    flattened, and padded if necessary.
    """
    if args.strategy != QuantizationStrategy.BLOCK or value.ndim != 2:
        return False
    if not value.is_floating_point() or not value.is_contiguous() or not value.numel():
        return False
    rows, columns = value.shape
    height, width = covered_by_scale(args, value.shape)
    return rows % height == 0 and columns % width == 0
