"""How loops are compiled, and how they read a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(*fastmath: str) -> Callable[[Function], Function]:
    """Compile with numba when it is first called; keep the result on disk where that is possible."""

    def compiled(function: Function) -> Function:
        options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder that can be written to
            return numba.njit(**options)(function)

    return compiled


@jit()
def value_of(bits: Any, kind: int) -> Any:
    """The float32 of a bit pattern; ``kind`` is one of :data:`~lightning_obs.numerics.kernels.KINDS`."""
    if kind == 0:
        return np.uint32(bits).view(np.float32)
    if kind == 1:
        return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    # Exponents of float16 are 112 less; what was infinity or NaN has to be so again.
    size = np.uint32(np.uint32(bits) & np.uint32(0x7FFF))
    magnitude = np.uint32(size << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    if size >= np.uint32(0x7C00):
        magnitude = np.uint32(np.uint32(size << np.uint32(13)) | np.uint32(0x7F800000)).view(np.float32)
    return -magnitude if bits & 0x8000 else magnitude
