"""The facts of a run and its layers, gathered once for the closing summary and the page."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, median_low
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_range
from torch import nn

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.entries import stored_layout
from lightning_obs.errors import name_list
from lightning_obs.model.weight import identities, whole_shape
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.logged_metrics import MetricKind, metric_kind, sorted_metrics
from lightning_obs.report.numbers import human_size, moved_texts, number, relative_change
from lightning_obs.report.predictions import Moved
from lightning_obs.report.step import Step
from lightning_obs.schemes.config import describe_scheme, observer_name

#: below this [dB] more than 3 % of a typical token's output energy is quantization noise
POOR_SQNR = 15.0
#: points of a layer's picture of its channels
CHANNELS = 48


@dataclass
class ScaleDrift:
    """The history of a model's scales, in powers of two: a drift of 1 is a scale that has doubled or halved."""

    steps: list[int] = field(default_factory=list)  # when scales were added
    #: by name of the scale, the mean of ``|log2(scale / first scale)|`` at each of these steps
    drifts: dict[str, list[float]] = field(default_factory=dict)
    _first: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, step: int, qparams: Mapping[str, torch.Tensor]) -> None:
        """Add the scales of ``{"layer.weight_scale": tensor}`` at a step; scales of another shape start again."""
        self.steps.append(step)
        for name, scale in qparams.items():
            if not name.endswith("_scale") or name.endswith("_global_scale"):
                continue
            now = scale.detach().float().cpu().abs().log2()
            first = self._first.get(name)
            if first is None or first.shape != now.shape:
                first = self._first[name] = now
            history = self.drifts.setdefault(name, [0.0] * (len(self.steps) - 1))
            history.append(float((now - first).abs().nan_to_num(nan=0.0, posinf=0.0).mean()))

    def numbers(self) -> dict[str, float]:
        """The largest drift and the mean one, now; nothing before there are two to compare.

        >>> drift = ScaleDrift()
        >>> for step, scale in enumerate((1.0, 2.0)):
        ...     drift.add(step, {"fc.weight_scale": torch.tensor([scale]), "fc.weight_zero_point": torch.zeros(1)})
        >>> drift.numbers()
        {'scale_drift_max': 1.0, 'scale_drift_mean': 1.0}
        """
        last = [history[-1] for history in self.drifts.values() if len(history) == len(self.steps)]
        if len(self.steps) < 2 or not last:
            return {}
        return {"scale_drift_max": max(last), "scale_drift_mean": sum(last) / len(last)}


@dataclass(frozen=True)
class LayerFacts:
    """One layer's scheme, observers and bytes."""

    scheme: str  # in a few words
    weight_width: int | None  # bits of its numbers; None: full precision
    input_width: int | None
    weight_observer: str  # which found the range; empty: none did
    input_observer: str
    before: int  # bytes of all its tensors in the model
    after: int  # and in a checkpoint
    outputs: int  # how many output channels the weight has scales of
    channels: list[float]  # largest weight that the scales of each can hold; of runs of channels where there are many
    grid: tuple[float, float] | None  # ends of the range of the input's one scale; None: it has several scales


