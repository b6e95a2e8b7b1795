"""When a search over candidates ends: after so many in a row that improved nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable


class Patience:
    """Counts candidates, in the order in which they are visited.

    Args:
        limit: so many in a row that improved nothing end the search, at least one; None: nothing ends it.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = sys.maxsize if limit is None else max(1, limit)
        #: so many more that improve nothing end the search
        self.left = self._limit

    def ends(self, improved: bool) -> bool:
        """Count one candidate; whether the search ends after it."""
        self.left = self._limit if improved else self.left - 1
        return not self.left


def visited(improved: Iterable[bool], patience: int | None) -> int:
    """How many candidates a search visits, of which one knows whether each improves anything.

    >>> visited([True, False, True, False, False, True], patience=2)
    5
    """
    improved, count = list(improved), Patience(patience)
    return next((number for number, one in enumerate(improved, 1) if count.ends(one)), len(improved))
