"""The words that a user types behind ``python -m lightning_obs``, and what is said of words that are wrong.

Hydra reads the words (it calls them overrides). Its own messages tell how to extend a config, which is not what
somebody needs who has mistyped a key: here the nearest known name comes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue

from lightning_obs.app.config_files import all_keys, group_names, option_names, options_with
from lightning_obs.app.words import in_words
from lightning_obs.errors import CalibrationError, likely

_EXAMPLE = "options are written key=value, such as scheme=fp8; --help lists them."
#: the key that holds a path or a name, which is easily taken for the group's own
_PATHS = {"model": "model.path", "data": "data.path", "export": "export.folder"}


# ---------------------------------------------------------------------- before Hydra reads them


def checked_words(words: Sequence[str]) -> list[str]:
    """The words as Hydra has to read them: names of options are compared without case, as Python's presets are.

    Raises:
        CalibrationError: a word that is neither a flag of Hydra nor ``key=value``, or a group without an option.
    """
    arguments, unknown = get_args_parser().parse_known_args(list(words))
    if arguments.shell_completion:
        return list(words)
    for word in unknown:
        _refuse_flag(word, words)
    typed = arguments.overrides or []
    for index, word in enumerate(typed):
        if "=" not in word and not word.startswith("~"):
            _refuse_bare(word, typed[index + 1 :])
    folder = None if arguments.config_dir is None else Path(arguments.config_dir)
    return [_with_option_as_named(word, folder) if word in typed else word for word in words]


def _refuse_flag(word: str, words: Sequence[str]) -> None:
    """Raise for a word that argparse does not know: a key with dashes, or one behind a flag of Hydra."""
    name = word.lstrip("-")
    behind = words[words.index(word) + 1 :]
    if "=" not in name and behind and "=" not in behind[0]:
        name = f"{name}={behind[0]}"
    raise CalibrationError(f"unknown flag {word}", remedy=f"write {name}: {_EXAMPLE}" if "=" in name else _EXAMPLE)


def _refuse_bare(word: str, behind: Sequence[str]) -> None:
    """Raise for a word without ``=``, and say how it is probably meant."""
    if word in ("help", "version"):
        raise CalibrationError(f"cannot read {word!r}", remedy=f"--{word}; {_EXAMPLE}")
    key, separator, value = re.match(r"([\w./@+]*)([:\s]*)(.*)", word, re.DOTALL).groups()  # type: ignore[union-attr]
    if not separator and behind and "=" not in behind[0]:
        value = behind[0]
    meant = f"write {key}={value}: " if key and value else ""
    raise CalibrationError(f"cannot read {word!r}, which has no `=`", remedy=f"{meant}{_EXAMPLE}")


def _with_option_as_named(word: str, folder: Path | None) -> str:
    """``scheme=FP8`` as ``scheme=fp8``; options of the user's own ``folder`` as they are."""
    key, equals, value = word.partition("=")
    group = key.lstrip("+").partition("@")[0]
    names = {name.casefold(): name for name in option_names(group)}
    if not names:
        return word
    if value.casefold() in ("", "null") or (value.casefold() == "none" and "none" not in names):
        raise CalibrationError(
            f"{word} chooses nothing", expected=_listed(group, names.values()), remedy="leave it out."
        )
    parts = []
    for part in value.split(","):
        is_own = folder is not None and (folder / group / f"{part}.yaml").is_file()
        parts.append(part if is_own else names.get(part.casefold(), part))
    return f"{key}{equals}{','.join(parts)}"


def refuse_deleted(words: Sequence[str]) -> None:
    """Refuse ``~key`` for keys that every run reads; Trainer and task take theirs as they stand."""
    for override in OverridesParser.create().parse_overrides(list(words)):
        key = str(override.key_or_group)
        if override.is_delete() and not key.startswith(("task.", "trainer.")):
            raise CalibrationError(f"{key} cannot be deleted", remedy="leave `~` out, or set it to another value.")


# ---------------------------------------------------------------------- after an error


def explained(error: Exception) -> str:
    """An error of Hydra or of this package as it is shown to the user: what is wrong, the nearest name, what to do."""
    for failure in (error, error.__cause__):
        if isinstance(failure, CalibrationError):
            return f"CalibrationError: {in_words(str(failure))}"
    for failure in (error, error.__cause__):
        if isinstance(failure, (ConfigAttributeError, ConfigKeyError)):
            return f"unknown key {_unknown_key(str(failure.full_key))}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).partition("/")
        path = f"\nA file, folder or name is given as {_PATHS[group]}={name}" if group in _PATHS else ""
        listed = _listed(group, error.options)
        return f"unknown option {group}={name}{likely(name, error.options)}. {listed}{path}"
    if isinstance(error, OverrideParseException):
        text = str(error.message).strip().splitlines()[0]
        quoted = "An option with brackets, spaces or quotes is quoted whole: 'ignore=[lm_head]'"
        return f"cannot read {error.override!r}: {text}\n{quoted}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has to be given: {error.full_key}=..."
    lines = [str(failure) for failure in (error, error.__cause__) if failure is not None]
    if isinstance(error, HydraException):  # without its advice to extend the config
        lines = [re.sub(r"\nTo append to your .*", "", line) for line in lines]
    return "\n".join(lines)


def _unknown_key(key: str) -> str:
    """The key, with the nearest one, or with the option that it belongs to."""
    parent, _, last = key.rpartition(".")
    if parent == "trainer":
        from lightning.pytorch import Trainer  # help and completion do without it

        if last in signature(Trainer).parameters:
            return f"{key}: an argument of the Trainer that its config does not list is added, +{key}=..."
    belongs = [str(option) for option in options_with(key)]
    if belongs:
        return f"{key}: it belongs to {' or '.join(belongs)}"
    beside = sorted({known.split(".")[parent.count(".") + 1] for known in all_keys() if known.startswith(f"{parent}.")})
    if not parent:
        beside = sorted({known.partition(".")[0] for known in all_keys()} | set(group_names()))
    same_end = [f"`{known}`" for known in all_keys() if known.endswith(f".{key}")]
    near = f" (did you mean {' or '.join(same_end[:3])}?)" if same_end else likely(last, beside)
    listed = f" Keys of {parent}: {', '.join(beside)}." if parent else f" Keys: {', '.join(beside)}."
    return f"{key}{near}.{listed if beside else ''}"


def _listed(group: str, names: object) -> str:
    return f"Options of {group}: {', '.join(sorted(names))}"  # type: ignore[call-overload]
