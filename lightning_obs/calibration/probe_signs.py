"""The random signs of the probe of a call's output, which do not depend on how the data was cut into batches.

Predictions whose gradients add up in one token need signs of their own: the positions of a sequence, counted among the
tokens that count, so that padding on either side moves none. Sequences of logits have the same signs: rows as long as
a vocabulary are few. Of other numbers each sequence begins at a row of its own, so that more signs are averaged.

Where a sample has one prediction, its signs are found by its own values: with the same signs for all samples, classes
that have one sign would count too little in every sample, and with signs by number they would depend on the order.
Tensors of one output have signs of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_obs.calibration.token_mask import PADDING

#: most rows of signs for samples with one prediction: a power of two
_SAMPLE_ROWS = 1 << 12
#: most signs in these rows: 16 MiB
_MOST_SIGNS = 1 << 24
#: by bytes of an element, the integer with as many
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ProbeSigns:
    """Rows of random signs. A row has the same signs on every device, however many rows were asked for before it."""

    def __init__(self) -> None:
        #: by number of the tensor and width of a row: the generator of further rows, and the rows so far
        self._rows: dict[tuple[int, int], tuple[torch.Generator, torch.Tensor]] = {}

    def of_call(
        self,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        number: int = 0,
        *,
        by_sample: bool = False,
    ) -> torch.Tensor:
        """Signs for a tensor of the output of a call of the model.

        Args:
            values: ``(batch, C)`` or ``(batch, ..., C)``: logits of C classes, or C numbers of any kind.
            mask: ``(batch, tokens)``, on the CPU, nonzero for tokens that count; None: all count.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            number: of the tensor: those of another number are independent.
            by_sample: whether the signs of ``(batch, positions, C)`` differ from sample to sample.

        Returns:
            ``(batch, ..., C)`` in int8, on the device of ``values``; without the batch axis where all samples have the
            same signs.
        """
        width = values.shape[-1]
        device = values.device
        if values.ndim == 2:
            count = _rows_for_samples(width)
            numbers = _numbers_of_samples(len(values), count, mask, args, kwargs)
            rows = self._first_rows(count, number, width, device)
            return rows[numbers.to(device)]
        positions = values[0, ..., 0].numel()
        if by_sample and positions <= _rows_for_samples(width):
            return self._by_sample_and_position(values, mask, args, kwargs, number)
        rows = self._first_rows(positions, number, width, device)[:positions]
        is_of_positions = mask is not None and mask.shape == values.shape[:-1]
        if mask is None or not is_of_positions or bool(mask.bool().all()):
            return rows.view(values.shape[1:])
        return rows[_numbers_of_tokens(mask).to(device)]

    def _by_sample_and_position(
        self,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        number: int,
    ) -> torch.Tensor:
        """Signs for ``(batch, positions, C)``: a sample's first row by the values of its input, then the next ones."""
        samples, positions, width = values.shape
        count = _rows_for_samples(width)
        first = _numbers_of_samples(samples, count, mask, args, kwargs).cpu()
        places = torch.arange(positions).expand(samples, positions)
        if mask is not None and mask.shape == values.shape[:-1]:
            places = _numbers_of_tokens(mask)
        numbers = (first[:, None] + places) % count
        rows = self._first_rows(count, number, width, values.device)
        return rows[numbers.to(values.device)]

    def _first_rows(self, count: int, number: int, width: int, device: torch.device) -> torch.Tensor:
        """At least the first ``count`` rows, ``(n, width)``; drawn on the CPU, so that every device has the same."""
        key = number, width
        if key not in self._rows:
            self._rows[key] = torch.Generator().manual_seed(number), torch.empty(0, width, dtype=torch.int8)
        generator, rows = self._rows[key]
        rows = rows.to(device)
        if len(rows) < count:
            bits = torch.empty((count - len(rows), width), dtype=torch.int8).random_(0, 2, generator=generator)
            signs = bits.mul_(2).sub_(1)
            rows = torch.cat([rows, signs.to(device)])
        self._rows[key] = generator, rows
        return rows


def _rows_for_samples(width: int) -> int:
    """How many rows of signs samples with one prediction share: a power of two, fewer where a row is long."""
    rows = _SAMPLE_ROWS
    while rows > 1 and rows * width > _MOST_SIGNS:
        rows //= 2
    return rows


def _numbers_of_tokens(mask: torch.Tensor) -> torch.Tensor:
    """The number of each token among the tokens of its sequence that count; a token that does not count has any."""
    return (mask.bool().cumsum(-1) - 1).clamp_min(0)


def _numbers_of_samples(
    samples: int, rows: int, mask: torch.Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """A number below ``rows`` for each sample, by the values of its input; padding has no part in it.

    Where no input has a row for each sample, by its place in the output.
    """
    value = _input_of(samples, args, kwargs)
    if value is None:
        return torch.arange(samples) % rows
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
    return (digests >> 40) & (rows - 1)


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
