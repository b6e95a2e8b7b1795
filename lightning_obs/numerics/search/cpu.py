"""The search by compiled loops: how they are called, and the rows that the definition decides after them.

Rows of up to ``_ROW`` values are measured with all candidates in one visit, in several threads. The errors of a longer
row are added up over its pieces, a few candidates at a time: its tensor has few scales, so the
search often ends early.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization.utils import should_generate_mx_scales

from lightning_obs.numerics.candidates import candidate_ranges, improves, on_device, shrink, visited
from lightning_obs.numerics.formats import format_of_dtype
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.search import definition
from lightning_obs.numerics.search.cpu_power import fit_power
from lightning_obs.numerics.search.definition import Found, GridSearch
from lightning_obs.numerics.search.rows import Rows

# Values of the longest row that is visited as a whole; of a piece of a longer one.
_ROW, _PIECE = 1 << 16, 1 << 17
# Rows whose best candidates are kept until the definition has decided among them.
_SLAB = 1 << 17

#: the steps of searches that the loops would have made; torch makes the limit in about ten seconds
slow_steps = launch.SlowSteps(limit=1 << 30)


def can_search(rows: Rows, search: GridSearch) -> bool:
    """Whether the loops know these values, this format and norm, and numba is there to compile them."""
    if not _knows(rows, search):
        return False
    if launch.numba_fault() is not None:
        slow_steps.add(rows.count * rows.size * len(search.factors))
        return False
    return True


def _knows(rows: Rows, search: GridSearch) -> bool:
    grid, dtype = search.grid, search.grid.scale_dtype
    scale = dtype in (None, rows.dtype) or format_of_dtype(dtype) is not None or should_generate_mx_scales(grid.args)
    integers = grid.number is None and grid.args.zp_dtype in (None, torch.int8)
    known = rows.hessian is None and grid.global_scale is None and search.norm >= 1
    return known and scale and (grid.args.symmetric or integers) and launch.knows(rows.view)


def visit(rows: Rows, search: GridSearch) -> Found:
    """As :func:`.definition.visit`; ``improved`` ends where the search does."""
    loops = _Loops(rows, search._replace(patience=None))
    if rows.size > _ROW:
        return loops.long_rows(search.limit)
    found, best, maybe = loops.all_rows()
    if search.limit is None or found.improved.all():
        return found
    improved, bits = found.improved, int(np.bitwise_or.reduce(maybe.numpy()))
    unsure = ~improved & torch.tensor([bool(bits >> k % 31 & 1) for k in range(len(improved))])
    ends = [visited(flags, search.limit) for flags in (improved, improved | unsure)]
    if unsure.any() and not torch.equal(*ends):  # the definition decides for the rows in question
        wanted = sum({1 << k % 31 for k in unsure.nonzero().flatten().tolist()})
        for _, copied in rows.copies((maybe & wanted).nonzero().squeeze(-1)):
            improved = improved | definition.visit(copied, loops.search).improved
    stop = int(visited(improved, search.limit).sum())
    late = (best >= stop).nonzero().squeeze(-1)  # their candidate comes after the end, which excludes it
    for some, copied in rows.copies(late):
        sooner = visit(copied, search._replace(factors=search.factors[:stop], patience=None))
        found.low[some], found.high[some] = sooner.low, sooner.high
    return found._replace(improved=improved[:stop])


class _Loops:
    """The rows and a search, as the loops read them."""

    def __init__(self, rows: Rows, search: GridSearch) -> None:
        from lightning_obs.numerics.search import cpu_format, cpu_kernel

        self.kernel: Any = cpu_kernel
        self.rows, self.search = rows, search
        self.factors = on_device(tuple(search.factors), rows.device)
        form, distance = cpu_format.loop_format(search, rows.dtype)
        self.measure = cpu_kernel.Measure(form, fit_power(search.norm, distance, search.grid.usual_error))
        self.importance: torch.Tensor | None = None  # of each value; as the rows are numbered in their view
        if rows.importance is not None:
            times = -(-rows.count // len(rows.importance))
            self.importance = rows.importance[None, :, None].expand(times, -1, rows.view.shape[2], -1)

    def _source(self, view: torch.Tensor | None) -> Any:
        """A view ``(A, B, N, G)`` as the loops read it; None: no values."""
        if view is None:
            return self.kernel.Source(np.empty(0, np.uint32), (0,) * 4, (0,) * 4)
        return self.kernel.Source(launch.memory(view), tuple(view.shape), view.stride())

    # ------------------------------------------------------------------ rows that are visited as a whole

    def all_rows(self) -> tuple[Found, torch.Tensor, torch.Tensor]:
        """What all candidates find, the best one of each row, and ``maybe`` of :class:`.cpu_kernel.Choices`."""
        rows, count = self.rows, len(self.factors)
        ends = torch.empty(2, rows.count, dtype=rows.dtype)
        best, maybe = (torch.empty(rows.count, dtype=dtype) for dtype in (torch.int16, torch.int32))
        improved = torch.zeros(count, dtype=torch.int64)
        for start in range(0, rows.count, _SLAB):
            part = slice(start, min(start + _SLAB, rows.count))
            ends[:, part], (index, rival, maybe[part]), sure = self._search(part)
            improved += sure + self._settle(start, ends[:, part], index, rival)
            best[part] = index
        return Found(ends[0], ends[1], improved > 0), best, maybe

    def _search(self, part: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The fields of :class:`.cpu_kernel.Choices` of some rows: of floats, of integers, of candidates."""
        count = part.stop - part.start
        side = self.kernel.LANES // self.kernel.lanes_of(self.rows.size)  # rows of a block: none is cut
        step = max(1, 8 * _PIECE // self.rows.size // side) * side
        starts = range(0, count, step)
        ends, chosen = np.empty((2, count), np.float32), np.empty((3, count), np.int32)
        improved = np.zeros((len(starts), len(self.factors)), np.int64)
        factors, expand = self.factors.numpy().astype(np.float32), np.float32(self.search.expand)
        sources = self._source(self.rows.view), self._source(self.importance)

        def work(start: int, better: Any) -> None:
            here = slice(start, start + step)
            found = self.kernel.Choices(*ends[:, here], *chosen[:, here], better)
            launch.run(self.kernel.search, *sources, part.start + start, factors, expand, self.measure, found)

        launch.in_threads(work, starts, improved, steps=count * self.rows.size * len(self.factors))
        return torch.from_numpy(ends), torch.from_numpy(chosen), torch.from_numpy(improved.sum(0))

    def _settle(self, start: int, ends: torch.Tensor, best: torch.Tensor, rival: torch.Tensor) -> torch.Tensor:
        """Write chosen ranges over observed ones; the definition decides between ``best`` and its rivals first.

        Returns which candidates improved a row of which it measured all, ``(C,)``.
        """
        left = (rival != -1).nonzero().squeeze(-1)
        if not len(left):
            ends.copy_(shrink(ends, self.factors[best]))
            return torch.zeros(len(self.factors), dtype=torch.bool)
        every = rival[left] == self.kernel.ALL
        for some, only in self.rows.copies(left[every], start):  # the loops do not see a NaN
            ends[:, some] = torch.stack(only.observed_range()) * self.search.expand
        measured = every[:, None].repeat(1, len(self.factors))
        measured.scatter_(1, torch.stack([best[left], rival[left].clamp(min=0)], 1).long(), True)
        row, candidate = measured.nonzero(as_tuple=True)
        errors, first = torch.full(measured.shape, torch.inf), 0
        for some, only in self.rows.copies(left[row], start):
            here = slice(first, first := first + len(some))
            low, high = shrink(ends[:, some], self.factors[candidate[here]]).split(1)
            found = definition.measure(only, slice(0, only.count), (low, high), self.search)
            errors[row[here], candidate[here]] = found[0]
        best[left] = errors.argmin(1).int()  # the first of equals
        chosen = self.factors[best]
        chosen[left[errors.amin(1) == torch.inf]] = 1.0
        ends.copy_(shrink(ends, chosen))
        return improves(errors[every].T).any(1)

    # ------------------------------------------------------------------ longer rows

    def long_rows(self, limit: int | None) -> Found:
        rows, search, count = self.rows, self.search, len(self.factors)
        low, high = rows.observed_range()
        size = torch.maximum(-low, high).float().numpy()
        lows, highs = candidate_ranges(low * search.expand, high * search.expand, self.factors)
        scales, zero_points = search.grid.qparams(lows, highs)
        scale: Any = scales.numpy()
        zeros: Any = np.zeros_like(scale) if zero_points is None else zero_points.numpy()
        improved, idle = list[bool](), 0
        most = limit or count
        best = np.full(rows.count, -1)
        errors = np.full((count + 2, rows.count), np.inf)  # beside them, sums of weighed squares and of weights

        @functools.cache
        def exact(k: int, r: int) -> float:
            at = slice(k, k + 1), slice(r, r + 1)
            return float(definition.measure(rows, at[1], (lows[at], highs[at]), search))

        while idle < most and len(improved) < count:
            some = range(len(improved), min(count, len(improved) + min(8, most - idle)))
            for r in range(rows.count):
                errors[[*some, -2, -1], r] = self._sum_errors(r, scale[some, r], zeros[some, r], scale[0, r])
            for k in some:
                better = False
                for r, b in enumerate(best.tolist()):
                    if b >= 0 and scale[k, r] == scale[b, r] and zeros[k, r] == zeros[b, r]:
                        continue
                    least = errors[[k, b], r].min() if b >= 0 else errors[k, r]
                    with np.errstate(over="ignore"):  # infinite: the definition decides
                        sums: Any = [np.float32(one) for one in (least, 1 / scale[0, r], size[r], *errors[-2:, r])]
                    off = self.kernel.doubt(*sums, self.kernel.STEPS, self.measure)
                    if off < 0:
                        return definition.visit(rows, search)
                    gain = -1.0 if b < 0 else errors[k, r] / errors[b, r] - 1 if errors[b, r] else 0.0
                    if gain < -off or (gain < off and exact(k, r) < exact(b, r)):
                        best[r], better = k, True
                idle = 0 if better else idle + 1
                improved.append(better)
        at = torch.from_numpy(best).unsqueeze(0)
        return Found(lows.gather(0, at)[0], highs.gather(0, at)[0], torch.tensor(improved))

    def _sum_errors(self, r: int, scale: Any, zeros: Any, unit: Any) -> Any:
        """Errors of candidates ``(c,)`` on row r in units of ``unit``, its sum of weighed squares and of weights."""
        high, wide = self.rows.view.shape[2:]
        # Some whole pieces, or a part of one that is long by itself.
        across = max(1, _PIECE // wide)
        starts = [(n, g) for n in range(0, high, across) for g in range(0, wide, _PIECE)]
        sums = np.zeros((len(starts), len(scale) + 2))
        row = [None if x is None else x[divmod(r, x.shape[1])][None, None] for x in (self.rows.view, self.importance)]

        def work(start: tuple[int, int], total: Any) -> None:
            n, g = start
            parts = (None if x is None else x[..., n : n + across, g : g + _PIECE] for x in row)
            launch.run(self.kernel.sum_errors, *map(self._source, parts), scale, zeros, unit, self.measure, total)

        launch.in_threads(work, starts, sums, steps=self.rows.size * len(scale))
        return sums.sum(0)
