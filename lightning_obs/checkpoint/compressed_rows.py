"""Compress a weight whose rows lie on several ranks (FSDP2): each rank its own rows, and what travels is small.

compressed-tensors' formats pack along a row, so the compressed rows below each other are the compressed weight. It is
not so for packed zero points, which are packed along the column, and for blocks that two ranks share: these weights
have to be gathered first.
"""

from __future__ import annotations

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.checkpoint.entries import compressor_of
from lightning_obs.model.kinds import kind_of
from lightning_obs.model.qparams import get_scheme, read_qparams
from lightning_obs.model.sharding import rows_of_ranks, whole_tensor

_ONE_SCALE_A_ROW = (QuantizationStrategy.CHANNEL, QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def rows_per_scale(module: nn.Module) -> int | None:
    """How many rows of a sharded weight have a scale together, where each rank can compress its own; else None.

    The answer is the same on every rank. 0: all rows, of all ranks.
    """
    scheme, weight = get_scheme(module), getattr(module, "weight", None)
    if scheme is None or scheme.weights is None or kind_of(module).stored_as is None:
        return None
    rows = rows_of_ranks(weight)
    if rows is None:
        return None
    args = scheme.weights
    if args.strategy in _ONE_SCALE_A_ROW:
        packed = scheme.format == CompressionFormat.pack_quantized.value
        return None if packed and not args.symmetric else 1
    if args.strategy == QuantizationStrategy.BLOCK:
        assert args.block_structure is not None
        height = int(args.block_structure[0])
        return None if any(start % height for start, stop in rows if start < stop) else height
    return 0 if args.strategy == QuantizationStrategy.TENSOR else None


def compress_rows(module: nn.Module) -> dict[str, torch.Tensor]:
    """Compress this rank's rows; talks to nobody.

    Args:
        module: calibrated, with :func:`rows_per_scale`.

    Returns:
        The entries of the module's weight and its quantization parameters in a checkpoint, under their names there:
        what has rows as a DTensor ``Shard(0)``, the rest whole.
    """
    scheme, weight, height = get_scheme(module), module.weight, rows_per_scale(module)
    assert isinstance(weight, DTensor)
    assert scheme is not None
    assert height is not None
    rows = weight.to_local().detach()
    start, _ = (rows_of_ranks(weight) or [])[weight.device_mesh.get_local_rank()]
    own = read_qparams(module)
    # A rank without rows compresses a block of zeros, and keeps nothing of it: shapes and dtypes are then right.
    empty = len(rows) == 0
    if empty:
        start, rows = 0, rows.new_zeros(max(1, height), *rows.shape[1:])
    entries: dict[str, torch.Tensor] = {"weight": rows}
    for name, value in own.items():
        has_rows = height > 0 and name in ("weight_scale", "weight_zero_point")
        entries[name] = value[start // height : -(-(start + len(rows)) // height)] if has_rows else value
    entries = compressor_of(scheme.format).compress(entries, scheme)
    if "weight_shape" in entries:
        dtype = entries["weight_shape"].dtype
        entries["weight_shape"] = torch.tensor(weight.shape, dtype=dtype, device=rows.device)
    heights = {"weight": 1, "weight_packed": 1, "weight_scale": height, "weight_zero_point": height}
    return {
        name: _sharded(value[:0] if empty else value, weight, heights[name]) if heights.get(name) else value
        for name, value in entries.items()
        if value is not None
    }


def gather_rows(entry: torch.Tensor) -> torch.Tensor:
    """An entry of :func:`compress_rows`, whole; every rank must call this."""
    if not isinstance(entry, DTensor):
        return entry
    rows = entry.to_local()
    if rows.itemsize > 1:
        return whole_tensor(entry)
    return whole_tensor(_sharded(rows.view(torch.uint8), entry, 1)).view(rows.dtype)  # gloo knows no float8


def _sharded(rows: torch.Tensor, weight: DTensor, height: int) -> DTensor:
    """One rank's rows as a part of what all ranks have."""
    shape = torch.Size((-(-len(weight) // height), *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(rows.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
