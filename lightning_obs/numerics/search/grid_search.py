"""The options of a range search: the number format, the candidates, and the error to minimize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_obs.numerics.formats import NumberGrid


class GridSearch(NamedTuple):
    """The options of a range search. Observers make one for each search (``observers/search_options.py``).

    Observers give all options. The defaults, for tests and benchmarks, are the hyperparameters of the observer ``mse``.

    Attributes:
        grid: number format and symmetry. The scales of a tensor_group are not rounded in the search unless the grid has
            the global scale, which is usually known only after the search.
        factors: the factors on the observed range that are tried, in the order of the search; of equal errors, the
            first is chosen.
        patience: the search ends after this many factors in a row without an improvement; less than 1 counts as 1.
            None: all factors are visited.
        norm: exponent of the error.
        expand: factor on the observed range before the search; above 1, ranges wider than the values are tried.
    """

    grid: NumberGrid
    factors: Sequence[float]
    patience: int | None = 5
    norm: float = 2.4
    expand: float = 1.0

    @property
    def limit(self) -> int | None:
        """``patience``, at least 1; None if the search visits all factors anyway, so that it need not count.

        ``ranges.py`` reads it to find where a search ends.
        """
        if self.patience is None:
            return None
        limit = max(1, self.patience)
        return limit if limit < len(self.factors) else None
