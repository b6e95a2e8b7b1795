"""The formats in which GGUF stores quantized weights, each a row, and how codes and scales become their blocks.

A block is 32 neighbouring weights of a row: a scale ``d`` in float16, in some formats a minimum ``m``, then the codes.
Scales of larger groups, of rows, or of a whole tensor are repeated: each of their blocks has the same one.

The layouts are those of ``ggml-common.h``. ``gguf.dequantize`` gives the numbers that llama.cpp computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from numpy.typing import NDArray

from lightning_obs.model.stored import StoredWeight
from lightning_obs.schemes.config import number_format

#: number of weights in a block, which share a scale
BLOCK = 32
#: relative error of the nearest float16, unless the number is too large or too small for it
_FLOAT16_ERROR = 2.0**-11

_Bytes: TypeAlias = "NDArray[np.uint8]"


class BlockFormat(NamedTuple):
    """A format of GGUF; ``FORMATS`` has all that are written, and :func:`format_for` chooses among them.

    Attributes:
        name: the name of the type in ``gguf.GGMLQuantizationType``.
        numbers: the number format of the weights that the format stores.
        symmetric: whether the weights have no zero point.
        file_type: the ``gguf.LlamaFileType`` of a file most of whose weights have this format.
        pack: takes codes ``(N, 32)``, scales ``(N, 1)`` and zero points ``(N, 1)`` of N blocks; returns their bytes
            ``(N, bytes of a block)``. Codes are int8: of an integer format the signed integers (-8 to 7 in int4), of
            float4 the four bits of each number, the sign in bit 3 (0 to 15).
    """

    name: str
    numbers: str
    symmetric: bool
    file_type: str
    pack: Callable[[Any, Any, Any], _Bytes]


# ---------------------------------------------------------------------- blocks


def _nibbles(codes: NDArray[np.uint8]) -> _Bytes:
    """Four bits of each code: the low halves of bytes are the first half of a block, the high halves the second."""
    four_bits = codes & 15
    low, high = np.split(four_bits, 2, axis=1)
    return low | (high << 4)


def _fifth_bits(codes: NDArray[np.uint8]) -> _Bytes:
    """The fifth bit of each of 32 codes, the first code's lowest."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _half(values: Any) -> _Bytes:
    """Float16 as bytes."""
    return values.astype(np.float16).view(np.uint8)


def _minimum(scale: Any, zero_point: Any, lowest: int) -> _Bytes:
    """The number ``m`` of the lowest code, in float16: the ``q``-th code above it stands for ``d * q + m``.

    The scale ``d`` is rounded to float16 before, since llama.cpp multiplies by the rounded scale.
    """
    step = scale.astype(np.float16).astype(np.float32)
    steps = lowest - zero_point.astype(np.float32)
    return _half(step * steps)


def _above(codes: Any, lowest: int) -> NDArray[np.uint8]:
    """Codes counted from the lowest code of their format, ``lowest`` (-8 of int4, -16 of int5), so from 0 on."""
    above = codes.astype(np.int16) - lowest
    return above.astype(np.uint8)


def _q4_0(codes: Any, scale: Any, zero_point: Any) -> _Bytes:
    """Blocks of Q4_0 (:attr:`BlockFormat.pack`, as are the functions below): scale, 4 bits of each code."""
    nibbles = _nibbles(_above(codes, -8))
    return np.concatenate([_half(scale), nibbles], axis=1)


def _q4_1(codes: Any, scale: Any, zero_point: Any) -> _Bytes:
    """Blocks of Q4_1: scale, minimum, 4 bits of each code."""
    minimum = _minimum(scale, zero_point, -8)
    nibbles = _nibbles(_above(codes, -8))
    return np.concatenate([_half(scale), minimum, nibbles], axis=1)


def _q5_0(codes: Any, scale: Any, zero_point: Any) -> _Bytes:
    """Blocks of Q5_0: scale, the fifth bits, the lower 4 bits of each code."""
    above = _above(codes, -16)
    return np.concatenate([_half(scale), _fifth_bits(above), _nibbles(above)], axis=1)


def _q5_1(codes: Any, scale: Any, zero_point: Any) -> _Bytes:
    """Blocks of Q5_1: scale, minimum, the fifth bits, the lower 4 bits of each code."""
    above = _above(codes, -16)
    minimum = _minimum(scale, zero_point, -16)
    return np.concatenate([_half(scale), minimum, _fifth_bits(above), _nibbles(above)], axis=1)


def _q8_0(codes: Any, scale: Any, zero_point: Any) -> _Bytes:
    """Blocks of Q8_0: scale, signed codes."""
    return np.concatenate([_half(scale), codes.view(np.uint8)], axis=1)


def _mxfp4(codes: Any, scale: Any, zero_point: Any) -> _Bytes:
    """Blocks of MXFP4: the exponent of the scale, a power of two, with the bias 127; then the four-bit floats.

    Their codes are the bits of e2m1 already, and llama.cpp numbers its four-bit floats in the same way.
    """
    _, exponent = np.frexp(scale)  # scale = 0.5 * 2 ** exponent: 2 ** (exponent - 1), with the bias exponent + 126
    biased = exponent + 126
    nibbles = _nibbles(codes.view(np.uint8))
    return np.concatenate([biased.astype(np.uint8), nibbles], axis=1)


