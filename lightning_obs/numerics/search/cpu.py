"""The search by compiled loops: what the loops are told, and what the definition decides after them.

A row of up to ``_ROW`` values meets all candidates in one visit, tile by tile, the tiles shared out over threads. A
longer one is added up in pieces, some candidates at a time, since its tensor has few scales, and the search may end
early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization.utils import should_generate_mx_scales

from lightning_obs.numerics.candidates import candidate_ranges, shrink
from lightning_obs.numerics.formats import NumberFormat, NumberGrid, format_of_dtype
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.search import definition
from lightning_obs.numerics.search.cpu_power import fit_power
from lightning_obs.numerics.search.definition import Visited
from lightning_obs.numerics.search.rows import Rows

# Values of the longest row that is visited as a whole; of a tile; of what the definition gets at once.
_ROW, _TILE, _GATHERED = 1 << 16, 1 << 17, 1 << 18
# Rows of which the best candidates are kept until the definition has decided among them.
_SLAB = 1 << 15


def can_search(rows: Rows, grid: NumberGrid, norm: float) -> bool:
    """Whether the loops know these values, this format and norm."""
    args, dtype = grid.args, grid.scale_dtype
    scale = dtype in (None, rows.dtype) or format_of_dtype(dtype) is not None or should_generate_mx_scales(args)
    integers = grid.number is None and args.zp_dtype in (None, torch.int8)
    return (
        rows.hessian is None
        and grid.global_scale is None
        and norm >= 1
        and scale
        and (grid.symmetric or integers)
        and launch.can_read(rows.view)
    )


def visit(
    rows: Rows, factors: Sequence[float], grid: NumberGrid, norm: float, expand: float, patience: int | None
) -> Visited:
    """As :func:`.definition.visit`; rows longer than ``_ROW`` may have met fewer candidates than there are."""
    search = _Search(rows, factors, grid, norm, expand)
    return search.long_rows(patience) if rows.size > _ROW else search.all_rows()


class _Search:
    def __init__(self, rows: Rows, factors: Sequence[float], grid: NumberGrid, norm: float, expand: float) -> None:
        from lightning_obs.numerics.search import cpu_kernel, cpu_tile

        self.kernel: Any = cpu_kernel
        self.tile: Any = cpu_tile
        self.rows, self.grid, self.norm, self.expand = rows, grid, norm, expand
        self.factors = torch.tensor(factors, dtype=torch.float64)
        self.form, distance = _format(grid, rows.dtype, factors, expand)
        self.power = fit_power(norm, distance, grid.usual_error)
        self.bits = launch.memory(rows.view)
        self.weights: Any = None if rows.importance is None else launch.memory(rows.importance.contiguous())

    # ------------------------------------------------------------------ rows that a tile holds

    def all_rows(self) -> Visited:
        rows, count = self.rows, len(self.factors)
        low, high = (torch.empty(rows.count, dtype=rows.dtype) for _ in range(2))
        index = definition.index_of(rows.count, count)
        side = self.tile.LANES // self.tile.lanes_of(rows.size)  # rows of a block: none is cut by a tile
        step = max(side, _TILE // rows.size // side * side)
        slab = max(step, _SLAB // step * step)
        improved = unsure = torch.zeros(count, dtype=torch.int64)
        for start in range(0, rows.count, slab):
            stop = min(start + slab, rows.count)
            ends, chosen = np.empty((2, stop - start), np.float32), np.empty((2, stop - start), np.int32)
            parts = range(start, stop, step)
            flags = np.zeros((len(parts), 2, count), np.int64)

            def work(
                number: int,
                parts: range = parts,
                ends: Any = ends,
                chosen: Any = chosen,
                flags: Any = flags,
                stop: int = stop,
            ) -> None:
                first = parts[number]
                here = slice(first - parts.start, min(first + step, stop) - parts.start)
                self._search(first, here.stop - here.start, *ends[:, here], *chosen[:, here], *flags[number])

            launch.in_threads(len(parts), work, (stop - start) * rows.size * count)
            added = torch.from_numpy(flags.sum(0))
            part = slice(start, stop)
            low[part], high[part] = (torch.from_numpy(end) for end in ends)
            best = torch.from_numpy(chosen[0]).long()
            settled = self._settle(start, low[part], high[part], best, torch.from_numpy(chosen[1]))
            index[part] = best
            improved, unsure = improved + added[0] + settled, unsure + added[1]
        return Visited(low, high, index, improved > 0, (unsure > 0) & (improved == 0))

    def _search(
        self, first: int, count: int, low: Any, high: Any, index: Any, rival: Any, sure: Any, maybe: Any
    ) -> None:
        (_, columns, *shape), strides = self.rows.view.shape, self.rows.view.stride()
        tile = self._load(self.bits, first, count, columns, strides, shape)
        weights = tile[:0]
        if self.rows.importance is not None:
            repeats, size = self.rows.importance.shape
            weights = self._load(self.weights, first, count, repeats, (0, size, 0, 1), shape)
        factors, expand = self.factors.numpy().astype(np.float32), np.float32(self.expand)
        launch.run(
            self.kernel.search,
            *(tile, weights, count, self.rows.size, factors, expand, self.form, self.power),
            *(low, high, index, rival, sure, maybe),
        )

    def _settle(
        self, start: int, low: torch.Tensor, high: torch.Tensor, best: torch.Tensor, rival: torch.Tensor
    ) -> torch.Tensor:
        """Write the chosen range over the observed one; where the loops left it open, the definition decides."""
        improved = torch.zeros(len(self.factors), dtype=torch.int64)

        def some_of(which: torch.Tensor) -> Iterator[torch.Tensor]:
            index = which.nonzero().squeeze(-1)
            return (some for some in index.split(max(1, _GATHERED // self.rows.size)) if len(some))

        for some in some_of(rival >= 0):
            pair = torch.stack([best[some], rival[some].long()]).sort(0).values  # the first of equals wins
            lows, highs = (shrink(end[some], self.factors[pair]) for end in (low, high))
            only = self.rows.only(some + start)
            errors = definition.measure(only, slice(0, only.count), lows, highs, self.grid, self.norm)
            best[some] = torch.where(errors[1] < errors[0], pair[1], pair[0])
        low.copy_(shrink(low, self.factors[best]))
        high.copy_(shrink(high, self.factors[best]))
        for some in some_of(rival == self.kernel.ALL):
            every = definition.visit(self.rows.only(some + start), self.factors, self.grid, self.norm, self.expand)
            low[some], high[some], best[some] = every.low, every.high, every.best.long()
            improved = improved + every.improved
        return improved

    # ------------------------------------------------------------------ longer rows

    def long_rows(self, patience: int | None) -> Visited:
        rows, count = self.rows, len(self.factors)
        low, high = rows.observed_range()
        size = torch.maximum(-low, high).float().numpy()
        lows, highs = candidate_ranges(low * self.expand, high * self.expand, self.factors)
        scales, zero_points = self.grid.qparams(lows, highs)
        scale: Any = scales.numpy()
        zeros: Any = np.zeros_like(scale) if zero_points is None else zero_points.numpy()
        improved, idle, most = list[bool](), 0, count if patience is None else max(1, patience)
        best = np.full(rows.count, -1)
        errors = np.full((count + 2, rows.count), np.inf)  # beside them, sums of weighed squares and of weights
        exact: dict[tuple[int, int], float] = {}

        def is_less(k: int, best: int, r: int) -> bool:
            for one in {k, best} - {one for one, row in exact if row == r}:
                at = slice(one, one + 1), slice(r, r + 1)
                exact[one, r] = float(definition.measure(rows, at[1], lows[at], highs[at], self.grid, self.norm))
            return exact[k, r] < exact[best, r]

        while idle < most and len(improved) < count:
            some = slice(len(improved), min(count, len(improved) + min(8, most - idle)))
            errors[[*range(count)[some], -2, -1]] = self._sum_errors(scale[some], zeros[some], scale[0])
            for k in range(count)[some]:
                better = False
                for r, b in enumerate(best):
                    if b >= 0 and scale[k, r] == scale[b, r] and zeros[k, r] == zeros[b, r]:
                        continue
                    least = errors[[k, b], r].min() if b >= 0 else errors[k, r]
                    with np.errstate(over="ignore"):  # infinite: the definition decides
                        sums: Any = [np.float32(one) for one in (least, 1 / scale[0, r], size[r], *errors[-2:, r])]
                    off = self.kernel.doubt(*sums, self.kernel.STEPS, self.form, self.power)
                    if off < 0:
                        return definition.visit(rows, self.factors, self.grid, self.norm, self.expand)
                    gain = -1.0 if b < 0 else errors[k, r] / errors[b, r] - 1 if errors[b, r] else 0.0
                    if gain < -off or (gain < off and is_less(k, int(b), r)):
                        best[r], better = k, True
                idle = 0 if better else idle + 1
                improved.append(better)
        at = torch.from_numpy(best).unsqueeze(0)
        flags = torch.tensor(improved)
        return Visited(lows.gather(0, at)[0], highs.gather(0, at)[0], at[0], flags, torch.zeros_like(flags))

    def _sum_errors(self, scale: Any, zeros: Any, unit: Any) -> Any:
        """Errors of candidates ``(c, R)`` in units of ``unit (R,)``; sums of weighed squares and of weights below."""
        _, columns, high, wide = self.rows.view.shape
        strides = self.rows.view.stride()
        sums = np.empty((len(scale) + 2, self.rows.count))
        # Some whole pieces, or a part of one that is long by itself.
        across = max(1, _TILE // wide)
        starts = [(n, g) for n in range(0, high, across) for g in range(0, wide, _TILE)]
        for r in range(self.rows.count):
            parts = np.zeros((len(starts), len(sums)))
            row = (r // columns) * strides[0] + (r % columns) * strides[1]

            def work(number: int, r: int = r, row: int = row, parts: Any = parts) -> None:
                n, g = starts[number]
                shape = min(across, high - n), min(_TILE, wide - g)
                at = row + n * strides[2] + g * strides[3]
                tile = self._load(self.bits[at:], 0, 1, 1, (0, 0, *strides[2:]), shape)[0]
                weights = tile[:0]
                if self.rows.importance is not None:
                    at = (r % len(self.rows.importance)) * wide + g
                    weights = self._load(self.weights[at:], 0, 1, 1, (0, 0, 0, 1), shape)[0]
                search = self.kernel.sum_errors
                launch.run(
                    search, tile, weights, scale[:, r], zeros[:, r], unit[r], self.form, self.power, parts[number]
                )

            launch.in_threads(len(starts), work, self.rows.size * len(scale))
            sums[:, r] = parts.sum(0)
        return sums

    # ------------------------------------------------------------------ both

    def _load(self, bits: Any, first: int, count: int, columns: int, strides: Any, shape: Any) -> Any:
        """Rows as a tile, or their weights."""
        size = shape[0] * shape[1]
        lanes = self.tile.lanes_of(size)
        side = self.tile.LANES // lanes
        tile = np.empty((-(-count // side), -(-size // lanes), self.tile.LANES), np.float32)
        launch.run(self.tile.load, bits, first, count, columns, strides, *shape, tile)
        return tile


def _format(grid: NumberGrid, dtype: torch.dtype, factors: Sequence[float], expand: float) -> tuple[Any, float]:
    """A format's parameters for the loops, and the largest distance of a value to its number, in first scales."""
    from lightning_obs.numerics.search.cpu_kernel import Format

    number, mx = grid.number, should_generate_mx_scales(grid.args)
    half = format_of_dtype(dtype)
    rounded = None if mx or grid.scale_dtype in (None, dtype) else format_of_dtype(grid.scale_dtype)
    # A scale may be narrower than its range asks for, by the last bit of its mantissa.
    slack = 2.0 if mx else 1.01 if rounded is None else 1 + 0.56 * 2.0**-rounded.mantissa
    span = -grid.low if grid.signed else (grid.high - grid.low) / (2 if grid.symmetric else 1)
    most, narrowest = span * slack / (expand * factors[0]), min(factors) / factors[0]
    distance = max(grid.last_step * max(factors) / factors[0], most - (span - 1) * narrowest / slack + 1)
    zero = torch.zeros(1, dtype=dtype)
    form = Format(
        *(
            np.float32(grid.low),
            np.float32(grid.high),
            number is not None,
            *_bits(number)[:2],
            grid.symmetric,
            grid.signed,
        ),
        divisor=np.float32(span),
        exact=half is not None or rounded is not None or mx or not grid.symmetric or grid.signed,
        range=_bits(half),
        scale=_bits(rounded),
        mx_round=np.int32(1 << (22 - number.mx_mantissa) if mx and number is not None else 0),
        mx_offset=np.int32(math.floor(math.log2(grid.high)) << 23),
        eps=np.float32(grid.qparams(zero, zero)[0].item()),
        least=np.float32(2.0 ** (-100 if half is None or not mx else max(-100, half.smallest + 1))),
        most=np.float32(most * 1.01),
    )
    return form, distance


def _bits(number: NumberFormat | None) -> tuple[Any, Any, Any]:
    """``normal`` and ``magic`` of a floating format, and its largest number; None: ``magic`` is 0."""
    if number is None:
        return np.int32(127 << 23), np.int32(0), np.float32(0)
    magic = ((23 - number.mantissa) << 23) + (1 << 22)
    return np.int32((number.smallest + 127) << 23), np.int32(magic), np.float32(number.last)
