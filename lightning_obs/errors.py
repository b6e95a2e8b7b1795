"""Errors and warnings of the package: the problem, where it is, the value given, the value expected, the remedy.

A failure of one rank is sent to all ranks (:func:`sendable`), and all raise the same (:func:`require_no_failure`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from numbers import Integral
from typing import Any

_NAMES_SHOWN = 8
#: top-level packages through which a user's call reaches the place of a warning
_ON_THE_WAY = {
    "lightning_obs", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch", "hydra",
    "jsonargparse", "compressed_tensors", "transformers", "contextlib", "dataclasses", "functools",
}  # fmt: skip


class CalibrationError(ValueError):
    """Calibration or export cannot go on, and nothing was written.

    Args:
        what: the problem in one clause.
        where: module names (all are kept in :attr:`where`; the message shows the first few).
        got: the value found.
        expected: the values that are accepted.
        remedy: how to solve it.

    Examples:
        >>> print(CalibrationError("columns are not divisible", where=["fc1"], got="10 columns",
        ...                        expected="a multiple of 4", remedy="list it in `ignore`."))
        columns are not divisible: fc1. Got 10 columns, expected a multiple of 4. Remedy: list it in `ignore`.
    """

    def __init__(
        self,
        what: str,
        *,
        where: Sequence[str] = (),
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.where = list(where)
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(printable(self._message()))

    def _message(self) -> str:
        """The text of the error, from its parts that are given."""
        clauses = {"got": self.got, "expected": self.expected}
        facts = ", ".join(f"{word} {value}" for word, value in clauses.items() if value is not None)
        text = f"{self.what}{': ' if self.where else ''}{name_list(self.where)}."
        text += f" {facts[0].upper()}{facts[1:]}." if facts else ""
        return f"{text} Remedy: {self.remedy}" if self.remedy else text

    def said_of(self, owner: str) -> CalibrationError:
        """Return this error with ``owner`` in front: the rank or the candidate that has failed."""
        clauses: dict[str, Any] = {
            "where": self.where,
            "got": self.got,
            "expected": self.expected,
            "remedy": self.remedy,
        }
        return CalibrationError(f"{owner}: {self.what}", **clauses)

    def __reduce__(self) -> tuple[object, ...]:
        # An exception with keyword-only arguments does not survive pickling (spawned ranks) by itself.
        clauses: dict[str, Any] = {
            "where": self.where,
            "got": self.got,
            "expected": self.expected,
            "remedy": self.remedy,
        }
        return partial(type(self), self.what, **clauses), ()


class CalibrationWarning(UserWarning):
    """Something the user probably did not intend, after which the result is still correct."""


def refuse(
    where: Sequence[str], what: str, *, got: object = None, expected: object = None, remedy: str | None = None
) -> None:
    """Raise a :class:`CalibrationError` unless ``where`` is empty; checks call it with the names they object to.

    Args:
        where: names of the modules, tensors or options that are wrong.
        what: the problem in one clause.
        got, expected, remedy: as :class:`CalibrationError` takes them.

    >>> refuse([], "the weight is not floating point")
    """
    if where:
        raise CalibrationError(what, where=where, got=got, expected=expected, remedy=remedy)


def refuse_unknown(given: Iterable[str], known: Collection[str], what: str = "unknown option") -> None:
    """Raise a :class:`CalibrationError` for ``given`` names that are not ``known``, each with the nearest known name.

    >>> refuse_unknown(["export_dir"], ["export_to", "ignore"])
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: unknown option: export_dir (did you mean `export_to`?).
    """
    hints = {name: likely(name, known) for name in given if name not in known}
    refuse(
        [name + hint for name, hint in hints.items()],
        what,
        expected=None if all(hints.values()) else f"some of {', '.join(sorted(known))}",
    )


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a :class:`CalibrationError` unless the ``value`` of the option ``name`` is among its ``choices``.

    >>> require_choice("on_missing", "ignore", ["error", "warn"])
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: on_missing. Got 'ignore', expected 'error', 'warn'.
    """
    if value not in list(choices):  # it may have no hash
        got = repr(value) + likely(str(value), choices)
        raise CalibrationError(name, got=got, expected=", ".join(map(repr, choices)))


def require_kind(name: str, value: object, kinds: Any, expected: str) -> None:
    """Raise a :class:`CalibrationError` unless the ``value`` of the option ``name`` is of ``kinds``, or None.

    >>> require_kind("module", 3, (str,), "the path of a module")
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: module. Got 3, expected the path of a module.
    """
    if value is not None and not isinstance(value, kinds):
        raise CalibrationError(name, got=repr(value), expected=expected)


