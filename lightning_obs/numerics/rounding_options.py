"""How a weight is rounded once it has scales, as the option ``rounding`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_obs.errors import CalibrationError

#: the share of the difference of inputs that a rounding on quantized inputs makes up for
_CORRECTION = 0.5


@dataclass(frozen=True)
class RoundingOptions:
    """The options of a rounding. They check themselves.

    Args:
        name: ``"gptq"``.
        act_order: round columns in the order of the Hessian's diagonal, largest first; off: as stored.
        damping: share of the mean of the Hessian's diagonal that is added to it, at least 0.
        inputs: the inputs by which a weight is rounded: ``"full_precision"``, those of the unquantized model, or
            ``"quantized"``, those that the quantized modules before it give. The latter runs the model block by block.
        correction: on quantized inputs, the share, in [0, 1], of what they differ by that the rounding makes up for
            (:func:`.corrected_target`). None: 0.5 on quantized inputs, else 0.

    Raises:
        CalibrationError: a value outside of these.
    """

    name: Literal["gptq"] = "gptq"
    act_order: bool = True
    damping: float = 0.1
    inputs: Literal["full_precision", "quantized"] = "full_precision"
    correction: float | None = None

    def __post_init__(self) -> None:
        if not self._is_valid():
            raise _refusal(self._as_written())
        if self.correction is None:
            object.__setattr__(self, "correction", _CORRECTION if self.on_quantized_inputs else 0.0)

    @classmethod
    def of(cls, option: str | Mapping[str, Any]) -> RoundingOptions:
        """The options of a name, or of the fields in a dict.

        Raises:
            CalibrationError: an unknown name or field, or a value of the wrong kind.
        """
        fields = {"name": option} if isinstance(option, str) else option
        try:
            return cls(**fields)
        except TypeError:  # a field of another name, or no dict
            raise _refusal(option) from None

    @property
    def on_quantized_inputs(self) -> bool:
        """Whether the model has to run block by block, each block on the outputs of the quantized ones before it."""
        return self.inputs == "quantized"

    def _as_written(self) -> Any:
        """The name, or the fields that are no defaults."""
        written = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                written[field.name] = value
        return self.name if written.keys() <= {"name"} else {"name": self.name} | written

    def _is_valid(self) -> bool:
        if self.name != "gptq" or not isinstance(self.act_order, bool):
            return False
        if not isinstance(self.damping, (int, float)) or not self.damping >= 0:
            return False
        if self.inputs not in ("full_precision", "quantized"):
            return False
        if self.correction is None:
            return True
        is_share = isinstance(self.correction, (int, float)) and 0 <= self.correction <= 1
        return is_share and (self.on_quantized_inputs or self.correction == 0)


def _refusal(option: Any) -> CalibrationError:
    return CalibrationError(
        "rounding",
        got=repr(option),
        expected="None, 'gptq', or a dict: {'name': 'gptq', 'act_order': True, 'damping': 0.1, "
        "'inputs': 'full_precision' or 'quantized', 'correction': with quantized inputs, 0 to 1}",
    )
