"""Random signs (+1, -1) for the probe of a model's output, independent of how the data was cut into batches.

:mod:`.output_probe` multiplies the output of each call by signs to estimate how much each token matters (Hutchinson's
estimator). A *row* is the signs of one prediction, one sign for each of its C numbers or classes. Rows are drawn once,
in a fixed order, and each prediction is given one:

- A sequence has several predictions, and their gradients add up in the tokens before. So each position gets another
  row. Positions are counted without padding, so that padding on either side changes nothing.
- All sequences of logits use the same rows, because rows as long as a vocabulary take much memory. For outputs with
  fewer numbers, each sequence begins at a row of its own, so that more signs are averaged.
- A sample with a single prediction gets its row from a hash of its input. With one row for all samples, classes that
  have the same sign in it would count too little in every sample. A row by the sample's number would depend on the
  order of the data.
- Each tensor of an output has rows of its own, drawn from another seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_obs.calibration.token_mask import PADDING

#: the most rows of signs that samples share; a power of two, so that a hash is reduced by a bit mask
_SAMPLE_ROWS = 1 << 12
#: the most signs in all these rows together: 16 MiB in int8
_MOST_SIGNS = 1 << 24
#: the lowest of the bits of a sample's hash that choose its row: a bit of the hash depends on the bits of the inputs at
#: and below its place, so it is a high one, and 24 bits from here on are enough for :data:`_SAMPLE_ROWS`
_FIRST_BIT = 40
#: by bytes of an element, the integer dtype of the same size, as which the bits of an input are hashed
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ProbeSigns:
    """Draws and keeps the rows of signs; an :class:`.OutputProbe` has one.

    A row has the same signs on every device and in every run, however many rows were drawn before it.
    """

    def __init__(self) -> None:
        #: by number of the tensor and length of a row: the generator of further rows, and the rows drawn so far
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
        """Signs for one tensor of the output of a call; :meth:`.OutputProbe.run_backward` calls this.

        Args:
            values: ``(batch, C)`` or ``(batch, ..., C)``: logits of C classes, or C numbers of any kind.
            mask: ``(batch, tokens)``, on the CPU, nonzero for tokens that count; None: all tokens count.
            args: positional arguments of the call, whose values choose the rows of samples.
            kwargs: keyword arguments of the call.
            number: which tensor of the output it is; tensors of different numbers have independent signs.
            by_sample: whether the samples begin at different rows, if there are rows enough. ``values`` then has two
                or three dimensions: :class:`.OutputProbe` sets it for all tensors but logits, which it has flattened
                to ``(batch, C)`` or ``(batch, positions, C)``.

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
        """Signs ``(batch, positions, C)``: the sample's input chooses the first row, and positions take the next rows.

        Arguments are those of :meth:`of_call`.
        """
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
        """The rows drawn so far, ``(n, width)``, at least ``count`` of them.

        They are drawn on the CPU, so that all devices have the same.

        Args:
            count: how many rows are needed.
            number: of the tensor; the seed.
            width: the length of a row.
            device: where the rows are returned.
        """
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
    """How many rows of signs of length ``width`` the samples share: a power of two, smaller for long rows."""
    rows = _SAMPLE_ROWS
    while rows > 1 and rows * width > _MOST_SIGNS:
        rows //= 2
    return rows


def _numbers_of_tokens(mask: torch.Tensor) -> torch.Tensor:
    """The position of each token among the tokens of its sequence that count, ``(batch, tokens)``.

    The values at tokens that do not count have no meaning.
    """
    return (mask.bool().cumsum(-1) - 1).clamp_min(0)


def _numbers_of_samples(
    samples: int, rows: int, mask: torch.Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """A row number for each sample, ``(samples,)``, hashed from the values of its input without padding.

    If no input has an entry for each sample, the number is the sample's index in the batch.

    Args:
        samples: how many samples the output has.
        rows: how many rows there are, a power of two.
        mask: of the tokens of the call.
        args, kwargs: of the call.
    """
    value = _input_of(samples, args, kwargs)
    if value is None:
        return torch.arange(samples) % rows
    if value.is_complex():
        value = torch.view_as_real(value)
    integers = value.contiguous().view(_INTEGERS[value.itemsize]).long().reshape(samples, -1)
    if value.itemsize == 8:
        # A row does not depend on the bits of an input above those that choose it, and a small whole number in float64
        # has only such bits. So the upper half of the bits is mixed into the lower half.
        integers = integers ^ (integers >> 32)
    generator = torch.Generator().manual_seed(0)
    if mask is not None and mask.ndim == 2 and value.shape[:2] == mask.shape:
        integers = integers.unflatten(1, (mask.shape[1], -1))
        factors_of_positions = _factors(integers[0].numel(), generator).view(integers.shape[1:])
        factors = factors_of_positions[_numbers_of_tokens(mask)] * mask.bool()[..., None]
    else:
        factors = _factors(integers.shape[1], generator)
    products = integers * factors.to(integers.device)
    digests = products.reshape(samples, -1).sum(1)  # modulo 2 ** 64: the same in any order
    return (digests >> _FIRST_BIT) & (rows - 1)


def _factors(count: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` random odd integers, the factors of the hash; a larger ``count`` begins with the same integers."""
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def _input_of(samples: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The argument of a call whose values stand for the samples: its largest tensor with ``samples`` entries.

    Floating point tensors come before others, and the first of equally large tensors is taken. The attention mask is
    left out. None if there is no such tensor.
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
