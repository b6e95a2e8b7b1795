"""The loops of a search: each measures candidates on some rows, and the search calls one of them.

Torch's operations run on any device and know Hessians. On a GPU a loop of Triton takes their place, on a CPU one of
numba: neither keeps the errors of single values in memory, and of most rows not even those of candidates, so they are
about ten times as fast. They round otherwise in the last bits, and an error is off by up to 4e-6: of two candidates
that are closer, either may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.candidates import Candidates, Improvements
from lightning_obs.numerics.search import numba_loop, torch_loop
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

#: ``loop(rows, part, candidates, search, least)`` says which candidates improve the consecutive rows ``part``, and
#: gives their least errors, each row's in a unit of its own. ``least`` are the least errors of earlier candidates of
#: these rows, ``(r,)`` as the loop gave them; None: there are none. Candidates of one scale and zero point have equal
#: errors.
Loop = Callable[[Rows, slice, Candidates, GridSearch, torch.Tensor | None], Improvements]


def loop_for(rows: Rows, search: GridSearch) -> Loop:
    """The fastest loop that is there for the rows of a search."""
    if rows.hessian is None and on_gpu.can_run(rows.view):
        return _triton_loop
    if numba_loop.can_run(rows, search):
        return numba_loop.measure
    return torch_loop.measure


def _triton_loop(
    rows: Rows, part: slice, candidates: Candidates, search: GridSearch, least: torch.Tensor | None
) -> Improvements:
    return on_gpu.measure_ranges(rows.view, part, rows.importance, candidates, search.grid, search.norm, least)
