"""Find the range that loses least when it is quantized.

The method: shrink the observed range by one factor after another, quantize and dequantize with each, and keep the
factor of least error ``sum(|q(x) - x| ** norm)`` per scale. The first of equal errors is kept, and the search ends when
``patience`` factors in a row improved no scale at all: a whole tensor visits the same factors. Factors, ties and early
stop are llm-compressor's, so in float32 the range found is the range found there.

The choice: a tile of 2**17 values at a time meets several factors before the next tile is read, so what lies between
weight and error (1.5 MiB) stays near the core. As many factors are taken at once as could pass before the search may
stop; which factors a tile visits then never depends on another tile. Half precision is widened tile by tile: its
candidates (range and scale) are rounded as they will be stored, and only the error is measured in float32.

The trade-off: ``pow(2.4)`` is half of the time. Two arithmetics take turns. The fast one measures in units of the scale
and writes ``u ** n`` as ``exp2(n * log2(u))``; it is right to about 1e-5. Where two candidates lie closer than that, or
a number comes near the ends of float32, the scale's candidates are measured again, operation by operation as
compressed-tensors would. That is rare (under 1 % of the scales) and decides every tie the exact way. A row longer than
a tile is added up in pieces, in float64: more accurate than one float32 sum, and not bit for bit the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range

from lightning_obs.errors import CalibrationError

Range = tuple[torch.Tensor, torch.Tensor]

# Elements of a tile. On a CPU, the fastest of 2**15 to 2**18 (L2 of 1 MiB); elsewhere a launch has to pay.
_TILE_CPU, _TILE_DEVICE = 1 << 17, 1 << 24
# At most so many factors per visit of a tile: bounds what is kept per scale, and gains no more beyond.
_FACTORS_AT_ONCE = 10
# Up to here torch runs an elementwise operation on one thread.
_SERIAL = (1 << 15) - 64
# Outside of these, float32 has lost bits of some term (or of the sum) in one of the two arithmetics.
_SMALLEST, _LARGEST = 1e-30, 1e36
# Below this mean error, in units of the scale, what is measured is the rounding of the measurement.
_NOISE = 0.05
# float formats: bits -> (mantissa bits, exponent of the smallest normal number)
_FLOATS = {8: (3, -6), 6: (3, 0), 4: (1, 0)}


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
    # With dimensions, aminmax is ten times slower than the two reductions.
    return torch.amin(observed, dim=(0, -1)), torch.amax(observed, dim=(0, -1))


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
    improved: torch.Tensor | None = None,
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
        improved: ``(len(factors),)`` of bool, all False; set where a factor improved any scale.

    Returns:
        (min, max), ``(*Q,)`` each, in the dtype of ``observed``. Where no candidate has a finite error (a NaN, an error
        beyond float32), it is the expanded range.
    """
    if not observed.is_floating_point():
        observed = observed.float()
    low, high = (value * expand for value in observed_range(observed))
    if not factors:
        return low, high
    search = _Search(
        rows=_as_rows(observed),
        low=low.reshape(-1),
        high=high.reshape(-1),
        grid=_Grid.of(args),
        factors=torch.tensor(factors, dtype=torch.float64, device=observed.device),
        norm=norm,
        importance=_importance_rows(importance, observed),
        tile=tile or (_TILE_CPU if observed.device.type == "cpu" else _TILE_DEVICE),
    )
    visited = search.run(patience)
    if improved is not None:
        improved[: len(visited)] = torch.tensor(visited)
    best_low, best_high = search.chosen()
    return best_low.reshape(low.shape), best_high.reshape(high.shape)


