"""How loops are compiled, and how they read a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import overload

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(*fastmath: str, inline: bool = False) -> Callable[[Function], Function]:
    """Compile with numba when it is first called; keep the result on disk where that is possible.

    Args:
        *fastmath: LLVM's flags for floats.
        inline: compile it into its callers: a call that passes tuples costs some 100 ns.
    """

    def compiled(function: Function) -> Function:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
        options["inline"] = "always" if inline else "never"
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder that can be written to
            return numba.njit(**options)(function)

    return compiled


def value_of(bits: Any) -> Any:
    """The float32 of a bit pattern, by its type: uint32, uint16 (bfloat16) or int16 (float16)."""
    raise NotImplementedError


@overload(value_of)  # type: ignore[untyped-decorator]
def _value_of(bits: Any) -> Any:
    return {types.uint32: _of_float32, types.uint16: _of_bfloat16}.get(bits, _of_float16)


def _of_float32(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


def _of_bfloat16(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _of_float16(bits: Any) -> Any:
    # Exponents are 112 less than float32's; infinity and NaN have to stay so.
    sign = np.uint32(np.uint32(np.uint16(bits) & np.uint16(0x8000)) << np.uint32(16))
    size = np.uint32(np.uint16(bits) & np.uint16(0x7FFF))
    special = np.uint32(0x7F800000) if size >= np.uint32(0x7C00) else np.uint32(0)
    scaled = np.float32(np.uint32(size << np.uint32(13)).view(np.float32) * np.float32(2.0**112))
    return np.uint32(np.uint32(scaled.view(np.uint32) | sign) | special).view(np.float32)
