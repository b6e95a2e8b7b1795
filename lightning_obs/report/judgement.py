"""Judge a run by its own numbers: is the quantized model good, which layers lose most, what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_obs.report.cause import cause_of, layer_losses
from lightning_obs.report.facts import Report
from lightning_obs.report.grade import Grade, GradedNumber, graded_numbers, headline, worst_grade
from lightning_obs.report.next_steps import next_steps
from lightning_obs.report.step import Step


@dataclass(frozen=True)
class Judgement:
    """The judgement that a reader needs first; :func:`judge` makes it, the page and the closing lines show it.

    Attributes:
        grade: the grade of the run, the worst one of its numbers.
        headline: the grade in a sentence.
        numbers: the numbers of the run with their grades, from which ``grade`` follows.
        cause: where the model loses, in a sentence; empty: not known, or the run is good.
        steps: the next steps to propose, the best first.
    """

    grade: Grade
    headline: str
    numbers: list[GradedNumber]
    cause: str
    steps: list[Step]


def judge(report: Report, folder: str | Path = ".") -> Judgement:
    """The judgement of a run whose report is written to ``folder``.

    The command line calls it before it writes the report, to add commands to the steps. ``write_report`` calls it for
    a report that comes without a judgement.
    """
    numbers = graded_numbers(report)
    grade = worst_grade(numbers)
    losses = layer_losses(report)
    cause = "" if grade == "good" else cause_of(report, losses)
    steps = next_steps(report, grade, losses, Path(folder))
    return Judgement(grade, headline(report, grade, numbers), numbers, cause, steps)
