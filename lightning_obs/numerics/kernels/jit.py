"""Compile loops with numba, and let the loops read bit patterns as floats.

numba knows no bfloat16, so loops get a tensor's memory as integers and call :func:`value_of` for each element. The
modules of loops (``kernels/loops.py`` and ``search/``) import this one, which imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import overload

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(*fastmath: str, inline: bool = False) -> Callable[[Function], Function]:
    """A decorator that compiles a function with numba at its first call, and caches the result on disk if it can.

    All loops of ``kernels/loops.py`` and ``search/`` are decorated with it.

    Args:
        *fastmath: LLVM's flags for floats, such as ``"contract"``, which lets a product and a sum be fused.
        inline: compile the function into its callers, because a call that passes tuples costs some 100 ns.
    """

    def compiled(function: Function) -> Function:
        # With numpy's error model a division by zero gives infinity or NaN, as in torch. Python's would raise, and its
        # test would keep a loop from being vectorised.
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        options["fastmath"] = set(fastmath)
        options["inline"] = "always" if inline else "never"
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder that can be written to
            return numba.njit(**options)(function)

    return compiled


def value_of(bits: Any) -> Any:
    """The float32 that a bit pattern stands for: uint32 is float32, uint16 is bfloat16, int16 is float16.

    Only compiled loops can call it: numba compiles in its place what :func:`_value_of` returns for the argument's type.
    """
    raise NotImplementedError


@overload(value_of)  # type: ignore[untyped-decorator]
def _value_of(bits: Any) -> Any:
    """The function that numba compiles for a call of :func:`value_of`; ``bits`` is the numba type of the argument."""
    if bits == types.uint32:
        return _of_float32
    if bits == types.uint16:
        return _of_bfloat16
    return _of_float16


# The three bodies of value_of. ``bits`` is an integer of the width in the name; the result is a float32.


def _of_float32(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


def _of_bfloat16(bits: Any) -> Any:
    wide = np.uint32(bits)
    return np.uint32(wide << np.uint32(16)).view(np.float32)


def _of_float16(bits: Any) -> Any:
    # float16's exponent bits are smaller than float32's by 112. Infinity and NaN get float32's largest exponent.
    pattern = np.uint16(bits)
    sign_bit = np.uint32(pattern & np.uint16(0x8000))
    sign = np.uint32(sign_bit << np.uint32(16))
    magnitude = np.uint32(pattern & np.uint16(0x7FFF))
    special = np.uint32(0x7F800000) if magnitude >= np.uint32(0x7C00) else np.uint32(0)
    unscaled = np.uint32(magnitude << np.uint32(13)).view(np.float32)
    scaled = np.float32(unscaled * np.float32(2.0**112))
    signed = np.uint32(scaled.view(np.uint32) | sign)
    return np.uint32(signed | special).view(np.float32)
