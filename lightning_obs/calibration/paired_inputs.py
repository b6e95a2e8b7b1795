"""Pair each input of a module in a quantized run with the same input in full precision.

:class:`.StepwiseCalibration` runs each batch twice if a rounding has a correction: in full precision, and with finished
modules quantized. The n-th call of a module in one run belongs to its n-th call in the other. Observers of the class
:class:`.InputErrors` observe the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.hold_out import HoldOut, Place
from lightning_obs.calibration.observed_calls import ObservedCalls
from lightning_obs.calibration.token_mask import TokenSelection
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import first_input
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.observers import Observer
from lightning_obs.observers.observer import observe_inputs_shared
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.planned_modules import PlannedModule


class PairedInputs:
    """Gives pairs of inputs to the observers of the modules of one step.

    :class:`.StepwiseCalibration` makes one for each step with a correction. For each batch, it runs the model inside
    :meth:`watch_exact`, again inside :meth:`watch_quantized`, and then calls :meth:`forget`.

    Args:
        model: the model that runs; transformers' models are known to be batch first.
        observers: the planned modules of the step, each with its :class:`.InputErrors`.
        calls: has the mask of the present batch.
        token_weights: has the weights of the tokens of the present batch; None: all tokens count alike.
        hold_outs: by name of a module whose fit is judged, its hold-out, which observes the pairs, too.
        collectives: of this rank; they tell the place of its batches among those of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        observers: Sequence[tuple[PlannedModule, Observer]],
        calls: ObservedCalls,
        token_weights: TokenWeights | None,
        hold_outs: Mapping[str, HoldOut],
        collectives: Collectives,
    ) -> None:
        self._observers = observers
        self._calls = calls
        self._token_weights = token_weights
        self._hold_outs = hold_outs
        self._collectives = collectives
        self._selection = TokenSelection(batch_first=is_transformers_model(model))
        #: by module name, copies of its inputs in the full-precision run, one for each call
        self._exact: dict[str, list[torch.Tensor]] = {}
        #: by module name, how often the quantized run has called the module so far
        self._quantized_calls: dict[str, int] = {}
        #: the tensor that was read last, its version, and the key of its token weights (:meth:`TokenWeights.reader_of`)
        self._read: tuple[torch.Tensor, int, Hashable] | None = None
        #: for the tensor that was read last: its copy or its pair, and the statistics of the pair
        self._measured: dict[Hashable, Any] = {}

    def watch_exact(self, stack: ExitStack) -> None:
        """Register hooks that keep the modules' inputs in a full-precision run; ``stack`` removes the hooks.

        Called before the full-precision run of each batch.
        """
        self._attach(stack, self._keep_exact)

    def watch_quantized(self, stack: ExitStack) -> None:
        """Register hooks that observe pairs while the same batch runs quantized; ``stack`` removes the hooks.

        Called before the quantized run of each batch.
        """
        self._attach(stack, self._observe_pair)

    def forget(self) -> None:
        """Release the inputs of a batch, after both runs."""
        self._exact = {}
        self._quantized_calls = {}
        self._read = None
        self._measured = {}

    def _attach(self, stack: ExitStack, take: Callable[[PlannedModule, Observer, torch.Tensor], None]) -> None:
        """Call ``take`` with each module, its observer and its input, whenever the module is called."""
        for target, observer in self._observers:
            hook = partial(_take_input, partial(take, target, observer))
            handle = target.module.register_forward_pre_hook(hook, with_kwargs=True)
            remove_hook = keep_hook_out(target.module, handle)
            stack.callback(remove_hook)

    def _keep_exact(self, target: PlannedModule, _: Observer, value: torch.Tensor) -> None:
        """Keep a copy of an input; called at each call of the module in the full-precision run."""
        inputs = self._exact.setdefault(target.name, [])
        if self._is_new(value, None):  # modules that read one tensor share its copy
            self._measured = {"copy": value.detach().clone()}
        inputs.append(self._measured["copy"])

    def _observe_pair(self, target: PlannedModule, observer: Observer, value: torch.Tensor) -> None:
        """Pair an input of the quantized run with the kept input of the same call, and observe the pair.

        Modules that read the same tensor one after the other, with the same token weights, share one pair: they read
        the same tensor in the full-precision run, too, and take it as the same tokens (q, k and v; gate and up). None
        of them is a convolution, whose tokens would be others: ``check_inputs_fit`` (``schemes/build_plan.py``) refuses
        to round its weight.

        Raises:
            CalibrationError: the full-precision run had no such call, or an input of another shape.
        """
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
        hold_out = self._hold_outs.get(target.name)
        if hold_out is not None:
            hold_out.observe_pair(self._measured["pair"], self._measured, Place.of(self._calls, self._collectives))

    def _is_new(self, value: torch.Tensor, reader: Hashable) -> bool:
        """Whether a tensor differs from the last one that was read: in object, version or key of token weights."""
        earlier = self._read
        self._read = (value, value._version, reader)
        return earlier is None or earlier[0] is not value or earlier[1:] != self._read[1:]

    def _weights_of(self, target: PlannedModule) -> TokenWeights | None:
        """The token weights, if the module weighs its tokens; None: all its tokens count alike."""
        if self._token_weights is not None and target.name in self._token_weights.modules:
            return self._token_weights
        return None

    def _tokens(
        self, target: PlannedModule, value: torch.Tensor, weights: TokenWeights | None, call: int
    ) -> torch.Tensor:
        """The tokens of an input that count, ``(..., C)``, each multiplied by the square root of its weight.

        Args:
            target: the module.
            value: its input ``(..., C)``, of either run.
            weights: of its tokens; None: all tokens count alike.
            call: the number of the module's call in the run, from 0.
        """
        tokens = value
        if weights is not None:
            tokens = weights.weigh(target.name, value, call)
        if self._calls.mask is None:
            return tokens
        return self._selection.of(tokens, self._calls.mask, target.name)


def _take_input(take: Callable[[torch.Tensor], None], _: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook that gives the module's first tensor input to ``take``."""
    value = first_input(args, kwargs)
    if value is not None:
        take(value)
