"""Counts, moments, range searches and GPTQ rounding on a GPU: launch the loops that Triton compiles.

``histogram.py``, ``moments.py``, ``rounding.py`` and ``search/loops.py`` call these functions where :func:`can_run`
says that the loops work, and torch's operations elsewhere. The loops are in ``kernels/gpu_loops.py``; a *program* is
Triton's unit of parallel work.

The method: one launch of a loop replaces torch's launches for each candidate or column, and copies of the data. The
choice: Triton, which comes with torch's builds for CUDA, so nothing is built when the package is installed. The
trade-off: what Triton compiles for an untested device may be wrong. So before the loops are first used on a device,
small results of each loop are compared there with torch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.errors import warn
from lightning_obs.numerics.candidates import Candidates, Improvements, finite_or_infinite, half_of_range, improvements
from lightning_obs.numerics.formats import NumberGrid

# Dtypes of values that the loops read.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Values that a program holds in registers.
_TILE = 4096
# Values per warp in a search: several warps on the same short rows would each compute all the scales of these rows.
_VALUES_OF_WARP = 1024
# Up to this number of rows, a search has small tiles, each for several warps, so that more of the device is busy.
_FEW_ROWS = 256
_WARPS_OF_FEW_ROWS = 4
# Rows that a program of the rounding holds.
_ROWS = 16
# Values that a program of the moments adds up.
_SPAN = 1 << 15
# Most tables of counts, and fewest programs that share a table: for a small tensor, adding up tables takes longer than
# counting in one table.
_TABLES = 16
_PROGRAMS_OF_TABLE = 16
# Up to this relative difference, a loop agrees with torch's operations; a wrong loop differs by far more.
_DIFFERENCE = 1e-3
# Exponent of the errors that are compared then: the default of the searches.
_NORM = 2.4


def _triton() -> Any:
    """The module of loops that Triton compiles, imported at first use; ImportError without Triton."""
    from lightning_obs.numerics.kernels import gpu_loops

    return gpu_loops


#: type of device -> function that returns the module of loops for it
LOOPS: dict[str, Callable[[], Any]] = {"cuda": _triton}


def _loops_for(value: torch.Tensor) -> Any:
    """The module of loops for the type of a tensor's device."""
    return LOOPS[value.device.type]()


def can_run(value: torch.Tensor) -> bool:
    """Whether the loops can run on this tensor, by its device and dtype. Callers ask before they call a loop here.

    The first question for a device compiles the loops, checks them on small data, and warns if they fail.
    """
    return value.device.type in LOOPS and value.dtype in _DTYPES and _available(value.device)


@functools.cache
def _available(device: torch.device) -> bool:
    """Whether the loops compile for a device and agree with torch's operations there; tried once, and warns if not."""
    try:
        difference = _difference(device)
    except Exception as error:  # no Triton, no compiler, a device that it does not know: each raises its own
        reason = f"cannot be compiled for {device} ({type(error).__name__}: {error})"
    else:
        if difference < _DIFFERENCE:
            return True
        reason = f"differ from torch's operations on {device} (by {difference:.1%})"
    warn(f"Triton's loops {reason}: searches and rounding run without them, many times slower")
    return False


def _difference(device: torch.device) -> float:
    """How far small results of the loops are from those of torch's operations: the sum of four measures, 0 if equal."""
    grid = NumberGrid.of(QuantizationArgs(num_bits=4, group_size=128))
    values = torch.linspace(-1, 1, 4096, device=device).pow(3)
    rows = values.bfloat16().view(32, 128)
    difference = _difference_of_errors(rows, grid)
    difference += _difference_of_levels(values.view(64, 64), grid)
    difference += _difference_of_counts(rows)
    difference += _difference_of_squares(rows)
    return float(difference)