@dataclass
class Report:
    """The facts of a run. Facts that are left out are not shown.

    Attributes:
        title: of the page.
        result: of the calibration.
        errors: of the layers, worst first.
        metrics: by name, before and after, ``{"perplexity": (14.80, 15.19)}``; kept in an order that does not depend
            on the order in which they were logged. The first one stands for the run in a comparison.
        higher_is_better: by name of a metric, its direction; of one that is not here its name tells it, or nothing
            (:func:`~lightning_obs.report.logged_metrics.metric_kind`).
        are_held_out: whether the metrics are of data that calibration has not seen.
        curves: metrics over the steps of a fit, ``{"step": 100, "val_loss": 2.1, "val_loss_quantized": 2.3}``.
        moved: how far the predictions are from the original's.
        was_trained: after calibration.
        calibrated: metrics of the calibrated model before it was trained, by name.
        sizes: bytes before and after; by default the sums of ``kinds``.
        checkpoint: the exported folder; None: nothing was exported.
        options: of the calibration.
        layers: facts of each layer that need no data.
        kinds: bytes before and after, by kind of tensor.
        counts: how often each input value was seen, by module name.
        drift: how scales have moved.
        sensitivity: of each module by itself, in any unit; the name of the unit is ``sensitivity_unit``.
        losses: of each module with the scheme that was chosen for it, in the unit of ``frontier``.
        choices: the scheme that was chosen for each module.
        frontier: points ``{"name", "bits_per_weight", "bytes", "loss"}``; ``"mark": "chosen"``, ``"measured"`` or
            ``"full precision"`` where a point is that.
        scores: of observers that were tried, ``{"of", "observer", "loss", "tensors"}``.
        runs: other runs beside this one, as :func:`~lightning_obs.report.summary.comparison_table` takes them.
        lines: further lines of the summary.
        can_run: whether a next step can run on this model after this run; without it, none is proposed.
        extra: further keys of ``report.json``.
    """

    title: str
    result: CalibrationResult | None = None
    errors: Sequence[LayerError] = ()
    metrics: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    are_held_out: bool = False
    curves: Sequence[Mapping[str, float]] = ()
    moved: Moved | None = None
    was_trained: bool = False
    calibrated: Mapping[str, float] = field(default_factory=dict)
    sizes: tuple[int, int] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    options: CalibrationOptions | None = None
    layers: Mapping[str, LayerFacts] = field(default_factory=dict)
    kinds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    counts: Mapping[str, Support] = field(default_factory=dict)
    drift: ScaleDrift | None = None
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    sensitivity_unit: str = ""
    losses: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    frontier: Sequence[Mapping[str, Any]] = ()
    scores: Sequence[Mapping[str, Any]] = ()
    runs: Sequence[Mapping[str, Any]] = ()
    lines: Sequence[str] = ()
    can_run: Callable[[Step], bool] = lambda step: False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = sorted_metrics(self.metrics, self.higher_is_better)
        if self.sizes is None and self.kinds:
            before, after = zip(*self.kinds.values(), strict=True)
            self.sizes = sum(before), sum(after)

    @property
    def lost(self) -> str:
        """The measure that layers are compared by: the loss that a plan estimated, else the noise of their outputs."""
        return "estimated loss" if self.losses else "noise"

    @property
    def row(self) -> dict[str, Any]:
        """The run's row of a comparison: the first metric before and after, size, seconds, the worst layer."""
        return {
            "run": self.title,
            "metric": next(iter(self.metrics), None),
            **dict(list(self.metrics.items())[:1]),
            **({} if self.moved is None else asdict(self.moved)),
            "size": None if self.sizes is None else self.sizes[1],
            "seconds": None if self.result is None else self.result.seconds,
            "worst_sqnr": self.errors[0].sqnr if self.errors else None,
        }

    @property
    def poor_layers(self) -> list[str]:
        """The layers to try in ``ignore``: those whose per-token SQNR is below :data:`POOR_SQNR`, worst first.

        Modules that must share a scheme (q, k, v; gate, up: ``result.fused``) are named together.
        """
        poor = dict.fromkeys(error.name for error in self.errors if error.sqnr < POOR_SQNR)
        for members in () if self.result is None else self.result.fused:
            if any(name in poor for name in members):
                poor.update(dict.fromkeys(members))
        return list(poor)


def facts(report: Report, arrow: str = "->") -> dict[str, str]:
    """What the run has measured, by name, in the order of a report; the arrow stands between before and after."""
    found = dict[str, str]()
    for name, (before, after) in report.metrics.items():
        if before is not None and after is not None:
            kind = metric_kind(name, report.higher_is_better.get(name))
            found[name] = metric_text(kind, before, after, arrow)
    if report.moved is not None:
        found |= moved_texts(asdict(report.moved))
    if report.sizes is not None:
        found["size"] = f" {arrow} ".join(map(human_size, report.sizes))
    if report.result is not None and any(sum(counts) for counts in report.result.expert_tokens.values()):
        found["experts"] = _expert_line(report.result.expert_tokens)
    return found


def metric_text(kind: MetricKind, before: float, after: float, arrow: str = "->") -> str:
    """Two values of a metric and their change: the difference of losses, else percent.

    >>> metric_text("perplexity", 14.8, 15.2), metric_text("loss", -1.0, -0.9)
    ('14.80 -> 15.20 (+2.7 %)', '-1.000 -> -0.9000 (+0.1000)')
    >>> metric_text("unknown", 2.0, 3.0)
    '2.000 -> 3.000 (changed by +50.0 %)'
    """
    values = f"{number(before)} {arrow} {number(after)}"
    if kind == "loss":
        return f"{values} ({after - before:+#.4g})"
    change = relative_change(before, after)
    if change is None:
        return values
    verb = "changed by " if kind == "unknown" else ""
    return f"{values} ({verb}{100 * change:+.1f} %)"


def _expert_line(tokens: Mapping[str, Sequence[int]]) -> str:
    """How many tokens the router sent to the experts, and which got none."""
    counts = sorted(count for layer in tokens.values() for count in layer)
    line = f"tokens per expert: {counts[0]} to {counts[-1]}, median {median_low(counts)}"
    none = [f"{name}.{i}" for name, layer in tokens.items() for i, count in enumerate(layer) if not count]
    return f"{line}; {len(none)} of {len(counts)} experts got none: {name_list(none)}" if none else line


