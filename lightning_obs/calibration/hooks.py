"""The hooks that give observers the inputs and outputs of planned modules while the user's code runs the model.

A session attaches :class:`ObserverHooks` before the data and detaches them after it. A hook never changes a value.
Padding is removed here: a masked token reaches no observer.

Modules that read the same tensor object (q, k, v; gate, up) share the statistics of observers of one kind as long as
the tensor's version counter does not change. Inference tensors, with which Lightning validates, have no version
counter. So for them, only modules of a fused set share statistics, within one batch: engines run a fused set as one
module that reads one tensor.

A pre-hook on the whole model (:class:`ModelCalls`) prepares each call: it counts the batch, takes the token mask from
the arguments, and measures token weights (:mod:`.token_weights`).
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

from lightning_obs.calibration.base_names import HESSIAN, RANGE
from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.calibration.hold_out import HoldOut, Place
from lightning_obs.calibration.observation import Observation, fused_sets_by_module
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

    A session has one for its lifetime. A calibration step by step makes one for each step and batch, and calls
    :meth:`attach_modules` alone.

    Args:
        observation: the record.
        token_mask: name of the model's argument that is nonzero for tokens that count; None: the model's arguments
            give no mask.
    """

    def __init__(self, observation: Observation, token_mask: str | None = None) -> None:
        self.calls = ModelCalls(observation, token_mask)
        self._observation = observation
        self._attached: ExitStack | None = None
        #: how much each token counts, since the hooks were last attached; None: all count alike
        self.token_weights: TokenWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the registered hooks out of a copy or pickle: a copy is not attached."""
        return {**vars(self), "_attached": None, "token_weights": None}

    @property
    def is_attached(self) -> bool:
        """Whether hooks are on the model; ``CalibrationSession.is_attached`` asks this."""
        return self._attached is not None

    def attach(
        self,
        count_calls: bool,
        attach_further: Callable[[Observation, ExitStack], None] | None = None,
        observes_modules: bool = True,
        keep_token_weights: bool = False,
    ) -> None:
        """Register all hooks.

        ``CalibrationSession.attach`` calls this before the data, and :func:`.observe_kept_calls` before kept calls run.

        Args:
            count_calls: count each call of the model as a batch.
            attach_further: called with the observation and a stack, to register hooks after those of the observers;
                the stack removes these hooks in :meth:`detach`. None: there are no such hooks.
            observes_modules: False: register only the hooks on the whole model. A session that keeps the model's calls
                (:attr:`.KeptRuns.observe_modules`) observes the modules later, when it runs the calls again.
            keep_token_weights: where tokens counted alike before, they go on to count alike, since what is observed now
                is added to the same statistics.

        Raises:
            CalibrationError: tokens are to be weighed, and the model cannot run backward as a whole.
        """
        observation = self._observation
        token_weights = self.token_weights if keep_token_weights else None
        if token_weights is None and observation.weighed_modules:
            token_weights = TokenWeights(observation)
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
        """Remove all hooks, and forget the present mask and the shared statistics of the tensor that was read last.

        Called by ``CalibrationSession.detach``, after the data and before hooks are attached anew. Without hooks only
        the mask is forgotten.
        """
        attached = self._attached
        self._attached = None
        self._observation.calls.mask = None
        if attached is not None:
            self._observation.calls.cache.forget()
            attached.close()

    def attach_modules(self, token_weights: TokenWeights | None, stack: ExitStack) -> None:
        """Register the hooks of all planned modules, attention modules and experts; ``stack`` removes them.

        Called by :meth:`attach`, and by ``StepwiseCalibration`` before each run of a batch. The caller makes the model
        run eagerly and unfused (:func:`.run_eagerly`, :func:`.unfused`) for as long as the hooks are registered.

        Args:
            token_weights: how much each token counts in the observation of weights; None: all tokens count alike.
            stack: removes the hooks when it closes.
        """
        observation = self._observation
        targets = observation.plan.targets
        states = {target.module: target.states for target in targets if target.states}
        if states:
            stack.enter_context(hooked_attention(observation.model, states))
        if observation.experts is not None:
            observation.experts.attach(observation.calls, stack)
        shared = _SharedByHooks(observation, token_weights)
        for target in targets:
            for base_name in target.states:
                observe = _ActivationHook(shared, target, self._observers_of(target, [base_name]))
                stack.callback(register_state_hook(target.module, base_name, observe))
            self._attach_inputs(target, shared, stack)
            self._attach_outputs(target, shared, stack)

    def _attach_inputs(self, target: PlannedModule, shared: _SharedByHooks, stack: ExitStack) -> None:
        """Register the hook that observes a module's inputs: for the scale of the input, and for the weight."""
        input_observers = self._observers_of(target, ["input", RANGE])
        weight_observers = self._observers_of(target, ["weight", HESSIAN])
        if not input_observers and not weight_observers:
            return
        hold_out = self._observation.hold_outs.get(target.name)
        observe = _ActivationHook(shared, target, input_observers, weight_observers, hold_out)

        def observe_arguments(_: nn.Module, args: Any, kwargs: Any) -> None:
            observe((*args, *kwargs.values()))

        handle = target.module.register_forward_pre_hook(observe_arguments, with_kwargs=True)
        remove_hook = keep_hook_out(target.module, handle)
        stack.callback(remove_hook)

    def _attach_outputs(self, target: PlannedModule, shared: _SharedByHooks, stack: ExitStack) -> None:
        """Register the hook that observes a module's outputs, if the plan quantizes them."""
        observers = self._observers_of(target, ["output"])
        if not observers:
            return
        observe = _ActivationHook(shared, target, observers)
        if target.is_block:
            self._attach_block(target, observe, stack)
        else:
            _attach_output_hooks(target.module, observe, stack)

    def _attach_block(self, target: PlannedModule, observe: Callable[[Any], None], stack: ExitStack) -> None:
        """Register the hook that observes a block's outputs if they are sums of quantized outputs.

        A block is a module around others, such as a residual block, of which the plan quantizes only the output. In the
        first batch a hook of :mod:`.quantized_outputs`, which runs before this one at each call, notes in
        ``output_readers.sums`` whether the block returns such a sum.

        Args:
            target: the block.
            observe: called with each output that is a sum.
            stack: removes the hook when it closes.
        """
        output_readers = self._observation.calls.readers
        assert output_readers is not None  # the plan quantizes outputs

        def observe_sum(_: nn.Module, args: Any, output: Any) -> None:
            if output_readers.sums.get(target.name):
                observe(output)

        handle = target.module.register_forward_hook(observe_sum, prepend=True)
        remove_hook = keep_hook_out(target.module, handle)
        stack.callback(remove_hook)

    def _observers_of(self, target: PlannedModule, base_names: Sequence[str]) -> list[Observer]:
        """The observers of these base names that a module's hook has to feed, in the order of the base names."""
        observers = []
        for base_name in base_names:
            observer = self._observation.data_observers.get((target.name, base_name))
            if observer is not None:
                observers.append(observer)
        return observers