def _difference_of_errors(rows: torch.Tensor, grid: NumberGrid) -> torch.Tensor:
    """The largest relative difference of a candidate's error on a row of ``(R, G)``.

    ``grid.error`` gives the difference of each value from its nearest number, ``(K, R, G)`` for K candidates.
    """
    factors = torch.tensor((1.0, 0.9), dtype=torch.float64, device=rows.device)
    candidates = Candidates(rows.amin(1), rows.amax(1), factors)
    scale, _ = candidates.qparams(grid)  # (K, R)
    expected_differences = grid.error(rows.float(), scale[..., None], None)
    expected = expected_differences.abs().pow(_NORM).sum(-1)
    errors_of_candidates = [_errors_of_candidate(rows, candidates, k, grid) for k in range(len(factors))]
    errors = torch.stack(errors_of_candidates)
    relative = (errors - expected) / expected
    return relative.abs().max()


def _errors_of_candidate(rows: torch.Tensor, candidates: Candidates, number: int, grid: NumberGrid) -> torch.Tensor:
    """The error of the candidate with this index on each row of ``(R, G)``, by the loop.

    The loop returns least errors, so it is called with this candidate alone.
    """
    factor = candidates.factors[number : number + 1]
    alone = candidates._replace(factors=factor)
    view = rows[None, :, None]
    everything = slice(0, len(rows))
    return measure_ranges(view, everything, None, alone, grid, _NORM).least


def _difference_of_levels(left: torch.Tensor, grid: NumberGrid) -> torch.Tensor:
    """The share of the values of a square panel that the loop rounds to another level than torch's operations."""
    zero = torch.zeros_like(left)
    step = zero + 0.1
    identity = torch.eye(len(left), device=left.device)
    factor = (identity + 0.01).triu()
    levels, _ = round_panel(left, step, zero, factor, grid)
    expected, _ = round_panel_plainly(left.clone(), step, zero, factor, grid)
    return (levels != expected).double().mean()


def _difference_of_counts(rows: torch.Tensor) -> torch.Tensor:
    """How many values of ``(R, G)`` the loop did not count, plus how many rows have a wrong total of counts."""
    counts = rows.new_zeros(len(rows), 1 << 16, dtype=torch.int64)
    count_patterns(rows[None], counts)
    patterns = rows.view(torch.uint16).long()
    misplaced = counts.gather(1, patterns) < 1
    is_other_number = counts.sum(1) != rows.shape[1]
    return misplaced.sum() + is_other_number.sum()


def _difference_of_squares(rows: torch.Tensor) -> torch.Tensor:
    """How many rows of ``(R, G)`` have another sum of squares than by torch's operations."""
    expected = rows.double().square().sum(1)
    _, squares = moments(rows[None])
    differences = (squares - expected).abs()
    return (differences > 1e-9).sum()


