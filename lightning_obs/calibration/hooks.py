"""Give observers the inputs and outputs of a plan's modules while the model's owner runs it.

A hook never changes a value. Padding is removed here: a masked token reaches no observer.

Modules that read the same tensor object (q, k, v; gate, up) share the statistics of observers of one kind while its
version does not change. Inference tensors, which Lightning validates with, have no version: there only modules of a
fused set share, within one batch, since engines run them as one module that reads one tensor.
Calls of the whole model pass :class:`ModelCalls` before they run: it counts them, takes their mask, and weighs their
tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.calibration.observation import HESSIAN, RANGE, Observation, fused_sets_by_module
from lightning_obs.calibration.token_mask import PADDING, Layout, TokenSelection, require_mask
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.attention import hooked_attention, register_state_hook
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.model.kinds import is_transformers_model, tokens_of
from lightning_obs.model.mark import is_inside_quantized, keep_hook_out
from lightning_obs.model.weight import adapters_of
from lightning_obs.observers import Observer
from lightning_obs.observers.observer import observe_inputs_shared, observe_shared
from lightning_obs.schemes.planned_modules import PlannedModule


class ObserverHooks:
    """The hooks that fill the record of an observation, from :meth:`attach` to :meth:`detach`.

    Args:
        observation: the record.
        token_mask: name of the model's argument that is nonzero for tokens that count; None: none.
    """

    def __init__(self, observation: Observation, token_mask: str | None = None) -> None:
        self.calls = ModelCalls(observation, token_mask)
        self._observation = observation
        self._attached: ExitStack | None = None
        #: how much each token counts, since the hooks were last attached; None: all count alike
        self.token_weights: TokenWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not attached."""
        return {**vars(self), "_attached": None, "token_weights": None}

    @property
    def is_attached(self) -> bool:
        """Whether hooks are on the model."""
        return self._attached is not None

    def attach(
        self,
        count_calls: bool,
        attach_further: Callable[[Observation, ExitStack], None] | None = None,
        observes_modules: bool = True,
    ) -> None:
        """Register all hooks.

        Args:
            count_calls: count calls of the model as batches.
            attach_further: registers hooks after those of the observers; its stack removes them. None: there are none.
            observes_modules: off: only the model's calls are hooked, whose modules are observed in later runs.

        Raises:
            CalibrationError: tokens are to be weighed, and the model cannot run backward as a whole.
        """
        observation = self._observation
        token_weights = TokenWeights(observation) if observation.weighed_modules else None
        self.token_weights = token_weights
        with ExitStack() as stack:
            stack.enter_context(run_eagerly())
            stack.enter_context(unfused(observation.model))
            if observes_modules:
                self.attach_modules(token_weights, stack)
            if attach_further is not None:
                attach_further(observation, stack)
            self.calls.attach(token_weights, count_calls, stack)
            self._attached = stack.pop_all()

    def detach(self) -> None:
        """Remove all hooks. Can be called at any time, any number of times."""
        attached = self._attached
        self._attached = None
        self._observation.calls.mask = None
        if attached is not None:
            self._observation.calls.cache.forget()
            attached.close()

    def attach_modules(self, token_weights: TokenWeights | None, stack: ExitStack) -> None:
        """Register the hooks of all planned modules, attention modules and experts; ``stack`` removes them.

        The model runs eagerly and unfused meanwhile, which the caller sees to.
        """
        observation = self._observation
        targets = observation.plan.targets
        states = {target.module: target.states for target in targets if target.states}
        if states:
            stack.enter_context(hooked_attention(observation.model, states))
        if observation.experts is not None:
            observation.experts.attach(observation.calls, stack)
        readers = _Readers(observation, token_weights)
        for target in targets:
            for base_name in target.states:
                observe = _ActivationHook(readers, target, self._observers_of(target, [base_name]))
                stack.callback(register_state_hook(target.module, base_name, observe))
            self._attach_inputs(target, readers, stack)
            self._attach_outputs(target, readers, stack)

    def _attach_inputs(self, target: PlannedModule, readers: _Readers, stack: ExitStack) -> None:
        """Observe the inputs of a module, for its input's scale and for its weight."""
        input_observers = self._observers_of(target, ["input", RANGE])
        weight_observers = self._observers_of(target, ["weight", HESSIAN])
        if not input_observers and not weight_observers:
            return
        observe = _ActivationHook(readers, target, input_observers, weight_observers)

        def observe_arguments(_: nn.Module, args: Any, kwargs: Any) -> None:
            observe((*args, *kwargs.values()))

        handle = target.module.register_forward_pre_hook(observe_arguments, with_kwargs=True)
        remove_hook = keep_hook_out(target.module, handle)
        stack.callback(remove_hook)

    def _attach_outputs(self, target: PlannedModule, readers: _Readers, stack: ExitStack) -> None:
        """Observe the outputs of a module."""
        observers = self._observers_of(target, ["output"])
        if not observers:
            return
        observe = _ActivationHook(readers, target, observers)
        if target.is_block:
            self._attach_block(target, observe, stack)
        else:
            _attach_output_hooks(target.module, observe, stack)

    def _attach_block(self, target: PlannedModule, observe: Callable[[Any], None], stack: ExitStack) -> None:
        """Observe the outputs of a block, if they are sums."""
        output_readers = self._observation.calls.readers
        assert output_readers is not None  # the output of a block is planned

        def observe_sum(_: nn.Module, args: Any, output: Any) -> None:
            if output_readers.sums.get(target.name):
                observe(output)

        handle = target.module.register_forward_hook(observe_sum, prepend=True)
        remove_hook = keep_hook_out(target.module, handle)
        stack.callback(remove_hook)

    def _observers_of(self, target: PlannedModule, base_names: Sequence[str]) -> list[Observer]:
        """The observers of a module that data reach, in the order of the base names."""
        observers = []
        for base_name in base_names:
            observer = self._observation.data_observers.get((target.name, base_name))
            if observer is not None:
                observers.append(observer)
        return observers


