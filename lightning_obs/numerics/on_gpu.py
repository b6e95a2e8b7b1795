"""Counts, moments, searches and roundings on a GPU, by the loops that Triton compiles.

Before the loops are used on a device, small results of each are compared there with torch's operations. Without Triton,
callers run torch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.errors import warn
from lightning_obs.numerics.candidates import candidate_ranges
from lightning_obs.numerics.formats import NumberGrid

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Values that a program holds in registers, rows that one of the rounding holds, and values that one adds up.
_TILE, _ROWS, _SPAN = 4096, 16, 1 << 15


def _triton() -> Any:
    from lightning_obs.numerics.kernels import gpu_loops

    return gpu_loops


#: by kind of device, the loops that are compiled for it
LOOPS: dict[str, Callable[[], Any]] = {"cuda": _triton}


def can_run(value: torch.Tensor) -> bool:
    """Whether the loops can run on this tensor."""
    return value.device.type in LOOPS and value.dtype in _DTYPES and _available(value.device)


@functools.cache
def _available(device: torch.device) -> bool:
    """Whether the loops compile for a device and agree with torch's operations there; else a warning says so."""
    try:
        difference = _difference(device)
    except Exception as error:  # no Triton, no compiler, a device that it does not know: each raises its own
        reason = f"cannot be compiled for {device} ({type(error).__name__}: {error})"
    else:
        if difference < 1e-3:
            return True
        reason = f"differ from torch's operations on {device} (by {difference:.1%})"
    warn(f"Triton's loops {reason}: searches and rounding run without them, many times slower")
    return False


def _difference(device: torch.device) -> float:
    """The relative difference of small results from those of torch's operations: the largest, or all that differ."""
    grid, factors = NumberGrid.of(QuantizationArgs(num_bits=4, group_size=128)), (1.0, 0.9)
    values = torch.linspace(-1, 1, 4096, device=device).pow(3)
    view = values.bfloat16().view(1, 32, 1, 128)
    ends = view.amin((0, 2, 3)), view.amax((0, 2, 3))
    scale, _ = grid.qparams(*candidate_ranges(*ends, factors))
    exact = grid.error(view[0, :, 0].float(), scale[..., None], None).abs().pow(2.4).sum(-1)
    tried = torch.tensor(factors, dtype=torch.float64, device=device)
    searched = errors_of_ranges(view, slice(0, 32), None, *ends, tried, grid, 2.4)
    left, zero = values.view(64, 64), torch.zeros(64, 64, device=device)
    factor = (torch.eye(64, device=device) + 0.01).triu()
    panel = left, zero + 0.1, zero, factor, grid
    rounded = round_panel(*panel)[0] != round_panel_plainly(left.clone(), *panel[1:])[0]
    wide, counted = view[0].double(), view.new_zeros(32, 1 << 16, dtype=torch.int64)
    count_patterns(view[0].transpose(0, 1), counted)
    misplaced = counted.gather(1, view[0, :, 0].view(torch.uint16).long()) < 1
    squares = moments(view[0].transpose(0, 1))[1] - wide.square().sum((1, 2))
    wrong = misplaced.sum() + (counted.sum(1) != 128).sum() + (squares.abs() > 1e-9).sum()
    return float(((searched - exact).abs() / exact).max() + rounded.double().mean() + wrong)


