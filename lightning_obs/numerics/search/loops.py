"""The loops of a search: each computes the errors of candidates on some rows, and the search calls one of them.

Torch's operations run on any device and know Hessians. On a GPU a loop of Triton takes their place, on a CPU one of
numba: neither keeps the errors of single values in memory, so they are about ten times as fast. They round otherwise in
the last bits, and an error is off by up to 4e-6: of two candidates that are closer, either may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.candidates import Candidates, finite_or_infinite
from lightning_obs.numerics.search import numba_loop, torch_loop
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

#: ``loop(rows, part, candidates, search)`` gives the errors of the candidates on the consecutive rows ``part``, ``(C,
#: r)``, each row's in a unit of its own. An error is infinite where it is not finite, and may be so where it is above
#: that of an earlier candidate. Candidates of one scale and zero point have equal errors.
Loop = Callable[[Rows, slice, Candidates, GridSearch], torch.Tensor]


def loop_for(rows: Rows, search: GridSearch) -> Loop:
    """The fastest loop that is there for the rows of a search."""
    if rows.hessian is None and on_gpu.can_run(rows.view):
        return _triton_loop
    if numba_loop.can_run(rows, search):
        return numba_loop.errors_of
    return torch_loop.errors_of


def _triton_loop(rows: Rows, part: slice, candidates: Candidates, search: GridSearch) -> torch.Tensor:
    errors = on_gpu.errors_of_ranges(rows.view, part, rows.importance, candidates, search.grid, search.norm)
    return finite_or_infinite(errors)
