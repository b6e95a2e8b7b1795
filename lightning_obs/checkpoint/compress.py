"""A calibrated model's state dict as a checkpoint holds it, wherever its weights lie, and one module's entries.

One module after the other is compressed into a state dict of its own: the model is not touched, and never held twice.

compressed-tensors stores Linear and Embedding. Its compressors take any matrix, so the weight of every other module
(convolutions, transformers' Conv1D) goes through them as the matrix that was calibrated, ``(output channels, inputs of
each)``, and is stored like a Linear's of that shape: int8 codes under ``weight``, 4-bit ones under ``weight_packed``.
The module that loads it knows its own shape.

Where weights are sharded over ranks, rank 0 is the one that keeps the result. Under FSDP2 each rank compresses the rows
that it has, and what is gathered, one module at a time, is compressed already: the formats pack along a row, so the
compressed rows below each other are the compressed weight. It is not so for packed zero points, which are packed along
the column, and for blocks that two ranks share. Such a weight is gathered first, and so is every unit of FSDP1, whose
ranks hold pieces of flat tensors. The other ranks hold one module or unit at a time, besides their own compressed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError, require_no_failure, sendable
from lightning_obs.model.kinds import from_matrix, kind_of, to_matrix
from lightning_obs.model.qparams import ROUNDED, get_scheme, quantized_states, read_qparams
from lightning_obs.model.weight import adapters_of, by_unit, full_weight, place_of, whole_tensor, whole_unit
from lightning_obs.numerics.fake_quantize import dequantize
from lightning_obs.observers.rows import rows_per_scale
from lightning_obs.ranks.collectives import gather_objects


def compressed_state_dict(model: nn.Module, keep: bool = True) -> dict[str, torch.Tensor]:
    """The model's state dict with every calibrated module's entries compressed.

    If weights are sharded, every rank must call this; one that does not ``keep`` it helps to gather, and gets nothing.
    """
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    # A module used under two names has its entries under both.
    places = [(f"{name}." if name else "", module) for name, module in model.named_modules(remove_duplicate=False)]
    prefixes = {module: prefix for prefix, module in reversed(places)}
    rows = _compressed_rows(prefixes)
    stored: dict[nn.Module, dict[str, torch.Tensor]] = {}
    tied: dict[int, torch.Tensor] = {}
    failure: Exception | None = None
    for modules in by_unit(module for _, module in places):  # in an order that is the same on every rank
        with whole_unit(modules[0]):
            for module in dict.fromkeys(modules):
                own = {key: _value(module, key) for key in _own_names(module, prefixes[module], state)}
                sharded = any(place_of(module, key).groups for key in own)
                if module in rows:
                    own = rows.pop(module) | {key: value for key, value in own.items() if key != "weight"}
                elif _is_compressible(module):
                    own = {key: whole_tensor(value) for key, value in own.items()}
                    try:
                        own = _compressed(module, own) if keep and failure is None else {}
                    except Exception as error:
                        if not sharded:
                            raise
                        own, failure = {}, error  # the other ranks go on gathering
                elif not sharded and adapters_of(module) is None:
                    continue
                stored[module] = {key: _whole(value, sharded, keep, tied) for key, value in own.items()}
    if failure is not None:
        raise failure
    for prefix, module in places if keep else ():
        if quantized_states(module) and get_scheme(module) is not None:
            state.update({prefix + key: value for key, value in read_qparams(module).items()})
        for key in _own_names(module, prefix, state) if _is_compressible(module) else ():
            del state[prefix + key]
        state.update({prefix + key: value for key, value in stored.get(module, {}).items()})
    return {name: whole_tensor(value) for name, value in state.items()} if keep else {}


@torch.no_grad()
def compressed_bytes(module: nn.Module) -> int:
    """How many bytes a module's weight and quantization parameters take in a checkpoint."""
    own = {"weight": _value(module, "weight")}
    return sum(value.nbytes for value in (_compressed(module, own) if _is_compressible(module) else own).values())


def _is_compressible(module: nn.Module) -> bool:
    """Whether the module's entries are compressed: it was calibrated, and is no attention module."""
    return get_scheme(module) is not None and not quantized_states(module)


def _own_names(module: nn.Module, prefix: str, state: Mapping[str, torch.Tensor]) -> list[str]:
    """The module's own parameters and buffers that are in the state dict."""
    own = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
    return [key for key in own if prefix + key in state]


def _value(module: nn.Module, name: str) -> torch.Tensor:
    value = full_weight(module) if name == "weight" else getattr(module, name)
    assert isinstance(value, torch.Tensor)
    return value


def _whole(value: torch.Tensor, sharded: bool, keep: bool, tied: dict[int, torch.Tensor]) -> torch.Tensor:
    """An entry, if it was sharded as a copy on the host; tied parameters stay one tensor, and are gathered once."""
    if id(value) in tied and isinstance(value, nn.Parameter):
        return tied[id(value)]
    whole = gather_rows(value)
    if sharded:
        whole = whole.to("cpu", copy=True) if keep else whole.new_empty(0)
    if isinstance(value, nn.Parameter):
        tied[id(value)] = whole
    return whole


# ---------------------------------------------------------------------- one module


