"""Refuse values of another kind than the configs declare, before anything is loaded.

Hydra reads ``no``, ``yes`` and ``flase`` as text, and any text is true. OmegaConf's own schemas would need a second
declaration of every key, so a key is declared by its value in the files of ``configs/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_obs.app.config_files import options
from lightning_obs.errors import CalibrationError

#: values beside those of the declared kind
_FURTHER_VALUES: dict[str, Sequence[object]] = {"model.layerwise": ["quantized"], "task.seed": [None]}
#: beginnings of keys whose numbers are checked where they are used: by Lightning, an observer, a scheme, the plan
_NUMBERS_CHECKED_LATER = (
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
    """Refuse text where true or false, or a number, is declared; and empty text. ``main.run`` calls this.

    Raises:
        CalibrationError: names the key and what it takes.
    """
    for key, kinds in _declared_kinds().items():
        value = OmegaConf.select(config, key, default=_ABSENT)
        if value is not _ABSENT:
            _check_value(key, value, kinds)


def _check_value(key: str, value: Any, kinds: set[type]) -> None:
    """Raise for a value of another type than a key has in the configs.

    Args:
        key: the full key.
        value: the value in the composed config.
        kinds: the types of the key's values in all configs.
    """
    if value == "" and key not in _MAY_BE_EMPTY:
        raise CalibrationError(f"{key} is empty", remedy="give a value, or leave it out.")
    if OmegaConf.is_config(value) and key.startswith("trainer."):
        return  # an object that Hydra makes, such as a logger
    expected = _expected(key, kinds)
    further_values = list(_FURTHER_VALUES.get(key, ()))
    if type(None) in kinds:
        further_values.append(None)
    if expected is None or value in further_values or _is_of_kind(value, kinds):
        return
    for further_value in further_values:
        expected += f", or {'null' if further_value is None else further_value}"
    raise CalibrationError(key, got=repr(value), expected=expected)


def _declared_kinds() -> dict[str, set[type]]:
    """The types of the values that each full key has in all config files."""
    kinds: dict[str, set[type]] = {}
    for option in options():
        for key, value in option.values.items():
            kinds.setdefault(key, set()).add(type(value))
    return kinds


def _expected(key: str, kinds: set[type]) -> str | None:
    """The value that a key takes, in words for the error; None if any is taken, or it is checked later."""
    value_kinds = kinds - {type(None)}
    if value_kinds == {bool}:
        return "true or false"
    if not value_kinds or key.startswith(_NUMBERS_CHECKED_LATER) or not value_kinds <= {int, float}:
        return None
    return "a number" if float in value_kinds else "a whole number"


def _is_of_kind(value: Any, kinds: set[type]) -> bool:
    """Whether a value is true or false where a key is declared so, or a number where a number is declared.

    :func:`_check_value` asks it for keys that take nothing else.
    """
    if bool in kinds or isinstance(value, bool):
        return bool in kinds and isinstance(value, bool)
    return isinstance(value, (int, float) if float in kinds else int)
