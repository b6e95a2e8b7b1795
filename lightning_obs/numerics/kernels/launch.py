"""Call the loops that numba compiles for a CPU: give them a tensor's memory, compile them, run them in threads.

``numerics/qparams.py``, ``histogram.py`` and ``moments.py`` call :func:`extremes`, :func:`count_values` and
:func:`channel_squares`, where :func:`can_read` says that a loop can read the tensor, and torch's operations elsewhere.
``search/numba_loop.py`` calls the loop of the range search with :func:`run` and :func:`in_threads`.

numba belongs to the extra ``fast`` and is imported when the first loop is needed. Without numba, callers run torch's
operations, and long searches propose once to install it (:class:`SlowSteps`). A loop gets a tensor's memory as flat
integers, with its strides, so nothing is copied or widened before. Loops release Python's lock, so work is split over
as many Python threads as torch uses; the order of every sum is independent of their number. No thread outlives a call,
so a process may fork at any time.

A loop is compiled once per machine: numba caches the result next to the source file, or else in its own cache folder.
Where it can write to neither, each process compiles again.
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

#: dtype of a tensor -> numpy's code of the integers that hold its bit patterns; loops tell the dtypes apart by them
_PATTERNS = {torch.float32: "<u4", torch.bfloat16: "<u2", torch.float16: "<i2"}
# Tensors with more elements are split over threads.
_PART = 1 << 22
# From this many steps (values visited by a loop) on, starting Python threads takes less time than it saves.
_WORTH = 1 << 26

# A loop and the types of its arguments (_type_of), for all that this process has compiled or read from the cache.
_ready: set[tuple[object, ...]] = set()
_compiling = threading.Lock()


def can_read(value: torch.Tensor) -> bool:
    """Whether the loops can run on this tensor: they can read its memory, and numba can be imported.

    Called before each use of :func:`extremes`, :func:`count_values` and :func:`channel_squares`.
    """
    return knows(value) and numba_fault() is None


def knows(value: torch.Tensor) -> bool:
    """Whether the loops could read this tensor's memory, by its device, layout and dtype; numba may be missing.

    The range search asks it apart from :func:`numba_fault`, to count what numba would have saved.
    """
    if value.device.type != "cpu" or value.layout != torch.strided:
        return False
    return value.dtype in _PATTERNS


@functools.cache
def numba_fault() -> str | None:
    """The message of the error that importing numba raises; None: numba can be imported. Tried once per process.

    Called before a loop is chosen, and for the warning of :class:`SlowSteps`.
    """
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


class SlowSteps:
    """Counts the steps that torch's operations make because numba is missing, and warns once when they are many.

    The range search on a CPU (``search/numba_loop.py``) holds one for the process, and adds to it for each search that
    it cannot compile its loop for. A step is one value measured with one candidate.

    Args:
        limit: the number of steps up to which there is no warning.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps = 0

    def add(self, steps: int) -> None:
        """Count more steps; warn when the sum first exceeds ``limit``.

        ``numba_loop.can_run`` calls it for each search that only the lack of numba keeps from the compiled loop.
        """
        before = self.steps
        self.steps += steps
        if before <= self.limit < self.steps:
            warn(
                f"numba cannot be imported ({numba_fault()}), so ranges are searched by torch's operations. With it "
                f"the search is about ten times as fast, and finds equally good ranges: {install_command('numba')}"
            )


def memory(value: torch.Tensor) -> Any:
    """A flat numpy array of integers, without a copy, over a tensor's memory from its first element to its last.

    Called before each call of a loop, which gets the array and the tensor's strides. The array keeps the tensor alive.
    ``Tensor.numpy()`` is not used, because afterwards FSDP1 could not free the storage of a gathered weight.
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


def run(loop: Any, source: Any, *arguments: Any) -> Any:
    """Call ``loop(source, *arguments)`` and return its result; show a status line while it is compiled.

    Called by the functions below and by ``search/numba_loop.py``, once for each part of their work, in any thread.
    numba compiles a loop anew for other types of arguments: another dtype, another format, another exponent. The first
    call with some types compiles the loop, or reads it from numba's cache, with a status line in the terminal; other
    threads wait.

    Args:
        loop: a function decorated with ``jit``.
        source: the values to read: an array from :func:`memory`, or an object that holds it as ``bits`` (``Source`` of
            ``search/lanes.py``).
        *arguments: the other arguments of the loop.
    """
    kind = (loop, _type_of((source, *arguments)))
    if kind in _ready:
        return loop(source, *arguments)
    with _compiling:
        from rich.console import Console

        logging.getLogger(__name__).debug("compiling %s", loop)
        # In a notebook rich would ask for ipywidgets, with a warning for each loop.
        with Console(stderr=True, force_jupyter=False).status("compiling a loop for this machine (once, some seconds)"):
            result = loop(source, *arguments)
        _ready.add(kind)
    return result


def _type_of(argument: Any) -> object:
    """What numba tells apart of an argument: the class, of a tuple also its fields; of an array dtype and layout."""
    if isinstance(argument, tuple):
        return type(argument), *map(_type_of, argument)
    if hasattr(argument, "dtype"):
        return argument.dtype, argument.ndim, argument.flags.c_contiguous
    return type(argument)


def in_threads(work: Callable[..., object], *arguments: Collection[Any], steps: int = _WORTH) -> None:
    """Call ``work`` with the elements of ``arguments``, as ``map`` does, in as many threads as torch uses.

    Called by the functions below and by ``search/numba_loop.py`` to split one computation over a CPU.

    Args:
        work: a function that calls a loop, which releases Python's lock.
        *arguments: collections of equal length, one for each argument of ``work``.
        steps: how many values all calls visit together; if they are few, all calls run in the current thread.
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
    """Smallest and largest value of each row of ``(A, B, N, G)``, ``(A, B)`` each; NaN where a row has one.

    Called by ``qparams.extremes`` for the range of each observed tensor. The tensor is cut into a part for each thread,
    by rows (dimension A), or by observations (N) if these are more. The loop reads and writes bit patterns as signed
    integers, which it compares in place of the floats; a pattern beyond that of infinity is NaN.
    """
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
    """Into how many parts a tensor is split for threads: one if it is small."""
    if value.numel() <= _PART:
        return 1
    return torch.get_num_threads()


def count_values(values: torch.Tensor) -> torch.Tensor:
    """How often each bfloat16 pattern occurs in flat ``values``, rounded to bfloat16: ``(65536,)`` in int64.

    Called by ``histogram.count_values`` for each scale of an observed tensor.
    """
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
    """Sum of squares of each column of ``(T, C)``, ``(C,)`` in float64.

    Called by ``moments.channel_squares`` for each batch of the imatrix observers, if neighbouring values of a row are
    adjacent in memory. Rows may be any distance apart.
    """
    from lightning_obs.numerics.kernels import loops

    chunks = rows.chunk(_number_of_chunks(rows), 1)
    sums = torch.zeros(rows.shape[1], dtype=torch.float64)
    widths = [chunk.shape[1] for chunk in chunks]
    sums_of_chunks = sums.split(widths)

    def work(chunk: torch.Tensor, chunk_sums: torch.Tensor) -> None:
        run(loops.squares, memory(chunk), *chunk.shape, chunk.stride(0), chunk_sums.numpy())

    in_threads(work, chunks, sums_of_chunks)
    return sums
