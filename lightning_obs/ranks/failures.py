"""What went wrong on one rank, as an error that all ranks raise alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Key


def key_text(key: Key, rank: int | None = None, more: str = "") -> str:
    """A key for a person to read: ``layers.0.fc1 (input, rank 1: 3 of 8 min_vals not finite)``."""
    name, base = key
    return f"{name} ({base}{'' if rank is None else f', rank {rank}'}{more and ': ' + more})"


def sendable(failure: Exception, key: Key | None = None) -> CalibrationError:
    """A failure as an error that can be pickled, whatever it holds; ``key`` is where it happened."""
    where = [] if key is None else [key_text(key)]
    if isinstance(failure, CalibrationError):
        got, expected = (None if x is None else str(x) for x in (failure.got, failure.expected))
        where = [str(name) for name in failure.where] or where
        return CalibrationError(failure.what, where=where, got=got, expected=expected, remedy=failure.remedy)
    return CalibrationError(f"{type(failure).__name__}: {failure}", where=where)


def require_no_failure(failures: Sequence[CalibrationError | None]) -> None:
    """Raise the first of the ranks' failures, with its rank.

    Args:
        failures: of each rank what went wrong there, :func:`sendable`.

    Raises:
        CalibrationError: a rank failed.
    """
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if failed:
        rank, first = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        what = first.what if len(failures) == 1 else f"rank {rank}{others}: {first.what}"
        raise CalibrationError(
            what, where=first.where, got=first.got, expected=first.expected, remedy=first.remedy
        ) from first


def require_finite(not_finite: Sequence[Mapping[Key, str]]) -> None:
    """Raise a CalibrationError that names what is NaN or infinite, given of each rank what is so of which observer."""
    many = len(not_finite) > 1
    bad = [
        key_text(key, rank if many else None, what)
        for rank, of_rank in enumerate(not_finite)
        for key, what in sorted(of_rank.items())
    ]
    if bad:
        raise CalibrationError(
            "what was observed is not finite",
            where=bad,
            expected="finite weights and activations",
            remedy="find the NaN or infinity in these modules' weights or in the data; nothing was written.",
        )


@contextmanager
def all_ranks_answer() -> Iterator[None]:
    """Say, in place of a socket's error, that another rank has ended.

    Raises:
        CalibrationError: a collective in the ``with`` block failed or did not end within the group's time limit.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of gloo, NCCL and the store alike
        raise CalibrationError(
            "another rank ended, or did not answer in time",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            remedy="look for the first error in the other ranks' output, then run again; nothing was written.",
        ) from error
