"""Remove padding, and samples that DistributedSampler repeated, from a module's inputs and outputs.

A *mask* is ``(batch, tokens)``, nonzero for tokens that count, or ``(batch,)`` for whole samples. The hooks of
:mod:`.hooks` apply it to each activation before it is observed.

Removing the wrong rows gives a wrong range that nobody notices. So rows are removed only if the shape of an activation
fits one layout alone. ``(batch, tokens, ...)`` with as many samples as tokens could also be ``(tokens, batch, ...)``. A
matrix of ``batch * tokens`` rows could hold the tokens in either order, or be the rows that a router selected.
transformers' models are batch first, also after flattening; another model may show its layout in a batch of another
size. If rows have to be removed and the layout stays ambiguous, that is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

from lightning_obs.errors import CalibrationError

#: the name under which transformers' models and tokenizers mark padding
PADDING = "attention_mask"
#: What is known of an activation's layout. ``tokens``: nothing but its shape; ``heads``: an attention state
#: ``(batch, heads, tokens, head_dim)``; ``positions``: ``(batch, positions, channels)`` of a convolution;
#: ``flattened``: ``(batch * tokens, channels)`` in this order; ``routed``: an expert's input, any rows of the batch.
Layout: TypeAlias = Literal["tokens", "heads", "positions", "flattened", "routed"]


class TokenSelection:
    """Selects the rows of activations that a mask keeps, and remembers the layouts that earlier calls have shown.

    The hooks of an observation share one, made when the first mask is used; a :class:`.PairedInputs` has its own.

    Args:
        batch_first: whether the model's activations are known to be ``(batch, tokens, ...)``, or flattened in that
            order, as those of transformers' models are.
    """

    def __init__(self, batch_first: bool = False) -> None:
        self._is_batch_first = batch_first
        #: by module name: whether in each call so far a matrix had one row for each sample, and any other activation
        #: had the samples in its first axis
        self._shows_samples_first: dict[str, bool] = {}

    def of(self, value: torch.Tensor, mask: torch.Tensor, name: str, layout: Layout = "tokens") -> torch.Tensor:
        """The rows of an activation that count; a hook calls this for each activation of a batch with a mask.

        Args:
            value: an activation ``(batch, tokens, ...)``, ``(batch * tokens, channels)``, or ``(batch, channels)`` with
                one vector for each sequence. A sequence's vector has no padding: a mask of tokens keeps all vectors,
                unless it keeps no token at all.
            mask: ``(batch, tokens)``, nonzero for a token that counts; ``(batch,)`` for whole samples.
            name: of the module.
            layout: what is known of the layout of ``value``.

        Returns:
            ``value`` with all its dimensions if everything counts, and its empty slice ``value[:0]`` if nothing counts
            (neither holds for the layout ``positions``). Otherwise the n rows that count: ``(n, ...)``, or of an
            attention state ``(1, heads, n, head_dim)``. A mask of samples keeps whole samples of an activation,
            ``(n, tokens, ...)``.

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
        """Remember for a module whether its activations have the samples in the first axis.

        Called for each activation before its rows are selected. A matrix shows samples first if it has one row for each
        sample; an activation of three dimensions, if its first axes have the shape of the mask. Once an activation has
        shown the opposite, the answer stays no. Activations that do not show their layout are ignored: those of three
        dimensions with as many samples as tokens, and those of any other number of dimensions.

        Args:
            value: the activation.
            counts: the mask as booleans.
            name: of the module.
        """
        if value.ndim == 2:
            has_samples_first = len(value) == len(counts)
        elif value.ndim == 3 and value.shape[0] != value.shape[1]:
            has_samples_first = _begins_with(value, counts)
        else:
            return
        self._shows_samples_first[name] = has_samples_first and self._shows_samples_first.get(name, True)

    def _select(self, value: torch.Tensor, counts: torch.Tensor, name: str, layout: Layout) -> torch.Tensor | None:
        """The rows of an activation that count; None if the shape does not tell which they are."""
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
        """A mask ``(rows,)`` of the rows of a matrix that count; None if the shape does not tell which they are."""
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
    """``value[counts]`` for a mask ``counts`` on the host.

    Called here and in :mod:`.expert_tokens` to drop the rows that do not count. A boolean mask on an accelerator would
    make the host wait for the number of rows. So the indices are computed on the host and sent.
    """
    indices = []
    for index in counts.nonzero(as_tuple=True):
        indices.append(index.to(value.device, non_blocking=True))
    return value[tuple(indices)]


def _begins_with(value: torch.Tensor, counts: torch.Tensor) -> bool:
    """Whether the first axes of an activation have the shape of the mask."""
    return value.shape[: counts.ndim] == counts.shape


def _select_states(value: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    """The tokens that count of an attention state ``(batch, heads, tokens, head_dim)``, as ``(1, heads, n, head_dim)``.

    None if the state has another shape, or the mask does not fit it.
    """
    if value.ndim != 4:
        return None
    batch, _, tokens, _ = value.shape
    if counts.shape not in ((batch,), (batch, tokens)):
        return None
    states = take(value.transpose(1, 2), counts)
    return states.flatten(0, -3).transpose(0, 1).unsqueeze(0)


def _may_be_mask_of(value: torch.Tensor, counts: torch.Tensor, layout: Layout) -> bool:
    """Whether a mask that keeps everything fits the shape of an activation, which can then be returned as it is."""
    if counts.ndim == 1:
        return True
    if layout == "heads" and value.ndim == 4:
        return (len(value), value.shape[2]) == counts.shape
    if value.ndim == 2 and layout != "heads" and len(value) in (len(counts), counts.numel()):
        return True
    return value.shape[:2] == counts.shape


def _unknown_rows(value: torch.Tensor, mask: torch.Tensor, name: str, layout: Layout) -> CalibrationError:
    """The error to raise if the shape of an activation does not tell which of its rows count."""
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
    """Return ``mask`` if it is a tensor of one or two dimensions, else raise a CalibrationError.

    Called by :func:`find_mask` for the mask in a batch, and by ``mask_tokens`` of :mod:`.hooks` for each mask that a
    session gets, from callbacks, the user or the arguments of the model. ``where`` names the mask in the error.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (1, 2):
        raise CalibrationError(
            f"{where} is not a token mask",
            got=f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__,
            expected="a tensor (batch, tokens), nonzero for a token that counts",
        )
    return mask


def find_mask(batch: Any, token_mask: str | Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Return the token mask of a batch of the DataLoader.

    Called before each batch runs, by the callbacks and the calibration from files; and by the command line for the
    first batch, before the run.

    Args:
        batch: of the DataLoader.
        token_mask: the key or the attribute of the batch that holds the mask, or a function that takes the batch and
            returns the mask. The result of a function is returned unchecked; a session that masks its tokens with it
            checks it (``mask_tokens`` of :mod:`.hooks`).

    Raises:
        CalibrationError: the batch has no such key or attribute, or what it holds is no mask.
    """
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
