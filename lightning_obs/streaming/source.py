"""A folder of safetensors files as a model on the meta device whose modules can be loaded one by one.

``config.json`` names the class that wrote the checkpoint. That class is built without data, with experts as Linears.
The files may hold a parameter under the name that transformers saves it by, under its name in the model, or as one
expert's item in a stack of all experts (a 3-D tensor). Everything that quantizes a checkpoint from its files makes a
:class:`CheckpointSource`: ``checkpoint_weights.py`` through ``quantized_files.py``, and ``layerwise.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_obs.checkpoint.entries import StoredTensors
from lightning_obs.checkpoint.load import CONFIG_FILE
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming, read_json
from lightning_obs.files.tensors import TensorReader
from lightning_obs.files.write import refuse_damage
from lightning_obs.model.conversions import converted
from lightning_obs.moe.experts import LinearExpert, fused_experts, linearize_experts, rows_of_expert
from lightning_obs.streaming.looked_up_weight import LookedUpWeight
from lightning_obs.streaming.meta_model import build_on_meta

_FOLDER_REMEDY = "give a folder with config.json and safetensors files."


class Location(NamedTuple):
    """Where the files hold a parameter or buffer of the model.

    The constructor of `CheckpointSource` makes one for each, for its ``locations``; `CheckpointSource.read` and
    `QuantizedFiles` read them.
    """

    #: the name of the tensor in the files
    tensor: str
    #: the expert's number if the tensor is a stack of experts; None: the tensor is the parameter
    item: int | None = None
    #: the expert's projection: gate, up, down; empty outside of experts
    role: str = ""
    #: whether the stack holds gate and up together
    joined: bool = False
    #: the expert that has the parameter; None outside of a stack
    expert: LinearExpert | None = None


class CheckpointSource:
    """A checkpoint to read: its ``model`` on the meta device, and the ``reader`` of its tensors, which is open.

    `quantize_checkpoint` (in each process) and `calibrate_layerwise` make one first, and close the reader at the end;
    the command line makes one before that, to check the option ``ignore``.

    Args:
        folder: transformers' ``config.json`` and safetensors files, in full precision.

    Raises:
        CalibrationError: the folder is damaged, quantized already, of an architecture that transformers does not know,
            or its files hold other tensors than its config says.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if isinstance(folder, nn.Module):
            remedy = "model.save_pretrained(folder) first, or CalibrationSession(model, ...), which takes it in memory."
            raise CalibrationError("a checkpoint is read from its folder", got=type(folder).__name__, remedy=remedy)
        self.folder = Path(folder)
        _refuse_quantized(self.folder)
        refuse_damage(self.folder)
        with ExitStack() as on_error:
            self.reader = TensorReader(self.folder)
            on_error.callback(self.reader.close)
            with naming(self.folder / CONFIG_FILE, remedy=_FOLDER_REMEDY):
                self.model = build_on_meta(self.folder, self.reader)
            stack_names = _names_of_stacks(self.model)
            linearize_experts(self.model)
            stored = StoredTensors(self.model)
            #: by name in the model, the name of each tensor in a checkpoint that transformers saves
            self.stored_as = stored.renamed
            #: by name in the model, where the files hold each parameter and buffer
            self.locations: dict[str, Location] = {}
            missing = []
            for name in stored.entries:
                location = self._locate(name, stack_names)
                if location is None:
                    missing.append(name)
                else:
                    self.locations[name] = location
            self._require_fit(missing)
            #: by the id of a meta tensor, its name in the model; one of its names if it is tied
            self._name_by_id = {id(self.meta(name)): name for name in self.locations}
            #: by the id of a meta tensor, its data while modules are loaded
            self._loaded_by_id: dict[int, torch.Tensor] = {}
            on_error.pop_all()

    def _locate(self, name: str, stack_names: Mapping[str, str]) -> Location | None:
        """Find a parameter or buffer in the files: under one of its names, or in a stack of experts.

        The constructor calls it for each parameter and buffer.

        Args:
            name: its name in the model.
            stack_names: of :func:`_names_of_stacks`: by a stack's name in the model before experts became Linears, its
                name in the files.

        Returns:
            None if the files do not hold it.
        """
        for candidate in (self.stored_as.get(name, name), name):
            if candidate in self.reader:
                return Location(candidate)
        module_name, _, key = name.rpartition(".")
        expert_name, _, projection = module_name.rpartition(".")
        expert = self.model.get_submodule(expert_name)
        if not isinstance(expert, LinearExpert):
            return None
        container, _, index = expert_name.rpartition(".")
        roles = {name_in_expert: role for role, name_in_expert in expert.projections.items()}
        role = roles[projection]  # all tensors of a LinearExpert are weights and biases of its projections
        suffix = "_bias" if key == "bias" else ""
        stacks = [f"{role}_proj{suffix}"]
        if role != "down":
            stacks.append(f"gate_up_proj{suffix}")
        for stack in stacks:
            path = f"{container}.{stack}"
            if path not in stack_names:
                continue
            for candidate in (stack_names[path], path):
                if candidate in self.reader:
                    return Location(candidate, int(index), role, stack.startswith("gate_up"), expert)
        return None

    def _require_fit(self, missing: list[str]) -> None:
        """Refuse files whose tensors are not the model's; ``missing`` are names in the model that no file holds."""
        refuse(
            converted(self.model, missing),
            f"transformers makes these from other tensors of the files of {self.folder}, which is not done here",
            remedy="load the model with from_pretrained, and calibrate it in memory (CalibrationSession).",
        )
        other_kinds = []
        misfits = [f"{name} (missing)" for name in missing]
        for name, location in self.locations.items():
            stored = self.reader.meta(location.tensor)
            expected = self.meta(name)
            if stored.dtype.is_floating_point != expected.dtype.is_floating_point:
                other_kinds.append(f"{name} ({stored.dtype} instead of {expected.dtype})")
            if location.item is None and stored.shape != expected.shape:
                misfits.append(f"{name} ({tuple(stored.shape)} instead of {tuple(expected.shape)})")
        refuse(
            other_kinds,
            f"the files of {self.folder} hold numbers of another kind than the model has",
            expected="weights in floating point",
            remedy="give the checkpoint in full precision; a quantized one holds codes, not weights.",
        )
        refuse(
            misfits,
            f"the files of {self.folder} hold other tensors than its config says",
            remedy="copy or download the checkpoint again; config.json and weights belong together.",
        )

    def meta(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer as the model has it now: a meta tensor unless its module is loaded.

        Called here for shapes and dtypes; by `QuantizedFiles.copy`, to write a loaded tensor from memory; and by
        `quantize_checkpoint` for the sizes of weights.
        """
        module_name, _, key = name.rpartition(".")
        value: torch.Tensor = getattr(self.model.get_submodule(module_name), key)
        return value

    def read(self, name: str) -> torch.Tensor:
        """Read a parameter or buffer by its name in the model: on the CPU, in the model's dtype.

        Called when a module is loaded (:meth:`loaded`).
        """
        location = self.locations[name]
        value = self.reader.read(location.tensor, location.item)
        if location.expert is not None:
            is_bias = name.endswith(".bias")
            value = rows_of_expert(location.expert.origin, value[0], location.role, location.joined, is_bias)
        return value.to(self.meta(name).dtype).contiguous()

    def _tensors_of(self, module_names: Iterable[str]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """The meta tensors of some modules that have data in the files; :meth:`loaded` replaces them.

        Returns:
            The dict of parameters or buffers that holds a tensor, its key there, and the tensor.
        """
        entries: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module_name in module_names:
            module = self.model.get_submodule(module_name)
            for tensors in (module._parameters, module._buffers):
                entries += [(tensors, key, meta) for key, meta in tensors.items() if id(meta) in self._name_by_id]
        return entries

    @contextmanager
    def loaded(self, module_names: Iterable[str], device: torch.device | None = None) -> Iterator[None]:
        """Hold the parameters and buffers of some modules in memory inside a ``with`` block; tied ones are read once.

        `quantize_checkpoint` enters it for one fused set at a time, `calibrate_layerwise` for one block.

        Args:
            module_names: names in the model; modules inside these are loaded only if they are named too.
            device: where the tensors are then; by default on the CPU.
        """
        replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        try:
            for tensors, key, meta in self._tensors_of(module_names):
                value = self._load(meta, device)
                replaced.append((tensors, key, meta))
                tensors[key] = value
            yield
        finally:
            for tensors, key, meta in replaced:
                tensors[key] = meta
                self._loaded_by_id.pop(id(meta), None)

    def _load(self, meta: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        """The data of one of the model's meta tensors, on ``device``.

        A tied tensor is one meta tensor under several names: it is read once.
        """
        if id(meta) not in self._loaded_by_id:
            value = self.read(self._name_by_id[id(meta)])
            if device is not None:
                value = value.to(device)
            if isinstance(meta, nn.Parameter):
                value = nn.Parameter(value, requires_grad=False)
            self._loaded_by_id[id(meta)] = value
        return self._loaded_by_id[id(meta)]

    def look_up(self, embedding: str, device: torch.device) -> None:
        """Let an embedding read, from now on, only the rows of its weight that its tokens look up.

        The run layer by layer calls this for embeddings that are not quantized.

        Args:
            embedding: the module's name.
            device: where the model runs.
        """
        name = f"{embedding}.weight"
        read = partial(self.reader.read, self.locations[name].tensor)
        weight = LookedUpWeight.of(self.meta(name), device, read)
        self.model.get_submodule(embedding)._parameters["weight"] = weight

    def end_look_ups(self) -> None:
        """Give embeddings their own meta tensors back, by which a tied weight is known.

        The run layer by layer calls this once the model has run.
        """
        for module in self.model.modules():
            weight = module._parameters.get("weight")
            if isinstance(weight, LookedUpWeight):
                module._parameters["weight"] = weight.meta_weight

    def make_buffers(self, device: torch.device) -> None:
        """Compute the buffers that no file holds, such as frequencies of rotary embeddings, as transformers does.

        `calibrate_layerwise` calls this before it runs the model; weights alone need no buffers.
        """
        model_of_module: dict[nn.Module, Any] = {}
        for model in self.model.modules():
            if hasattr(model, "_init_weights"):
                for module in model.modules():  # a model inside another comes later, and knows its modules
                    model_of_module[module] = model
        for module in model_of_module:
            for key in module._non_persistent_buffers_set:
                buffer = module._buffers[key]
                if buffer is not None:
                    module._buffers[key] = _unknown(buffer, device)
        for module, model in reversed(model_of_module.items()):  # inner modules first, as transformers does
            model._init_weights(module)


def _refuse_quantized(folder: Path) -> None:
    """Raise a CalibrationError for a checkpoint whose config says that it is quantized."""
    config = read_json(folder / CONFIG_FILE, remedy=_FOLDER_REMEDY)
    if "quantization_config" in config or "compression_config" in config:
        raise CalibrationError(
            f"{folder} is quantized already, its weights are on another grid",
            expected="a checkpoint in full precision",
            remedy="quantize the checkpoint that it was made from.",
        )


def _names_of_stacks(model: nn.Module) -> dict[str, str]:
    """The stacks of experts that files may hold: by name in the model, the name in files.

    A stack is saved under its own name or another one (``renamed``). Or transformers splits it when it saves; files
    that were not saved by transformers may hold it as it is, under its name in the model. Left out are stacks under
    whose name transformers saves another tensor (``files``). The constructor of `CheckpointSource` calls it.

    Args:
        model: on the meta device, before its experts become Linears.
    """
    stored = StoredTensors(model)
    names = {}
    for module_name, module in fused_experts(model).items():
        for key, _ in module.named_parameters():
            name = f"{module_name}.{key}"
            if name in stored.renamed or name not in stored.files:
                names[name] = stored.renamed.get(name, name)
    return names


def _unknown(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """NaN on ``device``, in the shape of a buffer: a buffer that nothing computes then shows where it is used."""
    values = torch.empty_like(buffer, device=device)
    if values.is_floating_point():
        values.fill_(torch.nan)
    return values
