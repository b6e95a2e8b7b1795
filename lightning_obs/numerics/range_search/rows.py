"""Read the values of each scale, a few scales at a time, whatever the layout of the tensor they are in.

A row is what one scale covers, ``(N, G)`` values. Nothing is copied but the rows that are read: a block of a weight is
no contiguous piece of it, and copying all of them at once would take as much memory as the weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.histogram import count_values, support

#: rows to read: consecutive ones, or these
Part = slice | torch.Tensor
Range = tuple[torch.Tensor, torch.Tensor]

# bfloat16 and float16 are widened before they are reduced: their own reductions are ten times slower on a CPU.
_REDUCED_AT_ONCE = 1 << 18
# From so many values per scale on, counting them is faster than searching them.
_COUNTED_FROM = 1 << 17


class Rows:
    """Rows of a tensor ``(R, N, G)``, or of a view ``(B, C, N, G)`` whose first two dimensions number the rows.

    Args:
        view: the values.
        importance: weight of each value's error, ``(I, G)``: row r has the weights of r modulo I. None: all 1.
    """

    def __init__(self, view: torch.Tensor, importance: torch.Tensor | None = None) -> None:
        self.view, self.importance = view, importance
        self.count, self.high, self.wide = view.shape[:-2].numel(), view.shape[-2], view.shape[-1]
        self.size = self.high * self.wide  # values of a row
        self.device, self.dtype = view.device, view.dtype

    def observed_range(self) -> Range:
        """Smallest and largest value of every row, ``(R,)`` each."""
        if self.dtype.itemsize >= 4 or self.device.type != "cpu":
            # With dimensions, aminmax is ten times slower than the two reductions.
            low, high = self.view.amin(-1).amin(-1), self.view.amax(-1).amax(-1)
            return low.reshape(-1), high.reshape(-1)
        low, high = (torch.empty(self.count, dtype=self.dtype) for _ in range(2))
        step = max(1, _REDUCED_AT_ONCE // self.size)
        for start in range(0, self.count, step):
            part = slice(start, min(start + step, self.count))
            ends = [(v.amin(-1), v.amax(-1)) for v, _ in self.pieces(part, _REDUCED_AT_ONCE, weigh=False)]
            low[part] = torch.stack([end[0] for end in ends]).amin(0)
            high[part] = torch.stack([end[1] for end in ends]).amax(0)
        return low, high

    def pieces(
        self, part: Part, tile: int, weigh: bool = True, widen: bool = True
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Values ``(rows, values)`` with their importance, in pieces of at most ``tile`` values of a row.

        Args:
            part: which rows.
            tile: values at once of a row that is longer than that.
            weigh: with importance, where there is one.
            widen: to float32.
        """
        high, wide = self.high, self.wide
        if self.size > tile:
            high, wide = max(1, tile // self.wide), min(self.wide, tile)
        importance = None
        for n in range(0, self.high, high):
            for g in range(0, self.wide, wide):
                piece = self._take(part, slice(n, n + high), slice(g, g + wide))
                if weigh and self.importance is not None:
                    index = part if isinstance(part, torch.Tensor) else torch.arange(part.start, part.stop)
                    weights = self.importance[index.to(self.importance.device) % len(self.importance), g : g + wide]
                    importance = weights.unsqueeze(1).expand(piece.shape).flatten(1)
                values = piece.flatten(1)
                yield values.float() if widen else values, importance

    def _take(self, part: Part, n: slice, g: slice) -> torch.Tensor:
        if self.view.ndim == 3:
            return self.view[part, n, g]
        columns = self.view.shape[1]
        if isinstance(part, torch.Tensor):
            return self.view[part // columns, part % columns][:, n, g]
        first, last = part.start // columns, (part.stop - 1) // columns
        return torch.cat(
            [
                self.view[i, max(0, part.start - i * columns) : part.stop - i * columns, n, g]
                for i in range(first, last + 1)
            ]
        )


def rows_of_observed(observed: torch.Tensor, importance: torch.Tensor | None = None) -> Rows:
    """``(N, *Q, G)`` as rows ``(R, N, G)``, one per scale; a view unless Q cannot be flattened.

    Args:
        observed: the values.
        importance: broadcastable to ``(*Q, G)``.
    """
    return Rows(observed.flatten(1, -2).transpose(0, 1), _importance_rows(importance, observed.shape[1:]))


def rows_of_counts(observed: torch.Tensor) -> tuple[Rows, torch.Tensor, torch.Tensor] | None:
    """The distinct values of each scale, as important as they are many; smallest and largest value ``(R,)``.

    None unless the values are bfloat16, which has few numbers, and many to each scale, and all of them finite.
    """
    if observed.dtype != torch.bfloat16 or observed.shape[0] * observed.shape[-1] < _COUNTED_FROM:
        return None
    found = count_values(observed.flatten(1, -2))
    if not bool((found.low.isfinite() & found.high.isfinite()).all()):
        return None
    each = [support(*one) for one in zip(*found, strict=True)]
    values, counts = (pad_sequence([getattr(s, name).float() for s in each], True) for name in ("values", "counts"))
    return Rows(values.unsqueeze(1), counts), found.low, found.high


def rows_of_blocks(weight: torch.Tensor, height: int, width: int) -> Rows:
    """Blocks of a weight, which they divide: a view."""
    rows, columns = weight.shape
    return Rows(weight.view(rows // height, height, columns // width, width).transpose(1, 2))


def _importance_rows(importance: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Importance as ``(I, G)``, where I divides the number of scales and row r takes the weights of r modulo I."""
    if importance is None:
        return None
    padded = (1,) * (len(shape) - importance.ndim) + tuple(importance.shape)
    if len(padded) != len(shape) or any(own not in (1, size) for own, size in zip(padded, shape, strict=True)):
        raise CalibrationError(
            "the importance does not fit",
            got=f"shape {tuple(importance.shape)}",
            expected=f"a shape that broadcasts to {tuple(shape)}",
        )
    lead = 0  # leading dimensions that the importance lacks need no copy: the modulo repeats it
    weights = importance.reshape(padded)
    while lead < len(shape) - 1 and weights.shape[lead] == 1:
        lead += 1
    return weights.expand(*weights.shape[:lead], *shape[lead:]).reshape(-1, shape[-1]).float()
