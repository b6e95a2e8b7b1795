"""The search for the range of least error, as observers hold it: its hyperparameters, and the candidates they give.

``memoryless_mse``, ``mse``, ``imatrix_mse``, ``local_hessian``, ``hessian`` and ``histogram`` declare these
hyperparameters each with its own defaults. The search itself is :mod:`lightning_obs.numerics.search`.
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
    """The candidates of a search, and when it ends; :func:`options_of` makes one of an observer's hyperparameters.

    Args:
        maxshrink: how much of the range may be given up, in [0, 1].
        grid: steps per unit of the factor.
        patience: consecutive candidates without an improvement of any scale that end the search; None: it visits all.
        norm: exponent of the error.
        expand: factor on the range before the search, at least 1.
        signed: whether scales may be negative.
        to_the_end: whether ``1 - maxshrink`` is a candidate, too.
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
        """The factors on the expanded range to try, in their order: 1, 1 - 1/grid, ..., to above ``1 - maxshrink``.

        With ``to_the_end`` the last whole step that is not below ``1 - maxshrink`` is tried, too, and at least one
        step: with maxshrink=0.64 and grid=36 the factors end at 1 - 23/36 = 0.361.
        """
        if not self.to_the_end:
            return shrink_factors(self.maxshrink, self.grid)
        steps = max(1, int(self.maxshrink * self.grid))
        return [1 - step / self.grid for step in range(steps + 1)]

    def widest(self, num_bits: int) -> float:
        """The widest candidate, as a factor on the observed range.

        Signed scales begin where positive ones do (:func:`~lightning_obs.numerics.qparams.signed_scale`).
        """
        codes = 2**num_bits
        if not self.signed:
            return self.expand
        return self.expand * codes / (codes - 1)

    def search_on(self, numbers: NumberGrid) -> GridSearch:
        """The search, with these options, for ranges of a number format."""
        expand = self.widest(numbers.args.num_bits)
        return GridSearch(numbers, self.factors, self.patience, self.norm, expand)


def options_of(observer: Any, to_the_end: bool = False) -> SearchOptions:
    """The options that an observer's hyperparameters give.

    Args:
        observer: has the hyperparameters as attributes.
        to_the_end: for observers that search by inputs, as llm-compressor's ``imatrix_mse``: also try the last step,
            and visit all candidates if patience is 0.
    """
    options = {}
    for field in fields(SearchOptions):
        if hasattr(observer, field.name):  # histogram has no factor expand
            options[field.name] = getattr(observer, field.name)
    if to_the_end and not observer.patience:
        options["patience"] = None
    return SearchOptions(**options, to_the_end=to_the_end)


def check_options(observer: Observer) -> None:
    """Raise a CalibrationError for a hyperparameter of the search outside its values; called by constructors."""
    positive = (sys.float_info.min, sys.float_info.max, "a positive number")
    limits = {
        "maxshrink": (0.0, 1.0, "a value in [0, 1]"),
        "patience": (0, sys.maxsize, "at least 0"),
        "grid": positive,
        "norm": positive,
        "expand": (1.0, sys.float_info.max, "at least 1"),
    }
    for name, (least, most, expected) in limits.items():
        value = getattr(observer, name)
        is_valid = isinstance(value, (int, float)) and least <= value <= most
        require(observer, name, is_valid, expected)


def divides_in_blocks(value: torch.Tensor, args: QuantizationArgs) -> bool:
    """Whether a weight has a scale for each block of rows and columns, and divides into whole blocks.

    Such a weight is searched as it is, block by block; any other is padded and flattened into a copy.
    """
    if args.strategy != QuantizationStrategy.BLOCK or value.ndim != 2:
        return False
    if not value.is_floating_point() or not value.is_contiguous() or not value.numel():
        return False
    rows, columns = value.shape
    height, width = covered_by_scale(args, value.shape)
    return rows % height == 0 and columns % width == 0
