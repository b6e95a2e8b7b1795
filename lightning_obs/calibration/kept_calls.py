"""The calls of a model, kept while its owner runs it, to be run again block by block.

A session whose weights are rounded on quantized inputs cannot observe the owner's run: its inputs are those of the
unquantized model. It keeps the arguments instead, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.token_weights import TokenWeights, WeightsOfCall
from lightning_obs.errors import warn
from lightning_obs.forward.calls import Autocast
from lightning_obs.forward.kept_batches import KEPT_BYTES, KeptBatches
from lightning_obs.model.mark import is_inside_quantized, keep_hook_out


@dataclass(frozen=True)
class _Call:
    """What was in force when the model was called: mask and weights of its tokens, autocast of its device."""

    mask: torch.Tensor | None
    autocast: Autocast
    token_weights: WeightsOfCall | None


class KeptCalls:
    """The arguments of the observed calls of a model, and which tokens of each count.

    Args:
        observation: of the model; calls are kept unless its record is paused.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._batches = KeptBatches(KEPT_BYTES)
        self._remove_hook: Callable[[], None] | None = None
        #: how much each token counts, measured in the owner's run; None: all count alike
        self.token_weights: TokenWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no calls, and keeps none."""
        changes = {"_batches": KeptBatches(KEPT_BYTES), "_remove_hook": None, "token_weights": None}
        return {**vars(self), **changes}

    def __len__(self) -> int:
        return len(self._batches)

    def attach(self, token_weights: TokenWeights | None, forget: bool = True) -> None:
        """Keep each call from now on; called after the hook is on the model that sets mask and weights of a call.

        Args:
            token_weights: measured in each call before it is kept; None: all tokens count alike.
            forget: release earlier calls.
        """
        self.token_weights = token_weights
        self.detach()
        if forget:
            self.release()
        model = self._observation.model
        handle = model.register_forward_pre_hook(self._keep, with_kwargs=True)
        self._remove_hook = keep_hook_out(model, handle)

    def detach(self) -> None:
        """Keep no further calls. Can be called at any time, any number of times."""
        if self._remove_hook is not None:
            self._remove_hook()
        self._remove_hook = None

    def release(self) -> None:
        """Release the calls."""
        self._batches = KeptBatches(KEPT_BYTES)

    def run(self, index: int) -> Any:
        """Call the model with copies of the arguments of a kept call, as it was called; returns its output."""
        args, kwargs = self._batches.copy(index)
        call: _Call = self._batches.note(index)
        if self.token_weights is not None and call.token_weights is not None:
            self.token_weights.use(call.token_weights)
        with call.autocast.entered():
            return self._observation.model(*args, **kwargs)

    def mask(self, index: int) -> torch.Tensor | None:
        """Which tokens of a call count, ``(batch, tokens)`` or ``(batch,)``; None: all."""
        call: _Call = self._batches.note(index)
        return call.mask

    def warn_of_calls_left_out(self) -> None:
        """Warn of calls that did not fit in memory, and are not observed."""
        kept = len(self)
        if kept < self._batches.offered:
            warn(
                f"rounding on quantized inputs runs the model's calls again, and {kept} of {self._batches.offered} fit "
                f"in {KEPT_BYTES / 2**30:.1f} GiB. The others are not observed."
            )

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._observation.calls.is_paused or is_inside_quantized(model):
            return
        parameter = next(model.parameters(), None)
        call = _Call(
            self._observation.calls.mask,
            Autocast.of(None if parameter is None else parameter.device),
            None if self.token_weights is None else self.token_weights.of_call,
        )
        self._batches.add((args, kwargs), call)
