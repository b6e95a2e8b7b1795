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
    """The judgement that a reader needs first.

    Attributes:
        grade: of the run: the worst of its numbers.
        headline: the grade in a sentence.
        numbers: the numbers that it follows from.
        cause: where the model loses, in a sentence; empty: not known, or the run is good.
        steps: what to do next, the best first.
    """

    grade: Grade
    headline: str
    numbers: list[GradedNumber]
    cause: str
    steps: list[Step]


def judge(report: Report, folder: str | Path = ".") -> Judgement:
    """The judgement of a run whose report is written to ``folder``.

    Called once for the closing lines and once for the page.
    """
    numbers = graded_numbers(report)
    grade = worst_grade(numbers)
    losses = layer_losses(report)
    cause = "" if grade == "good" else cause_of(report, losses)
    steps = next_steps(report, grade, losses, Path(folder))
    return Judgement(grade, headline(report, grade, numbers), numbers, cause, steps)
