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
#: by bytes of an element, the integer with as many
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ProbeSigns:
    """Rows of random signs. A row has the same signs on every device, however many rows were asked for before it."""

    def __init__(self) -> None:
        #: by number of classes: the generator of further rows, and the rows so far
        self._rows: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def of_call(
        self, logits: torch.Tensor, mask: torch.Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Signs for the logits of a call of the model.

        Args:
            logits: ``(batch, ..., classes)``.
            mask: ``(batch, tokens)``, on the CPU, nonzero for tokens that count; None: all count.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            ``(batch, ..., classes)`` in int8, on the device of the logits; without the batch axis where all samples
            have the same signs.
        """
        classes = logits.shape[-1]
        device = logits.device
        if logits.ndim == 2:
            numbers = _numbers_of_samples(len(logits), mask, args, kwargs)
            rows = self._first_rows(_SAMPLE_ROWS, classes, device)
            return rows[numbers.to(device)]
        positions = logits[0, ..., 0].numel()
        rows = self._first_rows(positions, classes, device)[:positions]
        is_of_predictions = mask is not None and mask.shape == logits.shape[:-1]
        if mask is None or not is_of_predictions or bool(mask.bool().all()):
            return rows.view(logits.shape[1:])
        return rows[_numbers_of_tokens(mask).to(device)]

    def _first_rows(self, count: int, classes: int, device: torch.device) -> torch.Tensor:
        """At least the first ``count`` rows, ``(n, classes)``; drawn on the CPU, so that every device has the same."""
        if classes not in self._rows:
            self._rows[classes] = torch.Generator().manual_seed(0), torch.empty(0, classes, dtype=torch.int8)
        generator, rows = self._rows[classes]
        rows = rows.to(device)
        if len(rows) < count:
            bits = torch.empty((count - len(rows), classes), dtype=torch.int8).random_(0, 2, generator=generator)
            signs = bits.mul_(2).sub_(1)
            rows = torch.cat([rows, signs.to(device)])
        self._rows[classes] = generator, rows
        return rows


def _numbers_of_tokens(mask: torch.Tensor) -> torch.Tensor:
    """The number of each token among the tokens of its sequence that count; a token that does not count has any."""
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
    integers = value.contiguous().view(_INTEGERS[value.itemsize]).long().reshape(samples, -1)
    generator = torch.Generator().manual_seed(0)
    if mask is not None and mask.ndim == 2 and value.shape[:2] == mask.shape:
        integers = integers.unflatten(1, (mask.shape[1], -1))
        factors_of_positions = _factors(integers[0].numel(), generator).view(integers.shape[1:])
        factors = factors_of_positions[_numbers_of_tokens(mask)] * mask.bool()[..., None]
    else:
        factors = _factors(integers.shape[1], generator)
    products = integers * factors.to(integers.device)
    digests = products.reshape(samples, -1).sum(1)  # modulo 2 ** 64: the same in any order
    return (digests >> 40) & (_SAMPLE_ROWS - 1)


def _factors(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random odd integers; the first ones are the same for any ``count``."""
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def _input_of(samples: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The largest floating point tensor of a call with a row for each sample; without one, the largest of the others.

    The first of several that are equally large. The attention mask is none of them.
    """
    arguments = {name: value for name, value in kwargs.items() if name != PADDING}
    largest = None
    largest_size = (False, 0)
    for value in tree_leaves((args, arguments)):
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != samples:
            continue
        size = (value.is_floating_point(), value.numel())
        if value.numel() and size > largest_size:
            largest = value
            largest_size = size
    return largest
