"""The tensors of a calibrated model's checkpoint, by their names in the state dict and in the files.

Names, shapes and dtypes follow from the model and its qparams alone (:func:`stored_layout`). The data are made one
module after the other, a block of rows at a time, and each block is handed on at once (:func:`store`): the model does
not change, and no compressed tensor stays in memory. Where weights are sharded over ranks, all ranks gather one module
after the other (under FSDP1 one unit, the modules whose weights it shards together), and rank 0 compresses and stores
it. ``export.py`` does this for a model in memory. ``streaming/`` writes one module's :func:`module_entries` at a time.

A plain module's names in the files are the names of its state dict. For models of transformers they are not
(:class:`StoredTensors`): transformers stores a tied weight once, and when it loads an architecture it may rename, stack
or split the tensors of the files. Its own function takes these conversions back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from lightning_obs.checkpoint.compress import Entry, Tensors, compress_by_rows, compressed_layout
from lightning_obs.errors import sendable
from lightning_obs.files.tensors import TensorWriter
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.module_qparams import get_scheme, quantized_states, read_qparams
from lightning_obs.model.weight import by_unit, full_weight, identities, place_of, whole_tensor, whole_unit
from lightning_obs.schemes.planned_modules import PlannedModule, expected_shapes

#: writes rows of a tensor: called with its name in the state dict, the rows, and the number of the first row
Put: TypeAlias = Callable[[str, torch.Tensor, int], None]


class _OwnTensors(NamedTuple):
    """The tensors of a state dict that one module has itself, not the modules inside it."""

    #: precedes the module's own names in the state dict: ``"layers.0."``; empty for the model
    prefix: str
    module: nn.Module
    #: names of its parameters and buffers
    keys: list[str]


def stored_layout(model: nn.Module) -> Tensors:
    """Every tensor of the model's checkpoint as a meta tensor, by its name in the state dict; no data are read.

    The report and the choice of schemes also call this, for the size of a checkpoint that is not written.

    Args:
        model: with the qparams that it will be stored with, meta tensors perhaps.

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
        module: calibrated or not.
        keys: the names of its tensors that are in the state dict.
        name: of the module, for errors.
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
    """
    qparams = {}
    for base, args in target.args.items():
        for name, shape in expected_shapes(target, base).items():
            dtype = args.zp_dtype if name.endswith("zero_point") else None
            qparams[name] = torch.empty(shape or (1,), dtype=dtype, device="meta")
    return qparams


def store(model: nn.Module, layout: Container[str], put: Put | None) -> Exception | None:
    """Compress a model for its export: give the tensors of its checkpoint to ``put``, one module after the other.

    If weights are sharded, every rank must call this, with the same ``layout``.

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
    """Gives the entries of :func:`store` to ``put`` until the first failure.

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
        """Whether a module's tensor is wanted under any of its names."""
        return any(prefix + key in self._layout for prefix in prefixes)

    def put_all(self, entries: Iterable[Entry], prefixes: Iterable[str]) -> None:
        """Give a module's entries to ``put``, under each of its names.

        Args:
            entries: of the module; a weight is compressed here, while they are read.
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

    Called to write a checkpoint from files, where one module after the other is loaded.
    """
    state = _state_tensors(module)
    return _gathered_entries(module, _keys_in(state, module, ""))


def _gathered_entries(module: nn.Module, keys: Iterable[str]) -> Iterable[Entry]:
    """A module's own entries, of its tensors ``keys`` and, if it was calibrated, its qparams.

    Sharded tensors are gathered here, so every rank must call this. A weight is compressed later, while the entries
    are read.
    """
    tensors = Tensors()
    for key in keys:
        value = full_weight(module) if key == "weight" else getattr(module, key)
        assert isinstance(value, torch.Tensor)
        tensors[key] = whole_tensor(value)
    scheme = get_scheme(module)
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

    :func:`~lightning_obs.export_checkpoint` writes by :meth:`put` and :meth:`finish`; ``streaming/`` reads the names.

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

        Args:
            writer: of the files.
            name: the tensor's name in the state dict.
            rows: from ``first`` on; blocks of a tensor come in order.
            first: the number of the first row.
            copy: whether the memory of ``rows`` is used for something else after the call.
        """
        if name in self.renamed:
            writer.write(self.renamed[name], rows, first)
        else:
            self._to_convert.setdefault(name, []).append(rows.detach().to("cpu", copy=copy))

    def finish(self, writer: TensorWriter) -> None:
        """Convert and write the tensors that :meth:`put` kept: the last step of an export.

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
    """The entries that transformers saves: each tied tensor once, without the tensors that its class leaves out."""
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
