"""The tensors of a calibrated model's checkpoint, wherever its weights lie, and one module's entries.

The layout of a checkpoint follows from shapes alone. Modules are compressed one after the other, a block of rows at a
time, and each block is handed on at once: the model does not change, and no compressed tensor stays in memory. Every
weight is stored like a Linear's, as the matrix that was calibrated; the module that loads it knows its own shape.

The formats pack along a row, so a weight can be compressed in blocks of rows; packed zero points, along the column, are
the exception. Where weights are sharded over ranks, all ranks gather one module (FSDP1: one unit) after the other, and
rank 0 compresses and stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, QuantizationType
from torch import nn

from lightning_obs.errors import sendable
from lightning_obs.files.tensors import TensorWriter
from lightning_obs.model.kinds import is_transformers_model, to_matrix
from lightning_obs.model.module_qparams import ROUNDED, get_scheme, quantized_states, read_qparams
from lightning_obs.model.weight import by_unit, full_weight, identities, place_of, whole_tensor, whole_unit
from lightning_obs.numerics.fake_quantize import dequantize, fake_quantize, pack_nibbles, quantize
from lightning_obs.numerics.qparams import rows_per_scale

_Tensors: TypeAlias = dict[str, torch.Tensor]
#: a tensor of the checkpoint, or rows of it: its name (in the module, or in the state dict), rows, number of the first
Entry: TypeAlias = tuple[str, torch.Tensor, int]
Put: TypeAlias = Callable[[str, torch.Tensor, int], None]
#: elements of a weight that are compressed at once, in the cache; compressed-tensors takes up to 36 bytes for each
_AT_ONCE = 1 << 18
#: bits of the formats that are compressed here; compressed-tensors takes many passes, or rounds otherwise on a GPU
_KNOWN = dict.fromkeys(("int-quantized", "float-quantized", "mxfp8-quantized"), 8)
_KNOWN |= dict.fromkeys(("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"), 4)


def stored_layout(model: nn.Module) -> _Tensors:
    """Every tensor of the model's checkpoint as a meta tensor, by its name in the state dict; no data are read.

    Raises:
        CalibrationError: a module cannot be compressed as its scheme says.
    """
    state = _state(model)
    layout = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    for prefix, module, keys in _own(model, state):
        entries = _Tensors()
        for key in keys:
            del layout[prefix + key]
            entries[key] = torch.empty(place_of(module, key).shape, dtype=getattr(module, key).dtype, device="meta")
        if (scheme := get_scheme(module)) is not None:
            entries |= {key: value.to("meta") for key, value in read_qparams(module).items()}
            if not quantized_states(module):
                try:
                    entries = compressed_layout(module, entries, scheme)
                except Exception as error:
                    raise sendable(error, (prefix.rstrip("."), "weight")) from error
        layout.update({prefix + key: value for key, value in entries.items()})
    return layout


def compressed_layout(module: nn.Module, own: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> _Tensors:
    """A module's entries in a checkpoint, from its ``own`` tensors and qparams; all are meta tensors."""
    stored, weights = _compress(_with_matrix(module, own, scheme), scheme), scheme.weights
    zero_point = stored.get("weight_zero_point")
    if weights is not None and zero_point is not None and _packs_zero_points(scheme):
        # compressed-tensors 0.20 leaves it as it is on meta
        rows = -(-len(zero_point) * weights.num_bits // 32)
        stored["weight_zero_point"] = zero_point.new_empty((rows, *zero_point.shape[1:]), dtype=torch.int32)
    return stored


def store(model: nn.Module, layout: Container[str], put: Put | None) -> Exception | None:
    """Give the tensors of the model's checkpoint that are in ``layout`` to ``put``, one module after the other.

    A compressed weight comes in blocks of rows. If weights are sharded, every rank must call this, with the same
    ``layout``; without ``put`` it only helps to gather. Returns the failure of this rank, if any.
    """
    state, keys_of, prefixes = _state(model), dict[nn.Module, list[str]](), dict[nn.Module, list[str]]()
    for prefix, module, keys in list(_own(model, state)):  # a module used under two names has its entries under both
        keys_of[module] = keys
        prefixes.setdefault(module, []).append(prefix)
        for key in keys:
            del state[prefix + key]
    failure: Exception | None = None

    def give(entries: Iterable[Entry], known_as: list[str]) -> None:
        nonlocal failure
        if put is None or failure is not None:
            return
        try:
            for key, rows, first in entries:
                for prefix in known_as:
                    if prefix + key in layout:
                        put(prefix + key, rows, first)
        except Exception as error:
            failure = error

    for modules in by_unit(prefixes):  # in an order that is the same on every rank
        with whole_unit(modules[0]):
            for module in modules:
                keys, known_as = keys_of[module], prefixes[module]
                if not _is_compressible(module):
                    keys = [key for key in keys if any(prefix + key in layout for prefix in known_as)]
                give(_entries(module, keys), known_as)
    give(((name, whole_tensor(value), 0) for name, value in state.items()), [""])
    return failure


def module_entries(module: nn.Module) -> Iterable[Entry]:
    """One module's entries in a checkpoint; a compressed weight's in blocks of rows."""
    return _entries(module, next(_own(module, _state(module)))[2])


def _is_compressible(module: nn.Module) -> bool:
    """Whether the module's entries are compressed: it was calibrated, and has no attention states."""
    return get_scheme(module) is not None and not quantized_states(module)


def _state(model: nn.Module) -> _Tensors:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _own(model: nn.Module, state: Container[str]) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Every module under all of its names: the prefix of its entries, and its own tensors that are in ``state``."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        yield prefix, module, [key for key in (*module._parameters, *module._buffers) if prefix + key in state]


def _packs_zero_points(scheme: QuantizationScheme) -> bool:
    weights = scheme.weights
    if weights is None or weights.symmetric:
        return False
    packed = scheme.format == CompressionFormat.pack_quantized.value
    return packed and weights.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)