@dataclass(frozen=True)
class _Grid:
    """The numbers that a format can hold, in units of the scale."""

    args: QuantizationArgs
    low: float
    high: float
    mantissa: int | None  # None: integers
    smallest: int

    @classmethod
    def of(cls, args: QuantizationArgs) -> _Grid:
        if args.strategy == QuantizationStrategy.TENSOR_GROUP and args.scale_dtype is not None:
            args = args.model_copy(update={"scale_dtype": None})
        low, high = (bound.item() for bound in calculate_range(args, "cpu"))
        mantissa, smallest = _FLOATS[args.num_bits] if args.type == QuantizationType.FLOAT else (None, 0)
        return cls(args, float(low), float(high), mantissa, smallest)

    @property
    def steps(self) -> float:
        """How many steps the largest magnitude is: what float32's rounding of ``x / scale`` is multiplied by."""
        return self.high + 1 if self.mantissa is None else float(2 ** (self.mantissa + 2))

    def qparams(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero point (None if symmetric) as float32, rounded as compressed-tensors stores them."""
        scale, zero_point = calculate_qparams(low, high, self.args)
        return scale.float(), None if self.args.symmetric else zero_point.float()

    def round(self, value: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Write the nearest numbers of the format (ties to even) to ``out``, which may be ``value``."""
        torch.clamp(value, self.low, self.high, out=out)
        if self.mantissa is None:
            return out.round_()
        # Adding 1.5 * 2**(23 - mantissa) times the value's power of two leaves no bits below the format's last, and
        # float32 rounds to even. Five times faster than a cast there and back, and bit for bit its result.
        torch.bitwise_and(out.view(torch.int32), 0x7F800000, out=scratch.view(torch.int32))
        scratch.clamp_(min=2.0**self.smallest).mul_(1.5 * 2.0 ** (23 - self.mantissa))
        return out.add_(scratch).sub_(scratch)


class _Search:
    """One search over ``rows`` (R, N, G): R scales, and per scale the best error and factor so far."""

    def __init__(
        self,
        rows: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        grid: _Grid,
        factors: torch.Tensor,
        norm: float,
        importance: torch.Tensor | None,
        tile: int,
    ) -> None:
        self.rows, self.low, self.high, self.grid, self.norm = rows, low, high, grid, norm
        self.factors, self.importance, self.tile = factors, importance, tile
        count, values = rows.shape[0], rows.shape[1] * rows.shape[2]
        self.in_pieces = values > tile
        error_dtype = torch.float64 if self.in_pieces else torch.float32
        self.best = torch.full((count,), torch.finfo(torch.float32).max, dtype=error_dtype, device=rows.device)
        self.index = torch.zeros(count, dtype=torch.int16, device=rows.device)
        self.buffers = torch.empty(3, min(tile, rows.numel()), device=rows.device)
        # How far fast and exact errors can differ: exp2 and log2, and float32's rounding of x / scale, which averages
        # out over a row unless one value may carry all the weight.
        averaged = 1 if importance is not None else values
        self.tolerance = 2e-5 + grid.steps * 2.0**-20 / averaged**0.5

    def run(self, patience: int | None) -> list[bool]:
        """Visit factors until ``patience`` of them in a row improved nothing; say of each if it improved any."""
        start, idle = 0, 0
        visited: list[bool] = []
        while start < len(self.factors):
            ahead = _FACTORS_AT_ONCE if patience is None else min(_FACTORS_AT_ONCE, max(1, patience - idle))
            for improved in self._visit(range(start, min(start + ahead, len(self.factors)))):
                idle = 0 if improved else idle + 1
                visited.append(improved)
            if patience is not None and idle >= max(1, patience):
                break
            start += ahead
        return visited

    def chosen(self) -> Range:
        """The range of the best factor of every scale; written over the observed range, tile by tile."""
        for start in range(0, len(self.low), self.tile):
            part = slice(start, start + self.tile)
            self.low[part], self.high[part] = self._candidates(part, self.index[part].long())
        return self.low, self.high

    def _visit(self, which: range) -> list[bool]:
        """Measure these factors on every row; say which of them improved any."""
        improved_any = torch.zeros(len(which), dtype=torch.bool, device=self.rows.device)
        count, observations, group = self.rows.shape
        step = max(1, self.tile // (observations * group))
        numbers = torch.arange(which.start, which.stop, device=self.rows.device).unsqueeze(-1)
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            errors, unsure = self._fast(part, numbers)
            before = _running_best(self.best[part], errors)
            unsure |= self._too_close(errors, before[:-1])
            again = unsure.nonzero().squeeze(-1)
            if len(again):
                at = again + start
                exact = self._exact(at, torch.cat([self.index[at].long().unsqueeze(0), numbers.expand(-1, len(at))]))
                errors[:, again] = exact[1:]
                before[:, again] = _running_best(exact[0] if which.start else self.best[at], exact[1:])
            improved = errors < before[:-1]
            improved_any |= improved.any(1)
            last = torch.where(improved, numbers, -1).amax(0)
            self.index[part] = torch.where(last >= 0, last, self.index[part]).to(torch.int16)
            self.best[part] = before[-1]
        return improved_any.tolist()

    def _too_close(self, errors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Rows of which some comparison could come out otherwise in the exact arithmetic."""
        # Written so that NaN counts as unsure.
        sure = (errors - before).abs_() > before * self.tolerance
        sure &= (errors > _SMALLEST) & (errors < _LARGEST)
        return ~sure.all(0)

    def _candidates(self, rows: torch.Tensor | slice, which: torch.Tensor) -> Range:
        """Shrunk ranges, rounded to the observed dtype as they will be stored."""
        factor = self.factors[which].to(torch.promote_types(self.low.dtype, torch.float32))
        low, high = self.low[rows] * factor, self.high[rows] * factor
        return low.to(self.low.dtype), high.to(self.high.dtype)

    def _fast(self, part: slice, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors (factors, rows) by the fast arithmetic, and which rows it cannot measure."""
        scale, zero_point = self.grid.qparams(*self._candidates(part, which))
        inverse = scale.reciprocal()
        total = torch.zeros(scale.shape, dtype=self.best.dtype, device=scale.device)
        weight = torch.zeros(1, device=scale.device)
        for values, importance in self._pieces(part):
            a, b, c = (buffer[: values.numel()].view(values.shape) for buffer in self.buffers)
            weight = weight + (values.shape[-1] if importance is None else importance.sum(-1))
            for number in range(len(which)):
                torch.mul(values, inverse[number].unsqueeze(-1), out=a)
                if zero_point is not None:
                    a.add_(zero_point[number].unsqueeze(-1))
                self._power_(a.sub_(self.grid.round(a, b, c)).abs_())
                if importance is not None:
                    a.mul_(importance)
                total[number] += a.sum(-1)
        unsure = ~(total > weight * _NOISE**self.norm).all(0)
        return total * scale.pow(self.norm), unsure

    def _power_(self, value: torch.Tensor) -> torch.Tensor:
        if self.norm in (1.0, 2.0, 3.0):  # a multiplication or two
            return value.pow_(self.norm)
        return value.log2_().mul_(self.norm).exp2_()

    def _exact(self, rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Errors (factors, rows), operation by operation as fake quantization computes them; never NaN."""
        scale, zero_point = self.grid.qparams(*self._candidates(rows, which))
        total = torch.zeros(scale.shape, dtype=self.best.dtype, device=scale.device)
        step = max(1, self.tile // (self.rows.shape[1] * self.rows.shape[2]))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            for values, importance in self._pieces(rows[part]):
                at_once = max(1, _SERIAL // values.numel())
                for first in range(0, len(which), at_once):
                    some = slice(first, first + at_once)
                    by = scale[some, part].unsqueeze(-1)
                    # pow rounds otherwise in a scalar loop, which is where the last elements of a tensor end up: two
                    # candidates of one scale would no longer tie. So there are more elements behind the last.
                    count = len(by) * values.numel()
                    padded = values.new_zeros(count + -count % 64)
                    error = padded[:count].view(len(by), *values.shape)
                    scratch = torch.empty_like(error)
                    torch.div(values, by, out=error)
                    if zero_point is None:
                        self.grid.round(error, error, scratch)
                    else:
                        shift = zero_point[some, part].unsqueeze(-1)
                        self.grid.round(error.add_(shift), error, scratch).sub_(shift)
                    error.mul_(by).sub_(values).abs_()
                    padded.pow_(self.norm)
                    if importance is not None:
                        error.mul_(importance)
                    total[some, part] += error.sum(-1)
        most = torch.finfo(torch.float32).max
        return total.nan_to_num_(nan=most, posinf=most)

    def _pieces(self, rows: torch.Tensor | slice) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Values ``(rows, values)`` in float32 with their importance, in pieces that fit a tile."""
        _, observations, group = self.rows.shape
        high, wide = observations, group
        if self.in_pieces:
            high, wide = max(1, self.tile // group), min(group, self.tile)
        importance = None
        for n in range(0, observations, high):
            for g in range(0, group, wide):
                piece = self.rows[rows, n : n + high, g : g + wide]
                if self.importance is not None:
                    index = rows if isinstance(rows, torch.Tensor) else torch.arange(rows.start, rows.stop)
                    weights = self.importance[index.to(self.importance.device) % len(self.importance), g : g + wide]
                    importance = weights.unsqueeze(1).expand(piece.shape).flatten(1)
                yield piece.flatten(1).float(), importance


def _running_best(best: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The least error before each candidate and after the last, ``(candidates + 1, rows)``."""
    found = torch.cat([best.unsqueeze(0), errors])
    for previous, this in itertools.pairwise(found):  # cummin(0) is ten times slower
        torch.minimum(previous, this, out=this)
    return found


def _as_rows(observed: torch.Tensor) -> torch.Tensor:
    """``(N, *Q, G)`` as ``(R, N, G)``, one row per scale; a view unless Q cannot be flattened."""
    return observed.flatten(1, -2).transpose(0, 1)


def _importance_rows(importance: torch.Tensor | None, observed: torch.Tensor) -> torch.Tensor | None:
    """Importance as ``(I, G)``, where I divides the number of scales and row r takes the weights of r modulo I."""
    if importance is None:
        return None
    shape = observed.shape[1:]
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
