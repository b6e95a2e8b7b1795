"""Take padding out of what a module reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_obs.errors import CalibrationError


def select_tokens(value: torch.Tensor, mask: torch.Tensor, name: str, heads: bool = False) -> torch.Tensor:
    """The tokens of ``value`` that count.

    Args:
        value: an activation ``(batch, tokens, ...)`` or ``(batch * tokens, channels)``. One vector per sequence,
            ``(batch, channels)``, has no padding and is returned as it is.
        mask: ``(batch, tokens)``, nonzero for a token that counts; ``(batch,)`` for whole samples.
        name: of the module, for the error.
        heads: ``value`` is an attention state ``(batch, heads, tokens, head_dim)``.

    Returns:
        ``(n, ...)``; of an attention state ``(1, heads, n, head_dim)``.

    Raises:
        CalibrationError: which rows of ``value`` are padding cannot be told from its shape.

    >>> select_tokens(torch.tensor([[[1.0], [2.0], [9.0]]]), torch.tensor([[1, 1, 0]]), "layer")
    tensor([[1.],
            [2.]])
    """
    chosen = mask.to(value.device).bool()
    if chosen.ndim == 1:
        if not bool(chosen.any()):  # nothing of this batch counts, whatever the shape
            return value[:0]
        if len(value) == len(chosen):
            return value[chosen]
        if value.ndim == 2 and len(chosen) and len(value) % len(chosen) == 0:
            return value.unflatten(0, (len(chosen), -1))[chosen].flatten(0, 1)
        raise _unknown_samples(value, mask, name)
    batch, tokens = chosen.shape
    if heads and value.ndim == 4 and (len(value), value.shape[2]) == (batch, tokens):
        return value.transpose(1, 2)[chosen].transpose(0, 1).unsqueeze(0)
    if not heads and value.shape[:2] == chosen.shape:
        return value[chosen]
    if not heads and value.ndim == 2 and len(value) == chosen.numel():
        return value[chosen.flatten()]
    if not heads and value.ndim == 2 and len(value) == batch:
        return value
    raise _unknown_rows(value, mask, name, heads)


def _unknown_rows(value: torch.Tensor, mask: torch.Tensor, name: str, heads: bool) -> CalibrationError:
    return CalibrationError(
        "which rows are padding cannot be told from the shape",
        where=[name],
        got=f"an activation of shape {tuple(value.shape)}, a token mask of shape {tuple(mask.shape)}",
        expected="(batch, heads, tokens, head_dim)"
        if heads
        else "(batch, tokens, channels) or (batch * tokens, channels)",
        remedy="list the module in `ignore`, or calibrate without padding and without token_mask.",
    )


def require_mask(mask: object, where: str) -> torch.Tensor:
    """Return ``mask`` if it is one.

    Raises:
        CalibrationError: it is not a tensor of shape ``(batch, tokens)`` or ``(batch,)``.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (1, 2):
        raise CalibrationError(
            f"{where} is not a token mask",
            got=f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__,
            expected="a tensor (batch, tokens), nonzero for a token that counts",
        )
    return mask


def _unknown_samples(value: torch.Tensor, mask: torch.Tensor, name: str) -> CalibrationError:
    return CalibrationError(
        "which rows are of samples that DistributedSampler repeated cannot be told from the shape",
        where=[name],
        got=f"an activation of shape {tuple(value.shape)}, a batch of {len(mask)} samples",
        expected="(batch, ...) or (batch * tokens, channels)",
        remedy="list the module in `ignore`, or calibrate on a number of samples that the ranks divide.",
    )


def find_mask(batch: Any, token_mask: str | Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """The token mask of a batch.

    Args:
        batch: what the DataLoader gives.
        token_mask: a key of the batch, or a function that returns the mask.

    Raises:
        CalibrationError: the batch has no such key.
    """
    if not isinstance(token_mask, str):
        return token_mask(batch)
    try:
        mask = batch[token_mask] if hasattr(batch, "keys") else getattr(batch, token_mask)
    except (KeyError, AttributeError) as error:
        keys = ", ".join(map(str, batch.keys())) if hasattr(batch, "keys") else f"a {type(batch).__name__}"
        raise CalibrationError(
            f"the batch has no {token_mask!r}, which token_mask names",
            got=keys,
            remedy="give the key that holds the mask, a function of the batch, or leave token_mask out.",
        ) from error
    return require_mask(mask, f"{token_mask} of the batch")