def _entries(module: nn.Module, keys: list[str]) -> Iterable[Entry]:
    """A module's entries in the checkpoint; ``keys``: its own tensors.

    Shards of other ranks are gathered in the call, so every rank must call it; a whole weight is compressed while the
    entries are read.
    """
    tensors = _Tensors()
    for key in keys:
        value = full_weight(module) if key == "weight" else getattr(module, key)
        assert isinstance(value, torch.Tensor)
        tensors[key] = whole_tensor(value)
    scheme = get_scheme(module)
    if scheme is not None:
        tensors |= read_qparams(module)
        if _is_compressible(module):
            return _compressed(_with_matrix(module, tensors, scheme), scheme)
    return [(key, value, 0) for key, value in tensors.items()]


# ---------------------------------------------------------------------- one module


def _with_matrix(module: nn.Module, own: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> _Tensors:
    if scheme.weights is None:
        return dict(own)
    matrix = to_matrix(module, own["weight"].detach())
    assert matrix is not None  # checked before calibration
    return {**own, "weight": matrix}


def _compress(own: _Tensors, scheme: QuantizationScheme) -> _Tensors:
    """The entries of a module whose weight is a matrix, or of rows of it, as they are stored."""
    entries, args = dict(own), scheme.weights
    if args is not None:
        rounded, weight = entries.pop(ROUNDED, None), entries["weight"].contiguous()
        scale, zero_point = entries["weight_scale"], entries.get("weight_zero_point")
        global_scale = entries.get("weight_global_scale")
        if rounded is not None:  # in float32, in which they are rounded to themselves
            weight = dequantize(rounded, scale, zero_point, args, global_scale=global_scale)
        known = _KNOWN.get(scheme.format or "") == args.num_bits and not weight.is_meta
        known &= scheme.format != "int-quantized" or weight.device.type != "cpu"  # there compressed-tensors is as fast
        known &= args.num_bits == 8 or (args.symmetric and weight.shape[1] % 8 == 0 and weight.itemsize < 8)
        if known:
            codes = quantize(weight, scale, zero_point, args, global_scale=global_scale)
            entries = _with_codes(entries, codes, scheme)
        else:
            if rounded is None and weight.device.type not in ("cpu", "meta"):
                # There compressed-tensors divides in float32, which gives the levels of its fake_quantize again.
                weight = fake_quantize(weight, scale, zero_point, args, global_scale=global_scale).float()
            entries = compressor_of(scheme).compress(entries | {"weight": weight}, scheme)
    return {key: value.contiguous() for key, value in entries.items() if value is not None}


def _with_codes(entries: _Tensors, codes: torch.Tensor, scheme: QuantizationScheme) -> _Tensors:
    """The result of compressed-tensors' compressor, which rounds to fp4 by masks and packs by scattering bits."""
    args, compressor = scheme.weights, compressor_of(scheme)
    assert args is not None
    del entries["weight"]
    if args.num_bits == 8:
        entries["weight"] = codes
    elif args.type == QuantizationType.FLOAT:
        entries["weight_packed"] = pack_nibbles(codes)
    else:  # counted from the lowest number, -8
        entries["weight_packed"] = pack_nibbles(codes.bitwise_xor_(8)).view(torch.int32)
        entries["weight_shape"] = torch.tensor(codes.shape)
    if hasattr(compressor, "_compress_scale"):
        entries["weight_scale"] = compressor._compress_scale(entries["weight_scale"], args)
    return dict(compressor._remove_symmetric_zp(entries, scheme))


def _compressed(own: _Tensors, scheme: QuantizationScheme) -> Iterator[Entry]:
    """As :func:`_compress`, a block of rows at a time where they can be compressed apart."""
    if scheme.weights is None or _packs_zero_points(scheme):
        yield from ((key, value, 0) for key, value in _compress(own, scheme).items())
        return
    matrix, heights = own["weight"], _heights(scheme)
    unit = heights["weight_scale"] or 1
    step = max(unit, _AT_ONCE // max(1, matrix.shape[1]) // unit * unit)
    for start in range(0, max(1, len(matrix)), step):
        for key, value in _compress(_rows_of(own, start, min(start + step, len(matrix)), scheme), scheme).items():
            height = heights.get(key)
            if start == 0 or height:
                yield key, value.new_tensor(matrix.shape) if key == "weight_shape" else value, start // (height or 1)


def _heights(scheme: QuantizationScheme) -> dict[str, int]:
    """How many rows of the matrix share one row of each entry; 0: the entry is not cut by rows."""
    assert scheme.weights is not None
    height = rows_per_scale(scheme.weights) or 0
    return {"weight": 1, ROUNDED: 1, "weight_packed": 1, "weight_scale": height, "weight_zero_point": height}


def _rows_of(entries: _Tensors, start: int, stop: int, scheme: QuantizationScheme) -> _Tensors:
    """The entries of rows ``start`` to ``stop`` of the matrix."""
    heights = _heights(scheme)
    return {
        key: value[start // height : -(-stop // height)] if (height := heights.get(key)) else value
        for key, value in entries.items()
    }


def compressor_of(scheme: QuantizationScheme) -> Any:
    """compressed-tensors' compressor of a scheme's format."""
    return BaseCompressor.get_value_from_registry(CompressionFormat(scheme.format).value)


# ---------------------------------------------------------------------- under the names of files


class StoredTensors:
    """The tensors of a model's checkpoint, by their names in the state dict and in the files.

    A plain module's names are its state dict's. transformers stores a tied weight once, and takes back the
    conversions with which it loads an architecture: most of them rename, some stack or split tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        #: stored tensors, as meta tensors, by their names in the state dict
        self.entries = stored_layout(model)
        if is_transformers_model(model):
            self.entries = _without_tied(model, self.entries)
        #: the same by their names in the files, converted
        self.files = self._converted(self.entries)
        names = {id(tensor): name for name, tensor in self.files.items()}
        #: the name in the files of each entry that is not converted
        self.renamed = {name: names[id(tensor)] for name, tensor in self.entries.items() if id(tensor) in names}
        #: blocks of rows of the entries that are to be converted
        self._unconverted: dict[str, list[torch.Tensor]] = {}

    def put(self, writer: TensorWriter, name: str, rows: torch.Tensor, first: int, copy: bool) -> None:
        """Write rows of an entry; ``copy``: their memory is freed after the call."""
        if name in self.renamed:
            writer.write(self.renamed[name], rows, first)
        else:
            self._unconverted.setdefault(name, []).append(rows.detach().to("cpu", copy=copy))

    def finish(self, writer: TensorWriter) -> None:
        """Convert and write the other entries, after all were :meth:`put`; refuse files that lack tensors."""
        whole = {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in self._unconverted.items()}
        self._unconverted = {}
        for name, tensor in self._converted(whole).items():
            writer.write(name, tensor)
        writer.require_complete()

    def _converted(self, tensors: _Tensors) -> _Tensors:
        if not is_transformers_model(self._model):
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, dict(tensors)))


def _without_tied(model: Any, entries: _Tensors) -> _Tensors:
    """The entries that transformers saves."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    own = identities(model)
    # transformers compares addresses, which meta tensors do not have.
    stand_ins = {one: torch.empty(1) for one in own.values()}
    tied = {name: stand_ins[one] for name, one in own.items() if name in entries}
    left_out = set(model._keys_to_ignore_on_save or ())
    kept = remove_tied_weights_from_state_dict({name: tied.get(name, torch.empty(1)) for name in entries}, model)
    return {name: tensor for name, tensor in entries.items() if name in kept and name not in left_out}
