"""Take padding, and samples that a sampler repeated, out of what a module reads or writes.

A row that is taken out for another one gives a wrong range, and nobody sees it. So a row is taken for a sample's, or
for a token's, only where no other layout fits the shape: ``(batch, tokens, ...)`` with as many samples as tokens could
be ``(tokens, batch, ...)``, a matrix of ``batch * tokens`` rows could hold them in either order, or rows that were
routed. transformers' models are known: batch first, also when they are flattened. Of others an earlier batch of another
size may have shown it. Where it stays open and something has to be taken out, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_obs.errors import CalibrationError, warn

#: under which transformers' models and tokenizers say which tokens are padding
PADDING = "attention_mask"


class TokenSelection:
    """Selects the rows that count, and knows what earlier calls of each module have shown of their layout.

    Args:
        batch_first: the model's activations are known to be ``(batch, tokens, ...)`` or that, flattened.
    """

    def __init__(self, batch_first: bool = False) -> None:
        self._known = batch_first
        #: whether all calls of a module so far had one row per sample (matrices), or their samples first (others)
        self._shown: dict[str, bool] = {}

    def of(
        self,
        value: torch.Tensor,
        mask: torch.Tensor,
        name: str,
        *,
        heads: bool = False,
        routed: bool = False,
        flattened: bool = False,
    ) -> torch.Tensor:
        """The rows of ``value`` that count.

        Args:
            value: an activation ``(batch, tokens, ...)`` or ``(batch * tokens, channels)``. One vector per sequence,
                ``(batch, channels)``, has no padding and is returned as it is.
            mask: ``(batch, tokens)``, nonzero for a token that counts; ``(batch,)`` for whole samples.
            name: of the module.
            heads: ``value`` is an attention state ``(batch, heads, tokens, head_dim)``.
            routed: ``value`` may hold some rows of several samples.
            flattened: ``value`` is known to be ``(batch * tokens, channels)``.

        Returns:
            ``(n, ...)``; of an attention state ``(1, heads, n, head_dim)``.

        Raises:
            CalibrationError: which rows of ``value`` do not count cannot be told.

        >>> TokenSelection().of(torch.tensor([[[1.0], [2.0], [9.0]]]), torch.tensor([[1, 1, 0]]), "layer")
        tensor([[1.],
                [2.]])
        """
        chosen = mask.to(value.device).bool()
        self._look_at(value, chosen, name)
        if bool(chosen.all()) and (routed or _may_be_of(value, chosen, heads)):
            return value
        if not bool(chosen.any()):
            return value[:0]
        if heads:
            if value.ndim == 4 and chosen.shape in ((len(value),), (len(value), value.shape[2])):
                states = value.transpose(1, 2)[chosen]
                return states.flatten(0, -3).transpose(0, 1).unsqueeze(0)
        elif value.ndim > 2 and value.shape[: chosen.ndim] == chosen.shape:
            square = value.ndim == 3 and value.shape[0] == value.shape[1]
            if not routed and (not square or self._known or self._shown.get(name, False)):
                return value[chosen]
        elif value.ndim == 2 and not routed:
            kept = self._rows(chosen, len(value), name, flattened)
            if kept is not None:
                return value[kept]
        raise _unknown_rows(value, mask, name, heads)

    def _look_at(self, value: torch.Tensor, chosen: torch.Tensor, name: str) -> None:
        first = value.ndim > 0 and len(value) == len(chosen)
        if value.ndim == 2:
            self._shown[name] = first and self._shown.get(name, True)
        elif value.ndim == 3 and value.shape[0] != value.shape[1]:
            self._shown[name] = value.shape[: chosen.ndim] == chosen.shape and self._shown.get(name, True)

    def _rows(self, chosen: torch.Tensor, rows: int, name: str, flattened: bool) -> torch.Tensor | None:
        """Which rows of a matrix count; None if it cannot be told."""
        flattened = flattened or self._known
        if rows == len(chosen) and (self._known or self._shown[name]):
            return chosen if chosen.ndim == 1 else torch.ones_like(chosen[:, 0])
        if chosen.ndim == 2 and rows == chosen.numel() and (flattened or len(chosen) == 1):
            return chosen.flatten()
        if chosen.ndim == 1 and rows % len(chosen) == 0 and flattened:
            return chosen.repeat_interleave(rows // len(chosen))
        return None


def select_positions(value: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
    """The positions of a convolution's data that count.

    Args:
        value: ``(batch, positions, channels)``.
        mask: ``(batch, positions)``, nonzero for a position that counts; ``(batch,)`` for whole samples.
        name: of the module.

    Returns:
        ``(n, channels)`` or, of whole samples, ``(n, positions, channels)``.

    Raises:
        CalibrationError: the mask is of something else.
    """
    if value.shape[: mask.ndim] != mask.shape:
        raise _unknown_rows(value, mask, name, heads=False)
    return value[mask.to(value.device).bool()]


def _may_be_of(value: torch.Tensor, mask: torch.Tensor, heads: bool) -> bool:
    """Whether a mask that leaves nothing out can be the one of an activation at all."""
    if mask.ndim == 1:
        return True
    shape = (len(value), value.shape[2]) if heads and value.ndim == 4 else value.shape[:2]
    return tuple(shape) == mask.shape or (value.ndim == 2 and not heads and len(value) in (len(mask), mask.numel()))


def _unknown_rows(value: torch.Tensor, mask: torch.Tensor, name: str, heads: bool) -> CalibrationError:
    shapes = "(batch, heads, tokens, head_dim)" if heads else "(batch, tokens, channels), tokens other than batch"
    got = f"an activation of shape {tuple(value.shape)}, "
    if mask.ndim == 1:
        return CalibrationError(
            "which rows are of samples that DistributedSampler repeated cannot be told from the shape",
            where=[name],
            got=got + f"a batch of {len(mask)} samples",
            expected=shapes if heads else f"{shapes}, or one row for each sample in every batch",
            remedy="list the module in `ignore`, or calibrate on a number of samples that the ranks divide.",
        )
    return CalibrationError(
        "which rows are padding cannot be told from the shape",
        where=[name],
        got=got + f"a token mask of shape {tuple(mask.shape)}",
        expected=shapes,
        remedy="list the module in `ignore`, use another batch size, or calibrate without padding.",
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


def warn_of_padding(mask: Any) -> bool:
    """Warn that padding is observed, if ``mask`` masks tokens, and return whether it does.

    Args:
        mask: an ``attention_mask``; what is no ``(batch, tokens)`` is not about padding.
    """
    masked = int((mask == 0).sum()) if isinstance(mask, torch.Tensor) and mask.ndim == 2 else 0
    if masked:
        warn(
            f"padding is observed: {PADDING} masks {masked} of {mask.numel()} tokens, and no token_mask is set. "
            f"token_mask={PADDING!r} keeps them out."
        )
    return masked > 0
