"""Take padding, and samples that a sampler repeated, out of a module's inputs and outputs.

Removing the wrong rows gives a wrong range that nobody notices, so rows are removed only where one layout alone fits.
``(batch, tokens, ...)`` with as many samples as tokens could be ``(tokens, batch, ...)``; a matrix of
``batch * tokens`` rows could hold them in either order, or routed rows. transformers' models are batch first, also when
flattened; others may have shown it by a batch of another size. An ambiguous layout is an error if rows have to go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

from lightning_obs.errors import CalibrationError

#: the name under which transformers' models and tokenizers mark padding
PADDING = "attention_mask"
#: The known layout of a value. ``tokens``: none; ``heads``: an attention state ``(batch, heads, tokens, head_dim)``;
#: ``positions``: a convolution's ``(batch, positions, channels)``; ``flattened``: ``(batch * tokens, channels)``;
#: ``routed``: it may hold some rows of several samples.
Layout: TypeAlias = Literal["tokens", "heads", "positions", "flattened", "routed"]


class TokenSelection:
    """Selects the rows that count; remembers the layout that earlier calls of each module have shown.

    ``batch_first``: the model's activations are known to be ``(batch, tokens, ...)``, or flattened in that order.
    """

    def __init__(self, batch_first: bool = False) -> None:
        self._known = batch_first
        #: whether all calls of a module so far had one row per sample (matrices), or their samples first (others)
        self._shown: dict[str, bool] = {}

    def of(self, value: torch.Tensor, mask: torch.Tensor, name: str, layout: Layout = "tokens") -> torch.Tensor:
        """The rows of ``value`` that count.

        Args:
            value: an activation ``(batch, tokens, ...)`` or ``(batch * tokens, channels)``. One vector per sequence,
                ``(batch, channels)``, has no padding and is returned as it is.
            mask: ``(batch, tokens)``, nonzero for a token that counts; ``(batch,)`` for whole samples.
            name: of the module.
            layout: of ``value``, as far as it is known.

        Returns:
            ``(n, ...)``; of an attention state ``(1, heads, n, head_dim)``.

        Raises:
            CalibrationError: the shape does not tell which rows of ``value`` count.

        >>> TokenSelection().of(torch.tensor([[[1.0], [2.0], [9.0]]]), torch.tensor([[1, 1, 0]]), "layer")
        tensor([[1.],
                [2.]])
        """
        chosen = mask.bool()
        fits = value.shape[: chosen.ndim] == chosen.shape
        if layout == "positions" and fits:
            return take(value, chosen)
        if layout == "positions":
            raise _unknown_rows(value, mask, name, layout)
        if value.ndim == 2:
            self._shown[name] = len(value) == len(chosen) and self._shown.get(name, True)
        elif value.ndim == 3 and value.shape[0] != value.shape[1]:
            self._shown[name] = fits and self._shown.get(name, True)
        if bool(chosen.all()) and (layout == "routed" or _may_be_of(value, chosen, layout)):
            return value
        if not bool(chosen.any()):
            return value[:0]
        if layout == "heads":
            if value.ndim == 4 and chosen.shape in ((len(value),), (len(value), value.shape[2])):
                states = take(value.transpose(1, 2), chosen)
                return states.flatten(0, -3).transpose(0, 1).unsqueeze(0)
        elif layout != "routed" and value.ndim > 2 and fits:
            square = value.ndim == 3 and value.shape[0] == value.shape[1]
            if not square or self._known or self._shown.get(name, False):
                return take(value, chosen)
        elif layout != "routed" and value.ndim == 2:
            kept = self._rows(chosen, len(value), name, layout == "flattened")
            if kept is not None:
                return take(value, kept)
        raise _unknown_rows(value, mask, name, layout)

    def _rows(self, chosen: torch.Tensor, rows: int, name: str, flattened: bool) -> torch.Tensor | None:
        """Which rows of a matrix count; None if the shape does not tell."""
        flattened = flattened or self._known
        if rows == len(chosen) and (self._known or self._shown[name]):
            return chosen if chosen.ndim == 1 else torch.ones_like(chosen[:, 0])
        if chosen.ndim == 2 and rows == chosen.numel() and (flattened or len(chosen) == 1):
            return chosen.flatten()
        if chosen.ndim == 1 and rows % len(chosen) == 0 and flattened:
            return chosen.repeat_interleave(rows // len(chosen))
        return None


def take(value: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """``value[chosen]``, of a mask on the host; an accelerator is given indices, for which the host does not wait."""
    return value[tuple(index.to(value.device, non_blocking=True) for index in chosen.nonzero(as_tuple=True))]


def _may_be_of(value: torch.Tensor, mask: torch.Tensor, layout: Layout) -> bool:
    """Whether a mask that leaves nothing out can be the mask of this activation."""
    if layout == "heads" and value.ndim == 4:
        return mask.ndim == 1 or (len(value), value.shape[2]) == mask.shape
    matrix = value.ndim == 2 and layout != "heads" and len(value) in (len(mask), mask.numel())
    return mask.ndim == 1 or matrix or value.shape[:2] == mask.shape


def _unknown_rows(value: torch.Tensor, mask: torch.Tensor, name: str, layout: Layout) -> CalibrationError:
    heads = layout == "heads"
    expected = "(batch, heads, tokens, head_dim)" if heads else "(batch, tokens, channels), tokens other than batch"
    if mask.ndim == 1:
        rows, given = "of samples that DistributedSampler repeated", f"a batch of {len(mask)} samples"
        expected += "" if heads else ", or one row for each sample in every batch"
        others = "or calibrate on a number of samples that the ranks divide"
    else:
        rows, given = "padding", f"a token mask of shape {tuple(mask.shape)}"
        others = "use another batch size, or calibrate without padding"
    return CalibrationError(
        f"which rows are {rows} cannot be told from the shape",
        where=[name],
        got=f"an activation of shape {tuple(value.shape)}, {given}",
        expected=expected,
        remedy=f"list the module in `ignore`, {others}.",
    )


def require_mask(mask: object, where: str) -> torch.Tensor:
    """Return ``mask`` if it is a tensor ``(batch, tokens)`` or ``(batch,)``, else raise a CalibrationError."""
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (1, 2):
        raise CalibrationError(
            f"{where} is not a token mask",
            got=f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__,
            expected="a tensor (batch, tokens), nonzero for a token that counts",
        )
    return mask


def find_mask(batch: Any, token_mask: str | Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """The token mask of a batch of the DataLoader, by a key of the batch, or by a function of it."""
    if not isinstance(token_mask, str):
        return token_mask(batch)
    try:
        mask = batch[token_mask] if hasattr(batch, "keys") else getattr(batch, token_mask)
    except (KeyError, AttributeError) as error:
        raise CalibrationError(
            f"the batch has no {token_mask!r}, which token_mask names",
            got=", ".join(map(str, batch.keys())) if hasattr(batch, "keys") else f"a {type(batch).__name__}",
            remedy="give the key that holds the mask, a function of the batch, or leave token_mask out.",
        ) from error
    return require_mask(mask, f"{token_mask} of the batch")
