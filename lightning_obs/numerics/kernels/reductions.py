"""Extremes, counts and sums of squares of a tensor in a CPU's memory, in one pass."""

from __future__ import annotations

import torch

from lightning_obs.numerics.kernels.launch import in_threads, memory, run

# dtypes of values -> integers of the same size, and infinity as one
_INTEGERS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
# Larger tensors are split over threads.
_PART = 1 << 22


def extremes(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each row of ``(A, B, N, G)``, ``(A, B)`` each; NaN where a row has one."""
    from lightning_obs.numerics.kernels import loops

    if view.shape[:3].numel() == 1 and view.shape[3] > _PART:  # pieces, to share out
        whole = view.shape[3] // _PART * _PART
        pieces = [view[..., :whole].unflatten(-1, (-1, _PART))[0], view[..., whole:]]
        lows, highs = zip(*(extremes(piece) for piece in pieces if piece.numel()), strict=True)
        return torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    axis = 0 if view.shape[0] >= view.shape[2] else 2
    parts = view.chunk(1 if view.numel() <= _PART else torch.get_num_threads(), axis)
    ends = [torch.empty(2, *part.shape[:2], dtype=view.dtype) for part in parts]
    integer, infinity = _INTEGERS[view.dtype]

    def work(number: int) -> None:
        part, found = parts[number], ends[number].view(integer).numpy()
        run(loops.extremes, memory(part).view(found.dtype), infinity, part.stride(), tuple(part.shape), found)

    in_threads(len(parts), work)
    low, high = ends[0]
    if len(parts) > 1 and axis == 0:
        low, high = torch.cat(ends, 1)
    elif len(parts) > 1:
        low, high = torch.stack([end[0] for end in ends]).amin(0), torch.stack([end[1] for end in ends]).amax(0)
    return low, high


def count_values(values: torch.Tensor) -> torch.Tensor:
    """How often each bfloat16 pattern occurs in flat ``values``, rounded to it: ``(65536,)`` in int64."""
    from lightning_obs.numerics.kernels import loops

    parts = values.contiguous().chunk(1 if len(values) <= _PART else torch.get_num_threads())
    counts = torch.zeros(len(parts), 1 << 16, dtype=torch.int64)

    def work(number: int) -> None:
        loop = loops.count if values.dtype == torch.bfloat16 else loops.count_rounded
        run(loop, memory(parts[number]), counts[number].numpy())

    in_threads(len(parts), work)
    return counts.sum(0) if len(parts) > 1 else counts[0]


def channel_squares(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares per column of ``(T, C)``, ``(C,)`` in float64."""
    from lightning_obs.numerics.kernels import loops

    parts = rows.chunk(1 if rows.numel() <= _PART else torch.get_num_threads(), 1)
    sums = torch.zeros(rows.shape[1], dtype=torch.float64)
    each = sums.split([part.shape[1] for part in parts])

    def work(number: int) -> None:
        part = parts[number]
        run(loops.squares, memory(part), part.shape[1], part.stride(0), each[number].numpy())

    in_threads(len(parts), work)
    return sums