class _SharedByHooks:
    """The objects that the hooks of all modules share; made by :meth:`ObserverHooks.attach_modules`.

    Attributes:
        calls: the record of the model's calls; the hooks count measurements in it.
        experts: the watch over the model's experts; None: the model has none.
        fused_sets: by module name, the names of the modules of its fused set; without modules that are in no set.
        token_weights: how much each token counts in the observation of weights; None: all tokens count alike.
        collectives: of the observation; they tell the place of this rank's batches among those of all ranks.
    """

    def __init__(self, observation: Observation, token_weights: TokenWeights | None) -> None:
        self.calls = observation.calls
        self.experts = observation.experts
        self._model = observation.model
        self.fused_sets = fused_sets_by_module(observation.plan)
        self.token_weights = token_weights
        self.collectives = observation.collectives

    @cached_property
    def selection(self) -> TokenSelection:
        """Selects the rows of activations that a mask keeps; made when the first mask is used."""
        return TokenSelection(batch_first=is_transformers_model(self._model))


class _ActivationHook:
    """Gives one kind of activation of a module (inputs, outputs, or an attention state) to its observers.

    :class:`ObserverHooks` makes one for each, and registers a hook that calls it.

    Args:
        shared: the objects that all hooks share.
        target: the module.
        observers: of the activation.
        weight_observers: of the module's weight, which gather statistics of the module's inputs.
        hold_out: of the module, which observes the inputs, too, to judge the fit of its weight; None: the fit is not
            judged.
    """

    def __init__(
        self,
        shared: _SharedByHooks,
        target: PlannedModule,
        observers: Sequence[Observer],
        weight_observers: Sequence[Observer] = (),
        hold_out: HoldOut | None = None,
    ) -> None:
        self._shared = shared
        self._calls = shared.calls
        #: the watch over the model's experts, if the module is an expert or inside an expert; else None
        self._experts: ExpertWatch | None = None
        if shared.experts is not None and shared.experts.holds(target.name):
            self._experts = shared.experts
        self._target = target
        self._observers = observers
        self._weight_observers = weight_observers
        self._hold_out = hold_out
        #: equal for all modules of a fused set, which read one tensor
        self._reader: Hashable = shared.fused_sets.get(target.name, target.name)
        token_weights = shared.token_weights
        weighs_tokens = token_weights is not None and target.name in token_weights.modules
        self._token_weights = token_weights if weighs_tokens and weight_observers else None

    def __call__(self, value: Any) -> None:
        """Observe the tensor that the module was given or has returned, or the first tensor of a tuple or list.

        Called at each call of the module while hooks are attached; calls that are not to be observed are ignored.
        """
        if self._ignores_this_call():
            return
        tensor = first_tensor(value)
        if tensor is not None:
            with apart_from_model():
                self._observe_tensor(tensor)

    def _observe_tensor(self, tensor: torch.Tensor) -> None:
        """Observe a tensor, and count how many statistics had to be computed for it."""
        self._require_observable(tensor)
        tokens = tensor
        if self._calls.mask is not None and not self._target.states:
            tokens = tokens_of(self._target.module, tensor)
        cache = self._calls.cache
        cache.read(tokens, self._stamp(tokens))
        measurements_before = len(cache.measured)
        self._observe(tokens.detach(), tensor, self._layout(is_unchanged=tokens is tensor))
        self._calls.measurements += len(cache.measured) - measurements_before

    def _ignores_this_call(self) -> bool:
        """Whether the present call of the module is not observed; asked at each call."""
        if self._calls.is_paused or self._calls.is_kept or is_inside_quantized(self._target.module):
            return True
        # With calibrate_all_experts (``are_forced``), experts also run on all tokens of their layer. Only this extra
        # run (``is_forcing``) is observed, not the model's own calls of the experts.
        if self._experts is not None and self._experts.are_forced and not self._experts.is_forcing:
            return True
        # In backward (a graph task runs), activation checkpointing calls modules again with data already observed.
        return torch._C._current_graph_task_id() != -1

    def _require_observable(self, tensor: torch.Tensor) -> None:
        """Raise a CalibrationError for a nested tensor, and for integers, booleans or 8-bit floats."""
        if tensor.is_nested:
            raise CalibrationError(
                "nested tensors cannot be observed",
                where=[self._target.name],
                got=f"a torch.nested tensor of {str(tensor.layout).removeprefix('torch.')} layout",
                expected="a tensor with one length for all samples",
                remedy="pad the batch and set `token_mask`, list the module in `ignore`, or quantize only its weight.",
            )
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise CalibrationError(
                "only floating point values can be observed",
                where=[self._target.name],
                got=str(tensor.dtype).removeprefix("torch."),
                expected="float64, float32, float16 or bfloat16",
                remedy="list the module in `ignore`, or quantize only its weight.",
            )

    def _layout(self, is_unchanged: bool) -> Layout:
        """The layout of the observed activation; ``is_unchanged``: ``tokens_of`` returned the module's own tensor."""
        if self._target.states:
            return "heads"
        return "tokens" if is_unchanged else "positions"

    def _stamp(self, tokens: torch.Tensor) -> Hashable:
        """A key for the read cache: two reads of one tensor share statistics only if their keys are equal.

        The key of a tensor is its version counter. Inference tensors have no such counter. Where tokens have weights,
        the tensor alone does not tell what is observed: each fused set has other weights, in each batch. In both cases
        the key is the fused set (or the module that is in none) and the number of batches.
        """
        if tokens.is_inference() or self._token_weights is not None:
            return self._reader, self._calls.batches
        return tokens._version

    def _observe(self, tokens: torch.Tensor, tensor: torch.Tensor, layout: Layout) -> None:
        """Give an activation to all observers of the module.

        On an accelerator, the activation of an expert is kept until all experts of its layer have run, and observed
        together with theirs, in fewer kernel launches. :meth:`.ExpertWatch.wait` keeps it for the observers that can
        wait, and returns the others, which observe it now.

        Args:
            tokens: the activation; with a mask, of a convolution, as ``(batch, positions, channels)``.
            tensor: the activation as the module reads or returns it.
            layout: of ``tokens``.
        """
        measured = self._calls.cache.measured
        observers = () if self._calls.only_for_weights else self._observers
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
        if self._hold_out is not None:
            self._hold_out.observe(tokens, measured, Place.of(self._calls, self._shared.collectives))

    def _tokens_that_count(self, tokens: torch.Tensor, mask: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The rows of an activation that the mask keeps, selected once for all modules that read the same tensor."""
        cache = self._calls.cache
        if cache.tokens is None:
            cache.tokens = self._select(tokens, mask, layout)
        return cache.tokens

    def _weighed_tokens(self, tensor: torch.Tensor, token_weights: TokenWeights) -> torch.Tensor:
        """The tokens that the mask keeps, each multiplied by the square root of its weight."""
        weighed = token_weights.weigh(self._target.name, tensor.detach())
        mask = self._calls.mask
        if mask is None:
            return weighed
        return self._select(weighed, mask, "tokens")

    def _select(self, value: torch.Tensor, mask: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The rows of an activation that the mask keeps; inside an expert, of the tokens that were routed to it."""
        selection = self._shared.selection
        if self._experts is None:
            return selection.of(value, mask, self._target.name, layout)
        return self._experts.select(value, mask, self._target.name, selection, layout)


#: whether the operations that run now are a hook's own, not the model's
_is_apart: ContextVar[bool] = ContextVar("is_apart", default=False)


@contextmanager
def apart_from_model() -> Iterator[None]:
    """Mark the operations of a ``with`` block as not the model's own.

    The hooks here and in ``quantized_outputs.py`` do their work in such blocks, that of observers included.
    """
    token = _is_apart.set(True)
    try:
        yield
    finally:
        _is_apart.reset(token)


def is_apart_from_model() -> bool:
    """Whether the code runs in an :func:`apart_from_model` block.

    :class:`.WatchedFunctions` asks this at each operation of torch, and ignores the operations of such blocks.
    """
    return _is_apart.get()


def first_tensor(value: Any) -> torch.Tensor | None:
    """``value`` if it is a tensor, or the first tensor of a tuple or list; None without one.

    Of a DTensor, this rank's local tensor. The hooks here and in ``quantized_outputs.py`` call it with the arguments or
    the output of a module.
    """
    candidates = value if isinstance(value, (tuple, list)) else (value,)
    for candidate in candidates:
        if isinstance(candidate, DTensor):
            return candidate.to_local()
        if isinstance(candidate, torch.Tensor):
            return candidate
    return None


def _attach_output_hooks(module: nn.Module, observe: Callable[[Any], None], stack: ExitStack) -> None:
    """Register hooks that give each output of a module to ``observe``.

    The output of a module with LoRA adapters is observed with the adapters' part added. In quantized training
    (:func:`quantize_training_forward`) the module itself computes this sum, with merged weights; otherwise the LoRA
    layer around the module does. The hooks are prepended, because in training a later hook quantizes the output, and
    the observer needs the output in full precision.
    """
    adapters = adapters_of(module)

    def runs_merged() -> bool:
        # Whether the module's own output is the whole output: it has no adapters, or quantize_training_forward has
        # given the LoRA layer a forward that calls only the module. That may change while the hooks are attached.
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
    """Prepares each call of the model for the observers: counts it, takes its token mask, measures token weights.

    A forward may call the model itself, on pieces of its batch. Such a call belongs to the call around it: it is not
    counted, and its tokens have the weights that were measured for the outer call. Only its token mask is its own.

    Args:
        observation: its ``calls`` count the batches and hold the mask of the present call.
        token_mask: name of the model's argument that is nonzero for tokens that count; None: the mask is set by
            :meth:`mask_tokens`, or all tokens count.
    """

    def __init__(self, observation: Observation, token_mask: str | None = None) -> None:
        self._observation = observation
        self._calls = observation.calls
        self._token_mask = token_mask
        self._token_weights: TokenWeights | None = None
        self._counts_calls = True
        self._has_warned_of_padding = False
        #: for each call of the model that runs now, the mask from before it
        self._masks_before: list[torch.Tensor | None] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave the token weights and the masks out of a copy or pickle: a copy is not attached."""
        return {**vars(self), "_token_weights": None, "_masks_before": []}

    def attach(self, token_weights: TokenWeights | None, count_calls: bool, stack: ExitStack) -> None:
        """Register the hooks on the whole model, after those on its modules; :meth:`ObserverHooks.attach` calls this.

        Args:
            token_weights: measures how much each token of a call counts; None: all tokens count alike.
            count_calls: count each call of the model as a batch.
            stack: removes the hooks when it closes.
        """
        model = self._observation.model
        self._counts_calls = count_calls
        self._token_weights = token_weights
        self._masks_before = []
        self._calls.depth = 0
        call_hook = model.register_forward_pre_hook(self._on_call, with_kwargs=True)
        end_hook = model.register_forward_hook(self._end_call, always_call=True)
        for handle in (call_hook, end_hook):
            remove_hook = keep_hook_out(model, handle)
            stack.callback(remove_hook)
        if token_weights is not None:
            token_weights.attach(stack)

    def mask_tokens(self, mask: torch.Tensor | None) -> None:
        """Keep padding out of every observer from the next call of the model on.

        Called for each call of the model by its pre-hook if the session has a ``token_mask``; else by
        ``CalibrationSession.mask_tokens``, which the callbacks call before each batch.

        Args:
            mask: ``(batch, tokens)`` or ``(batch,)``, nonzero for tokens or samples that count; None: all count.
        """
        self._calls.mask = None if mask is None else require_mask(mask, "mask_tokens").cpu()
        self._calls.cache.forget()

    def warn_of_padding(self, mask: Any) -> None:
        """Warn, once, if the next call would observe padding.

        Called for each call of the model without a ``token_mask``, and by the callbacks before each batch.

        Args:
            mask: the ``attention_mask`` of the call or batch, ``(batch, tokens)``, zero for padding; anything else is
                ignored.
        """
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
        """Prepare a call of the model; a forward pre-hook of the model.

        Calls inside a quantized forward are ignored. Calls while the observation is paused (batches beyond
        ``max_batches``, the run of a teacher) are not counted, and no token weights are measured for them.
        """
        self._masks_before.append(self._calls.mask)
        self._calls.depth = len(self._masks_before)
        if is_inside_quantized(model):
            return
        is_outermost = self._calls.depth == 1
        if is_outermost and self._counts_calls and not self._calls.is_paused:
            self._calls.batches += 1
        arguments = _arguments_by_name(model, args, kwargs)
        if self._token_mask is None:
            self.warn_of_padding(arguments.get(PADDING))
        else:
            self.mask_tokens(self._mask_argument(model, arguments, self._token_mask))
        if is_outermost and self._token_weights is not None and not self._calls.is_paused:
            self._token_weights.measure(model, args, kwargs)

    def _end_call(self, *_: Any) -> None:
        """End a call of the model; a forward hook of the model, which runs after each call, failed or not.

        The mask of the call around it, if there is one, is in force again.
        """
        if not self._masks_before:  # a hook of the user's has raised before :meth:`_on_call`
            return
        mask = self._masks_before.pop()
        self._calls.depth = len(self._masks_before)
        if self._masks_before and mask is not self._calls.mask:
            self._calls.mask = mask
            self._calls.cache.forget()

    def _mask_argument(self, model: nn.Module, arguments: Mapping[str, Any], name: str) -> torch.Tensor:
        """The mask among the arguments of a call; a CalibrationError if the call has none."""
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
    """All arguments of a call of the model, by name, among which the token mask is looked up.

    If the arguments do not fit the forward's signature, the keyword arguments alone.
    """
    with suppress(TypeError, ValueError):
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
        return {**bound.arguments, **bound.kwargs}
    return kwargs
