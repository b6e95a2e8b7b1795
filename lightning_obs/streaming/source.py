"""A folder of safetensors files as a model without data, and where each of its tensors lies in the files.

The structure comes from ``config.json``: the class that wrote the checkpoint is built on the meta device, experts as
Linears. A tensor lies in the files under the name that transformers would save it by, under its own, or as the item of
one expert in a stack of all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lightning_obs.checkpoint.compress import StoredTensors
from lightning_obs.checkpoint.load import CONFIG_FILE
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming, read_json
from lightning_obs.files.tensors import TensorReader
from lightning_obs.files.write import refuse_damage
from lightning_obs.model.conversions import converted
from lightning_obs.model.kinds import require_transformers
from lightning_obs.moe.experts import LinearExpert, fused_experts, linearize_experts, rows_of_expert


class Source(NamedTuple):
    """Where a parameter lies in the files."""

    name: str  # of the tensor, perhaps a stack of experts
    item: int | None = None  # the expert's number in the stack
    role: str = ""  # the expert's projection: gate, up, down
    joined: bool = False  # whether the stack holds gate and up together
    expert: LinearExpert | None = None


class CheckpointSource:
    """A checkpoint's folder: the ``model`` on the meta device, experts linearized, and the ``reader`` of its tensors.

    Raises:
        CalibrationError: the folder is damaged, quantized already, of an architecture that transformers does not know,
            or its files hold other tensors than its config says.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if isinstance(folder, nn.Module):
            remedy = "model.save_pretrained(folder) first, or CalibrationSession(model, ...), which takes it in memory."
            raise CalibrationError("a checkpoint is read from its folder", got=type(folder).__name__, remedy=remedy)
        self.folder = folder = Path(folder)
        remedy = "give a folder with config.json and safetensors files."
        raw = read_json(folder / CONFIG_FILE, remedy=remedy)
        if "quantization_config" in raw or "compression_config" in raw:
            raise CalibrationError(
                f"{folder} is quantized already, its weights are on another grid",
                expected="a checkpoint in full precision",
                remedy="quantize the checkpoint that it was made from.",
            )
        refuse_damage(folder)
        with ExitStack() as stack:
            self.reader = TensorReader(folder)
            stack.callback(self.reader.close)
            with naming(folder / CONFIG_FILE, remedy=remedy):
                self.model = _on_meta(folder, self.reader)
            stacks = _stacks(self.model)
            linearize_experts(self.model)
            names = StoredTensors(self.model)
            #: the name of each tensor in a checkpoint that transformers saves, by its name in the model
            self.stored_as = names.renamed
            found = {name: self._find(name, stacks) for name in names.entries}
            #: where each of them lies in the files
            self.sources = {name: source for name, source in found.items() if source is not None}
            self._require_fit(folder, [name for name, source in found.items() if source is None])
            #: the name of each tensor in the files, tied ones alike; and the tensors that are loaded now
            self._names = {id(self.meta(name)): name for name in self.sources}
            self._loaded: dict[int, torch.Tensor] = {}
            stack.pop_all()

    def _find(self, name: str, stacks: dict[str, str]) -> Source | None:
        for candidate in (self.stored_as.get(name, name), name):
            if candidate in self.reader:
                return Source(candidate)
        module, _, key = name.rpartition(".")
        path, _, projection = module.rpartition(".")
        expert = self.model.get_submodule(path)
        if isinstance(expert, LinearExpert):
            container, _, index = path.rpartition(".")
            role = next(role for role, known_as in expert.projections.items() if known_as == projection)
            suffix = "_bias" if key == "bias" else ""
            fused = () if role == "down" else (f"gate_up_proj{suffix}",)
            for stack in (f"{role}_proj{suffix}", *fused):
                own = f"{container}.{stack}"
                for stored in dict.fromkeys((stacks[own], own)) if own in stacks else ():
                    if stored in self.reader:
                        return Source(stored, int(index), role, stack.startswith("gate_up"), expert)
        return None

    def _require_fit(self, folder: Path, missing: list[str]) -> None:
        refuse(
            converted(self.model, missing),
            f"transformers makes these from other tensors of the files of {folder}, which is not done here",
            remedy="load the model with from_pretrained, and calibrate it in memory (CalibrationSession).",
        )
        integers = []
        for name, source in self.sources.items():
            stored = self.reader.meta(source.name).dtype
            expected = self.meta(name).dtype
            if stored.is_floating_point != expected.is_floating_point:
                integers.append(f"{name} ({stored} instead of {expected})")
        refuse(
            integers,
            f"the files of {folder} hold numbers of another kind than the model has",
            expected="weights in floating point",
            remedy="give the checkpoint in full precision; a quantized one holds codes, not weights.",
        )
        wrong = [f"{name} (missing)" for name in missing]
        for name, source in self.sources.items():
            here, there = self.reader.meta(source.name).shape, self.meta(name).shape
            if source.item is None and here != there:
                wrong.append(f"{name} ({tuple(here)} instead of {tuple(there)})")
        refuse(
            wrong,
            f"the files of {folder} hold other tensors than its config says",
            remedy="copy or download the checkpoint again; config.json and weights belong together.",
        )

    def meta(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the model, without data."""
        module, _, key = name.rpartition(".")
        value: torch.Tensor = getattr(self.model.get_submodule(module), key)
        return value

    def read(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the model, in the dtype that it has there."""
        source, meta = self.sources[name], self.meta(name)
        value = self.reader.read(source.name, source.item)
        if source.expert is not None:
            value = rows_of_expert(source.expert.origin, value[0], source.role, source.joined, name.endswith(".bias"))
        return value.to(meta.dtype).contiguous()

    @contextmanager
    def loaded(self, names: Iterable[str], device: torch.device | None = None) -> Iterator[None]:
        """Let modules have their parameters and buffers inside the ``with`` block; tied tensors are read once."""
        before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        try:
            for name in names:
                module = self.model.get_submodule(name)
                for held in (module._parameters, module._buffers):
                    for key, meta in held.items():
                        if meta is None or (known_as := self._names.get(id(meta))) is None:
                            continue
                        if id(meta) not in self._loaded:
                            value, is_parameter = self.read(known_as).to(device), isinstance(meta, nn.Parameter)
                            self._loaded[id(meta)] = nn.Parameter(value, False) if is_parameter else value
                        before.append((held, key, meta))
                        held[key] = self._loaded[id(meta)]
            yield
        finally:
            for held, key, meta in before:
                held[key] = meta
                self._loaded.pop(id(meta), None)

    def look_up(self, embedding: str, device: torch.device) -> None:
        """Let an embedding have, from now on, the rows of its weight that are looked up, on the CPU.

        ``device``: as which the weight's own is given to code of the model that asks for it.
        """
        name = f"{embedding}.weight"
        weight = self.meta(name).detach().as_subclass(_LookedUp)
        weight.origin, weight.read = self.meta(name), partial(self.reader.read, self.sources[name].name)
        weight.given_as = device
        weight.places, weight.rows = torch.full((len(weight),), -1), torch.empty(0, weight.shape[1], dtype=weight.dtype)
        self.model.get_submodule(embedding)._parameters["weight"] = weight

    def make_buffers(self, device: torch.device) -> None:
        """Compute the buffers that no file holds (frequencies of rotary embeddings...), as ``from_pretrained`` does."""
        model, owners = self.model, dict[nn.Module, Any]()
        for holder in model.modules():  # the innermost model of transformers knows its modules
            if hasattr(holder, "_init_weights"):
                owners |= dict.fromkeys(holder.modules(), holder)
        for module in owners:
            own = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
            # NaN: one that is not computed after all is found where it is used.
            module._buffers.update({key: _unknown(x, device) for key, x in own.items() if x is not None})
        for module, owner in reversed(owners.items()):  # those inside first, as transformers does
            owner._init_weights(module)


def _unknown(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(buffer, device=device)
    return made.fill_(torch.nan) if made.is_floating_point() else made


class _LookedUp(torch.Tensor):
    """A weight on the meta device, and its rows that an embedding has looked up; each row is read once."""

    origin: torch.Tensor  # the model's own meta tensor, whose id names it
    places: torch.Tensor
    rows: torch.Tensor
    read: Callable[..., torch.Tensor]
    given_as: torch.device

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.device.__get__:
            return args[0].given_as
        if function in (torch.Tensor.__getitem__, torch.Tensor.index_select):  # learned positions
            weight, *chosen = args
            return function(weight.read().to(weight.dtype), *chosen).to(weight.given_as)
        if function is not F.embedding:
            return super().__torch_function__(function, types, args, kwargs)
        tokens, weight = args
        asked = tokens.unique().cpu()
        new = asked[weight.places.index_select(0, asked) < 0]
        if len(new):
            weight.places[new] = torch.arange(len(new)) + len(weight.rows)
            weight.rows = torch.cat([weight.rows, *(weight.read(row).to(weight.dtype) for row in new.tolist())])
        options = {**kwargs, "padding_idx": None}  # gradients ask for them
        return F.embedding(weight.places[tokens.cpu()], weight.rows, **options).to(tokens.device)


@contextmanager
def custom_code_named(name: str, remedy: str) -> Iterator[None]:
    """Say, in place of transformers' error, that a checkpoint comes with code of its own, which was not to be run."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, CalibrationError) or "trust_remote_code" not in str(error):
            raise
        raise CalibrationError(
            f"{name} comes with code of its own, which is not run unasked",
            expected="a model whose class is in transformers",
            remedy=remedy,
        ) from error


def _on_meta(folder: Path, reader: TensorReader) -> Any:
    """The model that wrote the checkpoint, without data, in the dtype that ``from_pretrained`` gives it."""
    require_transformers()
    import transformers

    with custom_code_named(str(folder), "load the model with its own code, and calibrate it in memory."):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    written_by = (getattr(transformers, each, None) for each in config.architectures or ())
    kind: Any = next(filter(None, written_by), None)
    if kind is None:
        raise CalibrationError(
            f"transformers {transformers.__version__} does not know the architecture of {folder}",
            got=", ".join(config.architectures or ()) or "no architectures",
            remedy="load the model with its own code, and calibrate it in memory (CalibrationSession).",
        )
    floating = (dtype for name in reader if (dtype := reader.meta(name).dtype).is_floating_point)
    with torch.device("meta"):
        model = kind._from_config(config, dtype=config.dtype or next(floating, None))
    # Some constructors make tensors elsewhere, which have numbers that no file holds.
    made = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if not tensor.is_meta}
    model.load_state_dict(made, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def _stacks(model: nn.Module) -> dict[str, str]:
    """The name in files of each stack of experts that is stored as it is."""
    names = StoredTensors(model)
    own = [f"{name}.{key}" for name, module in fused_experts(model).items() for key in dict(module.named_parameters())]
    # One that is stored under its own name, but converted, would be read as something else.
    return {name: names.renamed.get(name, name) for name in own if name in names.renamed or name not in names.files}
