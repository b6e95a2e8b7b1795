"""Number formats, by name in one table, and the grid of a format: its numbers in units of the scale.

Range searches, fake quantization, rounding and the report quantize by :class:`NumberGrid`. Scale and zero point are
computed by compressed-tensors. Rounding gives the bits of compressed-tensors without its casts: adding and subtracting
a large enough number rounds a float32 to fewer bits, five times faster than a cast there and back, and the compiler of
a loop can inline it.
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
    """A floating-point format: a sign, an exponent and a mantissa, with subnormal numbers; a row of :data:`FORMATS`.

    Attributes:
        bits: number of bits of a number.
        mantissa: number of bits of the mantissa, without the implied one.
        smallest: exponent of the smallest normal number.
        last: the largest number.
        codes: a dtype of one byte that holds these numbers; rounding returns levels in it, and the report counts its
            patterns.
        dtype: torch's dtype of exactly these numbers; None: torch has no such dtype.
        mx_mantissa: for MX, where a scale is a power of two: number of mantissa bits to which compressed-tensors rounds
            the largest magnitude before it takes the power of two. The CPU's search (``search/lane_scales.py``) reads
            it. float8_e4m3fn keeps the default, because compressed-tensors rounds magnitudes for MXFP8 as for FP4.
    """

    bits: int
    mantissa: int
    smallest: int
    last: float
    codes: torch.dtype
    dtype: torch.dtype | None = None
    mx_mantissa: int = 1

    def last_step(self) -> float:
        """The distance from the second largest to the largest number; for :meth:`NumberGrid.last_step`."""
        exponent = math.floor(math.log2(self.last))
        return 2.0 ** (exponent - self.mantissa)


#: all floating formats of values, by name; QuantizationArgs identify one by its number of bits
FORMATS = {
    "float4_e2m1fn": NumberFormat(
        bits=4,
        mantissa=1,
        smallest=0,
        last=6.0,
        codes=torch.float8_e4m3fn,
    ),
    "float6_e2m3fn": NumberFormat(
        bits=6,
        mantissa=3,
        smallest=0,
        last=7.5,
        codes=torch.float8_e4m3fn,
        mx_mantissa=3,
    ),
    "float8_e4m3fn": NumberFormat(
        bits=8,
        mantissa=3,
        smallest=-6,
        last=448.0,
        dtype=torch.float8_e4m3fn,
        codes=torch.float8_e4m3fn,
    ),
}


def format_of(args: QuantizationArgs) -> NumberFormat | None:
    """The floating format to which values are quantized; None: values are quantized to integers.

    Called for each :class:`NumberGrid` that is made, by fake quantization, and by the ``local_hessian`` observer.

    Raises:
        CalibrationError: no format of this many bits is in :data:`FORMATS`.

    >>> format_of(QuantizationArgs(num_bits=8, type="float")) is FORMATS["float8_e4m3fn"]
    True
    """
    if args.type == QuantizationType.INT:
        return None
    for number in FORMATS.values():
        if number.bits == args.num_bits:
            return number
    raise CalibrationError(
        "no such number format",
        got=f"floating point of {args.num_bits} bits",
        expected="one of " + ", ".join(FORMATS),
        remedy="use one of these, or add a row to FORMATS in numerics/formats.py.",
    )


class NumberGrid(NamedTuple):
    """The numbers of a format, in units of the scale, before the zero point is subtracted.

    Searches, fake quantization, rounding and the report make one for each tensor, with :meth:`of`.

    Attributes:
        args: compressed-tensors' arguments, from which scales are computed.
        low: the smallest number.
        high: the largest number.
        number: the floating format of the numbers between them; None: they are the integers.
        signed: whether a scale may be negative (:func:`~lightning_obs.numerics.qparams.signed_scale`).
        global_scale: ``(1,)``, the number that multiplies the scales of a tensor_group before they are rounded; None
            for other strategies, or where it is not known yet.

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
        """The grid of the format that ``args`` ask for; ``signed`` and ``global_scale`` become its attributes."""
        number = format_of(args)
        if number is None:
            low = -(2.0 ** (args.num_bits - 1))
            high = -low - 1
        else:
            low = -number.last
            high = number.last
        return cls(args, low, high, number, signed, global_scale)

    def last_step(self) -> float:
        """The distance from the second largest to the largest number.

        ``fake_quantize.py`` calls it to tell which values were clipped, and ``report/metrics.py`` for the report's
        errors. It is no property, because the compiler of torch 2.10 cannot trace one here.
        """
        if self.number is None:
            return 1.0
        return self.number.last_step()

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """The dtype to which a search rounds scales; None: they keep the dtype of the range.

        It is None for a tensor_group, whose scales can be rounded only relative to a global scale. Read by
        :meth:`qparams`, and by ``candidates.half_of_range`` before a search.
        """
        if self.args.strategy == QuantizationStrategy.TENSOR_GROUP:
            return None
        return self.args.scale_dtype

    def qparams(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scale and the zero point (None if symmetric) of each range, as the searches compute with them.

        Scales are rounded as they are stored, then converted to float32. Under a global scale the stored number is the
        rounded product of both scales; the result is this number divided by the global scale. Without it, the scales of
        a tensor_group are not rounded. Called by the range searches for their candidate ranges.

        Args:
            low: smallest value of each range, any shape.
            high: largest value, of the same shape.

        Returns:
            Both in float32, in the shape of ``low``.
        """
        args = self.args
        if self.signed:
            return signed_scale(low, high, args).float(), None
        if self.global_scale is None and args.scale_dtype != self.scale_dtype:
            args = args.model_copy(update={"scale_dtype": None})
        # compressed-tensors makes small tensors here. The host must not wait for their upload, and those that it keeps
        # for the process must not be made in inference mode.
        with no_upload(low.device):
            keep_range_readable(args, low.device)
            scale, zero_point = calculate_qparams(low, high, args, global_scale=self.global_scale)
        if self.global_scale is not None:
            return scale.float() / self.global_scale, None
        if args.symmetric:
            return scale.float(), None
        return scale.float(), zero_point.float()

    def round(self, value: torch.Tensor) -> torch.Tensor:
        """The nearest number of the format, ties to even, to each value of a float32 tensor in units of the scale.

        Called by :meth:`error`, fake quantization, rounding, the entropy criterion and the report.
        """
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
        """The error ``dequantize(quantize(value)) - value`` of a float32 tensor, in the units of the value.

        ``scale`` and ``zero_point`` broadcast against the value. ``out``, if it is given, receives the result. The
        range searches call it for each candidate.
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