def count_patterns(values: torch.Tensor, counts: torch.Tensor) -> None:
    """Add how often each bit pattern of bfloat16 values ``(N, Q, G)`` occurs to ``counts``, ``(Q, 65536)`` in int64.

    Called by ``histogram.py`` for each tile that is counted. The programs of a large tensor count in several tables,
    which are added up at the end: in a single table, atomic additions to the same cache line wait for each other.
    """
    observations, scales, width = values.shape
    size = observations * width
    programs = -(-size // _TILE)
    number_of_tables = min(_TABLES // scales, programs // _PROGRAMS_OF_TABLE)
    has_several = number_of_tables > 1
    tables = counts.unsqueeze(0)
    if has_several:
        tables = counts.new_zeros(number_of_tables, *counts.shape, dtype=torch.int32)
    loop = _loops_for(values).count_patterns
    with torch.cuda.device_of(values):
        loop[programs, scales](
            values.view(torch.int16), tables, size, width, *values.stride(), scales, len(tables), BLOCK=_TILE
        )
    if has_several:
        counts += tables.sum(0)


def moments(values: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares of ``(N, Q, G)`` over the first and the last dimension, ``(2, Q)`` in float64.

    Called by ``moments.py`` for each batch of the normal observer.
    """
    observations, scales, width = values.shape
    size = observations * width
    span = min(_SPAN, _power(size))
    block = min(_TILE, span)
    pieces = -(-size // span)
    sums = torch.empty(pieces, 2, scales, dtype=torch.float64, device=values.device)
    loop = _loops_for(values).moments
    with torch.cuda.device_of(values):
        loop[scales, pieces](values, sums, size, width, *values.stride(), scales, SPAN=span, BLOCK=block)
    return sums[0] if pieces == 1 else sums.sum(0)


def _power(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


def measure_ranges(
    view: torch.Tensor,
    part: slice,
    importance: torch.Tensor | None,
    candidates: Candidates,
    grid: NumberGrid,
    norm: float,
    least: torch.Tensor | None = None,
) -> Improvements:
    """Which candidates improve which rows, by their errors ``sum |q(x) - x| ** norm``.

    Called by ``search/loops.py`` as the loop of a range search on a GPU. If a program can hold all values of a row, it
    compares the candidates itself, and no errors are kept: it writes which of the C candidates improve which of the r
    rows of ``part``, and the least errors. Longer rows are cut into pieces: the loop writes the error of each piece,
    and the errors are added up in float64 and compared here.

    The loop computes the scales itself where a scale is the range's magnitude over one number
    (:func:`.half_of_range`); for other formats it reads scales and zero points that torch has computed.

    Args:
        view: the values ``(A, B, N, G)``; the first two dimensions number the rows.
        part: the consecutive rows that are measured.
        importance: weight of each value's error, ``(I, G)``: row r has the weights ``r % I``. None: all weights are 1.
        candidates: the candidates of these rows.
        grid: the numbers of the format.
        norm: exponent of the error.
        least: the least errors of earlier candidates on the rows of ``part``, ``(r,)``; it is not changed. None: there
            are no earlier candidates.

    Returns:
        Which candidates improve which rows, ``(C, r)``, and the least error of each row, ``(r,)``.
    """
    rows = part.stop - part.start
    count = len(candidates.factors)
    size = view.shape[2:].numel()
    tiles = _Tiles.of(rows, size)
    is_whole = tiles.pieces == 1
    if is_whole:
        result = torch.empty(count, rows, dtype=torch.bool, device=view.device)
        least_errors = _least_errors(least, rows, view.device)
    else:
        result = torch.empty(tiles.pieces, count, rows, device=view.device)
        least_errors = result  # the loop does not use it here
    half = half_of_range(grid, candidates.low.dtype)
    scale = None
    zero_point = None
    if half is None:
        scale, zero_point = candidates.qparams(grid)
    # The loop takes a pointer for each tensor; one that it does not read may point to any tensor.
    unused = candidates.factors if scale is None else scale
    optional = (importance, scale, zero_point)
    pointers = [unused if tensor is None else tensor.contiguous() for tensor in optional]
    programs = -(-rows // tiles.height), tiles.pieces
    loop = _loops_for(view).measure_ranges
    with torch.cuda.device_of(view):
        loop[programs](
            view,
            *pointers,
            candidates.low.contiguous(),
            candidates.high.contiguous(),
            candidates.factors.float(),
            result,
            least_errors,
            part.start,
            rows,
            view.shape[1],
            view.shape[3],
            size,
            *view.stride(),
            1 if importance is None else len(importance),
            count,
            half or 0.0,
            torch.finfo(candidates.low.dtype).eps,
            norm=norm,
            **_loop_arguments(grid),
            WHOLE=is_whole,
            SCALED=half is None,
            SHIFTED=zero_point is not None,
            WEIGHED=importance is not None,
            ROWS=tiles.height,
            COLUMNS=tiles.width,
            num_warps=tiles.warps,
        )
    if is_whole:
        return Improvements(result, least_errors)
    errors = result.sum(0, dtype=torch.float64)
    return improvements(finite_or_infinite(errors), least)


class _Tiles(NamedTuple):
    """How the rows of a range search are cut into tiles, one for each program; made by :func:`measure_ranges`.

    Attributes:
        height: rows of a tile.
        width: values of each row in a tile.
        pieces: how many tiles share a row.
        warps: warps of a program.
    """

    height: int
    width: int
    pieces: int
    warps: int

    @classmethod
    def of(cls, rows: int, size: int) -> _Tiles:
        """Cut so many rows of ``size`` values each."""
        has_few_rows = rows <= _FEW_ROWS
        tile = _VALUES_OF_WARP if has_few_rows else _TILE
        width = min(tile, _power(size))
        height = max(1, _VALUES_OF_WARP // width)
        pieces = -(-size // width)
        warps = _WARPS_OF_FEW_ROWS if has_few_rows else height * width // _VALUES_OF_WARP
        return cls(height, width, pieces, warps)


def _least_errors(least: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor:
    """A copy of the least errors so far, ``(rows,)`` in float32, which the loop overwrites; infinity at first."""
    if least is None:
        return torch.full((rows,), torch.inf, device=device)
    return least.to(torch.float32, copy=True)


def round_panel(
    left: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor, grid: NumberGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the columns of a panel by GPTQ: each column is corrected by the errors of the columns before it.

    Called by ``rounding.py`` for one panel of columns after the other.

    Args:
        left: ``(P, R)`` in float32: P columns of the weight, less the corrections of all earlier panels.
        step: the scale of each value, ``(P, R)``.
        zero: the zero point of each value, ``(P, R)``.
        factor: ``(P, P)``, the panel's block on the diagonal of the inverse Hessian's upper Cholesky factor.
        grid: the numbers of the format.

    Returns:
        The levels, and the error of each column divided by the factor's diagonal, ``(P, R)`` each.
    """
    levels = torch.empty_like(left)
    errors = torch.empty_like(left)
    columns, rows = left.shape
    programs = (-(-rows // _ROWS),)
    loop = _loops_for(left).round_panel
    with torch.cuda.device_of(left):
        loop[programs](
            left,
            step,
            zero,
            factor,
            levels,
            errors,
            rows,
            columns,
            factor.stride(0),
            ROWS=_ROWS,
            PANEL=_power(columns),
            **_loop_arguments(grid),
        )
    return levels, errors


def round_panel_plainly(
    left: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor, grid: NumberGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`round_panel` by torch's operations, on any device; it overwrites ``left``.

    Called by ``rounding.py`` where the loops cannot run, and to check them.
    """
    levels = torch.empty_like(left)
    errors = torch.empty_like(left)
    for i in range(len(left)):
        column = left[i]
        steps = column / step[i]
        levels[i] = grid.round(steps + zero[i])
        rounded_steps = levels[i] - zero[i]
        dequantized = rounded_steps * step[i]
        errors[i] = (column - dequantized) / factor[i, i]
        later = slice(i + 1, None)
        left[later].addr_(factor[i, later], errors[i], alpha=-1)
    return levels, errors


def _loop_arguments(grid: NumberGrid) -> dict[str, Any]:
    """The arguments of the loops that describe the number format of a grid.

    A loop rounds a float by adding and subtracting ``rounder``, times the power of two of the number's exponent, which
    is not below ``smallest``: the sum has no room for more bits than the format's mantissa. ``enable_fp_fusion`` is off
    because a product that is fused with a sum is not rounded in between, and the bits would differ from torch's.
    """
    is_integer = grid.number is None
    smallest = 0 if grid.number is None else grid.number.smallest
    mantissa = 0 if grid.number is None else grid.number.mantissa
    return {
        "low": grid.low,
        "high": grid.high,
        "smallest": 2.0**smallest,
        "rounder": 1.5 * 2.0 ** (23 - mantissa),
        "INTEGERS": is_integer,
        "enable_fp_fusion": False,
    }
