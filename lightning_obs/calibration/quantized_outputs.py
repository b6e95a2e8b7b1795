"""Module outputs that engines keep as integers: record in the first batch which module reads which, then set ranges.

A session calls :func:`attach_readers` when it attaches its hooks and the scheme quantizes outputs (INT8_ONNX,
INT8_TENSORRT). The hooks fill the record of :mod:`.output_readers`, which explains why the readers matter;
:class:`WatchedFunctions` shows the record the ATen operations of the user's model. After the data, ``finalize`` calls
:func:`settle_outputs`, :func:`qparams_from_zero` and :func:`ranges_of_sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from lightning_obs.calibration.hooks import apart_from_model, first_tensor, is_apart_from_model
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.output_readers import OutputReaders
from lightning_obs.model.mark import is_inside_quantized, keep_hook_out
from lightning_obs.model.weight import adapters_of
from lightning_obs.numerics.qparams import QParamsDict, compute_qparams
from lightning_obs.observers import Key, Observer
from lightning_obs.schemes.config import FOLLOWERS

#: modules whose output holds only values of their input
_TRANSPARENT = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.Flatten,
    nn.Unflatten,
)


def is_transparent(module: nn.Module) -> bool:
    """Whether the module only selects or reshapes values of its input, so that its output keeps the input's range.

    :func:`attach_readers` asks this for each module of the model.
    """
    return type(module) in _TRANSPARENT


#: the fields of QuantizationArgs that an input and an output must share for the input to take the output's qparams
_FORMAT = {"type", "num_bits", "symmetric", "strategy", "dynamic"}

# ---------------------------------------------------------------------- who reads which output


def attach_readers(observation: Observation, stack: ExitStack) -> None:
    """Register the hooks that record in the first batch which module reads which quantized output.

    Called when a session attaches, after the hooks of the observers are registered. A *follower* is a module such as a
    batch norm or a ReLU that engines fuse into the module before it, and of which only the output is quantized.

    Args:
        observation: its plan quantizes outputs, so it has ``calls.readers``.
        stack: removes the hooks when it closes.
    """
    readers = observation.calls.readers
    assert readers is not None  # the plan has outputs
    hooks = _ReaderHooks(observation, readers, stack)
    for target in observation.plan.targets:
        module = target.module
        if "output" in target.args:
            if target.is_block:  # before the observer's hook, which observes the output only if it is a sum
                on_block_output = partial(hooks.on_block_output, target.name)
                hooks.keep(module, module.register_forward_hook(on_block_output, prepend=True))
            # A module with LoRA adapters returns its output through the layer that adds them. The hook comes after all
            # other hooks, because it needs the tensor that the next module will get.
            returning = adapters_of(module) or module
            hooks.keep(returning, returning.register_forward_hook(partial(hooks.on_output, target.name)))
        if "input" in target.args or target.is_follower:
            on_input = partial(hooks.on_input, target.name, target.is_follower)
            hooks.keep(module, module.register_forward_pre_hook(on_input))
    for module in observation.model.modules():
        if is_transparent(module):
            hooks.keep(module, module.register_forward_hook(hooks.on_transparent_output))
    _attach_watch(hooks)


class _ReaderHooks:
    """The hooks that pass the inputs and outputs of modules to an :class:`.OutputReaders` in the first batch.

    :func:`attach_readers` makes one and registers its methods.

    Args:
        observation: of the model; its ``calls`` count the batches.
        readers: the record to fill.
        stack: removes the hooks when it closes.
    """

    def __init__(self, observation: Observation, readers: OutputReaders, stack: ExitStack) -> None:
        self.observation = observation
        self.readers = readers
        self._stack = stack

    def keep(self, module: nn.Module, handle: RemovableHandle) -> None:
        """Let ``stack`` remove a hook, and leave the hook out of copies of its module.

        :func:`attach_readers` and :func:`_attach_watch` call this for each hook that they register.
        """
        self._stack.callback(keep_hook_out(module, handle))

    def are_due(self, module: nn.Module) -> bool:
        """Whether the present call of a module is to be recorded: a call in the first batch that is observed.

        The hooks here, and the hooks that enter the dispatch mode, ask this at each call. Calls while the observation
        is paused, and calls inside a quantized forward, are not recorded. Most callers of the model count a batch
        before it runs, so ``batches`` is 1 in the first batch. Quantized training counts it afterwards: ``batches`` is
        0 in the first batch, and 1 in the second, which is then recorded as well.
        """
        calls = self.observation.calls
        return calls.batches <= 1 and not calls.is_paused and not is_inside_quantized(module)

    def on_block_output(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a block whose output is planned: in the first batch, note whether the output is a sum."""
        if self.are_due(block):
            with apart_from_model():
                self.readers.note_block_output(name, output)

    def on_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a module, or block, whose output is planned: in the first batch, note the output.

        The output of a block is noted only if it is a sum of quantized outputs.
        """
        is_quantized = self.readers.sums.get(name, True)  # False: a block whose output is no sum
        if self.are_due(module) and is_quantized and isinstance(output, torch.Tensor):
            with apart_from_model():
                self.readers.note_output(name, output)

    def on_input(self, name: str, is_follower: bool, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of a module whose input is planned, or of a follower: in the first batch, note the input."""
        value = first_tensor(args)
        if self.are_due(module) and value is not None:
            with apart_from_model():
                self.readers.note_input(name, value, is_follower)

    def on_transparent_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a transparent module: in the first batch, note that its output holds values of its input."""
        value = first_tensor(args)
        if self.are_due(module) and value is not None and isinstance(output, torch.Tensor):
            with apart_from_model():
                self.readers.note_passed_on(value, output)


class WatchedFunctions(TorchDispatchMode):
    """A dispatch mode that shows each ATen operation to an :class:`.OutputReaders`, and runs the operation unchanged.

    In the first batch, hooks of :func:`_attach_watch` enter it at the outermost module call and leave it at the end of
    that call.

    Args:
        readers: the record of one session.
    """

    supports_higher_order_operators = True

    def __init__(self, readers: OutputReaders) -> None:
        super().__init__()
        self._readers = readers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and record what it reads and what its result holds; torch calls this for every operation.

        Operations of hooks and observers (:func:`.apart_from_model`) are not recorded.
        """
        kwargs = kwargs or {}
        if is_apart_from_model():
            return func(*args, **kwargs)
        with apart_from_model():
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            # What the result will hold (a quantized output, or a sum of such); None: neither. ``keep`` remembers it.
            value = self._readers.note_operation(func, tensors)
        result = func(*args, **kwargs)
        if value is not None:
            with apart_from_model():
                self._readers.keep(value, result[0] if isinstance(result, tuple) else result)
        return result


