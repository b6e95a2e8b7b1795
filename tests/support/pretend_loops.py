"""The loops of :mod:`lightning_obs.numerics.kernels.gpu_loops` for the pretend device: each call is one launch.

Arguments are those of a launch on a GPU; its arithmetic is here torch's on the values. It moves each tensor once.
That Triton's loops compute the same is ``tests/numerics/test_gpu_loops.py``'s.
"""

from __future__ import annotations

import torch

from lightning_obs.numerics import on_gpu
from tests.support import pretend_device
from tests.support.pretend_device import NAME, PretendTensor


class Loop:
    """Called as Triton's: ``loop[grid](*arguments, **constants)``."""

    def __init__(self, compute):
        self.compute = compute

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *given, **constants):
        tensors = {id(one): one for one in given if isinstance(one, torch.Tensor)}.values()
        assert all(isinstance(one, PretendTensor) for one in tensors), "a loop reads its device's memory only"
        assert len({one.device for one in tensors}) == 1
        moved = sum(pretend_device._bytes(one.values) for one in tensors)
        pretend_device._count(launches=1, moved=moved)
        self.compute(*pretend_device.on_cpu(given), **constants)


def _rows(values):
    return values.transpose(0, 1).flatten(1)


def _count_patterns(values, tables, *_, BLOCK):
    """Each program counts in its table, as on a GPU."""
    count = len(tables)
    bins = tables.shape[2]
    for scale, row in enumerate(_rows(values)):
        program = torch.arange(len(row)) // BLOCK
        place = (row.long() & 0xFFFF) + program % count * bins
        tables[:, scale] += torch.bincount(place, minlength=count * bins).view(count, bins)


def _moments(values, out, size, wide, stride_n, stride_q, stride_g, scales, *, SPAN, BLOCK):
    for piece, part in zip(out, _rows(values).double().split(SPAN, 1), strict=True):
        piece[0], piece[1] = part.sum(1), part.square().sum(1)


def _nearest(value, low, high, smallest, rounder, INTEGERS):
    near = value.clamp(low, high)
    if INTEGERS:
        return near.round()
    power = (near.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=smallest) * rounder
    return near + power - power


def _measure_ranges(
    values, importance, scales, zeros, low_ends, high_ends, factors, out, least_errors, first, rows, across, wide, size,
    _a, _b, _n, _g, repeats, candidates, half, eps,
    *, norm, low, high, smallest, rounder, INTEGERS, WHOLE, SCALED, SHIFTED, WEIGHED, ROWS, COLUMNS, enable_fp_fusion,
    num_warps,
):  # fmt: skip
    value = values.flatten(0, 1)[first : first + rows].flatten(1).float()
    if WEIGHED:
        weight = importance[torch.arange(first, first + rows) % repeats].repeat(1, size // wide)
    for candidate in range(candidates):
        if SCALED:
            scale = scales[candidate]
        else:
            below, above = ((end.float() * factors[candidate]).to(end.dtype).float() for end in (low_ends, high_ends))
            scale = (torch.maximum(-below, above).clamp(min=0) / half).to(low_ends.dtype).float()
            scale = torch.where(scale == 0, eps, scale)
        zero = zeros[candidate][:, None] if SHIFTED else 0
        level = _nearest(value * (1 / scale)[:, None] + zero, low, high, smallest, rounder, INTEGERS) - zero
        lost = (level * scale[:, None] - value).abs().pow(norm)
        errors = [part.sum(1) for part in (lost * weight if WEIGHED else lost).split(COLUMNS, 1)]
        if WHOLE:
            out[candidate] = errors[0] < least_errors
            least_errors[out[candidate]] = errors[0][out[candidate]]
        else:
            out[:, candidate] = torch.stack(errors)


def _round_panel(
    left, step, zeros, factor, levels, errors, rows, columns, stride, *, low, high, smallest, rounder, INTEGERS,
    ROWS, PANEL, enable_fp_fusion,
):  # fmt: skip
    left = left.clone()
    for i in range(columns):
        levels[i] = _nearest(left[i] / step[i] + zeros[i], low, high, smallest, rounder, INTEGERS)
        errors[i] = (left[i] - (levels[i] - zeros[i]) * step[i]) / factor[i, i]
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)


class Loops:
    """The loops by their names."""

    count_patterns = Loop(_count_patterns)
    moments = Loop(_moments)
    measure_ranges = Loop(_measure_ranges)
    round_panel = Loop(_round_panel)


def add_loops() -> None:
    """Let the device have them, as a GPU with Triton has."""
    on_gpu.LOOPS[NAME] = lambda: Loops
    assert on_gpu.can_run(torch.zeros(1, device=pretend_device.DEVICE))  # compared with torch's operations here
