"""A next step that a report proposes, in the words of Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

#: export: write a checkpoint. serve, load: use it. measure: compare with the unquantized model. leave_out: leave layers
#: in full precision. token_scales: a scheme with a scale for each token. smooth: move outliers of inputs
#: into weights. observers: choose them by measurement.
#: rounding: round weights by their inputs. without_data: choose weights without their inputs. budget: a plan of more
#: bits. untrained: the calibrated model without training. fine_tune: train it
StepName: TypeAlias = Literal[
    "export",
    "serve",
    "load",
    "measure",
    "leave_out",
    "smooth",
    "token_scales",
    "observers",
    "rounding",
    "without_data",
    "budget",
    "untrained",
    "fine_tune",
]


@dataclass(frozen=True)
class Step:
    """One thing to do next; :mod:`.next_steps` makes it when a run's report is judged, and the page shows it.

    Attributes:
        name: the name of the step, by which programs tell steps apart.
        title: the step in words, for a person.
        reason: its effect and its cost.
        python: Python to copy into a script.
        changes: the arguments in Python that the step changes, or needs, with their values. Those of "leave_out",
            "token_scales", "rounding" and "without_data" are fields of :class:`~lightning_obs.CalibrationOptions`.
        share: the largest share of the quantization noise that it could remove, by the layer errors of this run; 0: not
            known.
        command: the command to type into a shell, which the command line adds; None: no command does this step.
    """

    name: StepName
    title: str
    reason: str
    python: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    share: float = 0.0
    command: str | None = None
