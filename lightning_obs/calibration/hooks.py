"""Give observers what the modules of a plan read and write, while somebody runs the model.

A hook never changes what it sees. Padding is taken out here, before any observer: a masked token reaches none of them.

Modules that read one tensor (q, k, v; gate, up) share what observers of one kind find in it, if it is the same object
and was not changed in between. torch counts changes in place, except of inference tensors, which Lightning validates
with. There only modules of a fused set share: engines run them as one module, which reads one tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.calibration.token_mask import select_positions
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.attention import hooked_attention, register_state_hook
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.compile_stance import run_eagerly
from lightning_obs.forward.quantized_forward import is_inside_quantized
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import tokens_of
from lightning_obs.observers import Observer
from lightning_obs.observers.base import Key
from lightning_obs.schemes.planned_modules import Plan, PlannedModule


@dataclass
class _Read:
    """The tensor that was read last.

    Attributes:
        tensor: a weak reference to it.
        stamp: changes with it.
        tokens: those that count; None: not selected yet.
        measured: what observers found in them, by kind.
    """

    tensor: Callable[[], torch.Tensor | None]
    stamp: Hashable
    tokens: torch.Tensor | None = None
    measured: dict[Hashable, Any] = field(default_factory=dict)


class ObserverHooks:
    """The hooks of one plan. Nothing is attached before :meth:`attach`, and nothing is left after :meth:`detach`.

    Args:
        model: the model that holds the targets.
        plan: the modules.
        observers: ``{(module name, base name): observer}``. The observer of a weight is given the module's inputs too
            if it asks for them (:attr:`~lightning_obs.observers.Observer.needs_inputs`).
        extremes: by module name, second observers of inputs.
        experts: of the model; says which tokens an expert got, and when to look away.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        observers: Mapping[Key, Observer],
        extremes: Mapping[str, Observer],
        experts: ExpertWatch,
    ) -> None:
        self._model, self._targets, self._observers, self._experts = model, plan.targets, observers, experts
        self._extremes = extremes
        self._fused = {name: tuple(fused) for fused in plan.fused for name in fused}
        self._attached: ExitStack | None = None
        self._read: _Read | None = None
        #: how often observers looked at a tensor since :meth:`attach`; less than they were called, where they share
        self.measurements = 0
        self._mask: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: no module of it has hooks."""
        return {**vars(self), "_attached": None}

    @property
    def are_attached(self) -> bool:
        """Whether they are registered now."""
        return self._attached is not None

    @property
    def paused(self) -> bool:
        """Whether nothing is observed: the data are not asked for, or run once more for another purpose."""
        return self._experts.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._experts.paused = paused

    @property
    def masks_tokens(self) -> bool:
        """Whether tokens are kept out, not only whole samples."""
        return self._mask is not None and self._mask.ndim > 1

    def mask_tokens(self, mask: torch.Tensor | None) -> None:
        """Keep tokens out of every observer from now on; None keeps none out.

        Args:
            mask: ``(batch, tokens)``, nonzero for a token that counts.
        """
        self._mask = self._experts.mask = mask
        self._read = None

    def attach(self) -> None:
        """Register all hooks."""
        self.detach()
        self.measurements, self._mask, self.paused = 0, None, False
        with ExitStack() as stack:
            stack.enter_context(run_eagerly())
            states = {target.module: target.states for target in self._targets if target.states}
            stack.enter_context(hooked_attention(self._model, states))
            self._experts.attach(stack)
            for target in self._targets:
                for base_name in target.states:
                    stack.callback(register_state_hook(target.module, base_name, self._state(target, base_name)))
                for register, hook in self._hooks(target):
                    stack.callback(keep_hook_out(target.module, register(hook, with_kwargs=True)))
            self._attached = stack.pop_all()

    def detach(self) -> None:
        """Remove every hook. Can be called at any time, any number of times."""
        if self._attached is not None:
            self._attached.close()
            self._attached = None
        self._read = self._mask = None

    def _hooks(self, target: PlannedModule) -> list[tuple[Any, Any]]:
        """``(how to register it, hook)`` of one module."""
        inputs, output, weight = (self._observers.get((target.name, base)) for base in ("input", "output", "weight"))
        for_weight = weight if weight is not None and weight.needs_inputs else None
        hooks: list[tuple[Any, Any]] = []
        if inputs is not None or for_weight is not None:

            def observe_input(module: nn.Module, args: Any, kwargs: Any) -> None:
                self._observe(target, first_input(args, kwargs), inputs, for_weight, self._extremes.get(target.name))

            hooks.append((target.module.register_forward_pre_hook, observe_input))
        if output is not None:

            def observe_output(module: nn.Module, args: Any, kwargs: Any, value: Any) -> None:
                self._observe(target, value, output)

            # In training a hook of ours quantizes the output; the observer has to see it before that.
            hooks.append((partial(target.module.register_forward_hook, prepend=True), observe_output))
        return hooks

    def _state(self, target: PlannedModule, base_name: str) -> Callable[[torch.Tensor], None]:
        observer = self._observers[target.name, base_name]
        return lambda value: self._observe(target, value, observer, heads=True)

    def _observe(
        self,
        target: PlannedModule,
        value: Any,
        observer: Observer | None,
        for_weight: Observer | None = None,
        extremes: Observer | None = None,
        heads: bool = False,
    ) -> None:
        if isinstance(value, (tuple, list)):
            value = next((x for x in value if isinstance(x, torch.Tensor)), None)
        if isinstance(value, DTensor):
            value = value.to_local()
        deaf = self.paused or self._experts.is_deaf(target.name) or is_inside_quantized(target.module) or _in_backward()
        if deaf or not isinstance(value, torch.Tensor):
            return
        if not value.is_floating_point() or value.itemsize == 1:
            raise CalibrationError(
                "only floating point values can be observed",
                where=[target.name],
                got=str(value.dtype).removeprefix("torch."),
                expected="float64, float32, float16 or bfloat16",
                remedy="list the module in `ignore`, or quantize only its weight.",
            )
        apart = False
        if self._mask is not None and not heads:
            given, value = value, tokens_of(target.module, value)
            apart = value is not given
        read = self._reading(value, target.name)
        tokens = value.detach()
        if self._mask is not None:
            if read.tokens is None:
                select = self._experts.select_state if heads else self._experts.select
                read.tokens = (select_positions if apart else select)(tokens, self._mask, target.name)
            tokens = read.tokens
        before = len(read.measured)
        for each in filter(None, (observer, extremes)):
            each.observe_shared(tokens, read.measured)
        if for_weight is not None:
            for_weight.observe_inputs(tokens, read.measured)
        self.measurements += len(read.measured) - before

    def _reading(self, value: torch.Tensor, name: str) -> _Read:
        """What is known of ``value``, which the module ``name`` reads."""
        stamp = self._fused.get(name, name) if value.is_inference() else value._version
        if self._read is None or self._read.tensor() is not value or self._read.stamp != stamp:
            self._read = _Read(weakref.ref(value), stamp)
        return self._read


def _in_backward() -> bool:
    """Whether autograd is running: activation checkpointing calls modules again there, with data already seen."""
    return bool(torch._C._current_graph_task_id() != -1)
