"""The tensors of a calibrated model's checkpoint, by their names in the state dict and in the files.

Names, shapes and dtypes follow from the model and its qparams alone (:func:`stored_layout`). The data are made one
module after the other, a block of rows at a time, and each block is handed on at once (:func:`store`): the model does
not change, and no compressed tensor stays in memory. Where weights are sharded over ranks, all ranks gather one module
after the other (under FSDP1 one unit, the modules whose weights it shards together), and rank 0 compresses and stores
it. ``export.py`` does this for a model in memory. ``streaming/`` writes one module's :func:`module_entries` at a time.

A plain module's names in the files are the names of its state dict. For models of transformers they are not
(:class:`StoredTensors`): transformers stores a tied weight once, and when it loads an architecture it may rename, stack
or split the tensors of the files. Its own function takes these conversions back.

An entry is one stored tensor: ``weight_packed``, ``weight_scale``, ``bias``. A code is the stored number of one weight:
an integer, or the bits of a small float. :func:`compressed_layout` lays the entries of one module out, also for
``load.py``, which checks the tensors that it reads; :func:`compress_by_rows` fills them.

Every weight is stored like a Linear's, as the matrix ``(R, C)`` that was calibrated; the module that loads it knows its
own shape. The formats pack values along a row, so a weight can be compressed in blocks of rows, which fit into a
processor's cache. Packed zero points are the exception: they are packed along the column.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, QuantizationType
from torch import nn

from lightning_obs.errors import sendable
from lightning_obs.files.tensors import TensorWriter
from lightning_obs.model.kinds import is_transformers_model, to_matrix
from lightning_obs.model.module_qparams import ROUNDED, get_scheme, quantized_states, read_qparams
from lightning_obs.model.stored import bias_step, round_bias
from lightning_obs.model.weight import by_unit, full_weight, identities, place_of, whole_tensor, whole_unit
from lightning_obs.numerics.fake_quantize import dequantize, fake_quantize, pack_nibbles, quantize
from lightning_obs.numerics.qparams import rows_per_scale
from lightning_obs.schemes.planned_modules import PlannedModule, expected_shapes

#: tensors by the name of their entry
Tensors: TypeAlias = dict[str, torch.Tensor]
#: writes rows of a tensor: called with its name in the state dict, the rows, and the number of the first row
Put: TypeAlias = Callable[[str, torch.Tensor, int], None]


class Entry(NamedTuple):
    """A tensor of a checkpoint, or some of its rows, on the way from its module to the writer of the files.

    Made while a checkpoint is written, one after the other. Its reader writes it to a file at once, or keeps it with
    other small ones to bring them from an accelerator to the host together.
    """

    #: the name of the tensor, in its module or in the state dict
    name: str
    #: the tensor, or consecutive rows (items of its first dimension)
    rows: torch.Tensor
    #: the index, in the tensor, of the first of ``rows``
    first: int = 0


class _OwnTensors(NamedTuple):
    """The tensors of a state dict that one module has itself, not the modules inside it.

    :func:`_own_tensors` makes one for each name of a module, while a checkpoint is laid out or written.
    """

    #: precedes the module's own names in the state dict: ``"layers.0."``; empty for the model
    prefix: str
    module: nn.Module
    #: names of its parameters and buffers
    keys: list[str]


def stored_layout(model: nn.Module) -> Tensors:
    """Every tensor of the model's checkpoint as a meta tensor, by its name in the state dict; no data are read.

    :class:`StoredTensors` calls it before a checkpoint is written. The report, the choice of schemes and the
    calibration layer by layer also call it, for sizes.

    Args:
        model: the model, with the qparams that it will be stored with; these may be meta tensors.

    Raises:
        CalibrationError: a module cannot be compressed as its scheme says.
    """
    layout = {}
    for name, value in _state_tensors(model).items():
        layout[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    for prefix, module, keys in list(_own_tensors(model, layout)):
        for key in keys:
            del layout[prefix + key]
        for key, meta in _module_layout(module, keys, prefix.rstrip(".")).items():
            layout[prefix + key] = meta
    return layout


def _module_layout(module: nn.Module, keys: Iterable[str], name: str) -> Tensors:
    """A module's own entries as meta tensors, by their names in the module.

    Args:
        module: a module, calibrated or not.
        keys: the names of its tensors that are in the state dict.
        name: the module's name in the model, for errors.

    Raises:
        CalibrationError: the module cannot be compressed as its scheme says; the error names the module's weight, and
            carries the text of the error of compressed-tensors.
    """
    entries = {}
    for key in keys:
        shape = place_of(module, key).shape
        entries[key] = torch.empty(shape, dtype=getattr(module, key).dtype, device="meta")
    scheme = get_scheme(module)
    if scheme is None:
        return entries
    for key, value in read_qparams(module).items():
        entries[key] = value.to("meta")
    if not _is_compressible(module):
        return entries
    try:
        return compressed_layout(module, entries, scheme)
    except Exception as error:
        raise sendable(error, (name, "weight")) from error


def meta_qparams(target: PlannedModule) -> Tensors:
    """The quantization parameters that a planned module will have, as meta tensors by name.

    Called where a checkpoint is laid out before any data is read: to write it from files, and to check one on loading.
    Scales have torch's default dtype here. When they are written to a module they take the dtype in which it stores
    them, and on loading all wide floats count as equal. A shape that only data would tell becomes ``(1,)``.
    """
    qparams = {}
    for base, args in target.args.items():
        for name, shape in expected_shapes(target, base).items():
            dtype = args.zp_dtype if name.endswith("zero_point") else None
            qparams[name] = torch.empty(shape or (1,), dtype=dtype, device="meta")
    return qparams


def store(model: nn.Module, layout: Container[str], put: Put | None) -> Exception | None:
    """Compress a model for its export: give the tensors of its checkpoint to ``put``, one module after the other.

    ``export_checkpoint`` calls it once the files are laid out. If weights are sharded, every rank must call this, with
    the same ``layout``.

    Args:
        model: a calibrated model.
        layout: the names of the tensors that are wanted; others are left out.
        put: writes each tensor, a compressed weight in blocks of rows; None on a rank that only helps to gather.

    Returns:
        The first failure of ``put``, or of compressing, on this rank; None without one. It is not raised, because the
        other ranks go on gathering.
    """
    further_tensors = _state_tensors(model)
    keys_of_module: dict[nn.Module, list[str]] = {}
    prefixes_of_module: dict[nn.Module, list[str]] = {}  # a module that is used twice has entries under both names
    for prefix, module, keys in list(_own_tensors(model, further_tensors)):
        keys_of_module[module] = keys
        prefixes_of_module.setdefault(module, []).append(prefix)
        for key in keys:
            del further_tensors[prefix + key]
    output = _Output(layout, put)
    for modules in by_unit(prefixes_of_module):  # in an order that is the same on every rank
        with whole_unit(modules[0]):
            for module in modules:
                keys = keys_of_module[module]
                prefixes = prefixes_of_module[module]
                if not _is_compressible(module):
                    keys = [key for key in keys if output.takes(key, prefixes)]
                output.put_all(_gathered_entries(module, keys), prefixes)
    # Tensors that hooks add to the state dict; every rank gathers them, also a rank without ``put``.
    for name, value in further_tensors.items():
        whole_value = whole_tensor(value)
        output.put_all([Entry(name, whole_value)], [""])
    return output.failure


class _Output:
    """Gives the entries of :func:`store` to ``put`` until the first failure; a call of ``store`` makes one.

    Args:
        layout: the names of the tensors that are wanted.
        put: writes rows of a tensor; None: nothing is written.

    Attributes:
        failure: the first exception of ``put`` or of compressing; None without one.
    """

    def __init__(self, layout: Container[str], put: Put | None) -> None:
        self.failure: Exception | None = None
        self._layout = layout
        self._put = put

    def takes(self, key: str, prefixes: Iterable[str]) -> bool:
        """Whether a module's tensor is wanted under any of its names; asked before the tensor is gathered.

        Args:
            key: the tensor's name in its module.
            prefixes: precede it in the state dict; several for a module that is used twice.
        """
        return any(prefix + key in self._layout for prefix in prefixes)

    def put_all(self, entries: Iterable[Entry], prefixes: Iterable[str]) -> None:
        """Give a module's entries to ``put``, under each of its names.

        Args:
            entries: the module's entries; a weight is compressed here, while they are read.
            prefixes: precede the entries' names in the state dict; several for a module that is used twice.
        """
        if self._put is None or self.failure is not None:
            return
        try:
            for key, rows, first in entries:
                for prefix in prefixes:
                    if prefix + key in self._layout:
                        self._put(prefix + key, rows, first)
        except Exception as error:
            self.failure = error


def module_entries(module: nn.Module) -> Iterable[Entry]:
    """One module's own entries in a checkpoint, compressed if it was calibrated, by their names in the module.

    Called while a checkpoint is quantized from its files, for each module once it is loaded.
    """
    state = _state_tensors(module)
    return _gathered_entries(module, _keys_in(state, module, ""))


def _gathered_entries(module: nn.Module, keys: Iterable[str]) -> Iterable[Entry]:
    """A module's own entries: those of its tensors ``keys`` and, if it was calibrated, of its qparams.

    A bias is rounded where engines add it as an integer (:func:`.bias_step`). Sharded tensors are gathered here, so
    every rank must call this. A weight is compressed later, while the entries are read.
    """
    tensors = Tensors()
    for key in keys:
        value = full_weight(module) if key == "weight" else getattr(module, key)
        assert isinstance(value, torch.Tensor)
        tensors[key] = whole_tensor(value)
    scheme = get_scheme(module)
    if scheme is not None and scheme.output_activations is not None:
        step = bias_step(module)
        if step is not None and "bias" in tensors:
            tensors["bias"] = round_bias(tensors["bias"], step)
    if scheme is not None:
        tensors |= read_qparams(module)
        if _is_compressible(module):
            return compress_by_rows(module, tensors, scheme)
    return [Entry(key, value) for key, value in tensors.items()]


def _is_compressible(module: nn.Module) -> bool:
    """Whether the module's entries are compressed: it was calibrated, and has no attention states."""
    return get_scheme(module) is not None and not quantized_states(module)


