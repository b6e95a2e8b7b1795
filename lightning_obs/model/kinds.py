"""Kinds of modules: how they hold their weight and read their data; wrappers, and LoRA layers of peft.

A kind of module that computes is a row of :data:`KINDS`. A new kind is a new row, and nothing else.

Other modules hold a module and run it. Wrappers come from Fabric, DDP, FSDP1, torch.compile, activation checkpointing,
and from peft around a module that it trains whole (``modules_to_save``), where the wrapper runs a copy of the module.
Their attributes are parts of names (``layers.0._fsdp_wrapped_module.fc1``), so targets would not match and a checkpoint
could not be loaded. Code that reads names, or needs a ``state_dict`` that gathers nothing, runs inside
:func:`without_wrappers`.

A LoRA layer is exported as the quantized sum of base weight and adapters, as after peft's ``merge_and_unload``. So a
plan has the base layer, which remains after merging, and its weight is the sum, computed as by peft's ``merge``. peft
is not imported; its layers are recognized by their public attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.offload import OffloadCache
from compressed_tensors.utils import get_num_attn_heads, get_num_kv_heads
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_obs.errors import CalibrationError
from lightning_obs.model.mark import make_mark, mark_of
from lightning_obs.packages import require_release

#: the attribute by which a model of transformers says that its modules have the hooks that capture hidden states
CAPTURES_OUTPUTS = "_output_capturing_hooks_installed"

# The oldest release of transformers with which models of transformers are tested (`make oldest`).
_OLDEST_TRANSFORMERS = "5.17"


class LoneWeight(nn.Linear):
    """A weight ``(R, C)`` as a module, for a layer that passes it to one operation of torch with other tensors.

    ``linearize_recurrent`` makes one of each weight of an ``nn.LSTM`` or ``nn.GRU``. In each of its forwards the layer
    calls the module without an input, and gets the weight, quantized where the module runs quantized. The module has no
    input or output to quantize.
    """

    @classmethod
    def of(cls, weight: nn.Parameter) -> LoneWeight:
        """Make the module of a weight ``(R, C)``; the parameter stays the same object.

        Called when a recurrent layer is taken apart (``linearize_recurrent``).
        """
        rows, columns = weight.shape
        module = cls(columns, rows, bias=False, device="meta", dtype=weight.dtype)
        module.weight = weight
        return module

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        """Return the weight; the recurrent layer around the module calls it in each forward."""
        return self.weight


@dataclass(frozen=True)
class ModuleKind:
    """How modules of one kind hold their weight, and which dimension of their data holds the channels.

    A row of :data:`KINDS`; :func:`kind_of` finds the row of a module. The weight's matrix has the shape ``(output
    channels, inputs of each)``; with a scale per channel, each row has its scale. A token (a word, a
    pixel) has one vector of channels.
    """

    name: str
    holds: Callable[[nn.Module], bool]  # whether a module is of this kind
    rows: int = 0  # the dimension of the weight that becomes the rows: 0, or 1 where it is stored transposed
    #: how many dimensions of the data come after the channels; None: as many as the weight has after its first two
    positions: int | None = 0
    reads_indices: bool = False  # its input is indices of rows, not values
    #: the type by which readers of compressed-tensors know it; None: only ``load_checkpoint`` reads it
    stored_as: type[nn.Module] | None = None


def _is_a(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    # A predicate for a row of KINDS: whether a module is an instance of one of the classes.
    return lambda module: isinstance(module, classes)


def _is_of_class(module: object, package: str, name: str) -> bool:
    """Whether the module is an instance of a class, by name, so that its package need not be imported."""
    for module_class in type(module).__mro__:
        if module_class.__module__ == package and module_class.__name__ == name:
            return True
    return False


def is_conv1d_of_transformers(module: nn.Module) -> bool:
    """Whether a module is transformers' ``Conv1D``, a Linear whose weight is stored transposed.

    Asked for the kind of a module, and for the product that a layer computes in training: a ``Conv1D`` computes
    ``torch.addmm``, not ``F.linear``.
    """
    return _is_of_class(module, "transformers.pytorch_utils", "Conv1D")


#: a module is of the first kind that ``holds`` it
KINDS: list[ModuleKind] = [
    ModuleKind("Linear", _is_a(nn.Linear), stored_as=nn.Linear),
    ModuleKind("Embedding", _is_a(nn.Embedding), reads_indices=True, stored_as=nn.Embedding),
    ModuleKind("transposed convolution", _is_a(_ConvTransposeNd), rows=1, positions=None),
    ModuleKind("convolution", _is_a(_ConvNd), positions=None),
    ModuleKind("transformers' Conv1D", is_conv1d_of_transformers, rows=1),
    ModuleKind("any other with a weight", lambda module: True),
]


def kind_of(module: nn.Module) -> ModuleKind:
    """The row of :data:`KINDS` that says how ``module`` holds its weight and reads its data.

    Asked wherever that differs between kinds: for shapes, plans, engines, formats of files, and hooks.
    """
    return next(kind for kind in KINDS if kind.holds(module))


def to_matrix(module: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the weight's shape as ``(output channels, inputs of each)``, see :class:`ModuleKind`.

    Observers, searches and writers see a weight in this form only. None where there is no such matrix: a vector,
    and groups of a transposed convolution.
    """
    if weight.ndim < 2:
        return None
    is_transposed = kind_of(module).rows == 1
    if not is_transposed:
        return weight.flatten(1)
    has_groups = getattr(module, "groups", 1) != 1
    if weight.ndim > 2 and has_groups:
        return None
    return weight.transpose(0, 1).flatten(1)


