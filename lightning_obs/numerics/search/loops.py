"""Choose the loop of a range search: the function that measures candidates on some rows.

``ranges.py`` calls :func:`loop_for` for each search. The loop of torch's operations runs on any device, and alone can
measure errors by Hessians. On a GPU a loop of Triton replaces it, on a CPU one of numba. These two do not write the
errors of single values to memory, and for most rows not even the errors of candidates, so they are about ten times as
fast. Their results differ in the last bits, and the relative error of a candidate's error is up to 4e-6: of two
candidates that are closer, either may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.candidates import Candidates, Improvements
from lightning_obs.numerics.search import numba_loop, torch_loop
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.rows import Rows

#: ``loop(rows, part, candidates, search, least)`` returns which candidates improve the consecutive rows ``part``, and
#: the least error of each of these r rows, in a unit that may differ from row to row. ``least`` holds the least errors
#: of earlier candidates, ``(r,)`` as the same loop returned them; None: there are no earlier candidates. Candidates
#: with the same scale and zero point must get equal errors.
Loop = Callable[[Rows, slice, Candidates, GridSearch, torch.Tensor | None], Improvements]


def loop_for(rows: Rows, search: GridSearch) -> Loop:
    """The fastest loop that can measure these rows with the format of the search.

    ``ranges.py`` calls it at the beginning of each search.
    """
    if rows.hessian is None and on_gpu.can_run(rows.view):
        return _triton_loop
    if numba_loop.can_run(rows, search):
        return numba_loop.measure
    return torch_loop.measure


def _triton_loop(
    rows: Rows, part: slice, candidates: Candidates, search: GridSearch, least: torch.Tensor | None
) -> Improvements:
    """The loop of a GPU, with the arguments of :data:`Loop`."""
    return on_gpu.measure_ranges(rows.view, part, rows.importance, candidates, search.grid, search.norm, least)
