"""Refuse values of another kind than the configs declare, before anything is loaded.

Hydra reads ``no``, ``yes`` and ``flase`` as text, and any text is true; OmegaConf's own schemas would need a second
declaration of every key. So the declaration of a key is its value in the files of ``configs/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_obs.app.config_files import options
from lightning_obs.errors import CalibrationError

#: values beside those of the declared kind
_ALSO: dict[str, Sequence[object]] = {"model.layerwise": ["quantized"], "task.seed": [None]}
#: beginnings of keys whose numbers are checked by what reads them: Lightning, observers, compressed-tensors, the plan
_NUMBERS_CHECKED_THERE = (
    "trainer.",
    "observer.",
    "weight_observer.",
    "scheme.",
    "kv_cache.",
    "task.candidates.",
    "budget",
)
#: keys whose empty text has a meaning
_MAY_BE_EMPTY = ("module",)
_ABSENT = object()


def check_values(config: DictConfig) -> None:
    """Refuse text where true or false, or a number, is declared; and empty text.

    Raises:
        CalibrationError: names the key and what it takes.
    """
    for key, kinds in _declared_kinds().items():
        value = OmegaConf.select(config, key, default=_ABSENT)
        if value is _ABSENT:
            continue
        if value == "" and key not in _MAY_BE_EMPTY:
            raise CalibrationError(f"{key} is empty", remedy="give a value, or leave it out.")
        if OmegaConf.is_config(value) and key.startswith("trainer."):
            continue  # an object that Hydra makes, such as a logger
        expected = _expected(key, kinds)
        allowed = [*_ALSO.get(key, ()), *([None] if type(None) in kinds else ())]
        if expected is None or value in allowed or _is_of_kind(value, kinds):
            continue
        beside = "".join(f", or {_written(other)}" for other in allowed)
        raise CalibrationError(key, got=repr(value), expected=f"{expected}{beside}")


def _declared_kinds() -> dict[str, set[type]]:
    """The types of each key's values in all config files."""
    kinds: dict[str, set[type]] = {}
    for option in options():
        for key, value in option.values.items():
            kinds.setdefault(key, set()).add(type(value))
    return kinds


def _expected(key: str, kinds: set[type]) -> str | None:
    """What a key takes, for a person; None where any kind is taken."""
    stated = kinds - {type(None)}
    if stated == {bool}:
        return "true or false"
    if not stated or key.startswith(_NUMBERS_CHECKED_THERE) or not stated <= {int, float}:
        return None
    return "a number" if float in stated else "a whole number"


def _is_of_kind(value: Any, kinds: set[type]) -> bool:
    if bool in kinds or isinstance(value, bool):
        return bool in kinds and isinstance(value, bool)
    return isinstance(value, (int, float) if float in kinds else int)


def _written(value: object) -> str:
    return "null" if value is None else str(value)
