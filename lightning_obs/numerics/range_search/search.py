"""Find the range that loses least when it is quantized.

The method: shrink the observed range by one factor after another, quantize and dequantize with each, and keep the
factor of least error ``sum(|q(x) - x| ** norm)`` per scale. The first of equal errors is kept, and the search ends when
``patience`` factors in a row improved no scale at all: a whole tensor visits the same factors. Factors, ties and early
stop are llm-compressor's, so in float32 the range found is the range found there.

The choice: a tile of values at a time meets several factors before the next tile is read, so what lies between weight
and error stays near the core. As many factors are taken at once as could pass before the search may stop; which
factors a tile visits then never depends on another tile. Half precision is widened tile by tile: its candidates (range
and scale) are rounded as they will be stored, and only the error is measured in float32. A factor that cuts so much off
the largest value of a row that this alone is more than the least error so far is not measured on that row.

The trade-off: ``pow(2.4)`` is half of the time. Two arithmetics take turns. The fast one (:mod:`.fast_errors`) measures
in units of the scale and approximates the power; how far off it can be is known. Where two candidates lie closer than
that, or a number comes near the ends of float32, the scale's candidates are measured again, operation by operation as
compressed-tensors would. That is rare (under 1 % of the scales) and decides every tie the exact way. A row longer than
a tile is added up in pieces, in float64: more accurate than one float32 sum, and not bit for bit the same. Many
bfloat16 values of one scale are counted instead, and each distinct one is measured once (:mod:`.histogram`); nothing is
lost by that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.patience import Patience
from lightning_obs.numerics.range_search.compiled import Compile, compiled_errors
from lightning_obs.numerics.range_search.fast_errors import AT_ONCE, FastErrors, Measured, Numbers
from lightning_obs.numerics.range_search.rows import Part, Range, Rows, rows_of_blocks, rows_of_counts, rows_of_observed

# Elements of a tile. On a CPU, the fastest of 2**15 to 2**18 (L2 of 1 MiB). Compiled, nothing but the tile has to fit
# anywhere; elsewhere a launch has to pay.
_TILE_CPU, _TILE_COMPILED, _TILE_DEVICE = 1 << 17, 1 << 20, 1 << 24
# Rows of a tile: bounds what is kept per candidate and row.
_ROWS_CPU = 1 << 14
# Up to here torch runs an elementwise operation on one thread.
_SERIAL = (1 << 15) - 64


class Beyond:
    """What a search would have found, had it gone on after its end: other rows of the same tensor may decide that.

    Attributes:
        improved: of each factor, also of those before the end, whether it improved any scale.
        numbers: which factor improved a scale after the end, ascending, ``(K,)``.
        rows: which scale, counted row by row, ``(K,)``.
        low, high: the range that it gave this scale, ``(K,)`` each.
    """

    improved: list[bool]
    numbers: torch.Tensor
    rows: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def shrink_factors(maxshrink: float, grid: float) -> list[float]:
    """The factors to try, from 1 down to (not including) ``1 - maxshrink``, in steps of ``1 / grid``.

    >>> shrink_factors(maxshrink=0.2, grid=20)
    [1.0, 0.95, 0.9, 0.85]
    """
    return [1 - step / grid for step in range(int(maxshrink * grid))]


def observed_range(observed: torch.Tensor) -> Range:
    """Smallest and largest value per scale, ``(*Q,)`` each, of ``(N, *Q, G)``."""
    if observed.ndim == 3 and observed.shape[1] == 1:
        low, high = torch.aminmax(observed)  # one scale: a single pass, at the speed of memory
        return low.reshape(1), high.reshape(1)
    low, high = rows_of_observed(observed).observed_range()
    shape = observed.shape[1:-1]
    return low.reshape(shape), high.reshape(shape)


def search_range(
    observed: torch.Tensor,
    args: QuantizationArgs,
    factors: Sequence[float],
    *,
    patience: int | None = 5,
    norm: float = 2.4,
    expand: float = 1.0,
    importance: torch.Tensor | None = None,
    tile: int | None = None,
    compile: Compile = "auto",
    beyond: Beyond | None = None,
) -> Range:
    """The range of least quantization error per scale.

    Args:
        observed: ``(N, *Q, G)``, not empty: N observations, Q the shape of the scales, G values per scale.
        args: number format and symmetry. A tensor_group is searched without rounding its scales, and without the
            global scale, which is only known afterwards.
        factors: candidates, in the order of the search; the first wins a tie.
        patience: the search ends after so many factors in a row that improved nothing; None: it visits all.
        norm: exponent of the error.
        expand: factor on the observed range before the search; above 1 it tries ranges wider than the values.
        importance: weight of each value's error, broadcastable to ``(*Q, G)``, not negative.
        tile: elements of a tile; None chooses for the device.
        compile: whether to compile the inner loop, see :mod:`~lightning_obs.numerics.range_search.compiled`.
        beyond: where to put what the factors after the end of the search improve; without it they are not visited.

    Returns:
        (min, max), ``(*Q,)`` each, in the dtype of ``observed``. Where no candidate has a finite error (a NaN, an error
        beyond float32), it is the expanded range.
    """
    if not observed.is_floating_point():
        observed = observed.float()
    counted = rows_of_counts(observed) if importance is None else None
    if counted is not None:
        (rows, low, high), compile = counted, False
    else:
        rows, (low, high) = rows_of_observed(observed, importance), observed_range(observed)
    low, high = _search(rows, low, high, args, factors, patience, norm, expand, tile, compile, beyond)
    return low.reshape(observed.shape[1:-1]), high.reshape(observed.shape[1:-1])


def search_block_range(
    weight: torch.Tensor,
    args: QuantizationArgs,
    factors: Sequence[float],
    *,
    patience: int | None = 5,
    norm: float = 2.4,
    expand: float = 1.0,
    tile: int | None = None,
    compile: Compile = "auto",
    beyond: Beyond | None = None,
) -> Range:
    """The range of least quantization error per block of a weight ``(R, C)``, which is not copied.

    Args:
        weight: not empty; the height and width of a block divide it.
        args: its ``block_structure`` is the size of a block.
        factors, patience, norm, expand, tile, compile, beyond: see :func:`search_range`.

    Returns:
        (min, max), ``(R / height, C / width)`` each.
    """
    assert args.block_structure is not None  # QuantizationArgs validated it
    rows = rows_of_blocks(weight, *args.block_structure)
    low, high = _search(rows, *rows.observed_range(), args, factors, patience, norm, expand, tile, compile, beyond)
    return low.reshape(rows.view.shape[:2]), high.reshape(rows.view.shape[:2])


def _search(
    rows: Rows,
    low: torch.Tensor,
    high: torch.Tensor,
    args: QuantizationArgs,
    factors: Sequence[float],
    patience: int | None,
    norm: float,
    expand: float,
    tile: int | None,
    compile: Compile,
    beyond: Beyond | None,
) -> Range:
    low, high = low.reshape(-1), high.reshape(-1)
    if expand != 1:
        low, high = low.mul_(expand), high.mul_(expand)
    if not factors:
        return low, high
    search = _Search(rows, low, high, NumberGrid.of(args), factors, norm, expand, tile, compile)
    improved = search.run(patience)
    if beyond is not None:
        search.run_on(improved, beyond)
    return search.chosen()


class _Search:
    """One search, and per row the best error and factor so far."""

    def __init__(
        self,
        rows: Rows,
        low: torch.Tensor,
        high: torch.Tensor,
        grid: NumberGrid,
        factors: Sequence[float],
        norm: float,
        expand: float,
        tile: int | None,
        compile: Compile,
    ) -> None:
        self.rows, self.low, self.high, self.grid, self.norm = rows, low, high, grid, norm
        self.factors = torch.tensor(factors, dtype=torch.float64, device=rows.device)
        self.narrows = all(one >= next for one, next in itertools.pairwise(factors))
        # One value may carry all the weight.
        averaged = rows.size if rows.importance is None else 1
        self.numbers = Numbers.of(grid, norm, list(factors), expand, averaged)
        self.fast = FastErrors.of(grid, norm, rows.importance is not None)
        on_cpu = rows.device.type == "cpu"
        most = tile or (_TILE_COMPILED if on_cpu else _TILE_DEVICE)
        self.compiled = None
        if rows.size <= most:
            work = float(rows.count * rows.size * len(factors))
            self.compiled = compiled_errors(self.fast, compile, rows.device, rows.dtype, grid.symmetric, work)
        self.tile = most if self.compiled or not on_cpu else tile or _TILE_CPU
        self.step = max(1, self.tile // rows.size)  # rows at once
        if on_cpu:
            self.step = min(self.step, _ROWS_CPU)
        self.in_pieces = rows.size > self.tile
        error_dtype = torch.float64 if self.in_pieces else torch.float32
        self.best = torch.full((rows.count,), torch.finfo(torch.float32).max, dtype=error_dtype, device=rows.device)
        kind = torch.uint8 if len(factors) <= 256 else torch.int16
        self.index = torch.zeros(rows.count, dtype=kind, device=rows.device)
        self.finished = torch.zeros(rows.count, dtype=torch.bool, device=rows.device)

    def run(self, patience: int | None) -> list[bool]:
        """Visit factors until ``patience`` of them in a row improved nothing; say of each if it improved any."""
        count, visited = Patience(patience), list[bool]()
        while count.left and len(visited) < len(self.factors):
            ahead = len(visited) + min(2 * AT_ONCE, count.left)
            for improved in self._visit(range(len(visited), min(ahead, len(self.factors)))):
                count.ends(improved)
                visited.append(improved)
        return visited

    def run_on(self, improved: list[bool], into: Beyond) -> None:
        """Visit the factors that are left, one by one, without a change of what was found."""
        found = self.index.clone()
        later: list[tuple[int, torch.Tensor]] = []
        into.improved = list(improved)
        for number in range(len(improved), len(self.factors)):
            before = self.index.clone()
            into.improved += self._visit(range(number, number + 1))
            rows = (self.index != before).nonzero().squeeze(-1)
            if len(rows):
                later.append((number, rows))
        if later:
            into.rows = torch.cat([rows for _, rows in later])
            into.numbers = torch.cat([torch.full_like(rows, number) for number, rows in later])
            into.low, into.high = self._candidates(into.rows, into.numbers)
        else:
            into.rows = into.numbers = torch.zeros(0, dtype=torch.int64, device=self.low.device)
            into.low, into.high = self.low[:0].clone(), self.high[:0].clone()
        self.index = found

    def chosen(self) -> Range:
        """The range of the best factor of every scale; written over the observed range, tile by tile."""
        for start in range(0, len(self.low), _TILE_CPU):
            part = slice(start, start + _TILE_CPU)
            self.low[part], self.high[part] = self._candidates(part, self.index[part].long())
        return self.low, self.high

    def _visit(self, which: range) -> list[bool]:
        """Measure these factors on every row; say which of them improved any."""
        improved_any = torch.zeros(len(which), dtype=torch.bool, device=self.rows.device)
        numbers = torch.arange(which.start, which.stop, device=self.rows.device).unsqueeze(-1)
        for start in range(0, self.rows.count, self.step):
            part = slice(start, min(start + self.step, self.rows.count))
            for first in range(0, len(which), AT_ONCE):
                some = slice(first, first + AT_ONCE)
                rows = self._unfinished(part)
                if rows is not None:
                    improved_any[some] |= self._measure(rows, numbers[some])
        return improved_any.tolist()

    def _unfinished(self, part: slice) -> Part | None:
        """The rows that a narrower range may improve, or all if they are many; None if there are none."""
        finished = self.finished[part]
        count = int(finished.sum())
        if count == len(finished):
            return None
        if count < 0.25 * len(finished):
            return part
        return (~finished).nonzero().squeeze(-1) + part.start

    def _measure(self, rows: Part, numbers: torch.Tensor) -> torch.Tensor:
        """Measure factors ``numbers`` (C, 1) on rows; which of them improved any, ``(C,)``."""
        scale, zero_point = self.grid.qparams(*self._candidates(rows, numbers))
        found = self._fast(rows, scale, zero_point)
        unsure = found.unsure
        surely = (found.improved & ~found.close).any(1)
        if not surely.all():  # the search may end here
            unsure = unsure | (found.close & ~surely.unsqueeze(-1)).any(0)
        again = unsure.nonzero().squeeze(-1)
        index = self.index[rows]
        if len(again):
            at = again + rows.start if isinstance(rows, slice) else rows[again]
            exact = self._exact(at, torch.cat([index[again].long().unsqueeze(0), numbers.expand(-1, len(at))]))
            before = _running_best(exact[0] if numbers[0] else self.best[at], exact[1:])
            improved = exact[1:] < before[:-1]
            found.improved[:, again], found.best[again] = improved, before[-1].to(found.best.dtype)
            found.last[again] = torch.where(improved, numbers - numbers[0], -1).amax(0).to(found.last.dtype)
        self.index[rows] = torch.where(found.last >= 0, found.last.long() + numbers[0], index).to(index.dtype)
        self.best[rows] = found.best
        if self.narrows:
            self.finished[rows] = found.finished
        return found.improved.any(1)

    def _candidates(self, rows: Part, which: torch.Tensor) -> Range:
        """Shrunk ranges, rounded to the observed dtype as they will be stored."""
        factor = self.factors[which].to(torch.promote_types(self.low.dtype, torch.float32))
        low, high = self.low[rows] * factor, self.high[rows] * factor
        return low.to(self.low.dtype), high.to(self.high.dtype)

    def _fast(self, rows: Part, scale: torch.Tensor, zero_point: torch.Tensor | None) -> Measured:
        """Errors by the fast arithmetic, compared with the best so far."""
        low, high, best = self.low[rows], self.high[rows], self.best[rows]
        pieces = self.rows.pieces(rows, self.tile, widen=not self.compiled)
        if not self.in_pieces:
            values, importance = next(pieces)
            if self.compiled:
                return self.compiled.measure(values, importance, scale, zero_point, low, high, best, self.numbers)
            return self.fast.measure(values, importance, scale, zero_point, low, high, best, None, self.numbers)
        inverse = scale.reciprocal()
        total = torch.zeros(scale.shape, dtype=self.best.dtype, device=scale.device)
        weight = torch.zeros(1, device=scale.device)
        for values, importance in pieces:
            weight = weight + (values.shape[-1] if importance is None else importance.sum(-1))
            total += self.fast.sums(values, importance, inverse, zero_point, self.numbers)
        return self.fast.judge(total, weight, scale, scale**self.norm, zero_point, low, high, best, None, self.numbers)

    def _exact(self, rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Errors (factors, rows), operation by operation as fake quantization computes them; never NaN."""
        scale, zero_point = self.grid.qparams(*self._candidates(rows, which))
        total = torch.zeros(scale.shape, dtype=self.best.dtype, device=scale.device)
        step = max(1, min(self.tile, _TILE_CPU) // self.rows.size)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            for values, importance in self.rows.pieces(rows[part], self.tile):
                at_once = max(1, _SERIAL // values.numel())
                for first in range(0, len(which), at_once):
                    some = slice(first, first + at_once)
                    by = scale[some, part].unsqueeze(-1)
                    # pow rounds otherwise in a scalar loop, which is where the last elements of a tensor end up: two
                    # candidates of one scale would no longer tie. So there are more elements behind the last.
                    count = len(by) * values.numel()
                    padded = values.new_zeros(count + -count % 64)
                    error = padded[:count].view(len(by), *values.shape)
                    if zero_point is None:
                        torch.mul(self.grid.round(values / by), by, out=error)
                    else:
                        shift = zero_point[some, part].unsqueeze(-1)
                        torch.mul(self.grid.round((values / by).add_(shift)).sub_(shift), by, out=error)
                    error.sub_(values).abs_()
                    padded.pow_(self.norm)
                    if importance is not None:
                        error.mul_(importance)
                    total[some, part] += error.sum(-1)
        most = torch.finfo(torch.float32).max
        return total.nan_to_num_(nan=most, posinf=most)


def _running_best(best: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The least error before each candidate and after the last, ``(candidates + 1, rows)``."""
    found = torch.cat([best.unsqueeze(0), errors])
    for previous, this in itertools.pairwise(found):  # cummin(0) is ten times slower
        torch.minimum(previous, this, out=this)
    return found
