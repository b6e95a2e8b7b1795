"""What a checkpoint holds of one calibrated module, in both directions.

compressed-tensors stores Linear and Embedding. Its compressors take any matrix, so the weight of every other module
(convolutions, transformers' Conv1D) goes through them as the matrix that was calibrated, ``(output channels, inputs of
each)``, and is stored like a Linear's of that shape: int8 codes under ``weight``, 4-bit ones under ``weight_packed``.
The module that loads it knows its own shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from torch import nn

from lightning_obs.model.kinds import from_matrix, to_matrix


def compressor_of(name: Any) -> Any:
    """compressed-tensors' compressor of a format."""
    return BaseCompressor.get_value_from_registry(CompressionFormat(name).value)


def compress_entries(
    module: nn.Module, own: Mapping[str, torch.Tensor], scheme: QuantizationScheme
) -> dict[str, torch.Tensor]:
    """A module's own entries as they are stored.

    Args:
        module: says what its weight is as a matrix; nothing else of it is read.
        own: weight, bias and quantization parameters, by their names on the module.
        scheme: with its format.
    """
    entries = dict(own)
    if scheme.weights is not None:
        matrix = to_matrix(module, entries["weight"])
        assert matrix is not None  # checked before calibration
        entries["weight"] = matrix.contiguous()
        entries = compressor_of(scheme.format).compress(entries, scheme)
    return {key: value.contiguous() for key, value in entries.items() if value is not None}


def decompress_entries(
    module: nn.Module, stored: Mapping[str, torch.Tensor], scheme: QuantizationScheme
) -> dict[str, torch.Tensor]:
    """The inverse of :func:`compress_entries`; the weight is the dequantized one, in the module's shape."""
    entries = dict(stored)
    if scheme.weights is None:
        return entries
    packed = entries.get("weight_zero_point")
    if packed is not None and len(packed) == 1:
        # compressed-tensors 0.20 views the transpose as bytes, for which its last stride has to be 1.
        entries["weight_zero_point"] = packed.reshape(-1, 1).t()
    entries = compressor_of(scheme.format).decompress(entries, scheme)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    entries["weight"] = from_matrix(module, entries["weight"], weight.shape).contiguous()
    return entries
