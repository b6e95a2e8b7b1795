"""Which rows of a weight share a scale, and the ranges of a weight from those of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy


def rows_per_scale(args: QuantizationArgs) -> int | None:
    """How many rows of a weight have a scale together; None: all of them.

    >>> rows_per_scale(QuantizationArgs(strategy="block", block_structure=[4, 8]))
    4
    """
    if args.strategy == QuantizationStrategy.TENSOR:
        return None
    structure = args.block_structure if args.strategy == QuantizationStrategy.BLOCK else None
    return 1 if structure is None else int(structure[0])


def join_ranges(
    parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]], height: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The range of a whole weight: rows below rows, and the wider of two where parts share a scale.

    Args:
        parts: first row, smallest and largest values of each part, ``(*Q,)``; the weight's rows, none left out.
        height: rows that have a scale together; None: all.

    >>> one = torch.tensor([[-1.0], [-2.0]])
    >>> join_ranges([(0, one, -one), (3, one * 3, -one)], height=2)[0].flatten()
    tensor([-1., -3., -6.])
    """
    placed = [(0 if height is None else row // height, low, high) for row, low, high in parts]
    _, low, high = placed[0]
    count = max(first + len(part) for first, part, _ in placed)
    lows, highs = low.new_full((count, *low.shape[1:]), torch.inf), high.new_full((count, *high.shape[1:]), -torch.inf)
    for first, low, high in placed:
        part = slice(first, first + len(low))
        lows[part], highs[part] = torch.minimum(lows[part], low), torch.maximum(highs[part], high)
    return lows, highs
