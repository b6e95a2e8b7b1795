"""The calls of the calibrated model, before the model runs: counted, their padding masked, their tokens weighed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.token_mask import PADDING, require_mask
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.model.mark import is_inside_quantized, keep_hook_out


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
        stack.callback(keep_hook_out(model, handle))
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
        is_masked = self._calls.mask is not None and self._calls.mask.ndim > 1
        if self._has_warned_of_padding or is_masked or self._calls.is_paused or not self._observation.needs_data:
            return
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
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