def _state_tensors(model: nn.Module) -> Tensors:
    """The tensors of the state dict; other values (extra states) are left out."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _own_tensors(model: nn.Module, state: Container[str]) -> Iterator[_OwnTensors]:
    """Every module under all of its names, with its own tensors that are in ``state``."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        yield _OwnTensors(prefix, module, _keys_in(state, module, prefix))


def _keys_in(state: Container[str], module: nn.Module, prefix: str) -> list[str]:
    """The names of a module's own parameters and buffers that a state dict holds, where ``prefix`` precedes them."""
    return [key for key in (*module._parameters, *module._buffers) if prefix + key in state]


# ---------------------------------------------------------------------- under the names of files


class StoredTensors:
    """The tensors of a model's checkpoint, by their names in the state dict and in the files, and how they are written.

    :func:`~lightning_obs.export_checkpoint` makes one, and writes by :meth:`put` and :meth:`finish`. ``streaming/``,
    which quantizes a checkpoint from its files, makes one for the names and shapes only.

    Args:
        model: a calibrated model, or a model without qparams. No data are read.

    Attributes:
        entries: a meta tensor of each stored tensor, by its name in the state dict.
        files: a meta tensor of each stored tensor, by its name in the files; transformers may have stacked or split it.
        renamed: by name in the state dict, the name in the files of each tensor that is not stacked or split.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.entries = stored_layout(model)
        if is_transformers_model(model):
            self.entries = _without_unsaved(model, self.entries)
        self.files = self._converted(self.entries)
        name_in_files = {id(meta): name for name, meta in self.files.items()}
        self.renamed: dict[str, str] = {}
        for name, meta in self.entries.items():
            if id(meta) in name_in_files:
                self.renamed[name] = name_in_files[id(meta)]
        #: blocks of rows of the tensors that :meth:`finish` will convert
        self._to_convert: dict[str, list[torch.Tensor]] = {}

    def put(self, writer: TensorWriter, name: str, rows: torch.Tensor, first: int, copy: bool) -> None:
        """Write rows of a tensor, or keep them for :meth:`finish` if they have to be converted.

        ``export_checkpoint`` calls it for each block of rows that :func:`store` has compressed.

        Args:
            writer: the writer of the files.
            name: the tensor's name in the state dict.
            rows: the rows from ``first`` on; blocks of a tensor come in order.
            first: the index of the first row.
            copy: whether the memory of ``rows`` is used for something else after the call.
        """
        if name in self.renamed:
            writer.write(self.renamed[name], rows, first)
        else:
            self._to_convert.setdefault(name, []).append(rows.detach().to("cpu", copy=copy))

    def finish(self, writer: TensorWriter) -> None:
        """Convert and write the tensors that :meth:`put` kept: the last step of an export's tensors.

        Args:
            writer: the writer of the files.

        Raises:
            CalibrationError: a tensor, or some of its rows, was not written.
        """
        whole = {}
        for name, blocks in self._to_convert.items():
            whole[name] = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        self._to_convert = {}
        for name, tensor in self._converted(whole).items():
            writer.write(name, tensor)
        writer.require_complete()

    def _converted(self, tensors: Tensors) -> Tensors:
        """Tensors of the state dict as the files hold them: renamed, stacked or split if the model is transformers'."""
        if not is_transformers_model(self._model):
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, dict(tensors)))