def _attach_watch(hooks: _ReaderHooks) -> None:
    """Register hooks that enter a :class:`WatchedFunctions` for the length of each outermost module call.

    The outermost module is the model, or a part of it that the user's code calls by itself. The mode is entered anew
    for each such call, because the user's code may enter and leave other dispatch modes between two calls.
    """
    readers = hooks.readers
    modes: list[WatchedFunctions] = []  # at most one
    callers: list[nn.Module] = []  # the outermost module, once for each of its calls that has not ended (recursion)

    def begin(module: nn.Module, args: Any) -> None:
        if not modes and hooks.are_due(module):
            modes.append(WatchedFunctions(readers))
            modes[0].__enter__()
            callers.append(module)
        elif modes and module is callers[0]:
            callers.append(module)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not callers or module is not callers[0]:
            return
        callers.pop()
        if not callers:
            modes.pop().__exit__(None, None, None)
            # The user's code gets these tensors, so each quantized output among them has an unknown reader.
            readers.note_operation(None, _tensors_in(output))

    for module in hooks.observation.model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            continue
        hooks.keep(module, module.register_forward_pre_hook(begin))
        # Always called, so that a forward that raises does not leave the mode entered. Prepended: modes are a stack, so
        # the session that entered its mode last must leave first.
        hooks.keep(module, module.register_forward_hook(end, prepend=True, always_call=True))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ---------------------------------------------------------------------- the ranges that follow


def settle_outputs(observation: Observation, readers: OutputReaders) -> set[str]:
    """Remove from the plan the outputs that are not quantized.

    These are outputs that a follower reads, whose own output is quantized instead; outputs of blocks that are no sum;
    and outputs of followers that the model never called. Called by ``finalize``, on every rank, after the records of
    all ranks were merged and before qparams are computed.

    Args:
        observation: its plan and observers lose these outputs.
        readers: the merged record; its ``followed`` becomes the set of all removed outputs.

    Returns:
        Names of the modules whose output's range begins at zero, because only a ReLU reads the output. Empty for
        schemes of engines that do not fold a ReLU.
    """
    readers.followed.update(_without_outputs(observation, readers))
    observation.drop_outputs(readers.followed)
    return readers.begin_at_zero if FOLLOWERS in observation.plan.config.config_groups else set()


def qparams_from_zero(observer: Observer) -> QParamsDict:
    """The qparams of an output that only a ReLU reads: the observed range, with negative values cut off.

    ``finalize`` calls this for the modules that :func:`settle_outputs` has named.
    """
    low, high = observer.get_min_max()
    return compute_qparams(low.clamp(min=0), high.clamp(min=0), observer.args, signed=observer.signed)


def _without_outputs(observation: Observation, readers: OutputReaders) -> set[str]:
    """Names of blocks whose output is no sum, and of followers that the model never called.

    No data has reached the observers of either. Empty if no data has reached any observer: then the calibration lacks
    data altogether, which ``finalize`` reports as an error.
    """
    unreached = set(observation.coverage.unreached or ())
    if unreached >= observation.data_observers.keys():
        return set()
    names = set()
    for target in observation.plan.targets:
        is_idle = target.is_follower and (target.name, "output") in unreached
        is_no_sum = target.is_block and not readers.sums.get(target.name)
        if is_idle or is_no_sum:
            names.add(target.name)
    return names


def ranges_of_sources(
    observation: Observation, readers: OutputReaders, computed: Mapping[Key, QParamsDict]
) -> dict[Key, QParamsDict]:
    """The qparams of inputs that read a quantized output of the same number format: the qparams of that output.

    Called by ``finalize``, which replaces the inputs' own qparams by these.

    Args:
        observation: has the plan.
        readers: the merged record of which module reads which output.
        computed: the qparams of all activations, each from its own observer.

    Returns:
        The qparams by ``(name of the module, "input")``, for these inputs alone.
    """
    args_of_targets = {target.name: target.args for target in observation.plan.targets}
    kept: dict[Key, QParamsDict] = {}
    for name, source in readers.sources.items():
        qparams = computed.get((source or "", "output"))
        if qparams is None or (name, "input") not in computed:
            continue
        input_args = args_of_targets[name]["input"].model_dump(include=_FORMAT)
        if input_args == args_of_targets[source or ""]["output"].model_dump(include=_FORMAT):
            kept[name, "input"] = qparams
    return kept
