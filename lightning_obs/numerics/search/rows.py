"""Read the values of each scale, a few scales at a time, from a tensor of any layout.

``ranges.py`` makes :class:`Rows` for each search, and the loops read them. A row holds the values of one scale,
``(N, G)``. Only the rows that are read at a time are copied: a block of a weight is no contiguous piece of it, and
copying all blocks at once would take as much memory as the weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_obs.numerics.histogram import count_values, every_value, support
from lightning_obs.numerics.qparams import extremes

Range = tuple[torch.Tensor, torch.Tensor]

#: a CPU reads rows of up to this many values whole, and measures them with all candidates in one visit
LONG = 1 << 16
# With at least this many values per scale, counting them and measuring the distinct ones is faster.
_COUNTED_FROM = 1 << 17


class Rows:
    """The rows of a view ``(A, B, N, G)``, whose first two dimensions number them: row r is ``view[r // B, r % B]``.

    ``ranges.py`` makes them for each search.

    Args:
        view: the values.
        importance: weight of each value's error, ``(I, G)``: row r has the weights ``r % I``. None: all weights are 1.
        dtype: dtype of the ranges; None: that of the values.
        hessian: matrices that measure errors in place of norm and importance, one for each of T parts of the G columns,
            ``(I, T, G / T, G / T)``: row r has the matrices ``r % I``. None: norm and importance measure errors.
    """

    def __init__(
        self,
        view: torch.Tensor,
        importance: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        hessian: torch.Tensor | None = None,
    ) -> None:
        self.view = view
        self.importance = importance
        self.dtype = dtype or view.dtype
        self.hessian = hessian
        self.device = view.device
        #: number of rows
        self.count = view.shape[:2].numel()
        #: values of each row
        self.size = view.shape[2:].numel()

    @property
    def are_long(self) -> bool:
        """Whether the rows are on a CPU and so long that they are read in pieces, with few candidates at a time.

        Asked by the search, and by the loop that numba compiles.
        """
        is_on_cpu = self.device.type == "cpu"
        return is_on_cpu and self.size > LONG

    def observed_range(self) -> Range:
        """Smallest and largest value of every row, ``(R,)`` each: the ranges that a search shrinks.

        ``ranges.py`` calls it at the beginning of a search.
        """
        low, high = extremes(self.view)
        low = low.reshape(-1)
        high = high.reshape(-1)
        return low.to(self.dtype), high.to(self.dtype)

    def parts(self, part: slice, length: int) -> Iterator[slice]:
        """Cut consecutive rows into parts of at most ``length`` rows; searches and loops visit one part at a time.

        Where Hessians measure errors, each part but the last has a multiple of I rows, I the number of Hessians: if I
        is larger than ``length``, it has I rows. The last part has the rows that are left.
        """
        repeats = 1 if self.hessian is None else len(self.hessian)
        step = max(1, length // repeats) * repeats
        for start in range(part.start, part.stop, step):
            yield slice(start, min(start + step, part.stop))

    def pieces(self, part: slice, tile: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the values of consecutive rows, ``(rows, values)`` in float32, and their importance.

        Rows of more than ``tile`` values come in pieces of at most so many. The importance is ``(rows, values)``, too;
        None: all weights are 1. The loop of torch's operations calls it to read rows.
        """
        height, width = self.view.shape[2:]
        if self.size > tile:
            height = max(1, tile // width)
            width = min(width, tile)
        for n in range(0, self.view.shape[2], height):
            lines = slice(n, n + height)
            for g in range(0, self.view.shape[3], width):
                columns = slice(g, g + width)
                values = self._values(part, lines, columns)
                importance = self._importance(part, columns)
                if importance is not None:
                    importance = importance.unsqueeze(1).expand(values.shape).flatten(1)
                yield values.flatten(1).float(), importance

    def _values(self, part: slice, n: slice, g: slice) -> torch.Tensor:
        """The values of consecutive rows in the lines ``n`` and columns ``g``, ``(r, n, g)``."""
        columns = self.view.shape[1]
        first_line = part.start // columns
        last_row = part.stop - 1
        last_line = last_row // columns
        lines = []
        for line in range(first_line, last_line + 1):
            number = line * columns  # of its first row
            start = max(0, part.start - number)
            stop = part.stop - number
            lines.append(self.view[line, start:stop, n, g])
        return lines[0] if len(lines) == 1 else torch.cat(lines)

    def _importance(self, part: slice, g: slice) -> torch.Tensor | None:
        """The weights of consecutive rows in the columns ``g``, ``(r, g)``, or ``(1, g)`` if all rows share them."""
        if self.importance is None:
            return None
        weights = self.importance[:, g]
        if len(weights) == 1:
            return weights
        number = torch.arange(part.start, part.stop, device=self.device)
        return weights[number % len(weights)]


def rows_of_observed(
    observed: torch.Tensor, importance: torch.Tensor | None = None, hessian: torch.Tensor | None = None
) -> Rows:
    """``(N, *Q, G)`` as :class:`Rows`, one for each scale; a view unless Q cannot be flattened. For ``search_range``.

    ``importance`` and ``hessian`` are those of :class:`Rows`.
    """
    flat = observed.flatten(1, -2)
    is_plain = importance is None and hessian is None
    if is_plain and flat.shape[1] == 1 and flat.is_contiguous():
        flat = flat.reshape(1, 1, -1)  # one line of N * G values instead of N lines
    by_scale = flat.transpose(0, 1)
    return Rows(by_scale.unsqueeze(0), importance, None, hessian)


def rows_of_counts(observed: torch.Tensor) -> Rows | None:
    """Rows of the distinct values of each scale, with their counts as importance; None if counting does not help.

    ``search_range`` tries it for values without importance and Hessian.

    It helps where a scale has many bfloat16 values, because bfloat16 has only 65,536 numbers. On a CPU the result is
    None, too, if a value is not finite.
    """
    size = observed.shape[0] * observed.shape[-1]
    if observed.dtype != torch.bfloat16 or size < _COUNTED_FROM:
        return None
    counted = count_values(observed.flatten(1, -2))
    if observed.device.type != "cpu":  # the host does not ask which values occur, nor whether they are finite
        values = every_value(observed.device)
        counts = counted.counts
    elif not bool((counted.low.isfinite() & counted.high.isfinite()).all()):
        return None
    else:
        all_values = []
        all_counts = []
        for scale_counts, low, high in zip(*counted, strict=True):
            distinct, occurrences = support(scale_counts, low, high)
            all_values.append(distinct)
            all_counts.append(occurrences)
        values = pad_sequence(all_values, batch_first=True)
        counts = pad_sequence(all_counts, batch_first=True)
    # A bin without values has the importance 0. Its value is clamped, too, so that it does not widen the range.
    values = values.clamp(counted.low[:, None], counted.high[:, None])
    return Rows(values[None, :, None], counts.float(), observed.dtype)