def _without_unsaved(model: Any, entries: Mapping[str, torch.Tensor]) -> Tensors:
    """The entries that transformers saves: each tied tensor once, without those that the model's class leaves out."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    # transformers recognizes tied tensors by their addresses, which meta tensors do not have.
    tensor_of_identity: dict[Any, torch.Tensor] = {}
    identity_of_name = identities(model)
    stand_ins = {}
    for name in entries:
        stand_in = torch.empty(1)
        if name in identity_of_name:
            stand_in = tensor_of_identity.setdefault(identity_of_name[name], stand_in)
        stand_ins[name] = stand_in
    saved = remove_tied_weights_from_state_dict(stand_ins, model)
    left_out = set(model._keys_to_ignore_on_save or ())
    return {name: meta for name, meta in entries.items() if name in saved and name not in left_out}


# ---------------------------------------------------------------------- the weight of one module


#: elements of a weight that are compressed at once; compressed-tensors takes up to 36 bytes for each
_ELEMENTS_AT_ONCE = 1 << 18
#: by format, the number of bits for which codes are computed in this file. compressed-tensors would take many passes
#: over a weight, or round some weights differently on a GPU
_BITS_COMPUTED_HERE = {
    "int-quantized": 8,
    "float-quantized": 8,
    "mxfp8-quantized": 8,
    "pack-quantized": 4,
    "nvfp4-pack-quantized": 4,
    "mxfp4-pack-quantized": 4,
}


def compressor_of(scheme: QuantizationScheme) -> Any:
    """Return compressed-tensors' compressor of a scheme's format.

    Called here to compress a module that is exported, and in ``load.py`` to decompress a module that is loaded.
    """
    return BaseCompressor.get_value_from_registry(CompressionFormat(scheme.format).value)


def compressed_layout(module: nn.Module, tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> Tensors:
    """Return a module's entries in a checkpoint as meta tensors: their names, shapes and dtypes.

    Called to lay a checkpoint out before it is written, and in ``load.py`` to check one before it is read.

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

    Called for each compressible module while a checkpoint is written.

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
    """Yield, for each block of rows of a matrix, the index of its first row and the index after its last row.

    Args:
        matrix: the matrix to cut into blocks of about ``_ELEMENTS_AT_ONCE`` elements.
        rows_per_scale: rows that share a scale, which no block cuts.
    """
    rows = _ELEMENTS_AT_ONCE // max(1, matrix.shape[1])
    height = max(1, rows // rows_per_scale) * rows_per_scale
    for start in range(0, max(1, len(matrix)), height):
        yield start, min(start + height, len(matrix))


def _rows_of(entries: Tensors, start: int, stop: int, heights: Mapping[str, int]) -> Tensors:
    """Cut the entries to the rows from ``start`` to ``stop`` of the matrix.

    Args:
        entries: the entries of the whole matrix.
        start: the matrix's first row to take.
        stop: the row after the last row to take.
        heights: the result of :func:`_matrix_rows_per_entry_row`; an entry without rows to cut is taken whole.
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
        tensors: ``weight`` as a matrix, qparams, other tensors of the module (a bias), and, if a rounding chose the
            weight's numbers, these numbers (``ROUNDED``).
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
        # On an accelerator compressed-tensors divides the weight by its scales in float32, and may so round it to other
        # levels than ``quantized()`` does. A weight that is on a level already stays there, so it is put on one first.
        # A rounding has done that.
        weight = fake_quantize(weight, scale, zero_point, args, global_scale=global_scale).float()
    entries["weight"] = weight
    return dict(compressor_of(scheme).compress(entries, scheme))


def _computes_codes_here(weight: torch.Tensor, scheme: QuantizationScheme) -> bool:
    """Whether the codes of ``weight`` are computed and packed in this package, not by compressed-tensors.

    :func:`_with_compressed_weight` asks this for each block of rows. Of weights with four bits, compressed-tensors
    computes those with zero points, which would have to be packed, too; those whose rows do not fill whole int32, each
    of which holds eight codes; and those in float64, whose steps :func:`.quantize` would round to float32 first.
    """
    args = scheme.weights
    assert args is not None
    if weight.is_meta or _BITS_COMPUTED_HERE.get(scheme.format or "") != args.num_bits:
        return False
    if scheme.format == "int-quantized" and weight.device.type == "cpu":
        return False  # compressed-tensors is as fast
    if args.num_bits == 8:
        return True
    fills_int32 = weight.shape[1] % 8 == 0
    return bool(args.symmetric) and fills_int32 and weight.dtype is not torch.float64


def _with_codes(entries: Tensors, codes: torch.Tensor, scheme: QuantizationScheme) -> Tensors:
    """The entries that compressed-tensors' compressor would make, from codes that are computed already.

    This is faster: compressed-tensors rounds to fp4 by masks, and packs by scattering bits.

    Args:
        entries: the entries of a matrix or of some of its rows; the dict is changed.
        codes: the codes of its weights, in the shape of ``weight``.
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
        from_lowest = codes.bitwise_xor_(8)  # int4 is stored as its distance from -8, which is its lowest number
        entries["weight_packed"] = pack_nibbles(from_lowest).view(torch.int32)
        entries["weight_shape"] = torch.tensor(codes.shape)
    if hasattr(compressor, "_compress_scale"):
        entries["weight_scale"] = compressor._compress_scale(entries["weight_scale"], args)
    return dict(compressor._remove_symmetric_zp(entries, scheme))
