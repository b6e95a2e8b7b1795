"""Give observers the inputs and outputs of a plan's modules while the model's owner runs it.

A hook never changes a value. Padding is removed here: a masked token reaches no observer.

Modules that read the same tensor object (q, k, v; gate, up) share the statistics of observers of one kind while its
version does not change. Inference tensors, which Lightning validates with, have no version: there only modules of a
fused set share, within one batch, since engines run them as one module that reads one tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_obs.calibration.token_mask import Layout, TokenSelection
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.attention import hooked_attention, register_state_hook
from lightning_obs.forward.quantized_forward import INSIDE
from lightning_obs.forward.shared_blocks import run_eagerly
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import is_transformers_model, tokens_of
from lightning_obs.model.weight import adapters_of
from lightning_obs.observers import Observer
from lightning_obs.observers.shared_measurements import observe_inputs_shared, observe_shared
from lightning_obs.schemes.planned_modules import PlannedModule

if TYPE_CHECKING:
    from lightning_obs.calibration.session import CalibrationSession

#: base names of second observers
RANGE, HESSIAN, GRADIENTS = "input range", "weight by its inputs", "weight by the gradients at its outputs"


@dataclass
class Read:
    """The tensor that was read last, its tokens that count, and the statistics measured in them."""

    tensor: Callable[[], torch.Tensor | None] | None = None
    stamp: Hashable = None  # changes with the tensor
    tokens: torch.Tensor | None = None  # not selected yet
    measured: dict[Hashable, Any] = field(default_factory=dict)  # by the observers' kind

    def forget(self) -> None:
        """Forget the tensor and its statistics."""
        vars(self).update(vars(Read()))

    def see(self, tensor: torch.Tensor, stamp: Hashable) -> None:
        """Keep the statistics if the tensor was read last and has not changed; else begin with this tensor."""
        if self.tensor is None or self.tensor() is not tensor or self.stamp != stamp:
            vars(self).update(vars(Read(weakref.ref(tensor), stamp)))


class ObserverHooks:
    """The hooks of a session, from :meth:`attach` until its stack is closed."""

    def __init__(self, session: CalibrationSession) -> None:
        self._session = session
        self._selection = TokenSelection(batch_first=is_transformers_model(session.model))
        self._fused = {name: tuple(fused) for fused in session.plan.fused for name in fused}

    def attach(self, stack: ExitStack) -> None:
        """Register all hooks; ``stack`` removes them."""
        targets = self._session.plan.targets
        stack.enter_context(run_eagerly())
        states = {target.module: target.states for target in targets if target.states}
        stack.enter_context(hooked_attention(self._session.model, states))
        self._session.experts.attach(self._session, stack)
        for target in targets:
            for base_name in target.states:
                observe = self._observation(target, [self._session.fed[target.name, base_name]])
                stack.callback(register_state_hook(target.module, base_name, observe))
            for owner, handle in self._hooked(target):
                stack.callback(keep_hook_out(owner, handle))

    def _hooked(self, target: PlannedModule) -> Iterator[tuple[nn.Module, RemovableHandle]]:
        """Register the hooks of one module; each is given with the module that holds it."""
        module = target.module
        inputs, of_weight, outputs = (
            [fed for base in bases if (fed := self._session.fed.get((target.name, base))) is not None]
            for bases in (("input", RANGE), ("weight", HESSIAN), ("output",))
        )
        if inputs or of_weight:
            read = self._observation(target, inputs, of_weight)
            reading = module.register_forward_pre_hook(
                lambda _, args, kw: read((*args, *kw.values())), with_kwargs=True
            )
            yield module, reading
        if outputs:
            written = self._observation(target, outputs)
            yield from _output_hooks(module, written)

    def _observation(
        self, target: PlannedModule, observers: list[Observer], of_weight: Sequence[Observer] = ()
    ) -> Callable[[Any], None]:
        """A function that gives a value to the observers of a module; of a tuple, the first tensor."""
        session, experts, module, name = self._session, self._session.experts, target.module, target.name
        is_forced, waits = experts.is_forced(name), experts.is_waiting(name)

        def observe(value: Any) -> None:
            deaf = session.is_paused or (is_forced and not experts.is_forcing)
            # In backward, activation checkpointing calls modules again with data already seen.
            if deaf or INSIDE in vars(module) or torch._C._current_graph_task_id() != -1:
                return
            if isinstance(value, (tuple, list)):
                value = next((x for x in value if isinstance(x, torch.Tensor)), None)
            if isinstance(value, DTensor):
                value = value.to_local()
            if not isinstance(value, torch.Tensor):
                return
            if not value.is_floating_point() or value.itemsize == 1:
                raise CalibrationError(
                    "only floating point values can be observed",
                    where=[name],
                    got=str(value.dtype).removeprefix("torch."),
                    expected="float64, float32, float16 or bfloat16",
                    remedy="list the module in `ignore`, or quantize only its weight.",
                )
            mask, given = session.mask, value
            if mask is not None and not target.states:
                value = tokens_of(module, value)
            weighs = session.token_weights is not None and bool(of_weight) and name in session.token_weights.modules
            in_batch: Hashable = self._fused.get(name, name), session.batches
            stamp = in_batch if value.is_inference() or weighs else value._version
            read = session.read
            read.see(value, stamp)
            tokens = value.detach()
            before = len(read.measured)
            observed = experts.wait(name, observers, tokens, mask, read.measured) if waits else observers
            if mask is not None and (observed or of_weight):
                if read.tokens is None:
                    layout: Layout = "heads" if target.states else "tokens" if value is given else "positions"
                    read.tokens = experts.select(tokens, mask, name, self._selection, layout)
                tokens = read.tokens
            for observer in observed:
                observe_shared(observer, tokens, read.measured)
            if weighs:
                tokens = session.token_weights.weigh(name, given.detach())
                tokens = tokens if mask is None else experts.select(tokens, mask, name, self._selection, "tokens")
            for observer in of_weight:
                observe_inputs_shared(observer, tokens, read.measured)
            session.measurements += len(read.measured) - before

        return observe


def _output_hooks(module: nn.Module, observe: Callable[[Any], None]) -> Iterator[tuple[nn.Module, RemovableHandle]]:
    """Show ``observe`` each output of a module; of one with LoRA adapters, the output that it has when merged.

    In training a hook of ours quantizes the output; the observer has to see it before that. There the module itself
    runs merged, in place of its LoRA layer (:func:`quantize_training_forward`); else that layer adds the adapters.
    """
    adapters = adapters_of(module)

    def runs_merged() -> bool:
        return adapters is None or "forward" in vars(adapters)

    def see(_: nn.Module, args: Any, output: Any) -> None:
        if runs_merged():
            observe(output)

    def see_sum(_: nn.Module, args: Any, output: Any) -> None:
        if not runs_merged():
            observe(output)

    yield module, module.register_forward_hook(see, prepend=True)
    if adapters is not None:
        yield adapters, adapters.register_forward_hook(see_sum, prepend=True)
