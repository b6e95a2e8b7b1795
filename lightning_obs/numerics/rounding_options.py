"""How a weight is rounded once it has scales, as the option ``rounding`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_obs.errors import CalibrationError

#: the share of the difference of inputs that a rounding on quantized inputs makes up for
_CORRECTION = 0.5
#: how far all steps with the default learning rate move the logarithm of a scale together
_DISTANCE = 0.05


@dataclass(frozen=True)
class RoundingOptions:
    """The options of a rounding. They check themselves.

    Args:
        name: ``"gptq"``, or ``"learned"``: beginning at what GPTQ gives, signed gradient steps move the scales, so that
            each block's outputs come close to those in full precision (:class:`.LearnedWeight`).
        act_order: round columns in the order of the Hessian's diagonal, largest first; off: as stored.
        damping: share of the mean of the Hessian's diagonal that is added to it, at least 0.
        inputs: the inputs by which a weight is rounded: ``"full_precision"``, those of the unquantized model, or
            ``"quantized"``, those that the quantized modules before it give. The latter runs the model block by block.
            None: quantized where it is learned, which needs them, else in full precision.
        correction: on quantized inputs, the share, in [0, 1], of what they differ by that the rounding makes up for
            (:func:`.corrected_target`). None: 0.5 on quantized inputs, else 0.
        steps: of learning, for each block.
        samples: that a step runs at least, on all ranks together. Batches are run whole.
        learning_rate: by how much the first step moves the logarithm of each scale; lengths decay to zero. None:
            ``0.1 / steps``.

    Raises:
        CalibrationError: a value outside of these.
    """

    name: Literal["gptq", "learned"] = "gptq"
    act_order: bool = True
    damping: float = 0.1
    inputs: Literal["full_precision", "quantized"] | None = None
    correction: float | None = None
    steps: int = 50
    samples: int = 8
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if not self._is_valid():
            raise _refusal(self._as_written())
        if self.inputs is None:
            self._default("inputs", "quantized" if self.is_learned else "full_precision")
        if self.correction is None:
            self._default("correction", _CORRECTION if self.on_quantized_inputs else 0.0)
        if self.learning_rate is None:
            self._default("learning_rate", 2 * _DISTANCE / self.steps)

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

    @property
    def is_learned(self) -> bool:
        """Whether steps of learning follow."""
        return self.name == "learned"

    @property
    def first_length(self) -> float:
        """``learning_rate``, which is known by now."""
        assert self.learning_rate is not None
        return self.learning_rate

    def _as_written(self) -> Any:
        """The name, or the fields that are no defaults."""
        written = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                written[field.name] = value
        return self.name if written.keys() <= {"name"} else {"name": self.name} | written

    def _default(self, field: str, value: Any) -> None:
        """Give a field that is None its value."""
        object.__setattr__(self, field, value)

    def _is_valid(self) -> bool:
        if self.name not in ("gptq", "learned") or not isinstance(self.act_order, bool):
            return False
        if not isinstance(self.damping, (int, float)) or not self.damping >= 0:
            return False
        if self.inputs not in (None, "full_precision", "quantized"):
            return False
        if self.is_learned and not (self.inputs != "full_precision" and self._can_be_learned()):
            return False
        if self.correction is None:
            return True
        is_share = isinstance(self.correction, (int, float)) and 0 <= self.correction <= 1
        return is_share and (self.is_learned or self.on_quantized_inputs or self.correction == 0)

    def _can_be_learned(self) -> bool:
        """Whether the fields of learning have values of their kinds."""
        for count in (self.steps, self.samples):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                return False
        rate = self.learning_rate
        return rate is None or (isinstance(rate, (int, float)) and 0 <= rate <= 1)


def _refusal(option: Any) -> CalibrationError:
    return CalibrationError(
        "rounding",
        got=repr(option),
        expected="None, 'gptq', or a dict: {'name': 'gptq', 'act_order': True, 'damping': 0.1, "
        "'inputs': 'full_precision' or 'quantized', 'correction': with quantized inputs, 0 to 1}; or with "
        "quantized inputs {'name': 'learned', 'steps': 50, 'samples': 8, 'learning_rate': 0 to 1} and the "
        "options of gptq",
    )