class _Readers:
    """The objects that the hooks of all modules share.

    Attributes:
        calls: the calls of the model; the hooks count measurements in it.
        experts: the model's experts; None: it has none.
        fused_sets: by module name, the fused set that it is in.
        token_weights: how much each token counts for a weight; None: all count alike.
    """

    def __init__(self, observation: Observation, token_weights: TokenWeights | None) -> None:
        self.calls = observation.calls
        self.experts = observation.experts
        self._model = observation.model
        self.fused_sets = fused_sets_by_module(observation.plan)
        self.token_weights = token_weights

    @cached_property
    def selection(self) -> TokenSelection:
        """Removes padding; made when the first mask is used."""
        return TokenSelection(batch_first=is_transformers_model(self._model))


class _ActivationHook:
    """Gives the inputs, the outputs, or a state of attention of one module to its observers.

    Args:
        readers: shared with the hooks of all modules.
        target: the module.
        observers: of the activation.
        weight_observers: observe the activation for the module's weight.
    """

    def __init__(
        self,
        readers: _Readers,
        target: PlannedModule,
        observers: Sequence[Observer],
        weight_observers: Sequence[Observer] = (),
    ) -> None:
        self._readers = readers
        self._calls = readers.calls
        #: the experts that the module is in; None: it is in none
        self._experts: ExpertWatch | None = None
        if readers.experts is not None and readers.experts.holds(target.name):
            self._experts = readers.experts
        self._target = target
        self._observers = observers
        self._weight_observers = weight_observers
        #: the same for all modules of a fused set, which read one tensor
        self._reader: Hashable = readers.fused_sets.get(target.name, target.name)
        token_weights = readers.token_weights
        weighs_tokens = token_weights is not None and target.name in token_weights.modules
        self._token_weights = token_weights if weighs_tokens and weight_observers else None

    def __call__(self, value: Any) -> None:
        """Observe a value that the module was given or returned; of a tuple, the first tensor."""
        if self._ignores_this_call():
            return
        tensor = first_tensor(value)
        if tensor is not None:
            with apart_from_model():
                self._observe_tensor(tensor)

    def _observe_tensor(self, tensor: torch.Tensor) -> None:
        """Observe a tensor that counts."""
        self._require_floating_point(tensor)
        tokens = tensor
        if self._calls.mask is not None and not self._target.states:
            tokens = tokens_of(self._target.module, tensor)
        cache = self._calls.cache
        cache.read(tokens, self._stamp(tokens))
        measurements_before = len(cache.measured)
        self._observe(tokens.detach(), tensor, self._layout(is_unchanged=tokens is tensor))
        self._calls.measurements += len(cache.measured) - measurements_before

    def _ignores_this_call(self) -> bool:
        if self._calls.is_paused or is_inside_quantized(self._target.module):
            return True
        if self._experts is not None and self._experts.are_forced and not self._experts.is_forcing:
            return True
        # In backward, activation checkpointing calls modules again with data already seen.
        return torch._C._current_graph_task_id() != -1

    def _require_floating_point(self, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise CalibrationError(
                "only floating point values can be observed",
                where=[self._target.name],
                got=str(tensor.dtype).removeprefix("torch."),
                expected="float64, float32, float16 or bfloat16",
                remedy="list the module in `ignore`, or quantize only its weight.",
            )

    def _layout(self, is_unchanged: bool) -> Layout:
        if self._target.states:
            return "heads"
        return "tokens" if is_unchanged else "positions"

    def _stamp(self, tokens: torch.Tensor) -> Hashable:
        """A value that differs from an earlier one where the statistics of the tensor cannot be shared."""
        if tokens.is_inference() or self._token_weights is not None:
            return self._reader, self._calls.batches
        return tokens._version

    def _observe(self, tokens: torch.Tensor, tensor: torch.Tensor, layout: Layout) -> None:
        """Give an activation to all observers of the module.

        Args:
            tokens: the activation, its tokens in rows where there is a mask.
            tensor: the activation as the module has it.
            layout: of ``tokens``.
        """
        measured = self._calls.cache.measured
        observers = self._observers
        if self._experts is not None and self._experts.may_wait(self._target.name):
            observers = self._experts.wait(self._target.name, observers, tokens, self._calls.mask, measured)
        if self._calls.mask is not None and (observers or self._weight_observers):
            tokens = self._tokens_that_count(tokens, self._calls.mask, layout)
        for observer in observers:
            observe_shared(observer, tokens, measured)
        if self._token_weights is not None:
            tokens = self._weighed_tokens(tensor, self._token_weights)
        for observer in self._weight_observers:
            observe_inputs_shared(observer, tokens, measured)

    def _tokens_that_count(self, tokens: torch.Tensor, mask: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The rows of an activation that the mask does not exclude; modules that read one tensor share them."""
        cache = self._calls.cache
        if cache.tokens is None:
            cache.tokens = self._select(tokens, mask, layout)
        return cache.tokens

    def _weighed_tokens(self, tensor: torch.Tensor, token_weights: TokenWeights) -> torch.Tensor:
        """The tokens that count, each times the root of its weight."""
        weighed = token_weights.weigh(self._target.name, tensor.detach())
        mask = self._calls.mask
        if mask is None:
            return weighed
        return self._select(weighed, mask, "tokens")

    def _select(self, value: torch.Tensor, mask: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The rows of an activation that the mask does not exclude; an expert's, by the tokens that it was given."""
        selection = self._readers.selection
        if self._experts is None:
            return selection.of(value, mask, self._target.name, layout)
        return self._experts.select(value, mask, self._target.name, selection, layout)


#: whether an observer is looking at the values of a model
_is_apart: ContextVar[bool] = ContextVar("is_apart", default=False)


@contextmanager
def apart_from_model() -> Iterator[None]:
    """For a ``with`` block whose operations are not the model's: hooks that observe enter it."""
    token = _is_apart.set(True)
    try:
        yield
    finally:
        _is_apart.reset(token)


def is_apart_from_model() -> bool:
    """Whether the present operation is not the model's; asked where the operations of the model are watched."""
    return _is_apart.get()


def first_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, or the first one of a tuple or list; of a DTensor, this rank's part."""
    candidates = value if isinstance(value, (tuple, list)) else (value,)
    for candidate in candidates:
        if isinstance(candidate, DTensor):
            return candidate.to_local()
        if isinstance(candidate, torch.Tensor):
            return candidate
    return None


def _attach_output_hooks(module: nn.Module, observe: Callable[[Any], None], stack: ExitStack) -> None:
    """Give each output of a module to ``observe``; of one with LoRA adapters, the output that it has when merged.

    In training a hook of ours quantizes the output; the observer has to see it before that. There the module itself
    runs merged, in place of its LoRA layer (:func:`quantize_training_forward`); else that layer adds the adapters.
    """
    adapters = adapters_of(module)

    def runs_merged() -> bool:
        return adapters is None or "forward" in vars(adapters)

    def observe_output(_: nn.Module, args: Any, output: Any) -> None:
        if runs_merged():
            observe(output)

    def observe_sum(_: nn.Module, args: Any, output: Any) -> None:
        if not runs_merged():
            observe(output)

    handle = module.register_forward_hook(observe_output, prepend=True)
    remove_hook = keep_hook_out(module, handle)
    stack.callback(remove_hook)
    if adapters is not None:
        handle = adapters.register_forward_hook(observe_sum, prepend=True)
        remove_hook = keep_hook_out(adapters, handle)
        stack.callback(remove_hook)


# ---------------------------------------------------------------------- the calls of the model


class ModelCalls:
    """Prepares each call of the model for the observers of its modules.

    Args:
        observation: counts the calls, and holds the mask of the present one.
        token_mask: name of the model's argument that is nonzero for tokens that count; None: none.
    """

    def __init__(self, observation: Observation, token_mask: str | None = None) -> None:
        self._observation = observation
        self._calls = observation.calls
        self._token_mask = token_mask
        self._token_weights: TokenWeights | None = None
        self._counts_calls = True
        self._has_warned_of_padding = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not attached."""
        return {**vars(self), "_token_weights": None}

    def attach(self, token_weights: TokenWeights | None, count_calls: bool, stack: ExitStack) -> None:
        """Register the hooks on the model; ``stack`` removes them.

        Args:
            token_weights: measures how much each token of a call counts.
            count_calls: count calls of the model as batches.
            stack: removes the hooks when it closes.
        """
        model = self._observation.model
        self._counts_calls = count_calls
        self._token_weights = token_weights
        handle = model.register_forward_pre_hook(self._on_call, with_kwargs=True)
        remove_hook = keep_hook_out(model, handle)
        stack.callback(remove_hook)
        if token_weights is not None:
            token_weights.attach(stack)

    def mask_tokens(self, mask: torch.Tensor | None) -> None:
        """Keep padding out of every observer from the next call on.

        Args:
            mask: ``(batch, tokens)`` or ``(batch,)``, nonzero for tokens or samples that count; None: all count.
        """
        self._calls.mask = None if mask is None else require_mask(mask, "mask_tokens").cpu()
        self._calls.cache.forget()

    def warn_of_padding(self, mask: Any) -> None:
        """Warn, once, if tokens that ``mask``, ``(batch, tokens)``, marks as padding are about to be observed."""
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            return
        is_masked = self._calls.mask is not None and self._calls.mask.ndim > 1
        if self._has_warned_of_padding or is_masked or self._calls.is_paused or not self._observation.needs_data:
            return
        masked = int((mask == 0).sum())
        if masked:
            self._has_warned_of_padding = True
            warn(
                f"padding is observed: {PADDING} masks {masked} of {mask.numel()} tokens, and no token_mask is set. "
                f"token_mask={PADDING!r} keeps them out."
            )

    def _on_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Runs before each call of the model."""
        if is_inside_quantized(model):
            return
        if self._counts_calls:
            self._calls.batches += 1
        arguments = _arguments_by_name(model, args, kwargs)
        if self._token_mask is None:
            self.warn_of_padding(arguments.get(PADDING))
        else:
            self.mask_tokens(self._mask_argument(model, arguments, self._token_mask))
        if self._token_weights is not None and not self._calls.is_paused:
            self._token_weights.measure(model, args, kwargs)

    def _mask_argument(self, model: nn.Module, arguments: Mapping[str, Any], name: str) -> torch.Tensor:
        """The mask among the arguments of a call, which must have it."""
        mask: torch.Tensor | None = arguments.get(name)
        if mask is None:
            raise CalibrationError(
                f"token_mask={name!r} was not given to the model",
                where=[type(model).__name__],
                got=f"a call with {', '.join(arguments)}",
                remedy="pass it in every batch, or leave token_mask out if there is no padding.",
            )
        return mask


def _arguments_by_name(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call; keyword arguments alone if the call will fail, or the forward is compiled."""
    with suppress(TypeError, ValueError):
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
        return {**bound.arguments, **bound.kwargs}
    return kwargs