def _compressed(module: nn.Module, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return compress_entries(module, own | read_qparams(module), module.quantization_scheme)


def compress_entries(
    module: nn.Module, own: Mapping[str, torch.Tensor], scheme: QuantizationScheme
) -> dict[str, torch.Tensor]:
    """A module's own entries (weight, bias, quantization parameters, by their names there) as they are stored.

    The module says what its weight is as a matrix; nothing else of it is read.
    """
    entries = dict(own)
    if scheme.weights is not None:
        rounded, matrix = entries.pop(ROUNDED, None), to_matrix(module, entries["weight"].detach())
        assert matrix is not None  # checked before calibration
        if rounded is not None:  # in float32, in which they are rounded to themselves
            matrix = dequantize(
                rounded,
                entries["weight_scale"],
                entries.get("weight_zero_point"),
                scheme.weights,
                global_scale=entries.get("weight_global_scale"),
            )
        entries["weight"] = matrix.contiguous()
        entries = compressor_of(scheme).compress(entries, scheme)
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
    entries = compressor_of(scheme).decompress(entries, scheme)
    entries["weight"] = from_matrix(module, entries["weight"], place_of(module).shape).contiguous()
    return entries


def compressor_of(scheme: QuantizationScheme) -> Any:
    """compressed-tensors' compressor of a scheme's format."""
    return BaseCompressor.get_value_from_registry(CompressionFormat(scheme.format).value)


# ---------------------------------------------------------------------- the rows of each rank


def _compressed_rows(prefixes: Mapping[nn.Module, str]) -> dict[nn.Module, dict[str, torch.Tensor]]:
    """Compress this rank's rows of every weight that can be compressed so.

    Raises:
        CalibrationError: on every rank alike, what went wrong on one.
    """
    compressed: dict[nn.Module, dict[str, torch.Tensor]] = {}
    failure: CalibrationError | None = None
    by_rows = [module for module in prefixes if is_compressed_by_rows(module)]
    for module in by_rows:
        try:
            compressed[module] = compress_rows(module)
        except Exception as error:  # the other ranks wait for this one
            failure = sendable(error, (prefixes[module].rstrip("."), "weight"))
            break
    if by_rows:
        require_no_failure(gather_objects(failure))
    return compressed


def is_compressed_by_rows(module: nn.Module) -> bool:
    """Whether each rank can compress its own rows of the weight. The answer is the same on every rank."""
    scheme = get_scheme(module)
    if scheme is None or scheme.weights is None or kind_of(module).stored_as is None:
        return False
    rows, packs = place_of(module).rows, scheme.format == CompressionFormat.pack_quantized.value
    if rows is None or (packs and not scheme.weights.symmetric):
        return False
    height = rows_per_scale(scheme.weights) or 1
    return not any(start % height for start, stop in rows if start < stop)


def compress_rows(module: nn.Module) -> dict[str, torch.Tensor]:
    """Compress this rank's rows of a weight that :func:`is_compressed_by_rows`; talks to nobody.

    Returns:
        The entries of weight and quantization parameters in a checkpoint, under their names there: what has rows as a
        DTensor ``Shard(0)``, the rest whole.
    """
    scheme, weight, every = get_scheme(module), module.weight, place_of(module).rows
    assert isinstance(weight, DTensor)
    assert scheme is not None
    assert scheme.weights is not None
    assert every is not None
    rows, height = weight.to_local().detach(), rows_per_scale(scheme.weights) or 0
    start, _ = every[weight.device_mesh.get_local_rank()]
    # A rank without rows compresses a block of zeros, and keeps nothing of it: shapes and dtypes are then right.
    empty = len(rows) == 0
    if empty:
        start, rows = 0, rows.new_zeros(max(1, height), *rows.shape[1:])
    entries: dict[str, torch.Tensor] = {"weight": rows}
    for name, value in read_qparams(module).items():
        if name == ROUNDED:
            entries[name] = rows if empty else value[start : start + len(rows)]
            continue
        has_rows = height > 0 and name in ("weight_scale", "weight_zero_point")
        entries[name] = value[start // height : -(-(start + len(rows)) // height)] if has_rows else value
    entries = compress_entries(module, entries, scheme)
    if "weight_shape" in entries:
        entries["weight_shape"] = entries["weight_shape"].new_tensor(weight.shape)
    heights = {"weight": 1, "weight_packed": 1, "weight_scale": height, "weight_zero_point": height}
    return {
        name: _sharded(value[:0] if empty else value, weight, heights[name]) if heights.get(name) else value
        for name, value in entries.items()
    }


def gather_rows(entry: torch.Tensor) -> torch.Tensor:
    """An entry of :func:`compress_rows`, or any tensor, whole; every rank must call this."""
    if not isinstance(entry, DTensor) or entry.itemsize > 1:
        return whole_tensor(entry)
    rows = entry.to_local()
    return whole_tensor(_sharded(rows.view(torch.uint8), entry, 1)).view(rows.dtype)  # gloo knows no float8


def _sharded(rows: torch.Tensor, weight: DTensor, height: int) -> DTensor:
    """One rank's rows as a part of what all ranks have."""
    shape = torch.Size((-(-len(weight) // height), *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(rows.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