def count_patterns(values: torch.Tensor, counts: torch.Tensor) -> None:
    """Add how often each pattern of bfloat16 values ``(N, Q, G)`` occurs to ``counts``, ``(Q, 65536)`` in int64."""
    size = values.shape[0] * values.shape[2]
    with torch.cuda.device_of(values):
        LOOPS[values.device.type]().count_patterns[-(-size // _TILE), values.shape[1]](
            values.view(torch.int16), counts, size, values.shape[2], *values.stride(), BLOCK=_TILE
        )


def moments(values: torch.Tensor) -> torch.Tensor:
    """Sum, and sum of squares, of ``(N, Q, G)`` over the first and the last dimension: ``(2, Q)`` in float64."""
    scales, size = values.shape[1], values.shape[0] * values.shape[2]
    span = min(_SPAN, _power(size))
    pieces = -(-size // span)
    out = torch.empty(pieces, 2, scales, dtype=torch.float64, device=values.device)
    with torch.cuda.device_of(values):
        LOOPS[values.device.type]().moments[scales, pieces](
            values, out, size, values.shape[2], *values.stride(), scales, SPAN=span, BLOCK=min(_TILE, span)
        )
    return out[0] if pieces == 1 else out.sum(0)


def _power(size: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def errors_of_ranges(
    view: torch.Tensor,
    part: slice,
    importance: torch.Tensor | None,
    low: torch.Tensor,
    high: torch.Tensor,
    factors: torch.Tensor,
    grid: NumberGrid,
    norm: float,
) -> torch.Tensor:
    """``sum |q(x) - x| ** norm`` for each candidate and row, ``(C, r)``; of long rows in float64.

    Args:
        view: the values ``(A, B, N, G)``; the first two dimensions number the rows.
        part: the consecutive rows that are measured.
        importance: weight of each value's error, ``(I, G)``: row r has the weights of r modulo I.
        low: smallest value of each row, ``(r,)`` in the dtype in which ranges are stored.
        high: largest value of each row.
        factors: the candidates, by which ranges are multiplied, ``(C,)`` in float64.
        grid: the numbers of the format.
        norm: exponent of the error.
    """
    size, candidates, rows = view.shape[2:].numel(), len(factors), len(low)
    columns = min(_TILE, _power(size))
    side, pieces = _TILE // columns, -(-size // columns)
    out = torch.empty(pieces, candidates, rows, device=view.device)
    half, scale, zero_point = _half_of_range(grid, low.dtype), None, None
    if half is None:
        scale, zero_point = grid.qparams(*candidate_ranges(low, high, factors))
    ends = low.contiguous(), high.contiguous()
    unused = factors if scale is None else scale
    with torch.cuda.device_of(view):
        LOOPS[view.device.type]().errors_of_ranges[-(-rows // side), pieces](
            view,
            *(unused if each is None else each.contiguous() for each in (importance, scale, zero_point)),
            *ends,
            factors.float(),
            out,
            *(part.start, rows, view.shape[1], view.shape[3], size),
            *view.stride(),
            1 if importance is None else len(importance),
            candidates,
            half or 0.0,
            torch.finfo(low.dtype).eps,
            norm=norm,
            **_of_grid(grid),
            SCALED=half is None,
            SHIFTED=zero_point is not None,
            WEIGHED=importance is not None,
            ROWS=side,
            COLUMNS=columns,
        )
    return out[0] if pieces == 1 else out.sum(0, dtype=torch.float64)


def _half_of_range(grid: NumberGrid, dtype: torch.dtype) -> float | None:
    """The number of steps by which the magnitude of a range is divided; None: its scale takes more than that."""
    if not grid.args.symmetric or grid.signed or grid.global_scale is not None or grid.scale_dtype is not None:
        return None
    return (torch.tensor(grid.high - grid.low).to(dtype) / 2).item()


def round_panel(
    left: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor, grid: NumberGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels of the columns of a panel, each rounded after it took up the errors of the columns before it.

    Args:
        left: ``(P, R)`` in float32: P columns of the weight, less the corrections of all earlier panels.
        step: the scale of each value, ``(P, R)``.
        zero: the zero point of each value, ``(P, R)``.
        factor: ``(P, P)``, a block on the diagonal of the inverse Hessian's upper Cholesky factor.
        grid: the numbers of the format.

    Returns:
        The levels, and each column's error over the factor's diagonal, ``(P, R)`` both.
    """
    levels, errors = torch.empty_like(left), torch.empty_like(left)
    columns, rows = left.shape
    with torch.cuda.device_of(left):
        LOOPS[left.device.type]().round_panel[(-(-rows // _ROWS),)](
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
            **_of_grid(grid),
        )
    return levels, errors


def round_panel_plainly(
    left: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor, grid: NumberGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`round_panel`, operation by operation on any device; ``left`` is written over."""
    levels, errors = torch.empty_like(left), torch.empty_like(left)
    for i in range(len(left)):
        levels[i] = grid.round(left[i] / step[i] + zero[i])
        errors[i] = (left[i] - (levels[i] - zero[i]) * step[i]) / factor[i, i]
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return levels, errors


def _of_grid(grid: NumberGrid) -> dict[str, Any]:
    """The arguments by which the loops know a format."""
    smallest, mantissa = (0, 0) if grid.number is None else (grid.number.smallest, grid.number.mantissa)
    ends = {"low": grid.low, "high": grid.high, "smallest": 2.0**smallest, "rounder": 1.5 * 2.0 ** (23 - mantissa)}
    return {**ends, "INTEGERS": grid.number is None, "enable_fp_fusion": False}
