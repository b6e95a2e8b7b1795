"""The option ``rounding`` of a scheme: how a weight is rounded once its scales are chosen.

``qparams.rounding_of`` reads the option from ``observer_kwargs`` when an observer or a plan is made;
``calibration/weight_rounding.py`` rounds by it at the end of a calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_obs.errors import CalibrationError

#: default share of the error in its inputs that a rounding on quantized inputs makes up for
_CORRECTION = 0.5


@dataclass(frozen=True)
class RoundingOptions:
    """The options of a rounding. The constructor checks them, and replaces a ``correction`` of None by the default.

    ``qparams.rounding_of`` makes them by :meth:`of` for each weight whose scheme has the option.

    Args:
        name: ``"gptq"``.
        act_order: round the columns in the order of the Hessian's diagonal, largest first. False: in stored order.
        damping: share of the mean of the Hessian's diagonal that is added to the diagonal, at least 0.
        inputs: the inputs whose Hessian a weight is rounded by: ``"full_precision"``, those of the unquantized model,
            or ``"quantized"``, those that the quantized modules before it compute, for which the model runs block by
            block.
        correction: share, in [0, 1], of the difference between full-precision and quantized inputs that the rounding
            makes up for (:func:`.corrected_target`); above 0 only on quantized inputs. None: 0.5 on quantized inputs,
            else 0.
        random_tokens: share, in [0, 1], of a batch's tokens that random ones replace in a second run of the batch
            (``calibration/random_tokens.py``); above 0 only on quantized inputs.

    Raises:
        CalibrationError: a value that is not allowed.
    """

    name: Literal["gptq"] = "gptq"
    act_order: bool = True
    damping: float = 0.1
    inputs: Literal["full_precision", "quantized"] = "full_precision"
    correction: float | None = None
    random_tokens: float = 0.0

    def __post_init__(self) -> None:
        if not self._is_valid():
            raise _refusal(self._as_written())
        if self.correction is None:
            object.__setattr__(self, "correction", _CORRECTION if self.on_quantized_inputs else 0.0)

    @classmethod
    def of(cls, option: str | Mapping[str, Any]) -> RoundingOptions:
        """The options for a name, or for a dict of fields. ``rounding_of`` calls it with what the scheme holds.

        Raises:
            CalibrationError: an unknown name or field, or a value of the wrong kind.
        """
        fields = {"name": option} if isinstance(option, str) else option
        try:
            return cls(**fields)
        except TypeError:  # an unknown field, or not a mapping
            raise _refusal(option) from None

    @property
    def on_quantized_inputs(self) -> bool:
        """Whether the model has to run block by block, each block on the outputs of the quantized blocks before it.

        Asked by ``schemes/config.py`` for a whole scheme, before a calibration: its answer decides whether the
        calibration goes block by block.
        """
        return self.inputs == "quantized"

    def _as_written(self) -> Any:
        """The options as a user writes them, for an error: the name alone, or a dict of what differs from defaults."""
        written = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                written[field.name] = value
        return self.name if written.keys() <= {"name"} else {"name": self.name} | written

    def _is_valid(self) -> bool:
        """Whether all fields have values that are allowed, and allowed together."""
        if self.name != "gptq" or not isinstance(self.act_order, bool):
            return False
        if isinstance(self.damping, bool) or not isinstance(self.damping, (int, float)) or not self.damping >= 0:
            return False
        if self.inputs not in ("full_precision", "quantized"):
            return False
        for share in (self.correction, self.random_tokens):
            if share is not None and not self._is_valid_share(share):
                return False
        return True

    def _is_valid_share(self, share: object) -> bool:
        """Whether a value is a share; without quantized inputs it has to be 0."""
        is_share = isinstance(share, (int, float)) and 0 <= share <= 1
        return is_share and (self.on_quantized_inputs or share == 0)


def with_inputs_in_full_precision(option: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rounding on quantized inputs, for the same rounding by inputs in full precision.

    Called for the choices of a recipe, and for the schemes of a plan whose recipe went over to such inputs.

    >>> with_inputs_in_full_precision({"name": "gptq", "damping": 0.2, "inputs": "quantized", "correction": 1.0})
    {'name': 'gptq', 'damping': 0.2}
    """
    return {name: value for name, value in option.items() if name not in ("inputs", "correction", "random_tokens")}


def _refusal(option: Any) -> CalibrationError:
    """The error for an option that is not allowed; it shows what may be written."""
    return CalibrationError(
        "rounding",
        got=repr(option),
        expected="None, 'gptq', or a dict: {'name': 'gptq', 'act_order': True, 'damping': 0.1, "
        "'inputs': 'full_precision' or 'quantized', 'correction' and 'random_tokens': with quantized inputs, 0 to 1}",
    )
