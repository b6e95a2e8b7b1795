"""Outputs of modules that engines keep in integers: who reads them, seen in the first batch, and what range they get.

:func:`attach_readers` registers hooks that fill the record of :mod:`.output_readers` while the model runs, and
:class:`WatchedFunctions` shows it the operations that torch runs, in the user's model and unchanged. Finalize then asks
for the ranges that follow from who reads what.
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

#: modules whose output has values of their input alone
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
    """Whether all values of the module's output are values of its input: pooling by the maximum, another shape."""
    return type(module) in _TRANSPARENT


#: fields of args in which two tensors must agree so that one can have the qparams of the other
_FORMAT = {"type", "num_bits", "symmetric", "strategy", "dynamic"}

# ---------------------------------------------------------------------- who reads which output


def attach_readers(observation: Observation, stack: ExitStack) -> None:
    """Note in the first batch who reads which quantized output; called when the observers' hooks are on the model.

    Args:
        observation: of a plan with outputs.
        stack: removes the hooks when it closes.
    """
    readers = observation.calls.readers
    assert readers is not None  # the plan has outputs
    hooks = _ReaderHooks(observation, readers, stack)
    for target in observation.plan.targets:
        module = target.module
        if "output" in target.args:
            if target.is_block:  # judged before its observer sees the output
                hooks.keep(module, module.register_forward_hook(partial(hooks.judge_block, target.name), prepend=True))
            # Adapters beside a weight are a part of it. After all other hooks: the next module is given what the last
            # one returns.
            returning = adapters_of(module) or module
            hooks.keep(returning, returning.register_forward_hook(partial(hooks.leave, target.name)))
        if "input" in target.args or target.is_follower:
            enter = partial(hooks.enter, target.name, target.is_follower)
            hooks.keep(module, module.register_forward_pre_hook(enter))
    for module in observation.model.modules():
        if is_transparent(module):
            hooks.keep(module, module.register_forward_hook(hooks.pass_on))
    _attach_watch(hooks)


class _ReaderHooks:
    """The hooks that tell the readers what modules are given and return, in the first batch.

    Args:
        observation: has the model and its calls.
        readers: of quantized outputs.
        stack: removes the hooks when it closes.
    """

    def __init__(self, observation: Observation, readers: OutputReaders, stack: ExitStack) -> None:
        self.observation = observation
        self.readers = readers
        self._stack = stack

    def keep(self, module: nn.Module, handle: RemovableHandle) -> None:
        """Keep a hook out of copies of its module; the stack removes it."""
        self._stack.callback(keep_hook_out(module, handle))

    def are_due(self) -> bool:
        """Whether this is the first batch, which is counted before it runs, or after."""
        return self.observation.calls.batches <= 1

    def judge_block(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        """A hook of a block's output."""
        if self.are_due():
            with apart_from_model():
                self.readers.judge_block(name, output)

    def leave(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        """A hook of a planned output."""
        is_quantized = self.readers.sums.get(name, True)  # a block's, if it is a sum
        if self.are_due() and is_quantized and isinstance(output, torch.Tensor):
            with apart_from_model():
                self.readers.leave(name, output)

    def enter(self, name: str, is_follower: bool, _: nn.Module, args: Any) -> None:
        """A hook of the input of a planned module, or of a follower."""
        value = first_tensor(args)
        if self.are_due() and value is not None:
            with apart_from_model():
                self.readers.enter(name, value, is_follower)

    def pass_on(self, _: nn.Module, args: Any, output: Any) -> None:
        """A hook of a transparent module."""
        value = first_tensor(args)
        if self.are_due() and value is not None and isinstance(output, torch.Tensor):
            with apart_from_model():
                self.readers.pass_on(value, output)


class WatchedFunctions(TorchDispatchMode):
    """Shows each operation of torch in its ``with`` block to the readers of quantized outputs, and runs it as it is.

    A call of the observed model is such a block, in the first batch.

    Args:
        readers: of one session.
    """

    supports_higher_order_operators = True

    def __init__(self, readers: OutputReaders) -> None:
        super().__init__()
        self._readers = readers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; called by torch."""
        kwargs = kwargs or {}
        if is_apart_from_model():
            return func(*args, **kwargs)
        with apart_from_model():
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            value = self._readers.compute(func, tensors)
        result = func(*args, **kwargs)
        if value is not None:
            with apart_from_model():
                self._readers.keep(value, result[0] if isinstance(result, tuple) else result)
        return result


def _attach_watch(hooks: _ReaderHooks) -> None:
    """Watch the functions of torch that read quantized outputs, from the outermost call of a module to its end.

    Each call is a block of its own, because the user's code may enter and leave other modes between two calls.
    """
    calls = hooks.observation.calls
    readers = hooks.readers
    modes: list[WatchedFunctions] = []  # at most one
    callers: list[nn.Module] = []  # the outermost module, as often as it is being called

    def begin(module: nn.Module, args: Any) -> None:
        if not modes and hooks.are_due() and not calls.is_paused and not is_inside_quantized(module):
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
            readers.compute(None, _tensors_in(output))

    for module in hooks.observation.model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            continue
        hooks.keep(module, module.register_forward_pre_hook(begin))
        # called after a forward that raises, too; before the hooks of sessions that began to watch earlier
        hooks.keep(module, module.register_forward_hook(end, prepend=True, always_call=True))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ---------------------------------------------------------------------- the ranges that follow


def settle_outputs(observation: Observation, readers: OutputReaders) -> set[str]:
    """Leave outputs in float that are quantized behind their followers, once the readers of all ranks are known.

    Returns:
        Names of the modules whose output's range begins at zero: nothing but a ReLU reads it, and the scheme is for
        engines that fold one.
    """
    readers.followed.update(_without_outputs(observation, readers))
    observation.drop_outputs(readers.followed)
    return readers.begin_at_zero if FOLLOWERS in observation.plan.config.config_groups else set()


def qparams_from_zero(observer: Observer) -> QParamsDict:
    """The qparams of an output that nothing but a ReLU reads: its range begins at zero."""
    low, high = observer.get_min_max()
    return compute_qparams(low.clamp(min=0), high.clamp(min=0), observer.args, signed=observer.signed)


def _without_outputs(observation: Observation, readers: OutputReaders) -> set[str]:
    """Names of blocks whose output is no sum, and of followers that the model has and does not call.

    No data have reached them, while data have reached others; where no data were run at all, there are none.
    """
    unreached = set(observation.unreached or ())
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
    """The qparams of inputs that are quantized outputs already, which keep them.

    Args:
        observation: has the plan.
        readers: which module reads which output.
        computed: the qparams of all activations, each from its own observer.
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
