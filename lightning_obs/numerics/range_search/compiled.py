"""Whether the inner loop of a range search is compiled, and how.

- ``True`` compiles, or says why it cannot.
- ``False`` does not.
- ``"auto"`` compiles on a CPU once a kind of format had so much work that compiling would have paid, and on another
  device at once; it needs a C++ compiler, or triton. If the compilation fails, a warning says why, and nothing is
  compiled after.

Sizes are symbols, and the numbers of a format are inputs: there is one compilation for all integer formats and one for
all floating ones, per dtype (and one more with zero points, and with importance). Inputs, because a compiled loop that
torch found in its cache on disk had the numbers of another format in it. Nothing of torch's configuration is changed.
Where compiled code is switched off (``torch.compiler.set_stance("force_eager")``, as while a model is observed), none
is used.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from lightning_obs.errors import CalibrationError, warn
from lightning_obs.numerics.range_search.fast_errors import AT_ONCE, FastErrors, Measured, Numbers
from lightning_obs.numerics.range_search.power_fit import TERMS

Compile = bool | Literal["auto"]

# Elements x candidates whose eager time is that of compiling one format without a cache, 12 s at 2 ns.
_PAYS_BACK = 6e9

# The process's: what was compiled, the work that each format had so far, why compiling failed.
_compiled: dict[object, CompiledErrors] = {}
_work: dict[object, float] = {}
_failure: list[str] = []


def compiled_errors(
    fast: FastErrors, mode: Compile, device: torch.device, dtype: torch.dtype, symmetric: bool, work: float
) -> CompiledErrors | None:
    """The compiled loop, or None where it is to run as it stands.

    Args:
        fast: the loop.
        mode: see the module.
        device: where the values are.
        dtype: of the values.
        symmetric: whether there are no zero points.
        work: elements x candidates of the search at hand.

    Raises:
        CalibrationError: ``mode`` is True and there is no compiler, or it failed.
    """
    if mode is False:
        return None
    key = (fast, device.type, dtype, symmetric)
    if key not in _compiled:
        if mode == "auto":
            _work[key] = _work.get(key, 0.0) + work
            if _failure or (device.type == "cpu" and _work[key] < _PAYS_BACK):
                return None
        missing = _missing(device)
        if missing and mode == "auto":
            return None
        if missing:
            raise CalibrationError("the range search cannot be compiled", got=missing, remedy="compile: auto or false.")
    if not _compiled_code_runs():
        return None
    if key not in _compiled:
        try:
            _compiled[key] = CompiledErrors(fast, device, dtype, symmetric)
        except Exception as error:  # a compiler, a linker, a file system, a version of any of them
            reason = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
            if mode != "auto":
                raise CalibrationError(
                    "the range search could not be compiled", got=reason, remedy="compile: auto or false."
                ) from error
            _failure.append(reason)
            warn(f"the range search runs uncompiled: {reason}")
            return None
    return _compiled[key]


class CompiledErrors:
    """:meth:`FastErrors.measure`, compiled for one device and dtype, and for every size and all numbers."""

    def __init__(self, fast: FastErrors, device: torch.device, dtype: torch.dtype, symmetric: bool) -> None:
        self.fast = fast

        def sums(numbers: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
            return fast.sums(*inputs, Numbers.from_tensor(numbers))  # type: ignore[arg-type, call-arg]

        def judge(numbers: torch.Tensor, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            return fast.judge(*inputs, Numbers.from_tensor(numbers))  # type: ignore[arg-type, call-arg]

        # One graph would decide row by row, between its sums. Apart, it decides many rows at a time.
        self._sums, self._judge = _compile(sums), _compile(judge)
        values = torch.ones(288, 160, dtype=dtype, device=device)
        scale = torch.ones(AT_ONCE, 288, device=device)
        numbers = Numbers._make([*[1.0] * (len(Numbers._fields) - 1), [1.0] * TERMS])
        importance = values.float() if fast.weighted else None
        kinds = (dtype, dtype, torch.float32, torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Each a tensor of its own: torch would take it for given that two inputs are one.
            low, high, best, zero_point = (torch.ones(288, dtype=d, device=device) for d in kinds)
            shift = None if symmetric else zero_point.expand(AT_ONCE, -1).clone()
            self.measure(values, importance, scale, shift, low, high, best, numbers)

    def measure(
        self,
        values: torch.Tensor,
        importance: torch.Tensor | None,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        low: torch.Tensor,
        high: torch.Tensor,
        best: torch.Tensor,
        numbers: Numbers,
    ) -> Measured:
        """The same for at most five candidates; a single row, or rows of one value, run as they stand."""
        rows, size = values.shape
        if rows == 1 or size == 1:
            return self.fast.measure(values, importance, scale, zero_point, low, high, best, None, numbers)
        count, constants = len(scale), numbers.to_tensor(scale.device)
        scale, zero_point = _padded(scale), None if zero_point is None else _padded(zero_point)
        valid = torch.arange(AT_ONCE, device=scale.device).unsqueeze(-1) < count
        with torch.no_grad():
            importance = None if importance is None else importance.contiguous()
            total = self._sums(constants, values.contiguous(), importance, scale.reciprocal(), zero_point)
            weight = torch.full_like(best, size) if importance is None else importance.sum(-1)
            power = scale**numbers.norm
            found = self._judge(constants, total, weight, scale, power, zero_point, low, high, best, valid)
        return Measured(found[0][:count], found[1][:count], *found[2:])


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # torch counts compilations per code object, and gives up after a few: each loop gets its own.
    code = function.__code__
    function.__code__ = code.replace(co_name=f"range_search_{code.co_name}_{len(_compiled)}")
    return torch.compile(function, dynamic=True, fullgraph=True)


def _padded(candidates: torch.Tensor) -> torch.Tensor:
    """``(C, R)`` with the last repeated up to the number that the compiled loop takes."""
    missing = AT_ONCE - len(candidates)
    whole = torch.cat([candidates, candidates[-1:].expand(missing, -1)]) if missing else candidates
    return whole.contiguous()


def _missing(device: torch.device) -> str | None:
    """What compiling for the device lacks."""
    if device.type != "cpu":
        return None if importlib.util.find_spec("triton") else "no triton"
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", default)
    return None if shutil.which(compiler) else f"no C++ compiler {compiler!r}"


def _compiled_code_runs() -> bool:
    """Whether torch would run compiled code now: a stance, or an environment variable, may forbid it."""
    return bool(_probe()(torch.zeros(2)).any())


@functools.cache
def _probe() -> Callable[[torch.Tensor], torch.Tensor]:
    def one_if_compiled(zero: torch.Tensor) -> torch.Tensor:
        return zero + 1 if torch.compiler.is_compiling() else zero

    return torch.compile(one_if_compiled, backend="eager")
