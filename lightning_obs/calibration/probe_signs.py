"""The random signs of the probe of a call's logits, which do not depend on how the data was cut into batches.

Predictions whose gradients add up in one token need signs of their own: the positions of a sequence, counted among the
tokens that count, so that padding on either side moves none. Sequences may have the same signs. Where a sample has one
prediction, its signs are found by its own values: with the same signs for all samples, classes that have one sign would
count too little in every sample, and with signs by number they would depend on the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_obs.calibration.token_mask import PADDING

#: rows of signs for samples with one prediction: a power of two
_SAMPLE_ROWS = 1 << 12
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ProbeSigns:
    """Rows of random signs. A row has the same signs on every device, however many rows were asked for before it."""

    def __init__(self) -> None:
        #: by number of classes: the generator of further rows, and the rows so far
        self._rows: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def of_call(
        self, logits: torch.Tensor, mask: torch.Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Signs for logits ``(batch, ..., classes)``, in int8; without the batch where all samples have the same.

        ``mask`` is ``(batch, tokens)``, on the CPU, nonzero for tokens that count, or None; ``args`` and ``kwargs`` are
        of the call that gave the logits.
        """
        classes, device = logits.shape[-1], logits.device
        if logits.ndim == 2:
            numbers = _numbers_of_samples(len(logits), mask, args, kwargs)
            return self._first(_SAMPLE_ROWS, classes, device)[numbers.to(device)]
        positions = logits[0, ..., 0].numel()
        rows = self._first(positions, classes, device)[:positions]
        if mask is None or mask.shape != logits.shape[:-1] or bool(mask.bool().all()):
            return rows.view(logits.shape[1:])
        return rows[_ranks(mask).to(device)]

    def _first(self, count: int, classes: int, device: torch.device) -> torch.Tensor:
        """At least the first ``count`` rows, ``(n, classes)``; drawn on the CPU, so that every device has the same."""
        generator, rows = self._rows.get(classes) or (torch.Generator().manual_seed(0), torch.empty(0, classes))
        if len(rows) < count:
            further = torch.empty((count - len(rows), classes), dtype=torch.int8).random_(0, 2, generator=generator)
            rows = torch.cat([rows.to(device, torch.int8), further.mul_(2).sub_(1).to(device)])
        self._rows[classes] = generator, rows.to(device)
        return self._rows[classes][1]


def _ranks(mask: torch.Tensor) -> torch.Tensor:
    """The number of each token among the tokens of its sequence that count; of others, any."""
    return (mask.bool().cumsum(-1) - 1).clamp_min(0)


def _numbers_of_samples(
    samples: int, mask: torch.Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """A number below :data:`_SAMPLE_ROWS` for each sample, by the values of its input; padding has no part in it."""
    value = _input_of(samples, args, kwargs)
    if value is None:
        return torch.zeros(samples, dtype=torch.long)
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = value.contiguous().view(_INTEGERS[value.itemsize]).long().reshape(samples, -1)
    generator = torch.Generator().manual_seed(0)
    if mask is not None and mask.ndim == 2 and value.shape[:2] == mask.shape:
        bits = bits.unflatten(1, (mask.shape[1], -1))
        factors = _factors(bits[0].numel(), generator).view(bits.shape[1:])[_ranks(mask)].to(bits.device)
        factors = factors * mask.bool()[..., None].to(bits.device)
    else:
        factors = _factors(bits.shape[1], generator).to(bits.device)
    digests = (bits * factors).reshape(samples, -1).sum(1)  # modulo 2 ** 64: in any order
    return (digests >> 40) & (_SAMPLE_ROWS - 1)


def _factors(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random odd integers; the first ones are the same for any ``count``."""
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def _input_of(samples: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The largest floating point tensor of a call with a row for each sample; without one, the largest of the others.

    The first of several that are equally large. The attention mask is none of them.
    """
    given = tree_leaves((args, {name: value for name, value in kwargs.items() if name != PADDING}))
    largest = None
    for value in given:
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != samples or not value.numel():
            continue
        size = value.is_floating_point(), value.numel()
        if largest is None or size > (largest.is_floating_point(), largest.numel()):
            largest = value
    return largest
