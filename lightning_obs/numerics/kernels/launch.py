"""Extremes, counts and sums of squares in one pass, and how a compiled loop is called: memory, compilation, threads.

numba, of the extra ``fast``, is imported when the first loop is needed; without numba, callers run torch's operations
instead, and long searches propose once to install it (:class:`SlowSteps`). A loop gets a tensor's memory as flat
integers, with its strides, so nothing is copied or widened before. Loops release Python's lock, so
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
    """Whether the loops can run on this tensor: they can read its memory, and numba can be imported."""
    return knows(value) and numba_fault() is None


def knows(value: torch.Tensor) -> bool:
    """Whether the loops, where numba is there to compile them, can read this tensor's memory."""
    if value.device.type != "cpu" or value.layout != torch.strided:
        return False
    return value.dtype in _PATTERNS


@functools.cache
def numba_fault() -> str | None:
    """Why numba cannot be imported; None: it can."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


class SlowSteps:
    """Counts the steps that torch's operations make because numba is not installed, and proposes numba once.

    The range search on a CPU (``search/numba_loop.py``) holds one for the process, and adds to it where it cannot
    compile its loop.

    Args:
        limit: the number of steps up to which nothing is said.
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
                f"the search is about ten times as fast, and finds equally good ranges: {install_command('numba')}"
            )


def memory(value: torch.Tensor) -> Any:
    """The memory of a tensor from its first element to its last, as flat bit patterns for a loop.

    The array keeps the tensor alive. ``Tensor.numpy()`` is not used: FSDP1 could not free the storage of a gathered
    weight after it.
    """
    import numpy

    span = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        span += (size - 1) * stride
    interface = {
        "data": (value.data_ptr(), False),
        "shape": (span,),
        "typestr": _PATTERNS[value.dtype],
        "version": 3,
    }
    return numpy.asarray(SimpleNamespace(__array_interface__=interface, tensor=value.detach()))


def run(loop: Any, *arguments: Any) -> Any:
    """Call a loop; the first time for a dtype, a terminal shows that it is being compiled, or read from the cache."""
    source = arguments[0]
    memory_read = getattr(source, "bits", source)
    kind = (loop, memory_read.dtype)
    if kind in _ready:
        return loop(*arguments)
    with _compiling:
        from rich.console import Console

        logging.getLogger(__name__).debug("compiling %s", loop)
        # In a notebook rich would ask for ipywidgets, with a warning for each loop.
        with Console(stderr=True, force_jupyter=False).status("compiling a loop for this machine (once, some seconds)"):
            result = loop(*arguments)
        _ready.add(kind)
    return result


def in_threads(work: Callable[..., object], *arguments: Collection[Any], steps: int = _WORTH) -> None:
    """Map ``work`` over ``arguments``, as ``map`` does, in as many threads as torch uses.

    Args:
        work: calls a loop, which releases Python's lock.
        *arguments: collections of one length, one for each argument of ``work``.
        steps: of all the loops together; few steps run in this thread.
    """
    calls = len(arguments[0])
    threads = min(torch.get_num_threads(), calls)
    if threads <= 1 or steps < _WORTH:
        for of_one_call in zip(*arguments, strict=True):
            work(*of_one_call)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, *arguments))  # the list raises what a call raised


# ---------------------------------------------------------------------- results of the loops


def extremes(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each row of ``(A, B, N, G)``, ``(A, B)`` each; NaN where a row has one."""
    from lightning_obs.numerics.kernels import loops

    axis = 0 if view.shape[0] >= view.shape[2] else 2
    chunks = view.chunk(_number_of_chunks(view), axis)
    ends = [view.new_empty(2, *chunk.shape[:2]) for chunk in chunks]
    signed = torch.int32 if view.itemsize == 4 else torch.int16
    infinity = torch.tensor(torch.inf, dtype=view.dtype)
    infinity_bits = infinity.view(signed).item()

    def work(chunk: torch.Tensor, chunk_ends: torch.Tensor) -> None:
        ends_bits = chunk_ends.view(signed).numpy()
        bits = memory(chunk).view(ends_bits.dtype)
        run(loops.extremes, bits, infinity_bits, chunk.stride(), tuple(chunk.shape), ends_bits)

    in_threads(work, chunks, ends)
    if axis == 0:
        low, high = torch.cat(ends, 1)
        return low, high
    lows, highs = torch.stack(ends, 1)
    low = lows.amin(0)
    high = highs.amax(0)
    return low, high


def _number_of_chunks(value: torch.Tensor) -> int:
    """Into how many parts a tensor is split for threads."""
    if value.numel() <= _PART:
        return 1
    return torch.get_num_threads()


def count_values(values: torch.Tensor) -> torch.Tensor:
    """How often each bfloat16 pattern occurs in flat ``values``, rounded to it: ``(65536,)`` in int64."""
    from lightning_obs.numerics.kernels import loops

    chunks = values.contiguous().chunk(_number_of_chunks(values))
    counts = torch.zeros(len(chunks), 1 << 16, dtype=torch.int64)
    loop = loops.count if values.dtype == torch.bfloat16 else loops.count_rounded

    def work(chunk: torch.Tensor, chunk_counts: torch.Tensor) -> None:
        run(loop, memory(chunk), chunk_counts.numpy())

    in_threads(work, chunks, counts)
    if len(chunks) > 1:
        return counts.sum(0)
    return counts[0]


def channel_squares(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares per column of ``(T, C)``, ``(C,)`` in float64."""
    from lightning_obs.numerics.kernels import loops

    chunks = rows.chunk(_number_of_chunks(rows), 1)
    sums = torch.zeros(rows.shape[1], dtype=torch.float64)
    widths = [chunk.shape[1] for chunk in chunks]
    sums_of_chunks = sums.split(widths)

    def work(chunk: torch.Tensor, chunk_sums: torch.Tensor) -> None:
        columns = chunk.shape[1]
        row_stride = chunk.stride(0)
        run(loops.squares, memory(chunk), columns, row_stride, chunk_sums.numpy())

    in_threads(work, chunks, sums_of_chunks)
    return sums
