"""The files of a quantized checkpoint: which tensors they hold, and how each is made from the source's files.

A tensor of the source belongs to a module that is quantized, or is copied as bytes. All names, shapes and dtypes of the
new files follow from the plan, before any data is read: the qparams that modules will have are put on them as meta
tensors. So the place of each tensor in the new files is known from the beginning.

``checkpoint_weights.py`` and its worker processes write one fused set after the other; ``layerwise.py`` writes one
block after the other. A fused set is the modules that engines multiply as one matrix (q, k, v), so their scales are
found together.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterator, Set
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from lightning_obs.calibration.observation import Observation, fused_sets_by_module
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.checkpoint.entries import StoredTensors, meta_qparams, module_entries
from lightning_obs.checkpoint.export import write_quantization_config
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.tensors import Progress, Tally, TensorWriter
from lightning_obs.model.module_qparams import write_qparams
from lightning_obs.moe.experts import linear_experts
from lightning_obs.observers.lattice import GridShares
from lightning_obs.streaming.other_files import copy_other_files
from lightning_obs.streaming.parts import calibrated
from lightning_obs.streaming.source import CheckpointSource


class CopiedTensor(NamedTuple):
    """A tensor of the source's files that is stored as it is.

    The constructor of `QuantizedFiles` makes them for `QuantizedFiles.copied`; the methods that write and lay out files
    read them.
    """

    #: its name in the new files
    stored_as: str
    #: the parameter or buffer of the model that it holds; empty: the model does not know it
    name_in_model: str = ""


class QuantizedFiles:
    """The files of a new, quantized checkpoint: their layout, and methods that write parts of them.

    :meth:`opened` makes one for `quantize_checkpoint` and for each of its processes; `calibrate_layerwise` makes one
    itself.

    Args:
        source: the checkpoint in full precision that is read; it is open.
        observation: of the source's model; its plan says which modules are quantized.
        progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.

    Attributes:
        quantized: names of the modules whose tensors are not copied: planned modules, and the other experts of their
            layer, since the source may hold all experts in one stack and the new files hold them one by one.
        copied: by name in the source's files, the tensors that are stored as they are.
        layout: by name in the new files, a meta tensor of each stored tensor.
        tally: counts the bytes written.

    Raises:
        CalibrationError: the source's files hold tensors in quantized modules that the model does not know.
    """

    def __init__(self, source: CheckpointSource, observation: Observation, progress: Progress | None = None) -> None:
        self.source = source
        self.observation = observation
        self.put_later_qparams()
        self.quantized = self._find_quantized()
        self.copied = self._find_copied()
        stored = StoredTensors(source.model)
        #: by name in the model, the name in the new files: the source's names, and the names that compression gives;
        #: also of a module that is left in full precision after all
        self.stored_as = source.stored_as | stored.renamed
        self.layout: dict[str, torch.Tensor] = {}
        quantized = set(self.quantized)
        for name, meta in stored.entries.items():
            if _module_of(name) in quantized:
                self.layout[self.stored_as[name]] = meta
        self._refuse_strays()
        for name, tensor in self.copied.items():
            self.layout[tensor.stored_as] = source.reader.meta(name)
        total = sum(meta.nbytes for meta in self.layout.values())
        self.tally = Tally(total, progress)
        #: by name of a module that was quantized here with the observer ``lattice``, two shares of its weight's scales:
        #: of those whose values all lie on a grid, and of those whose values are stored bit for bit; for the result
        self.grids: dict[str, GridShares] = {}

    @classmethod
    @contextmanager
    def opened(
        cls, folder: str | os.PathLike[str], options: CalibrationOptions, progress: Progress | None = None
    ) -> Iterator[QuantizedFiles]:
        """Open the checkpoint in ``folder``, and yield its quantized files, for the length of a ``with`` block.

        Called by `quantize_checkpoint`, and by each process that it starts.

        Args:
            folder: the checkpoint in full precision.
            options: of the calibration.
            progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.
        """
        source = CheckpointSource(folder)
        with closing(source.reader), torch.inference_mode(False), torch.no_grad():
            yield cls(source, Observation.of_model(source.model, options), progress)

    # ------------------------------------------------------------------ which tensors

    def put_later_qparams(self, skipped: Container[str] = ()) -> None:
        """Give all planned modules, except the ``skipped`` ones, meta tensors of the qparams that they will have.

        With them the model is laid out, and its quantization config written, as if it were calibrated. Called by the
        constructor, and again by the run layer by layer, whose modules have lost their qparams, before it writes the
        config.
        """
        for target in self.observation.plan.targets:
            if target.name not in skipped:
                write_qparams(target.module, target.scheme, meta_qparams(target))

    def _find_quantized(self) -> list[str]:
        """The names for :attr:`quantized`: planned modules, and all experts' Linears of a layer with a planned one."""
        planned = {target.name for target in self.observation.plan.targets}
        expert_prefixes = []
        for container in linear_experts(self.source.model):
            prefix = f"{container}."
            if any(name.startswith(prefix) for name in planned):
                expert_prefixes.append(prefix)
        names = []
        for name, module in self.source.model.named_modules():
            is_expert = isinstance(module, nn.Linear) and name.startswith(tuple(expert_prefixes))
            if name in planned or is_expert:
                names.append(name)
        return names

    def _find_copied(self) -> dict[str, CopiedTensor]:
        """The tensors for :attr:`copied`: those in the source's files that no quantized module is made of."""
        source = self.source
        quantized = set(self.quantized)
        copied: dict[str, CopiedTensor] = {}
        consumed = set()
        for name, location in source.locations.items():
            name_in_files = location.tensor
            is_item_of_stack = location.item is not None
            if _module_of(name) in quantized:
                consumed.add(name_in_files)
            elif is_item_of_stack:
                # A stack comes here once for each of its experts, and the last one's name stays. Any of their names
                # will do: it tells only to which layer the stack belongs, and the stack is copied from file to file.
                copied[name_in_files] = CopiedTensor(name_in_files, name)
            else:
                stored_as = source.stored_as.get(name, name_in_files)
                copied[name_in_files] = CopiedTensor(stored_as, name)
        for tensor in source.reader:
            if tensor not in consumed and tensor not in copied:
                copied[tensor] = CopiedTensor(tensor)
        return copied

    def copied_of(self, module_names: Set[str]) -> list[str]:
        """Return the names, in the source's files, of the copied tensors that belong to these modules.

        The calibration layer by layer asks for them to write the file of a part.

        Args:
            module_names: names in the model. The model itself (``""``) has the tensors that its class does not know.
        """
        names = []
        for name, tensor in self.copied.items():
            if _module_of(tensor.name_in_model) in module_names:
                names.append(name)
        return names

    @property
    def _unknown(self) -> Set[str]:
        """Names of the copied tensors that the model's class does not know, in one order in every process."""
        unknown: dict[str, None] = {}
        for name, tensor in self.copied.items():
            if not tensor.name_in_model:
                unknown[name] = None
        return unknown.keys()

    def _refuse_strays(self) -> None:
        """Refuse unknown tensors under the name of a quantized module: a reader could take them for its entries."""
        modules = {_module_of(name) for name in self.layout}
        strays = []
        for name in self._unknown:
            module_name, _, key = name.rpartition(".")
            # A bias that the config leaves out is no entry of a quantized module.
            if name in self.layout or (module_name in modules and key != "bias"):
                strays.append(name)
        refuse(
            strays,
            f"the files of {self.source.folder} hold tensors in quantized modules that the model does not know",
            expected="a checkpoint in full precision, with the tensors of its model",
            remedy="delete them from the files, or list their modules in `ignore`.",
        )

    def fused_sets(self) -> list[tuple[str, ...]]:
        """Return the quantized modules in sets that have to be observed together; most sets have one module.

        `quantize_checkpoint` quantizes one set at a time, and shares the sets out to its processes.
        """
        set_of_module = fused_sets_by_module(self.observation.plan)
        fused_sets = {set_of_module.get(name, (name,)): None for name in self.quantized}
        return list(fused_sets)

    # ------------------------------------------------------------------ writing

    def quantize(self, writer: TensorWriter, module_names: Collection[str]) -> None:
        """Load the modules of one fused set, search the ranges of their weights, write their entries, and free them.

        Modules that are not planned are written in full precision. Called by `quantize_checkpoint`, or by one of its
        processes.

        Args:
            writer: of the new files.
            module_names: of the fused set, names in the model.
        """
        with self.source.loaded(module_names), calibrated(self.observation, module_names) as result:
            # None: the set has no planned module. Its modules are other experts of a layer, written in full precision.
            if result is not None:
                self.grids |= result.grids
            for name in module_names:
                self.write_module(writer, name)

    def write_module(self, writer: TensorWriter, module_name: str) -> None:
        """Write the entries of a loaded module, compressed if it holds qparams.

        Large entries come as several blocks of rows, so that no whole compressed weight is in memory; ``first`` is the
        index of a block's first row. Called by :meth:`quantize`, and by the calibration layer by layer for each module
        of a part.

        Args:
            writer: of the new files.
            module_name: its name in the model.
        """
        for key, rows, first in module_entries(self.source.model.get_submodule(module_name)):
            writer.write(self.stored_as[f"{module_name}.{key}"], rows, first)

    def copy(self, writer: TensorWriter, name: str) -> None:
        """Write a copied tensor: from memory if it is loaded as the files hold it, else from file to file.

        Called for each of :attr:`copied` by `quantize_checkpoint` or one of its processes, and by the calibration layer
        by layer with the part to which the tensor belongs.

        Args:
            writer: of the new files.
            name: of the tensor in the source's files.
        """
        tensor = self.copied[name]
        stored = self.layout[tensor.stored_as]
        if tensor.name_in_model:
            value = self.source.meta(tensor.name_in_model)  # a meta tensor only while its module is not loaded
            if not value.is_meta and value.dtype == stored.dtype and value.shape == stored.shape:
                writer.write(tensor.stored_as, value)
                return
        writer.copy(tensor.stored_as, self.source.reader, name)

    def write_other_files(self, new_folder: Path, stored: Set[str]) -> None:
        """Copy the files beside the weights, and add the quantization config to ``config.json``.

        Called on rank 0: by `quantize_checkpoint` before it writes weights, by `calibrate_layerwise` at its end.

        Args:
            new_folder: the folder of the new checkpoint.
            stored: names of all tensors in its files.
        """
        copy_other_files(self.source.folder, new_folder)
        write_quantization_config(self.source.model, new_folder, stored - self._unknown, self._unknown)


def require_apart(folder: str | os.PathLike[str], out: Path) -> None:
    """Refuse to write into the folder that is read, whose files would be copied into themselves.

    Called first by `quantize_checkpoint` and `calibrate_layerwise`.
    """
    if isinstance(folder, nn.Module):  # refused by CheckpointSource, which says more
        return
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder)):
        raise CalibrationError(
            f"{out} is inside the checkpoint that is read, {os.fspath(folder)}",
            expected="another folder",
            remedy="write beside it.",
        )


def _module_of(name: str) -> str:
    """The name of the module that has a tensor."""
    return name.rpartition(".")[0]
