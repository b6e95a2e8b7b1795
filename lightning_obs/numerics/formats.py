"""The numbers that a format can hold, in units of its scale.

Scale and zero point are compressed-tensors' own. Rounding is its result, bit for bit, without its casts: adding and
subtracting a large enough number rounds a float32 to fewer bits, five times faster than a cast there and back, and it
compiles into the loop around it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA, FP8_E4M3_DATA, FloatArgs
from compressed_tensors.quantization.utils import calculate_qparams


class FloatFormat(NamedTuple):
    """A sign, an exponent and a mantissa, with subnormal numbers; no infinity."""

    last: float  # the largest number
    last_step: float  # from the number before it
    mantissa: int  # bits
    smallest: int  # exponent of the smallest normal number

    @classmethod
    def of(cls, data: type[FloatArgs]) -> FloatFormat:
        """The format that compressed-tensors describes.

        >>> FloatFormat.of(FP8_E4M3_DATA)
        FloatFormat(last=448.0, last_step=32.0, mantissa=3, smallest=-6)
        """
        assert data.max is not None
        last_step = 2.0 ** (math.floor(math.log2(data.max)) - data.mantissa)
        return cls(data.max, last_step, data.mantissa, 2 - 2 ** (data.exponent - 1))

    @property
    def rounding(self) -> tuple[float, float]:
        """Smallest normal number, and what times a power of two leaves only the format's bits when it is added."""
        return 2.0**self.smallest, 1.5 * 2.0 ** (23 - self.mantissa)


#: bits -> format; compressed-tensors 0.19 does not describe the one of 6 bits, E2M3
FLOATS = {8: FloatFormat.of(FP8_E4M3_DATA), 6: FloatFormat(7.5, 0.5, 3, 0), 4: FloatFormat.of(FP4_E2M1_DATA)}


class Levels(NamedTuple):
    """The ends of what a format can hold, in units of the scale, zero point not subtracted."""

    low: float
    high: float
    last_step: float  # distance of the two outermost levels

    @classmethod
    def of(cls, args: QuantizationArgs) -> Levels:
        """Of a format.

        >>> Levels.of(QuantizationArgs(num_bits=4))
        Levels(low=-8.0, high=7.0, last_step=1.0)
        """
        if args.type == QuantizationType.INT:
            half = 2.0 ** (args.num_bits - 1)
            return cls(-half, half - 1, 1.0)
        number = FLOATS[args.num_bits]
        return cls(-number.last, number.last, number.last_step)


@dataclass(frozen=True)
class NumberGrid:
    """Smallest and largest number, and where the numbers between them lie.

    >>> NumberGrid.of(QuantizationArgs(num_bits=4)).round(torch.tensor([-9.0, 0.5, 1.5, 6.6]))
    tensor([-8.,  0.,  2.,  7.])
    """

    args: QuantizationArgs = field(compare=False)  # how a range becomes a scale
    symmetric: bool
    low: float
    high: float
    last_step: float
    number: FloatFormat | None  # None: integers

    @classmethod
    def of(cls, args: QuantizationArgs) -> NumberGrid:
        """The grid of a format. The scales of a tensor_group are not rounded: their global scale is not known yet."""
        if args.strategy == QuantizationStrategy.TENSOR_GROUP and args.scale_dtype is not None:
            args = args.model_copy(update={"scale_dtype": None})
        number = FLOATS[args.num_bits] if args.type == QuantizationType.FLOAT else None
        return cls(args, bool(args.symmetric), *Levels.of(args), number)

    @property
    def steps(self) -> float:
        """How many steps the largest magnitude is: what float32's rounding of ``x / scale`` is multiplied by."""
        return self.high + 1 if self.number is None else float(2 ** (self.number.mantissa + 2))

    @property
    def usual_error(self) -> float:
        """Largest rounding error of a value at a tenth of the range, where most values of a weight are."""
        if self.number is None:
            return 0.5
        return 2.0 ** (max(math.floor(math.log2(self.high / 10)), self.number.smallest) - self.number.mantissa - 1)

    @property
    def largest_error(self) -> float:
        """Largest rounding error of a value inside the range."""
        return self.last_step / 2

    def qparams(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero point (None if symmetric) as float32, rounded as compressed-tensors stores them."""
        scale, zero_point = calculate_qparams(low, high, self.args)
        return scale.float(), None if self.symmetric else zero_point.float()

    def round(
        self, value: torch.Tensor, *, out: torch.Tensor | None = None, scratch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The nearest numbers of the format (ties to even) to a float32 tensor; see :func:`round_to_grid`."""
        rounding = () if self.number is None else self.number.rounding
        return round_to_grid(value, self.low, self.high, *rounding, out=out, scratch=scratch)


def round_to_grid(
    value: torch.Tensor,
    low: Any,
    high: Any,
    normal: Any = None,
    magic: Any = None,
    *,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """:meth:`NumberGrid.round` by its numbers, floats or tensors; without the last two, to integers.

    Args:
        value: float32.
        low, high: the smallest and the largest number.
        normal, magic: see :attr:`FloatFormat.rounding`.
        out, scratch: memory for the result (perhaps ``value``), and to write over; None: fresh memory.
    """
    near = torch.clamp(value, low, high, out=out)
    if magic is None:
        return near.round_()
    # float32 rounds to even when the power of two, times 1.5 * 2**(23 - mantissa), is added.
    bits = None if scratch is None else scratch.view(torch.int32)
    power = torch.bitwise_and(near.view(torch.int32), 0x7F800000, out=bits).view(torch.float32)
    power = torch.clamp(power, min=normal, out=scratch).mul_(magic)
    return near.add_(power).sub_(power)
