"""How good a run is: a grade for each of its numbers, and the worst of them for the run.

The limits stand here once; docs/guide/read_the_page.md gives them with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from lightning_obs.report.facts import Report, facts, metric_text
from lightning_obs.report.logged_metrics import MetricKind

Grade: TypeAlias = Literal["good", "usable", "broken", "not graded", "not measured"]

#: nats per token by which the loss grows, or predictions diverge: above the first usable, above the second broken
NATS = (0.05, 0.3)
#: least share of the positions with the same most likely class
AGREEMENT = (0.88, 0.70)
#: least share of a score that is kept, ``after / before``; for an error, whose growth is bad, least ``before / after``
KEPT = (0.99, 0.95)
#: nats, or share, by which training has to lose against the calibrated model to be called worse: less is noise
WORSE = 1e-3

_HEADLINES: dict[Grade, str] = {
    "good": "Good: it says what the original says",
    "usable": "Usable: it loses something",
    "broken": "Broken: it no longer says what the original says",
    "not measured": "Not measured: no metric and no predictions were compared",
}
_ARROW = "\N{RIGHTWARDS ARROW}"


class GradedNumber(NamedTuple):
    """A number of the run as the page shows it: its label, its text and its grade.

    :func:`graded_numbers` makes it; the run's grade and the page's first lines are made of these numbers.
    """

    label: str
    value: str
    grade: Grade


def graded_numbers(report: Report) -> list[GradedNumber]:
    """The run's numbers with their grades: its metrics, the predictions, and training against calibration.

    Called by :func:`~lightning_obs.report.judgement.judge`, which takes the worst grade for the run.
    """
    texts = facts(report, _ARROW)
    numbers = []
    for name, (before, after) in report.quality.metrics.items():
        if before is not None and after is not None:
            kind = report.quality.kind_of(name)
            grade = metric_grade(kind, before, after, has_logits=report.quality.moved is not None)
            numbers.append(GradedNumber(name, texts[name], grade))
    if report.quality.moved is not None:
        divergence = _by_limits(report.quality.moved.divergence, NATS)
        agreement = _by_limits(report.quality.moved.agreement, AGREEMENT)
        numbers.append(GradedNumber("KL [nats]", texts["KL [nats]"], divergence))
        numbers.append(GradedNumber("same top-1 [%]", texts["same top-1 [%]"], agreement))
    return [*numbers, *_numbers_of_training(report)]


def worst_grade(numbers: Sequence[GradedNumber]) -> Grade:
    """The worst grade of a run's numbers; "not measured" without any. ``judge`` takes it for the run's grade."""
    grades = [number.grade for number in numbers]
    for grade in ("broken", "usable", "good", "not graded"):
        if grade in grades:
            return grade
    return "not measured"


def headline(report: Report, grade: Grade, numbers: Sequence[GradedNumber]) -> str:
    """The grade in a sentence; of a graded run it also says whether training made the model worse.

    :func:`~lightning_obs.report.judgement.judge` calls it, for the closing lines and the page.
    """
    if grade == "not graded":
        names = " and ".join(number.label for number in numbers)
        return f"Not graded: which values of {names} are good is not known."
    sentence = _HEADLINES[grade]
    if worse_than_calibrated(report):
        sentence += "; training has made it worse than the calibration had left it"
    return f"{sentence}."


def metric_grade(kind: MetricKind, before: float, after: float, *, has_logits: bool = True) -> Grade:
    """The grade of one metric from its values before and after quantization; for :func:`graded_numbers`.

    A loss is taken for a mean of nats and judged by its difference, so that it and its perplexity have one grade. If
    predictions were not compared, the metric called a loss may be a squared error instead. So it is not graded where
    the difference says good and the ratio (as of an error) says broken, or the other way round.

    Args:
        kind: the kind of the metric.
        before: the value of the unquantized model.
        after: the value of the quantized model. A value that is not finite is broken.
        has_logits: whether the model has logits, so that a loss is a cross entropy.

    >>> metric_grade("loss", 3.0, 3.2), metric_grade("score", 0.90, 0.87), metric_grade("unknown", 1.0, 2.0)
    ('usable', 'usable', 'not graded')
    """
    if not math.isfinite(before):
        return "not graded"
    if not math.isfinite(after):
        return "broken"
    worsening = _worsening(kind, before, after)
    if worsening is None:
        return "not graded"
    if kind not in ("perplexity", "loss"):
        return _by_limits(1 - worsening, KEPT)
    grade = _by_limits(worsening, NATS)
    if kind == "loss" and not has_logits:
        as_error = metric_grade("error", before, after)
        if {grade, as_error} == {"good", "broken"}:
            return "not graded"
    return grade


def worse_than_calibrated(report: Report) -> list[str]:
    """Names of the metrics by which training made the model worse than calibration had left it.

    The headline, the grades below and the next step "untrained" ask for them.
    """
    worse = []
    for name, calibrated in report.quality.calibrated.items():
        _, after = report.quality.metrics.get(name, (None, None))
        if after is None or not math.isfinite(calibrated):
            continue
        kind = report.quality.kind_of(name)
        lost = _worsening(kind, calibrated, after) if math.isfinite(after) else math.inf
        if lost is not None and lost > WORSE:
            worse.append(name)
    return worse


def _worsening(kind: MetricKind, before: float, after: float) -> float | None:
    """How much worse a finite value is: in nats, or as the share that is lost; None where that cannot be told.

    Negative where ``after`` is the better value. Called for the grade of a metric, and for metrics of the trained model
    against the calibrated one.

    - Equal values: 0, unless the kind is unknown.
    - A loss: the difference.
    - A perplexity: the logarithm of the quotient; None unless both values are above 0.
    - An error: ``1 - before / after``, so that twice the error is a loss of half. No error is no loss, whatever was
      before; None where a value is negative.
    - A score: the share of it that is lost; None unless ``before`` is above 0.
    """
    if before == after and kind != "unknown":
        return 0.0
    if kind == "loss":
        return after - before
    is_positive = before > 0 and after > 0
    if kind == "perplexity":
        if is_positive:
            return math.log(after / before)
        return None
    if kind == "error":
        if before < 0 or after < 0:
            return None
        return 1 - before / after if after > 0 else 0.0
    if kind == "score":
        if before > 0:
            return 1 - after / before
        return None
    return None


def _by_limits(value: float, limits: tuple[float, float]) -> Grade:
    """The grade by limits that rise (less is better) or fall (more is better); NaN is broken.

    >>> _by_limits(0.1, NATS), _by_limits(0.1, AGREEMENT), _by_limits(math.nan, NATS)
    ('usable', 'broken', 'broken')
    """
    good, usable = limits
    sign = 1 if good < usable else -1
    if sign * value <= sign * good:
        return "good"
    if sign * value <= sign * usable:
        return "usable"
    return "broken"


def _numbers_of_training(report: Report) -> list[GradedNumber]:
    """Each metric of the calibrated model beside that of the trained one; a model that got worse is at most usable.

    :func:`graded_numbers` calls it. A trained model whose metric is not finite has got worse. A metric of which nobody
    knows which values are better, and one that was not finite before training, are not graded.
    """
    worse = worse_than_calibrated(report)
    numbers = []
    for name, calibrated in report.quality.calibrated.items():
        _, after = report.quality.metrics.get(name, (None, None))
        if after is None:
            continue
        kind = report.quality.kind_of(name)
        grade: Grade = "good"
        if name in worse:
            grade = "usable"
        elif not math.isfinite(calibrated) or _worsening(kind, calibrated, after) is None:
            grade = "not graded"
        text = metric_text(kind, calibrated, after, _ARROW)
        numbers.append(GradedNumber(f"{name} since calibration", text, grade))
    return numbers