#: every format that is written; :func:`format_for` takes the first one that fits
FORMATS = (
    BlockFormat("Q4_0", "int4", True, "MOSTLY_Q4_0", _q4_0),
    BlockFormat("Q4_1", "int4", False, "MOSTLY_Q4_1", _q4_1),
    BlockFormat("Q5_0", "int5", True, "MOSTLY_Q5_0", _q5_0),
    BlockFormat("Q5_1", "int5", False, "MOSTLY_Q5_1", _q5_1),
    BlockFormat("Q8_0", "int8", True, "MOSTLY_Q8_0", _q8_0),
    BlockFormat("MXFP4", "float4", True, "MOSTLY_MXFP4_MOE", _mxfp4),
)


# ---------------------------------------------------------------------- schemes and weights


def format_for(args: QuantizationArgs, columns: int) -> BlockFormat | None:
    """Return the format that stores a weight with its codes and its sharing of scales; None: there is none.

    The codes are stored unchanged. MXFP4 stores scales unchanged as well; the other formats round them to float16, and
    :class:`InFloat16` tells how closely.

    ``gguf_file.py`` calls it for each quantized module: before the calibration to refuse schemes that no format holds,
    and at the export.

    Args:
        args: how the weight is quantized.
        columns: columns of the weight's matrix.

    >>> format_for(QuantizationArgs(num_bits=4, group_size=64), columns=128).name
    'Q4_0'
    >>> format_for(QuantizationArgs(num_bits=4, group_size=16), columns=128)
    """
    columns_of_scale = columns
    if args.strategy == QuantizationStrategy.GROUP:
        columns_of_scale = args.group_size or 0
    elif args.strategy not in (QuantizationStrategy.CHANNEL, QuantizationStrategy.TENSOR):
        return None
    if columns_of_scale % BLOCK or columns % BLOCK or args.actorder is not None:
        return None
    # The one format of floats is MXFP4: its scales are powers of two (uint8), and MX has groups of 32 only.
    if args.type == "float" and (args.scale_dtype != torch.uint8 or columns_of_scale != BLOCK):
        return None
    numbers = number_format(args)
    for block_format in FORMATS:
        if block_format.numbers == numbers and block_format.symmetric == args.symmetric:
            return block_format
    return None


def to_blocks(weight: StoredWeight, block_format: BlockFormat) -> _Bytes:
    """Store a weight in blocks; ``gguf_file.py`` calls it for each calibrated module when it writes a file.

    Args:
        weight: codes and range of a weight whose format is ``block_format``, by :func:`format_for`.
        block_format: the format to store it in.

    Returns:
        ``(rows, bytes of a row)``.
    """
    rows, columns = weight.codes.shape
    codes = weight.codes.cpu().numpy().reshape(-1, BLOCK)
    scale = _of_each_block(weight.range.scale, rows, columns)
    zero_point = _of_each_block(weight.range.zero_point, rows, columns)
    blocks = block_format.pack(codes, scale, zero_point)
    return blocks.reshape(rows, -1)


def _of_each_block(values: torch.Tensor, rows: int, columns: int) -> Any:
    """Scales or zero points, one for each block, ``(rows * blocks of a row, 1)`` in float32.

    Args:
        values: one for each group ``(rows, groups)``, for each row ``(rows, 1)``, or one for all ``(1,)``.
        rows: the number of the weight's rows.
        columns: the number of the weight's columns.
    """
    groups = values.shape[-1]
    matrix = values.float().cpu().reshape(-1, groups)
    of_all_rows = matrix.expand(rows, -1)
    blocks_of_group = columns // BLOCK // groups
    of_all_blocks = of_all_rows.repeat_interleave(blocks_of_group, dim=1)
    return of_all_blocks.reshape(-1, 1).numpy()


class InFloat16(NamedTuple):
    """How well float16, in which blocks store scales, holds the scales of a weight.

    ``export_gguf`` makes one for each quantized weight before it writes anything. It refuses a weight whose scales are
    not close, and warns if they are not exact.

    Attributes:
        is_exact: whether float16 holds every scale exactly.
        is_close: whether the error of every scale is at most float16's relative precision times the weight's largest
            scale. The weights of a scale that is too small for float16 are negligible beside the others.
    """

    is_exact: bool
    is_close: bool

    @classmethod
    def of(cls, scale: torch.Tensor, block_format: BlockFormat) -> InFloat16:
        """Compare the scales of a weight with the numbers that the blocks of ``block_format`` store for them.

        MXFP4 stores the exponents of its scales, which are powers of two, so it always holds them exactly.
        """
        if block_format.name == "MXFP4":
            return cls(True, True)
        exact = scale.double()
        error = (scale.half().double() - exact).abs()
        tolerance = _FLOAT16_ERROR * exact.abs().max()
        is_exact = bool((error == 0).all())
        is_close = bool((error <= tolerance).all())
        return cls(is_exact, is_close)
