"""How the inputs of a module differ once the modules before it are quantized: sums of ``(x - x~) x~^T``.

A rounding on quantized inputs makes up for a share of the difference (:func:`.corrected_target`). Each batch runs
twice, in full precision and quantized so far; the calls of a module in both runs belong together by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_obs.calibration.observed_calls import ObservedCalls
from lightning_obs.calibration.token_mask import TokenSelection
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import first_input
from lightning_obs.model.kinds import is_transformers_model, tokens_of
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.numerics.moments import cross_products
from lightning_obs.observers import Observer
from lightning_obs.observers.observer import observe_inputs_shared
from lightning_obs.observers.statistic import Statistic
from lightning_obs.schemes.planned_modules import PlannedModule


class InputErrors(Observer):
    """Gathers how the inputs of a weight's module differ between two runs of the model.

    ``input_errors`` is the sum of ``(x - x~) x~^T`` over tokens, ``(C, C)`` in float32, x in full precision and x~ of
    the quantized model so far. It observes pairs ``(2, ..., C)``: x, then x~.
    """

    statistics: ClassVar[tuple[Statistic, ...]] = (Statistic("input_errors", "sum", of_inputs=True),)
    _inputs_by: ClassVar[tuple[str, ...]] = ()

    def measure_inputs(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """The sum of ``(x - x~) x~^T`` of a pair."""
        exact, quantized = value.float()
        return (cross_products(exact - quantized, quantized),)


class PairedInputs:
    """Gives the observers of some modules each input of a quantized run with the same input in full precision.

    Args:
        model: that is run; it tells where the tokens of an activation are.
        observers: by planned module, its :class:`InputErrors`.
        calls: has the mask of the present batch.
    """

    def __init__(self, model: nn.Module, observers: Sequence[tuple[PlannedModule, Observer]], calls: ObservedCalls):
        self._observers = observers
        self._calls = calls
        self._selection = TokenSelection(batch_first=is_transformers_model(model))
        #: the inputs of each module in the full-precision run, by its name
        self._exact: dict[str, list[torch.Tensor]] = {}
        #: how often each module was called in the quantized run
        self._quantized_calls: dict[str, int] = {}
        #: the tensor that was read last, and its version; what was measured in its pair
        self._read: tuple[torch.Tensor, int] | None = None
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
        if self._is_new(value):  # modules that read one tensor share its copy
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
        if self._is_new(value):
            pair = [self._tokens(target, exact), self._tokens(target, value.detach())]
            self._measured = {"pair": torch.stack(pair)}
        observe_inputs_shared(observer, self._measured["pair"], self._measured)

    def _is_new(self, value: torch.Tensor) -> bool:
        """Whether a tensor is another than the one that was read last, or was changed since."""
        is_same = self._read is not None and self._read[0] is value and self._read[1] == value._version
        self._read = (value, value._version)
        return not is_same

    def _tokens(self, target: PlannedModule, value: torch.Tensor) -> torch.Tensor:
        """The tokens of an input that count, ``(..., C)``."""
        tokens = tokens_of(target.module, value)
        if self._calls.mask is None:
            return tokens
        layout: Any = "tokens" if tokens is value else "positions"
        return self._selection.of(tokens, self._calls.mask, target.name, layout)


def _take_input(take: Callable[[torch.Tensor], None], _: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook that hands the module's input on."""
    value = first_input(args, kwargs)
    if value is not None:
        take(value)
