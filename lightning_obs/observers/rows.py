"""Which rows of a weight share a scale, and a statistic of a weight from those of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from lightning_obs.observers.statistic import Statistic


def rows_per_scale(args: QuantizationArgs) -> int | None:
    """How many rows of a weight have a scale together; None: all of them.

    >>> rows_per_scale(QuantizationArgs(strategy="block", block_structure=[4, 8]))
    4
    """
    if args.strategy == QuantizationStrategy.TENSOR:
        return None
    structure = args.block_structure if args.strategy == QuantizationStrategy.BLOCK else None
    return 1 if structure is None else int(structure[0])


def join_rows(parts: Sequence[tuple[int, torch.Tensor]], height: int | None, statistic: Statistic) -> torch.Tensor:
    """A statistic of a whole weight from those of its parts: rows below rows, reduced where parts share a scale.

    Args:
        parts: first row and statistic ``(*Q,)`` of each part; the weight's rows, none left out.
        height: rows that have a scale together; None: all.
        statistic: its declaration.

    >>> one = torch.tensor([[-1.0], [-2.0]])
    >>> join_rows([(0, one), (3, one * 3)], height=2, statistic=Statistic("min_vals", rows="min")).flatten()
    tensor([-1., -3., -6.])
    """
    placed = [(0 if height is None else row // height, values) for row, values in parts]
    first = placed[0][1]
    count = max(at + len(values) for at, values in placed)
    reduce, identity = (torch.maximum, -torch.inf) if statistic.rows == "max" else (torch.minimum, torch.inf)
    joined = first.new_full((count, *first.shape[1:]), identity)
    for at, values in placed:
        joined[at : at + len(values)] = reduce(joined[at : at + len(values)], values)
    return joined