def from_matrix(module: nn.Module, matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of :func:`to_matrix`: a weight of the module's own shape, from its matrix.

    Called where stored or quantized numbers go back to a module: in the quantized forward, and when a checkpoint is
    loaded.

    Args:
        module: tells which dimension of the weight became the rows.
        matrix: ``(output channels, inputs of each)``.
        shape: the shape of the module's weight.
    """
    if kind_of(module).rows:
        return matrix.unflatten(1, (shape[0], *shape[2:])).transpose(0, 1)
    return matrix.view(shape)


def tokens_of(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """A module's input or output as ``(..., tokens, channels)``; ``value`` itself where it has that shape.

    Called for each input or output that an observer weighs or masks by token, and for the errors of a report.
    """
    positions = _positions_of(module)
    if not 0 < positions < value.ndim:
        return value
    return value.flatten(-positions).transpose(-1, -2)


def count_tokens(module: nn.Module, value: torch.Tensor) -> int:
    """How many tokens a module's input or output has; at least 1.

    The quantized forward asks it, to find how many values share a scale.
    """
    channels = max(1, value.shape[-1 - _positions_of(module)])
    return max(1, value.numel() // channels)


def channel_axis(module: nn.Module, value: torch.Tensor) -> int:
    """The dimension of a module's input or output that holds the channels, as an index of ``value.shape``.

    Called to find the dimension of a model's output that holds the classes (``forward/class_axis.py``).
    """
    return value.ndim - 1 - _positions_of(module)


def _positions_of(module: nn.Module) -> int:
    """How many dimensions of the module's data come after the channels."""
    positions = kind_of(module).positions
    if positions is None:
        assert isinstance(module.weight, torch.Tensor)
        positions = module.weight.ndim - 2
    return positions


def is_transformers_model(module: object) -> bool:
    """Whether transformers saves and loads the module: whether its class is a transformers ``PreTrainedModel``.

    Asked wherever a file, a name or an engine is of transformers only. Its attributes do not tell: models of
    diffusers and of segmentation-models-pytorch, and every class with huggingface_hub's mixin, have a
    ``save_pretrained`` and a ``config`` of their own.
    """
    return _is_of_class(module, "transformers.modeling_utils", "PreTrainedModel")


def inside_transformers(model: nn.Module) -> set[nn.Module]:
    """All modules of the transformers models that are in a model.

    Called by ``linearize_attention`` and ``linearize_recurrent``, which leave layers in these models as they are:
    transformers could not load a model with other layers.
    """
    modules: set[nn.Module] = set()
    for module in model.modules():
        if is_transformers_model(module):
            modules.update(module.modules())
    return modules


def require_transformers(model: object | None = None) -> None:
    """Raise a :class:`CalibrationError` where transformers is too old for its models to be calibrated and stored.

    Called before a model is planned, before its experts become Linears, and before a checkpoint is loaded.

    Args:
        model: a module of any kind; of a module that is not of transformers no release is required. None: a checkpoint
            of transformers will be loaded.
    """
    if model is None or is_transformers_model(model):
        require_release("transformers", _OLDEST_TRANSFORMERS, "a model of transformers")


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate or compressed-tensors says on which device the module's own tensors are (:mod:`.offload`).

    Such a module may have meta tensors in place of its weights. Asked before a weight is read, moved or copied.
    """
    attributes = vars(module)
    if "_hf_hook" in attributes or isinstance(attributes["_parameters"], OffloadCache):
        return True
    mark = mark_of(module)
    return mark is not None and mark.offload_owner is not None


def holds_parameters(module: nn.Module) -> bool:
    """Whether the module has parameters of its own; containers and activation functions have none.

    Asked of modules that a target matches by a pattern, while a plan and the config of a checkpoint are made.
    """
    return next(module.parameters(recurse=False), None) is not None


def may_hold_experts(model: nn.Module) -> bool:
    """Whether any module could hold experts, stacked or one by one (:mod:`lightning_obs.moe.experts`).

    Called when a plan is made, as a cheap test before the slower search for experts.
    """
    return any(is_named_experts(name, module) for name, module in model.named_modules())


def is_named_experts(name: str, module: nn.Module) -> bool:
    """Whether the name or class of a module says that it holds experts, or it has an attribute ``num_experts``."""
    is_called_experts = name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__
    return is_called_experts or hasattr(module, "num_experts")


def count_heads(model: Any) -> dict[str, int]:
    """How many heads the q, k and v of a transformers model, or of its attention module, have.

    Called while attention states are planned, and for the shape of scales per head. compressed-tensors counts heads in
    the same way when it loads a checkpoint and allocates such scales.

    Returns:
        The numbers of heads by state: ``{"q": 32, "k": 8, "v": 8}``.
    """
    configs = (module.config for module in model.modules() if hasattr(module, "config"))
    config = next(configs).get_text_config(decoder=True)
    kv_heads = get_num_kv_heads(config)
    return {"q": get_num_attn_heads(config), "k": kv_heads, "v": kv_heads}


# ---------------------------------------------------------------------- wrappers


#: the submodule that is wrapped: of FSDP1, activation checkpointing, torch.compile, Fabric
_INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module")


def inside(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper, which may itself be a wrapper; None if ``module`` is no wrapper.

    Called to step through the wrappers around a model; the docstring of this file lists them. A wrapper of peft that
    holds several copies gives the active one.
    """
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return module.module
    if {"original_module", "modules_to_save"} <= module._modules.keys():
        copies = module._modules["modules_to_save"]
        assert isinstance(copies, nn.ModuleDict)
        active = [name for name in module.active_adapters if name in copies]  # type: ignore[union-attr]
        return copies[active[0]] if active else module._modules["original_module"]
    for attribute in _INSIDE:
        if attribute in module._modules:
            return module._modules[attribute]
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers; ``module`` itself if it is no wrapper.

    Called when a session, an export, or the loading of a checkpoint is given a model.
    """
    wrapped = inside(module)
    return module if wrapped is None else unwrapped(wrapped)


def without_wrappers(model: nn.Module) -> AbstractContextManager[None]:
    """Take the wrappers inside ``model``, and so their names, out of it; ``model`` must not run in the ``with`` block.

    If ``model`` is a wrapper itself, it stays one, and names begin with the wrapper's attribute (``module.``). Callers
    that need names without it call :func:`unwrapped` first.

    Called by everything that reads names: while a plan is made, a saved state is written or loaded, and a checkpoint is
    exported.
    """

    def core_of(module: nn.Module) -> nn.Module | None:
        return None if inside(module) is None else unwrapped(module)

    return _replaced(model, core_of)


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Put base layers in the places of LoRA layers inside the ``with`` block, as in the merged model.

    Called by export, saved state and the facts of a report, whose names are those of the merged model.
    """

    def base_layer_of(module: nn.Module) -> nn.Module | None:
        return module.get_submodule("base_layer") if is_adapted(module) else None

    return _replaced(model, base_layer_of)


@contextmanager
def _replaced(model: nn.Module, core_of: Callable[[nn.Module], nn.Module | None]) -> Iterator[None]:
    """Inside the ``with`` block, put ``core_of`` of each submodule that has one in the submodule's place.

    A core that is itself replaced in the block, as ``load_checkpoint`` replaces torch's attention, stays replaced.
    """
    cores: list[tuple[nn.Module, str, nn.Module]] = []
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in model.modules():
        if core_of(parent) is not None:
            continue
        for name, child in parent._modules.items():
            core = None if child is None else core_of(child)
            if child is not None and core is not None:
                cores.append((parent, name, core))
                replaced.append((parent, name, child))
    try:
        for parent, name, core in cores:
            parent._modules[name] = core
        yield
    finally:
        for (parent, name, core), (_, _, child) in zip(cores, replaced, strict=True):
            if parent._modules[name] is core:
                parent._modules[name] = child


# ---------------------------------------------------------------------- LoRA


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is a LoRA layer around a Linear, by public attributes of peft's layers.

    Asked while adapters are registered and modules are planned.
    """
    if not isinstance(getattr(module, "base_layer", None), nn.Linear):
        return False
    return all(hasattr(module, name) for name in ("get_delta_weight", "active_adapters", "merged", "lora_A"))


def register_adapters(model: nn.Module) -> list[str]:
    """Note on the mark of every base layer which LoRA layer surrounds it.

    Called when a model is taken up: by a session, while its plan is made, and by an export. From then on the adapters
    count as a part of the base layer's weight (:func:`~lightning_obs.model.weight.held`).

    Returns:
        Names of LoRA layers whose adapters cannot be added to the weight, each with the reason. Nothing is noted there.
    """
    refused = []
    for name, layer in model.named_modules():
        if not is_adapted(layer):
            continue
        reason = _why_not_mergeable(layer)
        if reason is None:
            make_mark(layer.base_layer).lora_layer = layer
        else:
            refused.append(f"{name} ({reason})")
    return refused


def base_of(module: nn.Module) -> nn.Module:
    """The base layer of a LoRA layer, any other module itself; ``build_plan`` calls it for each matched module.

    Raises:
        CalibrationError: the adapters of the LoRA layer cannot be merged into the base layer's weight.
    """
    if not is_adapted(module):
        return module
    reason = _why_not_mergeable(module)
    if reason is not None:
        raise CalibrationError(f"adapters with {reason} cannot be a part of the quantized weight")
    assert isinstance(module.base_layer, nn.Linear)
    return module.base_layer


def drops_inputs(layer: nn.Module | None) -> bool:
    """Whether a LoRA layer drops inputs of its adapters in training, which merged adapters cannot do.

    Fine-tuning refuses such a layer, since its adapters are merged into the quantized weight. In evaluation mode
    nothing is dropped. ``layer`` is None for a module without adapters.
    """
    dropouts = getattr(layer, "lora_dropout", nn.ModuleDict())
    return any(getattr(dropout, "p", 0) > 0 for dropout in dropouts.values())


def _why_not_mergeable(layer: nn.Module) -> str | None:
    """The option of a LoRA layer by which its output differs from that of the merged weight; None: it has none."""
    if getattr(layer, "lora_variant", None):
        return "a variant of LoRA (DoRA...)"
    if any(getattr(layer, "lora_bias", {}).values()):
        return "lora_bias"
    return None


def inside_adapted(model: nn.Module) -> set[str]:
    """Names of the modules in LoRA layers (base layers, adapters), which the merged model does not have.

    Called while a plan is made and reported: these modules are not planned by themselves.
    """
    names: set[str] = set()
    for layer_name, layer in model.named_modules():
        if not is_adapted(layer):
            continue
        for name, module in layer.named_modules(prefix=layer_name):
            if module is not layer:
                names.add(name)
    return names
