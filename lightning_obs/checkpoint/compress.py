"""Compress the weight of one module to its entries in a checkpoint.

An entry is one stored tensor: ``weight_packed``, ``weight_scale``, ``bias``. A code is the stored number of one weight:
an integer, or the bits of a small float. ``entries.py`` calls :func:`compressed_layout` to lay the files out, and
:func:`compress_by_rows` to fill them; ``load.py`` calls the former to check the tensors that it reads.

Every weight is stored like a Linear's, as the matrix ``(R, C)`` that was calibrated; the module that loads it knows its
own shape. The formats pack values along a row, so a weight can be compressed in blocks of rows, which fit into a
processor's cache. Packed zero points are the exception: they are packed along the column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, QuantizationType
from torch import nn

from lightning_obs.model.kinds import to_matrix
from lightning_obs.model.module_qparams import ROUNDED
from lightning_obs.numerics.fake_quantize import dequantize, fake_quantize, pack_nibbles, quantize
from lightning_obs.numerics.qparams import rows_per_scale

#: tensors by the name of their entry
Tensors: TypeAlias = dict[str, torch.Tensor]

#: elements of a weight that are compressed at once; compressed-tensors takes up to 36 bytes for each
_ELEMENTS_AT_ONCE = 1 << 18
#: by format, the bits at which codes are computed here: compressed-tensors takes many passes, or rounds otherwise on a
#: GPU
_BITS_COMPUTED_HERE = {
    "int-quantized": 8,
    "float-quantized": 8,
    "mxfp8-quantized": 8,
    "pack-quantized": 4,
    "nvfp4-pack-quantized": 4,
    "mxfp4-pack-quantized": 4,
}


class Entry(NamedTuple):
    """A tensor of a checkpoint, or some of its rows."""

    #: the name of the tensor, in its module or in the state dict
    name: str
    rows: torch.Tensor
    #: which row of the tensor is the first of ``rows``
    first: int = 0


def compressor_of(scheme: QuantizationScheme) -> Any:
    """compressed-tensors' compressor of a scheme's format."""
    return BaseCompressor.get_value_from_registry(CompressionFormat(scheme.format).value)


def compressed_layout(module: nn.Module, tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> Tensors:
    """A module's entries in a checkpoint as meta tensors: their names, shapes and dtypes.

    Args:
        module: its kind says which matrix its weight is.
        tensors: its own tensors and its qparams (scales, zero points), as meta tensors.
        scheme: how it is quantized.

    Returns:
        The entries by their names in the module.
    """
    entries = _compress(_with_matrix(module, tensors, scheme), scheme)
    zero_point = entries.get("weight_zero_point")
    if scheme.weights is not None and zero_point is not None and _packs_zero_points(scheme):
        # compressed-tensors 0.20 does not pack a zero point on the meta device.
        rows = -(-len(zero_point) * scheme.weights.num_bits // 32)
        entries["weight_zero_point"] = zero_point.new_empty((rows, *zero_point.shape[1:]), dtype=torch.int32)
    return entries


def compress_by_rows(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme
) -> Iterator[Entry]:
    """Yield a module's entries in a checkpoint, a block of rows at a time where rows can be compressed separately.

    Args:
        module: its kind says which matrix its weight is.
        tensors: its own tensors, whole, and its qparams.
        scheme: how it is quantized.
    """
    entries = _with_matrix(module, tensors, scheme)
    if scheme.weights is None or _packs_zero_points(scheme):
        for name, value in _compress(entries, scheme).items():
            yield Entry(name, value)
        return
    matrix = entries["weight"]
    heights = _matrix_rows_per_entry_row(scheme)
    for start, stop in _blocks_of_rows(matrix, heights["weight_scale"] or 1):
        block = _compress(_rows_of(entries, start, stop, heights), scheme)
        for name, value in block.items():
            if name == "weight_shape":
                value = value.new_tensor(matrix.shape)
            height = heights.get(name, 0)
            if height > 0:
                yield Entry(name, value, start // height)
            elif start == 0:
                yield Entry(name, value)


def _packs_zero_points(scheme: QuantizationScheme) -> bool:
    """Whether the format packs zero points, along the column."""
    weights = scheme.weights
    if weights is None or weights.symmetric or scheme.format != CompressionFormat.pack_quantized.value:
        return False
    return weights.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)


def _with_matrix(module: nn.Module, tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> Tensors:
    """A module's tensors with the weight as a matrix, if the scheme quantizes the weight."""
    entries = dict(tensors)
    if scheme.weights is not None:
        matrix = to_matrix(module, entries["weight"].detach())
        assert matrix is not None  # a plan has no module without a matrix
        entries["weight"] = matrix
    return entries


# ---------------------------------------------------------------------- blocks of rows