def aggregates(result: CalibrationResult | None, errors: Sequence[LayerError]) -> dict[str, float]:
    """Numbers for a logger to plot over time: least and median SQNR [dB], the largest clipped share [%] of an input,
    tokens of the least and of the median expert, and how long calibration took [s].

    >>> from lightning_obs.report.metrics import TensorError
    >>> aggregates(None, [LayerError("a", TensorError(20.0)), LayerError("b", input=TensorError(30.0, clipped=0.5))])
    {'sqnr_min': 20.0, 'sqnr_median': 25.0, 'clipped_max': 0.5}
    """
    found: dict[str, float] = {}
    ratios = [error.sqnr for error in errors if math.isfinite(error.sqnr)]
    if ratios:
        found |= {"sqnr_min": min(ratios), "sqnr_median": median(ratios)}
    clipped = [error.clipped for error in errors if error.clipped is not None]
    if clipped:
        found["clipped_max"] = max(clipped)
    if result is None:
        return found
    tokens = [count for layer in result.expert_tokens.values() for count in layer]
    if any(tokens):
        found |= {"expert_tokens_min": float(min(tokens)), "expert_tokens_median": float(median(tokens))}
    return found | {"seconds": result.seconds}


# ---------------------------------------------------------------------- facts of a session


def known_facts(session: CalibrationSession) -> dict[str, Any]:
    """The fields of :class:`Report` that a calibrated session knows; no data are read."""
    assert session.result is not None
    qparams, targets = session.result.qparams, {t.name: t for t in session.plan.targets if not t.states}
    kinds, bytes_of = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    with session.in_force():
        sizes = _sizes(session.model)
    for name, (before, after) in sizes.items():
        path, _, key = name.rpartition(".")
        kind = _kind(session.model.get_submodule(path), key, path in targets)
        for found, at in ((kinds, kind), (bytes_of, path)):
            had = found.get(at, (0, 0))
            found[at] = had[0] + before, had[1] + after
    of_observers = {(n, base): observer_name(base, one.args) for (n, base), one in session.observers.items()}
    layers = {}
    for name, target in targets.items():
        weight, read = (target.args.get(base) for base in ("weight", "input"))
        layers[name] = LayerFacts(
            describe_scheme(target.scheme),
            None if weight is None else weight.num_bits,
            None if read is None else read.num_bits,
            of_observers.get((name, "weight"), ""),
            of_observers.get((name, "input"), ""),
            *bytes_of.get(name, (0, 0)),
            *_channels(weight, qparams.get(f"{name}.weight_scale")),
            _grid(read, *(qparams.get(f"{name}.input_{key}") for key in ("scale", "zero_point"))),
        )
    return {"result": session.result, "options": session.options, "layers": layers, "kinds": kinds}


def _sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Bytes before and after of each tensor, by its name in either state dict; tied ones once."""
    names = identities(model)
    once = {one: name for name, one in reversed(names.items())}
    sizes = {}
    for path, _, key in (name.rpartition(".") for name in once.values()):
        module = model.get_submodule(path)
        if (shape := whole_shape(module, key)) is not None:
            sizes[f"{path}.{key}" if path else key] = shape.numel() * getattr(module, key).itemsize, 0
    tied = names.keys() - once.values()
    for name, value in stored_layout(model).items():
        if name not in tied:
            sizes[name] = sizes.get(name, (0, 0))[0], value.nbytes
    return sizes


def _kind(module: nn.Module, key: str, is_target: bool) -> str:
    if is_target and key != "bias":
        return "quantized weights" if key in ("weight", "weight_packed") else "scales"
    return "embeddings" if isinstance(module, nn.Embedding) else "full precision"


def _channels(args: QuantizationArgs | None, scale: torch.Tensor | None) -> tuple[int, list[float]]:
    if args is None or scale is None or scale.ndim < 2 or len(scale) < 2:
        return 0, []
    held = scale.detach().float().abs().flatten(1).amax(1) * calculate_range(args, scale.device)[1].float()
    return len(held), [float(part.max()) for part in held.tensor_split(min(CHANNELS, len(held)))]


def _grid(
    args: QuantizationArgs | None, scale: torch.Tensor | None, zero: torch.Tensor | None
) -> tuple[float, float] | None:
    if args is None or scale is None or scale.numel() != 1:
        return None
    middle = 0.0 if zero is None else float(zero)
    low, high = ((float(end) - middle) * float(scale) for end in calculate_range(args, torch.device("cpu")))
    return low, high
