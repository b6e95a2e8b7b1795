"""Pair the inputs of modules in a quantized run with the same inputs in full precision.

Each batch runs twice, in full precision and quantized so far; the calls of a module in both runs belong together by
their order. Observers of :class:`.InputErrors` observe the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.observed_calls import ObservedCalls
from lightning_obs.calibration.token_mask import TokenSelection
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import first_input
from lightning_obs.model.kinds import is_transformers_model, tokens_of
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.observers import Observer
from lightning_obs.observers.observer import observe_inputs_shared
from lightning_obs.schemes.planned_modules import PlannedModule


class PairedInputs:
    """Gives the observers of some modules each input of a quantized run with the same input in full precision.

    Args:
        model: that is run; it tells where the tokens of an activation are.
        observers: by planned module, its :class:`InputErrors`.
        calls: has the mask of the present batch.
        token_weights: has the weights of its tokens; None: all count alike.
    """

    def __init__(
        self,
        model: nn.Module,
        observers: Sequence[tuple[PlannedModule, Observer]],
        calls: ObservedCalls,
        token_weights: TokenWeights | None = None,
    ) -> None:
        self._observers = observers
        self._calls = calls
        self._token_weights = token_weights
        self._selection = TokenSelection(batch_first=is_transformers_model(model))
        #: the inputs of each module in the full-precision run, by its name
        self._exact: dict[str, list[torch.Tensor]] = {}
        #: how often each module was called in the quantized run
        self._quantized_calls: dict[str, int] = {}
        #: the tensor that was read last, its version, and whose weights its tokens have; what was measured in its pair
        self._read: tuple[torch.Tensor, int, Hashable] | None = None
        self._measured: dict[Hashable, Any] = {}

    def watch_exact(self, stack: ExitStack) -> None:
        """Keep the inputs of a run in full precision until :meth:`forget`; ``stack`` removes the hooks."""
        self._attach(stack, self._keep_exact)

    def watch_quantized(self, stack: ExitStack) -> None:
        """Observe the pairs while the same batch runs quantized so far; ``stack`` removes the hooks."""
        self._attach(stack, self._observe_pair)

    def forget(self) -> None:
        """Release the inputs of a batch."""
        self._exact = {}
        self._quantized_calls = {}
        self._read = None
        self._measured = {}

    def _attach(self, stack: ExitStack, take: Callable[[PlannedModule, Observer, torch.Tensor], None]) -> None:
        for target, observer in self._observers:
            hook = partial(_take_input, partial(take, target, observer))
            handle = target.module.register_forward_pre_hook(hook, with_kwargs=True)
            remove_hook = keep_hook_out(target.module, handle)
            stack.callback(remove_hook)

    def _keep_exact(self, target: PlannedModule, _: Observer, value: torch.Tensor) -> None:
        inputs = self._exact.setdefault(target.name, [])
        if self._is_new(value, None):  # modules that read one tensor share its copy
            self._measured = {"copy": value.detach().clone()}
        inputs.append(self._measured["copy"])

    def _observe_pair(self, target: PlannedModule, observer: Observer, value: torch.Tensor) -> None:
        call = self._quantized_calls.get(target.name, 0)
        self._quantized_calls[target.name] = call + 1
        exact_inputs = self._exact.get(target.name, [])
        exact = exact_inputs[call] if call < len(exact_inputs) else None
        if exact is None or exact.shape != value.shape:
            raise CalibrationError(
                "the quantized model calls a module in another way than the model in full precision",
                where=[target.name],
                got=f"an input {tuple(value.shape)} in call {call}, in full precision "
                f"{'none' if exact is None else tuple(exact.shape)}",
                expected="a forward whose shapes do not depend on the values of activations",
                remedy="leave out the correction: rounding={'name': 'gptq', 'inputs': 'quantized', 'correction': 0}.",
            )
        weights = self._weights_of(target)
        reader = None if weights is None else weights.reader_of(target.name)
        if self._is_new(value, reader):
            pair = [self._tokens(target, each, weights, call) for each in (exact, value.detach())]
            self._measured = {"pair": torch.stack(pair)}
        observe_inputs_shared(observer, self._measured["pair"], self._measured)

    def _is_new(self, value: torch.Tensor, reader: Hashable) -> bool:
        """Whether a tensor is another than the one that was read last, was changed since, or has other weights."""
        earlier = self._read
        self._read = (value, value._version, reader)
        return earlier is None or earlier[0] is not value or earlier[1:] != self._read[1:]

    def _weights_of(self, target: PlannedModule) -> TokenWeights | None:
        """What weighs the tokens of a module; None: they count alike."""
        if self._token_weights is not None and target.name in self._token_weights.modules:
            return self._token_weights
        return None

    def _tokens(
        self, target: PlannedModule, value: torch.Tensor, weights: TokenWeights | None, call: int
    ) -> torch.Tensor:
        """The tokens of an input that count, ``(..., C)``, each times the root of its weight."""
        tokens = tokens_of(target.module, value)
        layout: Any = "tokens" if tokens is value else "positions"
        if weights is not None:
            tokens = weights.weigh(target.name, value, call)
            layout = "tokens"
        if self._calls.mask is None:
            return tokens
        return self._selection.of(tokens, self._calls.mask, target.name, layout)


def _take_input(take: Callable[[torch.Tensor], None], _: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook that hands the module's input on."""
    value = first_input(args, kwargs)
    if value is not None:
        take(value)
