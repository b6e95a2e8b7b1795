"""Read the values of each scale, a few scales at a time, from a tensor of any layout.

A row holds the values of one scale, ``(N, G)``. Nothing is copied but the rows that are read: a block of a weight is
no contiguous piece of it, and copying all of them at once would take as much memory as the weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_obs.numerics.histogram import count_values, every_value, support
from lightning_obs.numerics.qparams import extremes

Range = tuple[torch.Tensor, torch.Tensor]

# With at least this many values per scale, counting them is faster than searching them.
_COUNTED_FROM = 1 << 17
# Values of rows that are copied at once.
_COPIED = 1 << 18


class Rows:
    """Rows of a view ``(A, B, N, G)``, whose first two dimensions number them.

    Args:
        view: the values.
        importance: weight of each value's error, ``(I, G)``: row r has the weights of r modulo I. None: all 1.
        dtype: of the ranges; None: that of the values.
        hessian: instead of norm and importance, quadratic forms of T parts of G, ``(I, T, G / T, G / T)``: row r has
            those of r modulo I.
    """

    def __init__(
        self,
        view: torch.Tensor,
        importance: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        hessian: torch.Tensor | None = None,
    ) -> None:
        self.view, self.importance, self.dtype, self.hessian = view, importance, dtype or view.dtype, hessian
        self.count, self.size = view.shape[:2].numel(), view.shape[2:].numel()  # rows, values of each
        self.device = view.device

    def observed_range(self) -> Range:
        """Smallest and largest value of every row, ``(R,)`` each."""
        low, high = extremes(self.view)
        return low.reshape(-1).to(self.dtype), high.reshape(-1).to(self.dtype)

    def copies(self, places: torch.Tensor, first: int = 0) -> Iterator[tuple[torch.Tensor, Rows]]:
        """The rows of these numbers, counted from ``first``, about as many at a time: their numbers, and a copy."""
        parts = -(-len(places) // max(1, _COPIED // self.size))
        for some in places.tensor_split(parts) if parts else ():
            index, columns = some + first, self.view.shape[1]
            importance = None if self.importance is None else self.importance[index % len(self.importance)]
            yield some, Rows(self.view[index // columns, index % columns][None], importance, self.dtype)

    def pieces(self, part: slice, tile: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Values ``(rows, values)`` in float32 with their importance, in pieces of at most ``tile`` values of a row."""
        high, wide = self.view.shape[2:]
        if self.size > tile:
            high, wide = max(1, tile // wide), min(wide, tile)
        for n in range(0, self.view.shape[2], high):
            for g in range(0, self.view.shape[3], wide):
                piece = self._take(part, slice(n, n + high), slice(g, g + wide))
                importance = None
                if self.importance is not None:
                    weights = self.importance[:, g : g + wide]
                    if len(weights) > 1:
                        weights = weights[torch.arange(part.start, part.stop, device=self.device) % len(weights)]
                    importance = weights.unsqueeze(1).expand(piece.shape).flatten(1)
                yield piece.flatten(1).float(), importance

    def _take(self, part: slice, n: slice, g: slice) -> torch.Tensor:
        columns = self.view.shape[1]
        first, last = part.start // columns, (part.stop - 1) // columns
        lines = [
            self.view[i, max(0, part.start - i * columns) : part.stop - i * columns, n, g]
            for i in range(first, last + 1)
        ]
        return lines[0] if len(lines) == 1 else torch.cat(lines)


def rows_of_observed(
    observed: torch.Tensor, importance: torch.Tensor | None = None, hessian: torch.Tensor | None = None
) -> Rows:
    """``(N, *Q, G)`` as :class:`Rows`, one per scale; a view unless Q cannot be flattened."""
    flat = observed.flatten(1, -2)
    if flat.shape[1] == 1 and flat.is_contiguous():  # one piece, not one per observation
        flat = flat.reshape(1, 1, -1) if importance is None and hessian is None else flat
    return Rows(flat.transpose(0, 1).unsqueeze(0), importance, None, hessian)


def rows_of_counts(observed: torch.Tensor) -> Rows | None:
    """The distinct values of each scale, as important as they are many.

    None unless the values are bfloat16, which has few numbers, and many to each scale, and all of them finite.
    """
    if observed.dtype != torch.bfloat16 or observed.shape[0] * observed.shape[-1] < _COUNTED_FROM:
        return None
    counted = count_values(observed.flatten(1, -2))
    if observed.device.type != "cpu":  # the host does not ask which values occur, nor whether they are finite
        values, counts = every_value(observed.device), counted.counts
    elif not bool((counted.low.isfinite() & counted.high.isfinite()).all()):
        return None
    else:
        values, counts = (pad_sequence(list(each), True) for each in zip(*map(support, *counted), strict=True))
    # A bin without values is not important; its own value might lie outside the range.
    values = values.clamp(counted.low[:, None], counted.high[:, None])
    return Rows(values[None, :, None], counts.float(), observed.dtype)