def require_bool(**options: object) -> None:
    """Raise a :class:`CalibrationError` for an option that is neither True nor False.

    The text "no" would count as true.

    >>> require_bool(overwrite="no")
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: overwrite. Got 'no', expected True or False.
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            raise CalibrationError(name, got=repr(value), expected="True or False")


def require_at_least(least: int, **options: int | None) -> None:
    """Raise a :class:`CalibrationError` for an option that is no whole number or a number below ``least``.

    The parts of callbacks call it in their constructors, for counts of batches, steps and epochs; the functions that
    choose schemes call it for seeds and counts.

    Args:
        least: the smallest number that is accepted: 0 or 1, for the text of the error.
        **options: the values by name of the option; None is accepted, True and False are not.

    >>> require_at_least(1, max_batches=0)
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: max_batches. Got 0, expected a whole number, one or more.
    >>> require_at_least(1, max_batches=1.5)
    Traceback (most recent call last):
    lightning_obs.errors.CalibrationError: max_batches. Got 1.5, expected a whole number, one or more.
    """
    for name, number in options.items():
        is_whole = isinstance(number, Integral) and not isinstance(number, bool)
        if number is not None and not (is_whole and number >= least):
            expected = f"a whole number, {'one' if least else 'zero'} or more"
            raise CalibrationError(name, got=repr(number), expected=expected)


def likely(name: str, known: Iterable[str]) -> str:
    """Return a hint to append to an error about a wrong name: the closest known name, or an empty string.

    >>> "unknown observer minmx" + likely("minmx", ["minmax", "mse"])
    'unknown observer minmx (did you mean `minmax`?)'
    """
    names = {other.casefold(): other for other in known if other != name}
    near = get_close_matches(name.casefold(), names, 1)
    return f" (did you mean `{names[near[0]]}`?)" if near else ""


def key_text(key: tuple[str, str], rank: int | None = None, more: str = "") -> str:
    """An observer's key for a person to read: ``layers.0.fc1 (input, rank 1: 3 of 8 min_vals not finite)``.

    Called for each observer that an error names. Only ``ranks/sync.py`` passes more than the key, when it compares the
    statistics of all ranks or sends them.

    Args:
        key: module name and base name.
        rank: the rank on which something is wrong with the observer; None: it is not shown.
        more: what is wrong, such as the name of a statistic that cannot be sent; empty: nothing is added.
    """
    name, base = key
    return f"{name} ({base}{'' if rank is None else f', rank {rank}'}{more and ': ' + more})"


def sendable(failure: Exception, key: tuple[str, str] | None = None) -> CalibrationError:
    """Return a failure as a :class:`CalibrationError` that can always be pickled, to be sent to the other ranks.

    ``key`` is the observer at which it happened, as module name and base name; None: at no single one.
    """
    where = [] if key is None else [key_text(key)]
    if isinstance(failure, CalibrationError):
        got, expected = (None if x is None else str(x) for x in (failure.got, failure.expected))
        where = [str(name) for name in failure.where] or where
        return CalibrationError(failure.what, where=where, got=got, expected=expected, remedy=failure.remedy)
    return CalibrationError(f"{type(failure).__name__}: {failure}", where=where)


def require_no_failure(failures: Sequence[CalibrationError | None]) -> None:
    """Raise the first of the ranks' failures, with its rank; called on every rank, so that all raise the same.

    ``failures`` has one item for each rank: an error made by :func:`sendable`, or None where nothing failed.
    """
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if failed:
        rank, first = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise first if len(failures) == 1 else first.said_of(f"rank {rank}{others}")


def warn(message: str) -> None:
    """Give a :class:`CalibrationWarning` that points at the user's line, however deep in the package it arises.

    The user's line is the innermost call from a module outside the packages in ``_ON_THE_WAY``. Modules are known by
    their names, so it does not matter where they are installed. Under ``python -m lightning_obs`` the line is that of
    ``__main__.py``.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _ON_THE_WAY:
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), CalibrationWarning, stacklevel=level)


def printable(text: str) -> str:
    r"""Return the text for a terminal: control characters, and characters that cannot be encoded, as their escapes.

    >>> print(printable("layer\x1b[2J.\ud800"))
    layer\x1b[2J.\ud800
    """
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return text if text.isprintable() else "".join(shown)


def name_list(names: Sequence[str], shown: int = _NAMES_SHOWN) -> str:
    """Join names of modules for a message: the first ``shown`` names, and a count of the rest.

    >>> name_list(["a", "b", "c"], shown=2)
    'a, b and 1 more'
    """
    names = list(names)
    head = printable(", ".join(names[:shown]))
    return head if len(names) <= shown else f"{head} and {len(names) - shown} more"