def _matrix_rows_per_entry_row(scheme: QuantizationScheme) -> dict[str, int]:
    """By name of an entry, how many rows of the weight's matrix one of its rows belongs to: 128 for scales of blocks.

    An entry with 0, or without a number, is not cut into rows (a bias, one scale for the whole weight).
    """
    assert scheme.weights is not None
    per_scale = rows_per_scale(scheme.weights) or 0
    return {"weight": 1, ROUNDED: 1, "weight_packed": 1, "weight_scale": per_scale, "weight_zero_point": per_scale}


def _blocks_of_rows(matrix: torch.Tensor, rows_per_scale: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block of a matrix, and the row after its last.

    Args:
        matrix: to cut into blocks of about ``_ELEMENTS_AT_ONCE`` elements.
        rows_per_scale: rows that share a scale, which no block cuts.
    """
    rows = _ELEMENTS_AT_ONCE // max(1, matrix.shape[1])
    height = max(1, rows // rows_per_scale) * rows_per_scale
    for start in range(0, max(1, len(matrix)), height):
        yield start, min(start + height, len(matrix))


def _rows_of(entries: Tensors, start: int, stop: int, heights: Mapping[str, int]) -> Tensors:
    """Cut the entries to the rows from ``start`` to ``stop`` of the matrix.

    Args:
        entries: of the whole matrix.
        start: its first row to take.
        stop: the row after the last.
        heights: of :func:`_matrix_rows_per_entry_row`; an entry without rows to cut is taken whole.
    """
    rows = {}
    for name, value in entries.items():
        height = heights.get(name, 0)
        rows[name] = value[start // height : -(-stop // height)] if height > 0 else value
    return rows


# ---------------------------------------------------------------------- entries of a matrix


def _compress(tensors: Tensors, scheme: QuantizationScheme) -> Tensors:
    """The stored entries of a matrix, or of some of its rows; a bias and the like stay as they are.

    Args:
        tensors: ``weight`` as a matrix, qparams, perhaps the integers that a rounding chose (``ROUNDED``), and others.
        scheme: how the matrix is quantized.
    """
    entries = dict(tensors)
    if scheme.weights is not None:
        entries = _with_compressed_weight(entries, scheme)
    return {name: value.contiguous() for name, value in entries.items() if value is not None}


def _with_compressed_weight(entries: Tensors, scheme: QuantizationScheme) -> Tensors:
    """The entries with ``weight`` and qparams as the format stores them; this package or compressed-tensors does it."""
    args = scheme.weights
    assert args is not None
    weight = entries["weight"].contiguous()
    rounded = entries.pop(ROUNDED, None)
    scale = entries["weight_scale"]
    zero_point = entries.get("weight_zero_point")
    global_scale = entries.get("weight_global_scale")
    if rounded is not None:
        # In float32, in which these numbers are rounded to themselves.
        weight = dequantize(rounded, scale, zero_point, args, global_scale=global_scale)
    if _computes_codes_here(weight, scheme):
        codes = quantize(weight, scale, zero_point, args, global_scale=global_scale)
        return _with_codes(entries, codes, scheme)
    if rounded is None and weight.device.type not in ("cpu", "meta"):
        # There compressed-tensors divides in float32, which gives the levels of its fake_quantize again.
        weight = fake_quantize(weight, scale, zero_point, args, global_scale=global_scale).float()
    entries["weight"] = weight
    return dict(compressor_of(scheme).compress(entries, scheme))


def _computes_codes_here(weight: torch.Tensor, scheme: QuantizationScheme) -> bool:
    """Whether codes are computed and packed in this package, not by compressed-tensors."""
    args = scheme.weights
    assert args is not None
    if weight.is_meta or _BITS_COMPUTED_HERE.get(scheme.format or "") != args.num_bits:
        return False
    if scheme.format == "int-quantized" and weight.device.type == "cpu":
        return False  # compressed-tensors is as fast
    if args.num_bits == 8:
        return True
    return bool(args.symmetric) and weight.shape[1] % 8 == 0 and weight.itemsize < 8


def _with_codes(entries: Tensors, codes: torch.Tensor, scheme: QuantizationScheme) -> Tensors:
    """The entries that compressed-tensors' compressor would make, from codes that are computed already.

    This is faster: compressed-tensors rounds to fp4 by masks, and packs by scattering bits.

    Args:
        entries: of a matrix or of some of its rows; changed.
        codes: of its weights, in the shape of ``weight``.
        scheme: how the matrix is quantized.
    """
    args = scheme.weights
    compressor = compressor_of(scheme)
    assert args is not None
    del entries["weight"]
    if args.num_bits == 8:
        entries["weight"] = codes
    elif args.type == QuantizationType.FLOAT:
        entries["weight_packed"] = pack_nibbles(codes)
    else:
        from_lowest = codes.bitwise_xor_(8)  # int4 is stored as its distance from -8
        entries["weight_packed"] = pack_nibbles(from_lowest).view(torch.int32)
        entries["weight_shape"] = torch.tensor(codes.shape)
    if hasattr(compressor, "_compress_scale"):
        entries["weight_scale"] = compressor._compress_scale(entries["weight_scale"], args)
    return dict(compressor._remove_symmetric_zp(entries, scheme))
