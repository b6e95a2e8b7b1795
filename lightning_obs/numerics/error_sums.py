"""The inner loop of a range search: the error of a few candidate scales on one tile of values.

One function, two executions. As it stands, torch runs it operation by operation, each of them a pass over the tile.
``torch.compile`` makes one loop of it that reads a value once for five candidates, five times as fast, after some
seconds of compilation. Which of the two runs is :func:`error_sums`' to decide:

- ``True`` compiles, or says why it cannot.
- ``False`` does not.
- ``"auto"`` compiles on a CPU once a format had so much work that compiling would have paid, and on another device at
  once; it needs a C++ compiler, or triton. If the compilation fails, a warning says why, and nothing is compiled after.

Sizes are symbols, so a format is compiled once. Nothing of torch's configuration is changed. Where compiled code is
switched off (``torch.compiler.set_stance("force_eager")``, as while a model is observed), none is used.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_obs.errors import CalibrationError, CalibrationWarning
from lightning_obs.numerics.number_grid import NumberGrid
from lightning_obs.numerics.power_fit import PowerFit, evaluate_power

Compile = bool | Literal["auto"]
#: (values (R, G), inverse scales (C, R), zero points (C, R) or None, importance (R, G) or None) -> (C, R)
ErrorSums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]

#: Candidates in one compiled loop. More of them are little faster, and take longer to compile.
AT_ONCE = 5
# Elements x candidates whose eager time is that of compiling one format without a cache, 12 s at 2 ns.
_PAYS_BACK = 6e9
# A row that is alone is cut into rows of so many values: a size of 1 would be compiled as a case of its own.
_CUT = 4096


@dataclass(frozen=True)
class Loop:
    """What one compiled loop is for."""

    grid: NumberGrid
    norm: float
    power: PowerFit | None  # None: the norm is a power that needs no approximation

    def sums(
        self,
        values: torch.Tensor,
        inverse: torch.Tensor,
        zero_point: torch.Tensor | None,
        importance: torch.Tensor | None,
    ) -> torch.Tensor:
        """``sum |u - round(u)| ** norm`` with ``u = values / scale + zero_point``, per candidate and row.

        Args:
            values: ``(R, G)``, any floating dtype.
            inverse: one over the scales, ``(C, R)``.
            zero_point: ``(C, R)`` or None.
            importance: ``(R, G)`` or None.

        Returns:
            ``(C, R)`` in float32, in units of each scale.
        """
        values = values.float()
        totals = []
        for number in range(AT_ONCE if torch.compiler.is_compiling() else len(inverse)):
            scaled = values * inverse[number].unsqueeze(-1)
            if zero_point is not None:
                scaled = scaled.add_(zero_point[number].unsqueeze(-1))
            error = self._power(scaled.sub_(self.grid.round(scaled)).abs_())
            if importance is not None:
                error = error.mul_(importance)
            totals.append(error.sum(-1))
        return torch.stack(totals)

    def _power(self, error: torch.Tensor) -> torch.Tensor:
        if self.power is None:
            return error.pow_(self.norm)
        if torch.compiler.is_compiling():
            return evaluate_power(error, self.power)
        return error.log2_().mul_(self.norm).exp2_()


def error_sums(
    loop: Loop, mode: Compile, device: torch.device, dtype: torch.dtype, weighted: bool, work: float
) -> ErrorSums | None:
    """The compiled :meth:`Loop.sums`, or None where it is to run as it stands.

    Args:
        loop: format and norm.
        mode: see the module.
        device: where the values are.
        dtype: of the values.
        weighted: whether there is importance.
        work: elements x candidates of the search at hand.

    Raises:
        CalibrationError: ``mode`` is True and there is no compiler, or it failed.
    """
    if mode is False:
        return None
    key = (loop.grid.key, loop.norm, loop.power, device.type, dtype, weighted)
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
            _compiled[key] = _compile(loop, device, dtype, weighted)
        except Exception as error:  # a compiler, a linker, a file system, a version of any of them
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            if mode != "auto":
                raise CalibrationError(
                    "the range search could not be compiled", got=reason, remedy="compile: auto or false."
                ) from error
            _failure.append(reason)
            warnings.warn(f"the range search runs uncompiled: {reason}", CalibrationWarning, stacklevel=2)
            return None
    return functools.partial(_by_fives, loop, _compiled[key])


# The process's: what was compiled, the work that each format had so far, why compiling failed.
_compiled: dict[object, ErrorSums] = {}
_work: dict[object, float] = {}
_failure: list[str] = []


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


def _compile(loop: Loop, device: torch.device, dtype: torch.dtype, weighted: bool) -> ErrorSums:
    """Compile for every size, and run once."""

    def sums(
        values: torch.Tensor, inverse: torch.Tensor, zero_point: torch.Tensor | None, importance: torch.Tensor | None
    ) -> torch.Tensor:
        return loop.sums(values, inverse, zero_point, importance)

    # torch counts compilations per code object, and gives up after a few: each format gets its own.
    sums.__code__ = sums.__code__.replace(co_name=f"error_sums_{len(_compiled)}")
    compiled: ErrorSums = torch.compile(sums, dynamic=True, fullgraph=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # Three sizes that differ, lest they be taken for one.
        values = torch.ones(288, 160, dtype=dtype, device=device)
        inverse = torch.ones(AT_ONCE, 288, device=device)
        compiled(values, inverse, None if loop.grid.args.symmetric else inverse, values.float() if weighted else None)
    return compiled


def _by_fives(
    loop: Loop,
    compiled: ErrorSums,
    values: torch.Tensor,
    inverse: torch.Tensor,
    zero_point: torch.Tensor | None,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Run the compiled loop on whole fives of candidates, and rows that are more than one."""
    rows, size = values.shape
    if rows == 1 and size >= 2 * _CUT:
        cut = size - size % _CUT
        many = cut // _CUT
        parts = [
            _by_fives(
                loop,
                compiled,
                values[:, :cut].reshape(many, _CUT),
                inverse.expand(-1, many),
                None if zero_point is None else zero_point.expand(-1, many),
                None if importance is None else importance[:, :cut].reshape(many, _CUT),
            )
        ]
        if cut < size:
            rest = None if importance is None else importance[:, cut:]
            parts.append(loop.sums(values[:, cut:], inverse, zero_point, rest))
        return torch.cat(parts, dim=-1).double().sum(-1, keepdim=True)
    if rows == 1 or size == 1:
        return loop.sums(values, inverse, zero_point, importance)
    candidates = len(inverse)
    if candidates % AT_ONCE:
        # Those that are missing repeat the last.
        index = torch.arange(candidates + -candidates % AT_ONCE, device=inverse.device).clamp_(max=candidates - 1)
        inverse, zero_point = inverse[index], None if zero_point is None else zero_point[index]
    values = values.contiguous()
    importance = None if importance is None else importance.contiguous()
    found = []
    with torch.no_grad():
        for start in range(0, len(inverse), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            shift = None if zero_point is None else zero_point[part].contiguous()
            found.append(compiled(values, inverse[part].contiguous(), shift, importance))
    return torch.cat(found)[:candidates]
