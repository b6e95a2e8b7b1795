"""Callbacks that are deep-copied before they run: the original answers with the results of its copy.

neuralforecast builds its models from the user's callbacks, copies the models, and fits the copies. The user has the
original in hand, which no Trainer has ever called.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol, TypeVar

from lightning_obs.errors import CalibrationError
from lightning_obs.model.weight import matrix_shape


class HasCalibrated(Protocol):
    """The results of a callback that may have calibrated a model; :class:`DeepCopies` reads both properties."""

    @property
    def session(self) -> Any:
        """The session of the callback's run; None before the callback has run."""
        ...

    @property
    def has_calibrated(self) -> bool:
        """Whether the session has quantization parameters, computed or loaded."""
        ...


_C = TypeVar("_C", bound=HasCalibrated)


class DeepCopies:
    """The callbacks that are deep copies of one another, the original included; all of them hold this one object.

    Made by `Results`, the part of a callback that answers for it, when a callback is copied for the first time. So
    "callback" stands for its `Results` here. A callback is registered when it makes its session. Callbacks that nobody
    holds any more are forgotten, except the last one.
    """

    def __init__(self) -> None:
        self._registered: list[weakref.ref[Any]] = []
        self._last: Any = None  # keeps the last one alive

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepCopies:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # The other callbacks are not in the process that unpickles this one.
        return DeepCopies, ()

    def register(self, callback: HasCalibrated) -> None:
        """Remember a callback that has made its session; called by ``Results.register``."""
        self._last = callback
        earlier = [reference for reference in self._registered if reference() is not callback]
        self._registered = [*earlier, weakref.ref(callback)]

    def with_results(self, callback: _C) -> _C:
        """Find the callback that holds the results: ``callback`` itself if it ran, else the copy that ran last.

        ``Results`` asks it before each export and report. A model that is fitted again is calibrated again, and
        the last calibration counts.

        Raises:
            CalibrationError: it did not run, and its copies have calibrated models of different architectures.
        """
        if callback.session is not None:
            return callback
        copies = self._calibrated()
        architectures = {_architecture_of(copy.session) for copy in copies}
        if len(architectures) > 1:
            raise CalibrationError(
                f"copies of this callback have calibrated {len(architectures)} different models, and it is not known "
                "which of them is meant",
                where=[type(copy.session.model).__name__ for copy in copies],
                remedy="give each model a callback of its own.",
            )
        return copies[-1] if copies else callback

    def _calibrated(self) -> list[Any]:
        """The registered callbacks that still exist and have calibrated, in the order of their registration."""
        callbacks = []
        for reference in self._registered:
            callback = reference()
            if callback is not None:
                callbacks.append(callback)
        self._registered = [weakref.ref(callback) for callback in callbacks]
        return [callback for callback in callbacks if callback.has_calibrated]


def _architecture_of(session: Any) -> tuple[Any, ...]:
    """The class of the calibrated model and the names and shapes of its planned modules."""
    shapes = [(target.name, matrix_shape(target.module)) for target in session.plan.targets]
    return type(session.model), *shapes
