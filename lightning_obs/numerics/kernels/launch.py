"""Extremes, counts and sums of squares in one pass, and how a compiled loop is called: memory, compilation, threads.

numba, of the extra ``fast``, is imported when the first loop is needed; without numba, callers run torch's operations
instead, and searches that take long propose it once (:class:`SlowSteps`). A loop gets flat
memory as integers and finds values by strides, so nothing is copied or widened before. Loops release Python's lock, so
work is split over as many Python threads as torch uses; the order of every sum is independent of their number. No
thread outlives a call, so a process may fork at any time.

A loop is compiled once per machine: numba keeps the result beside the source, else in its own cache folder; each
process compiles again where neither can be written to.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from lightning_obs.errors import warn
from lightning_obs.packages import install_command

#: dtypes that the loops read -> the integers, in numpy's words, of their bit patterns, by which the loops know them
_PATTERNS = {torch.float32: "<u4", torch.bfloat16: "<u2", torch.float16: "<i2"}
# Larger tensors are split over threads.
_PART = 1 << 22
# From this many steps on, starting threads of Python, beside torch's own, pays off.
_WORTH = 1 << 26

_ready: set[tuple[object, object]] = set()
_compiling = threading.Lock()


def can_read(value: torch.Tensor) -> bool:
    """Whether the loops can run on this tensor: they know its memory, and numba can be imported."""
    return knows(value) and numba_fault() is None


def knows(value: torch.Tensor) -> bool:
    """Whether the loops, where numba is there to compile them, can read this tensor's memory."""
    return value.dtype in _PATTERNS and value.layout == torch.strided and value.device.type == "cpu"


@functools.cache
def numba_fault() -> str | None:
    """Why numba cannot be imported; None: it can."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


class SlowSteps:
    """Counts the steps of loops that torch's operations made because numba is not there, and proposes numba once.

    Args:
        limit: so many steps are not worth a word.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps = 0

    def add(self, steps: int) -> None:
        """Count further steps; the first time that there are more than ``limit``, warn."""
        before = self.steps
        self.steps += steps
        if before <= self.limit < self.steps:
            warn(
                f"numba cannot be imported ({numba_fault()}), so ranges are searched by torch's operations. With it "
                f"the search is 10 to 20 times as fast, and finds the same ranges: {install_command('numba')}"
            )


def memory(value: torch.Tensor) -> Any:
    """The memory of a tensor from its first element to its last, as flat bit patterns; it keeps the tensor alive.

    After ``Tensor.numpy()`` the storage could not be freed early, as FSDP1 does with gathered weights.
    """
    import numpy

    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    where = {"data": (value.data_ptr(), False), "shape": (span,), "typestr": _PATTERNS[value.dtype], "version": 3}
    return numpy.asarray(SimpleNamespace(__array_interface__=where, tensor=value.detach()))


def run(loop: Any, *arguments: Any) -> Any:
    """Call a loop; a terminal shows that it is being compiled, or read from the cache."""
    kind = loop, getattr(arguments[0], "bits", arguments[0]).dtype
    if kind in _ready:
        return loop(*arguments)
    with _compiling:
        from rich.console import Console

        logging.getLogger(__name__).debug("compiling %s", loop)
        with Console(stderr=True).status("compiling a loop for this machine (once, some seconds)"):
            result = loop(*arguments)
        _ready.add(kind)
    return result


def in_threads(work: Callable[..., object], *parts: Collection[Any], steps: int = _WORTH) -> None:
    """Map ``work``, which does not hold Python's lock, over ``parts``, in as many threads as torch uses.

    ``steps`` are those of the loops, in all; few are done in this thread.
    """
    threads = 1 if steps < _WORTH else min(torch.get_num_threads(), len(parts[0]))
    if threads <= 1:
        list(map(work, *parts))
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, *parts))


# ---------------------------------------------------------------------- results of the loops


def extremes(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each row of ``(A, B, N, G)``, ``(A, B)`` each; NaN where a row has one."""
    from lightning_obs.numerics.kernels import loops

    axis = 0 if view.shape[0] >= view.shape[2] else 2
    parts = view.chunk(1 if view.numel() <= _PART else torch.get_num_threads(), axis)
    ends = [torch.empty(2, *part.shape[:2], dtype=view.dtype) for part in parts]
    signed = torch.int32 if view.itemsize == 4 else torch.int16
    infinity = torch.tensor(torch.inf, dtype=view.dtype).view(signed).item()

    def work(part: torch.Tensor, end: torch.Tensor) -> None:
        found = end.view(signed).numpy()
        run(loops.extremes, memory(part).view(found.dtype), infinity, part.stride(), tuple(part.shape), found)

    in_threads(work, parts, ends)
    low, high = torch.cat(ends, 1) if axis == 0 else torch.stack(ends, 1)
    return (low, high) if axis == 0 else (low.amin(0), high.amax(0))


def count_values(values: torch.Tensor) -> torch.Tensor:
    """How often each bfloat16 pattern occurs in flat ``values``, rounded to it: ``(65536,)`` in int64."""
    from lightning_obs.numerics.kernels import loops

    parts = values.contiguous().chunk(1 if len(values) <= _PART else torch.get_num_threads())
    counts = torch.zeros(len(parts), 1 << 16, dtype=torch.int64)
    loop = loops.count if values.dtype == torch.bfloat16 else loops.count_rounded
    in_threads(lambda part, found: run(loop, memory(part), found), parts, counts.numpy())
    return counts.sum(0) if len(parts) > 1 else counts[0]


def channel_squares(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares per column of ``(T, C)``, ``(C,)`` in float64."""
    from lightning_obs.numerics.kernels import loops

    parts = rows.chunk(1 if rows.numel() <= _PART else torch.get_num_threads(), 1)
    sums = torch.zeros(rows.shape[1], dtype=torch.float64)

    def work(part: torch.Tensor, found: torch.Tensor) -> None:
        run(loops.squares, memory(part), part.shape[1], part.stride(0), found.numpy())

    in_threads(work, parts, sums.split([part.shape[1] for part in parts]))
    return sums
