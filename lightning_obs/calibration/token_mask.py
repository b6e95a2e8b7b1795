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

    Args:
        batch_first: the model's activations are known to be ``(batch, tokens, ...)``, or flattened in that order.
    """

    def __init__(self, batch_first: bool = False) -> None:
        self._is_batch_first = batch_first
        #: by name of a module: whether all its matrices so far had one row per sample, and all its other activations
        #: their samples first
        self._shows_samples_first: dict[str, bool] = {}

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
        counts = mask.bool()
        if layout == "positions":
            rows = take(value, counts) if _begins_with(value, counts) else None
        else:
            self._remember_layout(value, counts, name)
            rows = self._select(value, counts, name, layout)
        if rows is None:
            raise _unknown_rows(value, mask, name, layout)
        return rows

    def _remember_layout(self, value: torch.Tensor, counts: torch.Tensor, name: str) -> None:
        """Remember whether an activation has its samples first; a square one does not show it."""
        if value.ndim == 2:
            has_samples_first = len(value) == len(counts)
        elif value.ndim == 3 and value.shape[0] != value.shape[1]:
            has_samples_first = _begins_with(value, counts)
        else:
            return
        self._shows_samples_first[name] = has_samples_first and self._shows_samples_first.get(name, True)

    def _select(self, value: torch.Tensor, counts: torch.Tensor, name: str, layout: Layout) -> torch.Tensor | None:
        """The rows of an activation that count; None if the shape does not tell."""
        if bool(counts.all()) and (layout == "routed" or _may_be_mask_of(value, counts, layout)):
            return value
        if not bool(counts.any()):
            return value[:0]
        if layout == "heads":
            return _select_states(value, counts)
        if layout == "routed":
            return None
        if value.ndim == 2:
            rows = self._rows_of_matrix(counts, len(value), name, layout)
            return None if rows is None else take(value, rows)
        if value.ndim > 2 and _begins_with(value, counts):
            is_square = value.ndim == 3 and value.shape[0] == value.shape[1]
            if not is_square or self._is_batch_first or self._shows_samples_first.get(name, False):
                return take(value, counts)
        return None

    def _rows_of_matrix(self, counts: torch.Tensor, rows: int, name: str, layout: Layout) -> torch.Tensor | None:
        """Which of the rows of a matrix count, ``(rows,)``; None if the shape does not tell."""
        is_flattened = layout == "flattened" or self._is_batch_first
        samples = len(counts)
        if rows == samples and (self._is_batch_first or self._shows_samples_first[name]):
            return counts if counts.ndim == 1 else torch.ones_like(counts[:, 0])
        if counts.ndim == 2 and rows == counts.numel() and (is_flattened or samples == 1):
            return counts.flatten()
        if counts.ndim == 1 and rows % samples == 0 and is_flattened:
            return counts.repeat_interleave(rows // samples)
        return None


def take(value: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``value[counts]``, of a mask on the host; an accelerator is given indices, for which the host does not wait."""
    indices = []
    for index in counts.nonzero(as_tuple=True):
        indices.append(index.to(value.device, non_blocking=True))
    return value[tuple(indices)]


def _begins_with(value: torch.Tensor, counts: torch.Tensor) -> bool:
    """Whether the first axes of an activation are the mask's."""
    return value.shape[: counts.ndim] == counts.shape


def _select_states(value: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    """The tokens of an attention state ``(batch, heads, tokens, head_dim)`` that count; None for another shape."""
    if value.ndim != 4:
        return None
    batch, _, tokens, _ = value.shape
    if counts.shape not in ((batch,), (batch, tokens)):
        return None
    states = take(value.transpose(1, 2), counts)
    return states.flatten(0, -3).transpose(0, 1).unsqueeze(0)


def _may_be_mask_of(value: torch.Tensor, counts: torch.Tensor, layout: Layout) -> bool:
    """Whether a mask that leaves nothing out can be the mask of this activation."""
    if counts.ndim == 1:
        return True
    if layout == "heads" and value.ndim == 4:
        return (len(value), value.shape[2]) == counts.shape
    if value.ndim == 2 and layout != "heads" and len(value) in (len(counts), counts.numel()):
        return True
    return value.shape[:2] == counts.shape


def _unknown_rows(value: torch.Tensor, mask: torch.Tensor, name: str, layout: Layout) -> CalibrationError:
    is_state = layout == "heads"
    expected = "(batch, heads, tokens, head_dim)" if is_state else "(batch, tokens, channels), tokens other than batch"
    if mask.ndim == 1:
        rows = "of samples that DistributedSampler repeated"
        mask_text = f"a batch of {len(mask)} samples"
        alternative = "or calibrate on a number of samples that the ranks divide"
        if not is_state:
            expected += ", or one row for each sample in every batch"
    else:
        rows = "padding"
        mask_text = f"a token mask of shape {tuple(mask.shape)}"
        alternative = "use another batch size, or calibrate without padding"
    return CalibrationError(
        f"which rows are {rows} cannot be told from the shape",
        where=[name],
        got=f"an activation of shape {tuple(value.shape)}, {mask_text}",
        expected=expected,
        remedy=f"list the module in `ignore`, {alternative}.",
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
