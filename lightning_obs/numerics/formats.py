"""Number formats, by name in one table, and the grid of one in units of a scale.

Scale and zero point are compressed-tensors' own. Rounding is its result, bit for bit, without its casts: adding and
subtracting a large enough number rounds a float32 to fewer bits, five times faster than a cast there and back, and it
compiles into the loop around it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.qparams import keep_range_readable, no_upload, signed_scale


class NumberFormat(NamedTuple):
    """A sign, an exponent and a mantissa, with subnormal numbers.

    Attributes:
        bits: of a number.
        mantissa: bits of it.
        smallest: exponent of the smallest normal number.
        last: the largest number.
        dtype: torch's dtype of these numbers; None: torch has none.
        codes: a dtype of one byte that holds these numbers, if values are quantized to them; None: only ranges and
            scales are rounded to them.
        mx_mantissa: bits to which compressed-tensors rounds the largest magnitude before it takes the power of two that
            is an MX scale.
    """

    bits: int
    mantissa: int
    smallest: int
    last: float
    dtype: torch.dtype | None = None
    codes: torch.dtype | None = None
    mx_mantissa: int = 1

    def last_step(self) -> float:
        """The step from the second largest to the largest number."""
        exponent = math.floor(math.log2(self.last))
        return 2.0 ** (exponent - self.mantissa)


#: all floating formats; QuantizationArgs name formats of values by their bits
FORMATS = {
    "float4_e2m1fn": NumberFormat(4, 1, 0, 6.0, codes=torch.float8_e4m3fn),
    "float6_e2m3fn": NumberFormat(6, 3, 0, 7.5, codes=torch.float8_e4m3fn, mx_mantissa=3),
    "float8_e4m3fn": NumberFormat(8, 3, -6, 448.0, torch.float8_e4m3fn, codes=torch.float8_e4m3fn),
    "float16": NumberFormat(16, 10, -14, 65504.0, torch.float16),
    "bfloat16": NumberFormat(16, 7, -126, torch.finfo(torch.bfloat16).max, torch.bfloat16),
}


def format_of(args: QuantizationArgs) -> NumberFormat | None:
    """The floating format to which values are quantized; None: integers.

    Called for each :class:`NumberGrid` that is made.

    Raises:
        CalibrationError: no format of this many bits is in :data:`FORMATS`.

    >>> format_of(QuantizationArgs(num_bits=8, type="float")) is FORMATS["float8_e4m3fn"]
    True
    """
    if args.type == QuantizationType.INT:
        return None
    value_formats = {name: number for name, number in FORMATS.items() if number.codes is not None}
    for number in value_formats.values():
        if number.bits == args.num_bits:
            return number
    raise CalibrationError(
        "no such number format",
        got=f"floating point of {args.num_bits} bits",
        expected="one of " + ", ".join(value_formats),
        remedy="use one of these, or add a row to FORMATS in numerics/formats.py.",
    )


def format_of_dtype(dtype: torch.dtype | None) -> NumberFormat | None:
    """The format of ranges and scales in a dtype; None: not in :data:`FORMATS`, or as wide as float32.

    The range search on a CPU asks it for the rounding that its compiled loop has to imitate.
    """
    if dtype is None:
        return None
    for number in FORMATS.values():
        if number.dtype == dtype:
            return number
    return None


class NumberGrid(NamedTuple):
    """The numbers of a format, in units of the scale; the zero point is not subtracted.

    Searches, fake quantization, rounding and the report make one for each tensor, with :meth:`of`.

    Attributes:
        args: how a range becomes a scale.
        low: the smallest number.
        high: the largest number.
        number: the floating format, which says where the numbers between lie; None: at the integers.
        signed: whether a scale may be negative (:func:`~lightning_obs.numerics.qparams.signed_scale`).
        global_scale: ``(1,)``, to which the scales of a tensor_group are relative; None for other strategies, or where
            it is not known yet.

    >>> NumberGrid.of(QuantizationArgs(num_bits=4)).round(torch.tensor([-9.0, 0.5, 1.5, 6.6]))
    tensor([-8.,  0.,  2.,  7.])
    """

    args: QuantizationArgs
    low: float
    high: float
    number: NumberFormat | None
    signed: bool = False
    global_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, args: QuantizationArgs, signed: bool = False, global_scale: torch.Tensor | None = None) -> NumberGrid:
        """The grid of a format."""
        number = format_of(args)
        if number is None:
            low = -(2.0 ** (args.num_bits - 1))
            high = -low - 1
        else:
            low = -number.last
            high = number.last
        return cls(args, low, high, number, signed, global_scale)

    def last_step(self) -> float:
        """Distance of the two outermost numbers. Not a property, which the compiler of torch 2.10 cannot trace."""
        if self.number is None:
            return 1.0
        return self.number.last_step()

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """The dtype to which scales are rounded; None for a tensor_group, whose global scale is not known yet."""
        if self.args.strategy == QuantizationStrategy.TENSOR_GROUP:
            return None
        return self.args.scale_dtype

    def qparams(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero point (None if symmetric) as float32, rounded as compressed-tensors stores them.

        Called by the range searches for their candidate ranges.

        Args:
            low: smallest value of each range, any shape.
            high: largest value, of the same shape.
        """
        args = self.args
        if self.signed:
            return signed_scale(low, high, args).float(), None
        if self.global_scale is None and args.scale_dtype != self.scale_dtype:
            args = args.model_copy(update={"scale_dtype": None})
        with no_upload(low.device):
            keep_range_readable(args, low.device)
            scale, zero_point = calculate_qparams(low, high, args, global_scale=self.global_scale)
        if self.global_scale is not None:
            return scale.float() / self.global_scale, None
        if args.symmetric:
            return scale.float(), None
        return scale.float(), zero_point.float()

    def round(self, value: torch.Tensor) -> torch.Tensor:
        """The nearest numbers of the format (ties to even) to a float32 tensor."""
        near = value.clamp(self.low, self.high)
        if self.number is None:
            return near.round_()
        # float32 rounds to the format's bits, ties to even, when 1.5 * 2**(23 - mantissa) times the value's power of
        # two is added.
        bits = near.view(torch.int32)
        exponent_bits = torch.bitwise_and(bits, 0x7F800000)
        power = exponent_bits.view(torch.float32)
        power.clamp_(min=2.0**self.number.smallest)
        rounder = power.mul_(1.5 * 2.0 ** (23 - self.number.mantissa))
        return near.add_(rounder).sub_(rounder)

    def error(
        self, value: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The error of quantizing and dequantizing a float32 tensor; scale and zero point broadcast against it.

        Called by the searches for ranges.
        """
        steps = value / scale
        if zero_point is not None:
            steps.add_(zero_point)
        levels = self.round(steps)
        if zero_point is not None:
            levels.sub_(zero_point)
        if out is None:
            out = levels
        dequantized = torch.mul(levels, scale, out=out)
        return dequantized.sub_(value)
