"""A run beside an earlier one, by the earlier one's ``report.json``: what got better, what worse, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_obs.files.read import naming, read_json
from lightning_obs.report.logged_metrics import MetricKind
from lightning_obs.report.numbers import human_size, number

#: a layer whose SQNR changed by less [dB] counts as unchanged
SAME = 0.1
#: layers that the page lists in each direction
LISTED = 5


class LayerChange(NamedTuple):
    """The SQNR of a layer's output in an earlier run and now [dB], and the difference, for :func:`compared_with`."""

    name: str
    before: float
    now: float
    change: float


def read_earlier(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the ``report.json`` of an earlier run.

    Called for ``against``: at once by the command line, so that a wrong path is an error before the run, and by the
    page.

    Args:
        path: of the file, or of the folder that holds it.

    Raises:
        CalibrationError: no such file, or one that no run has written.
    """
    file = Path(path)
    if file.is_dir():
        file /= "report.json"
    expected = "the report.json that an earlier run has written"
    earlier: dict[str, Any] = read_json(file, expected=expected)
    with naming(file, expected=expected):
        if not isinstance(earlier["title"], str):
            raise TypeError("its title is not a text")
        # the additions raise a TypeError for a name that is no text and for an SQNR that is no number
        for layer in earlier["layers"]:
            _ = layer["name"] + ""
            _ = (layer.get("sqnr") or 0.0) + 0.0
    return earlier


def compared_with(
    earlier: Mapping[str, Any], data: Mapping[str, Any], kind_of: Callable[[str], MetricKind]
) -> dict[str, Any]:
    """What got better and what worse since an earlier run; the page calls it for a report with ``against``.

    Args:
        earlier: the ``report.json`` of the earlier run.
        data: the content of the present run's ``report.json``.
        kind_of: the kind of a metric by its name, which says whether more is better.

    Returns:
        ``title`` of the earlier run; ``numbers``, a list of ``{"label", "before", "now", "verdict"}`` with the verdict
        "better", "worse", "as before" or "" (unknown); ``better`` and ``worse``, layers as
        ``{"name", "before", "now", "change"}`` in dB, those that changed most first; ``same``, how many did not change;
        ``added`` and ``removed``, names of layers that one of the two runs has.
    """
    earlier_ratios = _ratios(earlier)
    ratios = _ratios(data)
    better: list[LayerChange] = []
    worse: list[LayerChange] = []
    same = 0
    for name in ratios.keys() & earlier_ratios.keys():
        before = earlier_ratios[name]
        change = LayerChange(name, before, ratios[name], ratios[name] - before)
        if abs(change.change) < SAME:
            same += 1
        else:
            (better if change.change > 0 else worse).append(change)
    better.sort(key=lambda change: (-change.change, change.name))
    worse.sort(key=lambda change: (change.change, change.name))
    return {
        "title": earlier["title"],
        "numbers": [*_metrics(earlier, data, kind_of), *_facts(earlier, data)],
        "better": [change._asdict() for change in better],
        "worse": [change._asdict() for change in worse],
        "same": same,
        "added": [name for name in ratios if name not in earlier_ratios],
        "removed": [name for name in earlier_ratios if name not in ratios],
    }


def _ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """The SQNR of each layer that has one [dB]."""
    ratios = {}
    for layer in report["layers"]:
        ratio = layer.get("sqnr")
        if ratio is not None:
            ratios[layer["name"]] = ratio
    return ratios


def _metrics(
    earlier: Mapping[str, Any], data: Mapping[str, Any], kind_of: Callable[[str], MetricKind]
) -> list[dict[str, str]]:
    """The metrics of the quantized models that both runs have."""
    lines = []
    for name, (_, now) in data["metrics"].items():
        _, before = earlier.get("metrics", {}).get(name) or (None, None)
        if before is None or now is None:
            continue
        kind = kind_of(name)
        gain = now - before if kind == "score" else before - now
        verdict = "" if kind == "unknown" else _verdict(gain)
        lines.append({"label": name, "before": number(before), "now": number(now), "verdict": verdict})
    return lines


def _facts(earlier: Mapping[str, Any], data: Mapping[str, Any]) -> list[dict[str, str]]:
    """How far predictions are from the original's, and the size, as far as both runs know them."""
    entries: Sequence[tuple[str, str, Callable[[float], str], float]] = [
        ("divergence", "KL [nats]", number, -1.0),
        ("agreement", "same top-1 [%]", lambda share: f"{100 * share:.2f}", 1.0),
        ("size", "size", human_size, -1.0),
    ]
    lines = []
    for key, label, text, sign in entries:
        before = earlier.get(key)
        now = data.get(key)
        if before is not None and now is not None:
            verdict = _verdict(sign * (now - before))
            lines.append({"label": label, "before": text(before), "now": text(now), "verdict": verdict})
    return lines


# The verdict of a change whose sign says whether the present run is better.
def _verdict(gain: float) -> str:
    if gain == 0:
        return "as before"
    return "better" if gain > 0 else "worse"
