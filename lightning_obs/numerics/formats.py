"""The numbers that a format can hold, in units of its scale.

Scale and zero point are compressed-tensors' own. Rounding is its result, bit for bit, without its casts: adding and
subtracting a large enough number rounds a float32 to fewer bits, five times faster than a cast there and back, and it
compiles into the loop around it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range

# float formats: bits -> (mantissa bits, exponent of the smallest normal number)
_FLOATS = {8: (3, -6), 6: (3, 0), 4: (1, 0)}


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
    mantissa: int | None  # None: integers
    smallest: int

    @classmethod
    def of(cls, args: QuantizationArgs) -> NumberGrid:
        """The grid of a format. The scales of a tensor_group are not rounded: their global scale is not known yet."""
        if args.strategy == QuantizationStrategy.TENSOR_GROUP and args.scale_dtype is not None:
            args = args.model_copy(update={"scale_dtype": None})
        low, high = (bound.item() for bound in calculate_range(args, "cpu"))
        mantissa, smallest = _FLOATS[args.num_bits] if args.type == QuantizationType.FLOAT else (None, 0)
        return cls(args, bool(args.symmetric), float(low), float(high), mantissa, smallest)

    @property
    def steps(self) -> float:
        """How many steps the largest magnitude is: what float32's rounding of ``x / scale`` is multiplied by."""
        return self.high + 1 if self.mantissa is None else float(2 ** (self.mantissa + 2))

    @property
    def usual_error(self) -> float:
        """Largest rounding error of a value at a tenth of the range, where most values of a weight are."""
        if self.mantissa is None:
            return 0.5
        return 2.0 ** (max(math.floor(math.log2(self.high / 10)), self.smallest) - self.mantissa - 1)

    @property
    def largest_error(self) -> float:
        """Largest rounding error of a value inside the range."""
        return 0.5 if self.mantissa is None else 2.0 ** (math.floor(math.log2(self.high)) - self.mantissa - 1)

    def qparams(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero point (None if symmetric) as float32, rounded as compressed-tensors stores them."""
        scale, zero_point = calculate_qparams(low, high, self.args)
        return scale.float(), None if self.symmetric else zero_point.float()

    def round(self, value: torch.Tensor) -> torch.Tensor:
        """The nearest numbers of the format (ties to even) to a float32 tensor, as a new tensor."""
        if self.mantissa is None:
            return round_to_grid(value, self.low, self.high)
        return round_to_grid(value, self.low, self.high, *self.rounding)

    @property
    def rounding(self) -> tuple[float, float]:
        """Smallest normal number, and what times a power of two leaves only the format's bits when it is added."""
        if self.mantissa is None:
            return 0.0, 0.0
        return 2.0**self.smallest, 1.5 * 2.0 ** (23 - self.mantissa)


def round_to_grid(
    value: torch.Tensor,
    low: Any,
    high: Any,
    normal: Any = None,
    magic: Any = None,
) -> torch.Tensor:
    """:meth:`NumberGrid.round` by its numbers, floats or tensors; without the last two, to integers."""
    near = value.clamp(low, high)
    if magic is None:
        return near.round_()
    # float32 rounds to even when the power of two, times 1.5 * 2**(23 - mantissa), is added.
    power = (near.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=normal)
    power = power.mul_(magic)
    return near.add_(power).sub_(power)
