"""Check the words behind ``python -m lightning_obs`` before Hydra reads them, and explain Hydra's errors.

``lightning_obs.__main__`` calls :func:`checked_words` before Hydra runs, and :func:`explained` for an error.

Hydra's own messages tell how to extend a config. A user who has mistyped a key needs the nearest known name first.
Hydra calls the words overrides; :mod:`lightning_obs.app.typed_words` checks them against the composed config.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
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
#: by group, the key of a path or name, which is easily typed as an option of the group
_PATHS = {"model": "model.path", "data": "data.path", "export": "export.folder"}
#: keys of the paths to which a run writes
PATHS_WRITTEN = ("output_dir", "export.folder", "export.file")


# ---------------------------------------------------------------------- before Hydra reads them


def checked_words(words: Sequence[str]) -> list[str]:
    """Check the typed words, and return those to hand to Hydra; ``__main__`` calls this first.

    Names of options are spelled as their files are, since presets are compared without case.

    Raises:
        CalibrationError: a word that is neither a flag of Hydra nor ``key=value``; a group without an option; a path
            to which all runs of a ``--multirun`` would write.
    """
    arguments, unknown = get_args_parser().parse_known_args(list(words))
    if arguments.shell_completion:
        return list(words)
    for word in unknown:
        _raise_for_flag(word, words)
    overrides = arguments.overrides or []
    for index, word in enumerate(overrides):
        if "=" not in word and not word.startswith("~"):
            _raise_for_bare_word(word, overrides[index + 1 :])
    folder = None if arguments.config_dir is None else Path(arguments.config_dir)
    checked = []
    for word in words:
        checked.append(_with_known_option(word, folder) if word in overrides else word)
    if arguments.multirun:
        _refuse_shared_path(overrides)
    return checked


def _raise_for_flag(word: str, words: Sequence[str]) -> None:
    """Raise for a word that Hydra's argparse does not take: an unknown flag, or an option in a wrong place.

    An unknown flag is ``--scheme=fp8``, or the first word of ``--scheme fp8``. Options must stand together: argparse
    takes the first run of them, and leaves over what is behind the next flag (``scheme=fp8 -m data.batches=2,4``).
    :func:`checked_words` calls this.

    Args:
        word: the word that argparse left over.
        words: all words; the next one may be the value of a flag.
    """
    if not word.startswith("-"):
        raise CalibrationError(
            f"{word} is behind a flag, and other options are before it",
            got=" ".join(words),
            remedy="write all flags (--multirun, --config-dir ...) before the options, or all behind them.",
        )
    override = word.lstrip("-")
    next_words = words[words.index(word) + 1 :]
    if "=" not in override and next_words and "=" not in next_words[0]:
        override = f"{override}={next_words[0]}"
    remedy = f"write {override}: {_EXAMPLE}" if "=" in override else _EXAMPLE
    raise CalibrationError(f"unknown flag {word}", remedy=remedy)


def _raise_for_bare_word(word: str, next_words: Sequence[str]) -> None:
    """Raise for a word without ``=``, and propose the override that was probably meant.

    Args:
        word: the word, such as ``scheme`` or ``scheme:fp8``.
        next_words: the words behind it; the first one may be its value.
    """
    if word in ("help", "version"):
        raise CalibrationError(f"cannot read {word!r}", remedy=f"--{word}; {_EXAMPLE}")
    match = re.match(r"([\w./@+]*)([:\s]*)(.*)", word, re.DOTALL)
    assert match is not None  # every part may be empty
    key, separator, value = match.groups()
    if not separator and next_words and "=" not in next_words[0]:
        value = next_words[0]
    proposal = f"write {key}={value}: " if key and value else ""
    raise CalibrationError(f"cannot read {word!r}, which has no `=`", remedy=f"{proposal}{_EXAMPLE}")


def _refuse_shared_path(words: Sequence[str]) -> None:
    """Raise for a path to which several runs of a ``--multirun`` would write, each in place of the run before it.

    :func:`checked_words` calls this. A path with an interpolation, such as ``${hydra:job.num}``, differs from run to
    run.

    Args:
        words: the words that are no flags.
    """
    overrides = OverridesParser.create().parse_overrides(list(words))
    for word, override in zip(words, overrides, strict=True):
        has_other_sweep = any(other.is_sweep_override() for other in overrides if other is not override)
        if override.key_or_group in PATHS_WRITTEN and has_other_sweep and "${" not in word:
            own_path = shlex.quote(with_suffix(word, "-${hydra:job.num}"))
            raise CalibrationError(
                f"several runs of the --multirun would write to {word}",
                expected="a path for each run",
                remedy=f"{own_path}, or leave it out: then each run writes into its output folder.",
            )


def with_suffix(word: str, suffix: str) -> str:
    """The override of a path with ``suffix`` behind the path's name: before the quote of a quoted path, and before the
    extension of a file.

    Called for the error about a path that several runs share, and by ``step_commands.py`` for the paths of a proposed
    run.

    >>> with_suffix("output_dir=out/", "-small"), with_suffix("output_dir='a=b'", "-small")
    ('output_dir=out-small', "output_dir='a=b-small'")
    >>> with_suffix("export.file=out/model.onnx", "-small")
    'export.file=out/model-small.onnx'
    """
    quote = word[-1] if word.endswith(("'", '"')) else ""
    path = word.removesuffix(quote).rstrip("/")
    extension = os.path.splitext(path)[1] if word.lstrip("+").startswith("export.file=") else ""
    return f"{path.removesuffix(extension)}{suffix}{extension}{quote}"


def _with_known_option(word: str, folder: Path | None) -> str:
    """Return a word with its option spelled as the config file is: ``scheme=fp8`` for ``scheme=FP8``.

    Words that choose no option are returned unchanged.

    Args:
        word: an override.
        folder: the folder of the user's own configs (``--config-dir``), whose options stay as typed; None without one.

    Raises:
        CalibrationError: a group with an empty option, ``null`` or ``none``.
    """
    key, equals, value = word.partition("=")
    group = key.lstrip("+").partition("@")[0]
    names = {name.casefold(): name for name in option_names(group)}
    if not names:
        return word
    chooses_nothing = value.casefold() in ("", "null") or (value.casefold() == "none" and "none" not in names)
    if chooses_nothing:
        options = _options_text(group, names.values())
        raise CalibrationError(f"{word} chooses nothing", expected=options, remedy="leave it out.")
    options_typed = []
    for option in value.split(","):  # several with --multirun
        is_of_user = folder is not None and (folder / group / f"{option}.yaml").is_file()
        options_typed.append(option if is_of_user else names.get(option.casefold(), option))
    return f"{key}{equals}{','.join(options_typed)}"


# ---------------------------------------------------------------------- after an error


def explained(error: Exception) -> str:
    """Return the text to show for an error of Hydra or of this package: what is wrong, the nearest name, the remedy.

    ``__main__`` exits with it.
    """
    causes = [failure for failure in (error, error.__cause__) if failure is not None]
    for failure in causes:
        if isinstance(failure, CalibrationError):
            return f"CalibrationError: {in_words(str(failure))}"
    for failure in causes:
        if isinstance(failure, (ConfigAttributeError, ConfigKeyError)):
            return f"unknown key {_unknown_key(str(failure.full_key))}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return _unknown_option(str(error.missing_cfg_file), error.options)
    if isinstance(error, OverrideParseException):
        reason = str(error.message).strip().splitlines()[0]
        hint = (
            "An option with brackets, spaces or quotes is quoted whole: 'ignore=[lm_head]'\n"
            "A value with other characters than ASCII letters and digits needs quotes of its own, too: "
            "'model.path=\"größe 1\"'"
        )
        return f"cannot read {error.override!r}: {reason}\n{hint}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has to be given: {error.full_key}=..."
    lines = [str(failure) for failure in causes]
    if isinstance(error, HydraException):
        lines = [re.sub(r"\nTo append to your .*", "", line) for line in lines]  # its advice to extend the config
    return "\n".join(lines)


def _unknown_option(file: str, options: Sequence[str]) -> str:
    """The text for an option that its group does not have, with the options that it has.

    Args:
        file: ``group/name``, as Hydra calls the config that it did not find.
        options: the options of the group.
    """
    group, _, name = file.partition("/")
    text = f"unknown option {group}={name}{likely(name, options)}. {_options_text(group, options)}"
    if group in _PATHS:
        text += f"\nA file, folder or name is given as {_PATHS[group]}={name}"
    return text


def _unknown_key(key: str) -> str:
    """The rest of the sentence "unknown key ...": the key, and the option that has it, or similar keys."""
    parent, _, name = key.rpartition(".")
    if parent == "trainer":
        from lightning.pytorch import Trainer  # help and completion do without it

        if name in signature(Trainer).parameters:
            return f"{key}: the Trainer takes it, but its config does not list it. Add it with +{key}=..."
    options = [str(option) for option in options_with(key)]
    if options:
        return f"{key}: it belongs to {' or '.join(options)}"
    siblings = _keys_below(parent)
    similar = [f"`{other}`" for other in all_keys() if other.endswith(f".{key}")]
    hint = f" (did you mean {' or '.join(similar[:3])}?)" if similar else likely(name, siblings)
    if not siblings:
        return f"{key}{hint}."
    heading = f"Keys of {parent}" if parent else "Keys"
    return f"{key}{hint}. {heading}: {', '.join(siblings)}."


def _keys_below(parent: str) -> list[str]:
    """The names of the keys directly below the node ``parent``; for the top level (``""``), also names of groups."""
    names = set() if parent else set(group_names())
    prefix = f"{parent}." if parent else ""
    for key in all_keys():
        if key.startswith(prefix):
            names.add(key.removeprefix(prefix).partition(".")[0])
    return sorted(names)


def _options_text(group: str, names: Iterable[str]) -> str:
    """The sentence that lists a group's options."""
    return f"Options of {group}: {', '.join(sorted(names))}"
