"""What a range search is asked for: the number format, the candidates, and the error that is to be least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_obs.numerics.formats import NumberGrid


class GridSearch(NamedTuple):
    """The candidates of a search, and the error that is to be least.

    Attributes:
        grid: number format and symmetry. A tensor_group is searched without rounding its scales unless the grid has the
            global scale, which is only known afterwards.
        factors: candidates, in the order of the search; the first wins a tie.
        patience: number of consecutive factors without an improvement, at least 1, that ends the search; None: it
            visits all.
        norm: exponent of the error.
        expand: factor on the observed range before the search; above 1 it tries ranges wider than the values.
    """

    grid: NumberGrid
    factors: Sequence[float]
    patience: int | None = 5
    norm: float = 2.4
    expand: float = 1.0

    @property
    def limit(self) -> int | None:
        """After how many factors without an improvement the search ends; None: it visits all of them."""
        if self.patience is None:
            return None
        limit = max(1, self.patience)
        return limit if limit < len(self.factors) else None
