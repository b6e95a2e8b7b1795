"""The facts of a run and its layers, gathered once for the closing summary and the page."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from statistics import median, median_low
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_range
from torch import nn

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.entries import stored_layout
from lightning_obs.errors import name_list
from lightning_obs.model.kinds import without_adapters, without_wrappers
from lightning_obs.model.weight import identities, whole_shape
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.logged_metrics import MetricKind, metric_kind, sorted_metrics
from lightning_obs.report.metrics import ScaleDrift
from lightning_obs.report.numbers import human_size, moved_texts, number, percent, relative_change
from lightning_obs.report.predictions import Moved
from lightning_obs.report.step import Step
from lightning_obs.schemes.config import describe_scheme, observer_name
from lightning_obs.schemes.planned_modules import PlannedModule

#: below this [dB] more than 3 % of a typical token's output energy is quantization noise
POOR_SQNR = 15.0
#: points of a layer's picture of its channels
CHANNELS = 48


@dataclass(frozen=True)
class LayerFacts:
    """One layer's scheme, observers and bytes.

    :func:`known_facts` makes it for each quantized module. The page shows it, and next steps are judged by it.
    """

    scheme: str  # in a few words
    weight_width: int | None  # bits of a weight; None: full precision
    input_width: int | None  # bits of an input value; None: full precision
    weight_observer: str  # name of the observer that chose the weight's range; empty: none did
    input_observer: str  # name of the observer that chose the input's range; empty: none did
    before: int  # bytes of all its tensors in the model
    after: int  # bytes of all its tensors in a checkpoint
    outputs: int  # number of output channels that have scales of their own; 0: they share scales
    #: for each output channel, the largest weight that its scales can represent; of more than 48 channels, the largest
    #: one in each of 48 runs of neighbours
    channels: list[float]
    #: the smallest and the largest value that the input's one stored scale can represent; None: the input is in full
    #: precision, has several scales, or a scale that is computed as the model runs
    grid: tuple[float, float] | None


@dataclass
class Quality:
    """How good the quantized model is, in numbers; :meth:`Report.of` makes it of a run's facts.

    Attributes:
        metrics: the values of each metric before and after quantization, by its name,
            ``{"perplexity": (14.80, 15.19)}``; kept in an order that does not depend on the order in which they were
            logged. The first metric stands for the run in a comparison.
        higher_is_better: the direction of each metric, by its name. Without an entry, the direction follows from the
            name, if it can (:func:`~lightning_obs.report.logged_metrics.metric_kind`).
        are_held_out: whether the metrics are of data that calibration has not seen.
        curves: metrics over the steps of a fit, ``{"step": 100, "val_loss": 2.1, "val_loss_quantized": 2.3}``.
        moved: the distance of the predictions from the original's; None: not measured.
        was_trained: whether the model was trained after its calibration.
        calibrated: metrics of the calibrated model before it was trained, by name.
    """

    metrics: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    are_held_out: bool = False
    curves: Sequence[Mapping[str, float]] = ()
    moved: Moved | None = None
    was_trained: bool = False
    calibrated: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = sorted_metrics(self.metrics, self.higher_is_better)

    def kind_of(self, name: str) -> MetricKind:
        """The kind of a metric, by its name and its direction; its grade, its text and its verdict follow from it."""
        return metric_kind(name, self.higher_is_better.get(name))


@dataclass
class Decisions:
    """What was decided by measurement: schemes and observers; :meth:`Report.of` makes it of a run's facts.

    Attributes:
        sensitivity: the loss that quantizing each module causes (of a plan: with its worst candidate), by name.
        sensitivity_unit: the name of the unit of ``sensitivity``.
        losses: the estimated loss of each module with the scheme that was chosen for it, by name, in the unit of the
            losses in ``frontier`` (nats of divergence, for language models).
        choices: the name of the scheme that was chosen for each module, by the module's name.
        frontier: the points of the page's picture of loss against size,
            ``{"name", "bits_per_weight", "bytes", "loss"}``; a point may have ``"mark"``: ``"chosen"``, ``"measured"``
            or ``"full precision"``.
        scores: the assignments of observers that were tried, ``{"of", "observer", "loss", "measured", "tensors",
            "chosen"}``: the base name of the tensors (``"weight"``, ``"input"``), the observer, the estimated loss and
            the measured divergence with it, how many tensors it was chosen for, and whether the assignment was taken.
        scored: sentences about what was taken, and on which data that was measured.
    """

    sensitivity: Mapping[str, float] = field(default_factory=dict)
    sensitivity_unit: str = ""
    losses: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    frontier: Sequence[Mapping[str, Any]] = ()
    scores: Sequence[Mapping[str, Any]] = ()
    scored: Sequence[str] = ()


@dataclass
class Written:
    """What a run has written, and its sizes; :meth:`Report.of` makes it of a run's facts.

    Attributes:
        sizes: bytes of the model before and after quantization; by default the sums of ``kinds``.
        kinds: bytes before and after, by kind of tensor ("quantized weights", "scales", "embeddings"...).
        checkpoint: the exported folder; None: no checkpoint was exported.
        files: the files that were exported in other formats (ONNX, program, GGUF).
    """

    sizes: tuple[int, int] | None = None
    kinds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    checkpoint: str | os.PathLike[str] | None = None
    files: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self) -> None:
        if self.sizes is None and self.kinds:
            before = 0
            after = 0
            for before_size, after_size in self.kinds.values():
                before += before_size
                after += after_size
            self.sizes = before, after


@dataclass
class OtherRuns:
    """Runs that the page compares this one with; :meth:`Report.of` makes it of a run's facts.

    Attributes:
        runs: the rows of other runs beside this one, as :func:`~lightning_obs.report.runs.compared_runs` takes them.
        against: the ``report.json`` of an earlier run, or its folder.
    """

    runs: Sequence[Mapping[str, Any]] = ()
    against: str | os.PathLike[str] | None = None


@dataclass
class Report:
    """The facts of a run. Facts that are left out are not shown.

    :meth:`of` makes it at the end of a run that calibrates. Tasks that compare, evaluate or train adapters make one
    without it. ``write_report`` and ``summary`` show it.

    Attributes:
        title: the title of the page.
        result: the result of the calibration; None: nothing was calibrated.
        errors: the errors of the layers, worst first.
        quality: metrics, predictions, training.
        decisions: sensitivities, a plan of schemes, scores of observers.
        written: sizes and exported files.
        other_runs: runs to compare this one with.
        options: the options of the calibration.
        token_mask: the callback's option of this name: where to find, in a batch, which tokens count; None: all count.
        layers: the facts of each layer that need no data, by module name.
        counts: the values of each layer's input and how often each was seen, by module name.
        drift: the history of the scales.
        lines: further lines of the summary; a string is one line.
        provenance: further facts on the origin of the report, by label (command, data, seed...), beside those of
            :func:`~lightning_obs.report.provenance.provenance`.
        can_run: a function that says whether a next step can run on this model after this run; without it, none is
            proposed.
        extra: further keys of ``report.json``.
    """

    title: str
    result: CalibrationResult | None = None
    errors: Sequence[LayerError] = ()
    quality: Quality = field(default_factory=Quality)
    decisions: Decisions = field(default_factory=Decisions)
    written: Written = field(default_factory=Written)
    other_runs: OtherRuns = field(default_factory=OtherRuns)
    options: CalibrationOptions | None = None
    token_mask: str | Callable[[Any], torch.Tensor] | None = None
    layers: Mapping[str, LayerFacts] = field(default_factory=dict)
    counts: Mapping[str, Support] = field(default_factory=dict)
    drift: ScaleDrift | None = None
    lines: Sequence[str] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    can_run: Callable[[Step], bool] = lambda step: False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, title: str, **facts: Any) -> Report:
        """A report from facts by name: fields of :class:`Report` and of the classes of its parts.

        ``Results.facts`` of a callback calls it, for the callback's own report and for those of tasks that calibrate.
        A callback's ``report()`` has checked the names that a user gives (:func:`fact_names`); an unknown name is a
        KeyError here.
        """
        of_part: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
        for name, fact in facts.items():
            of_part[_PART_OF_FACT[name]][name] = fact
        quality = Quality(**of_part["quality"])
        decisions = Decisions(**of_part["decisions"])
        written = Written(**of_part["written"])
        other_runs = OtherRuns(**of_part["other_runs"])
        return cls(
            title, quality=quality, decisions=decisions, written=written, other_runs=other_runs, **of_part["report"]
        )

    @property
    def lost(self) -> str:
        """The measure that layers are compared by: the loss that a plan estimated, else the noise of their outputs.

        Causes, next steps and a column of the page name it.
        """
        return "estimated loss" if self.decisions.losses else "noise"

    @property
    def row(self) -> dict[str, Any]:
        """The run's row of a comparison: the first metric before and after, its direction, size, seconds, worst layer.

        The page puts it into ``report.json``, and a task returns it for the table of a ``--multirun``.
        """
        row: dict[str, Any] = {"run": self.title, "metric": None}
        for name, values in self.quality.metrics.items():
            row["metric"] = name
            row[name] = values
            row["higher_is_better"] = self.quality.higher_is_better.get(name)
            break  # the first metric stands for the run
        if self.quality.moved is not None:
            row |= asdict(self.quality.moved)
        row["size"] = None if self.written.sizes is None else self.written.sizes[1]
        row["seconds"] = None if self.result is None else self.result.seconds
        row["worst_sqnr"] = self.errors[0].sqnr if self.errors else None
        return row

    @property
    def poor_layers(self) -> list[str]:
        """The layers to try in ``ignore``: those whose per-token SQNR is below :data:`POOR_SQNR`, worst first.

        A next step proposes to leave them in float, and the closing summary names them. Modules that must share a
        scheme (q, k, v; gate, up: ``result.plan.fused``) are named together.
        """
        poor: dict[str, None] = {}
        for error in self.errors:
            if error.sqnr < POOR_SQNR:
                poor[error.name] = None
        fused = () if self.result is None else self.result.plan.fused
        for members in fused:
            if not poor.keys().isdisjoint(members):
                poor |= dict.fromkeys(members)
        return list(poor)


#: the report and its parts, by the names of its fields
_PARTS: dict[str, type[Any]] = {
    "report": Report,
    "quality": Quality,
    "decisions": Decisions,
    "written": Written,
    "other_runs": OtherRuns,
}


def _parts_of_facts() -> dict[str, str]:
    """By name of a fact, the key of ``_PARTS`` whose class holds it."""
    part_of_fact: dict[str, str] = {}
    for name_of_part, owner in _PARTS.items():
        for fact in fields(owner):
            if fact.name != "title" and fact.name not in _PARTS:
                part_of_fact[fact.name] = name_of_part
    return part_of_fact


#: by name of a fact, the part of a report that holds it
_PART_OF_FACT = _parts_of_facts()


def fact_names() -> list[str]:
    """The facts that :meth:`Report.of` takes, and ``title``, for the callbacks' ``report()`` to check its keywords."""
    return ["title", *_PART_OF_FACT]


def facts(report: Report, arrow: str = "->") -> dict[str, str]:
    """What the run has measured, by name, in the order of a report; the arrow stands between before and after.

    The closing summary and the page call it and show these texts; ``graded_numbers`` shows them beside the grades.
    """
    texts: dict[str, str] = {}
    for name, (before, after) in report.quality.metrics.items():
        if before is not None and after is not None:
            kind = report.quality.kind_of(name)
            texts[name] = metric_text(kind, before, after, arrow)
    if report.quality.moved is not None:
        texts |= moved_texts(asdict(report.quality.moved))
    if report.written.sizes is not None:
        before_size, after_size = report.written.sizes
        texts["size"] = f"{human_size(before_size)} {arrow} {human_size(after_size)}"
    expert_tokens = {} if report.result is None else report.result.expert_tokens
    if any(map(sum, expert_tokens.values())):
        texts["experts"] = _expert_line(expert_tokens)
    return texts


def metric_text(kind: MetricKind, before: float, after: float, arrow: str = "->") -> str:
    """Two values of a metric and their change: the difference of losses, else percent.

    Called for the facts of a run, and for the grades of metrics before and after training.

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
    return f"{values} ({verb}{percent(change)})"


def _expert_line(tokens: Mapping[str, Sequence[int]]) -> str:
    """How many tokens the router sent to the experts, and which experts received none."""
    counts: list[int] = []
    without_tokens: list[str] = []
    for layer_name, counts_of_layer in tokens.items():
        counts += counts_of_layer
        for expert, count in enumerate(counts_of_layer):
            if count == 0:
                without_tokens.append(f"{layer_name}.{expert}")
    line = f"tokens per expert: {min(counts)} to {max(counts)}, median {median_low(counts)}"
    if without_tokens:
        line += f"; {len(without_tokens)} of {len(counts)} experts got none: {name_list(without_tokens)}"
    return line


def aggregates(result: CalibrationResult | None, errors: Sequence[LayerError]) -> dict[str, float]:
    """Numbers of one calibration; ``Results.log_calibration`` logs them, so that loggers plot them over time.

    Least and median SQNR [dB], the largest share of an input that is clipped [%], the tokens of the expert with the
    fewest and of the median expert, and the time that calibration took [s].

    >>> from lightning_obs.report.metrics import TensorError
    >>> aggregates(None, [LayerError("a", TensorError(20.0)), LayerError("b", input=TensorError(30.0, clipped=0.5))])
    {'sqnr_min': 20.0, 'sqnr_median': 25.0, 'clipped_max': 0.5}
    """
    numbers: dict[str, float] = {}
    ratios = [error.sqnr for error in errors if math.isfinite(error.sqnr)]
    if ratios:
        numbers["sqnr_min"] = min(ratios)
        numbers["sqnr_median"] = median(ratios)
    clipped = [error.clipped for error in errors if error.clipped is not None]
    if clipped:
        numbers["clipped_max"] = max(clipped)
    if result is None:
        return numbers
    tokens = list(chain.from_iterable(result.expert_tokens.values()))
    if any(tokens):
        numbers["expert_tokens_min"] = float(min(tokens))
        numbers["expert_tokens_median"] = float(median(tokens))
    numbers["seconds"] = result.seconds
    return numbers


# ---------------------------------------------------------------------- facts of a session


def known_facts(session: CalibrationSession) -> dict[str, Any]:
    """The fields of :class:`Report` that a calibrated session knows; no data are read.

    ``Results.facts`` of a callback calls it when it makes a report.
    """
    assert session.result is not None
    targets = {target.name: target for target in session.plan.targets if not target.states}
    kinds: dict[str, tuple[int, int]] = {}
    sizes_of_modules: dict[str, tuple[int, int]] = {}
    # Sizes follow from the qparams on the modules, and another session may have written its own there since: so this
    # session's are put there for the block. The plan's names, and those of a checkpoint, are the merged model's.
    with session.in_force(), without_wrappers(session.model), without_adapters(session.model):
        for name, size in _sizes(session.model).items():
            path, _, key = name.rpartition(".")
            module = session.model.get_submodule(path)
            kind = _kind(module, key, path in targets)
            _add_size(kinds, kind, size)
            _add_size(sizes_of_modules, path, size)
    layers: dict[str, LayerFacts] = {}
    for name, target in targets.items():
        size = sizes_of_modules.get(name, (0, 0))
        layers[name] = _layer_facts(session, target, size)
    return {"result": session.result, "options": session.options, "layers": layers, "kinds": kinds}


def _add_size(sizes: dict[str, tuple[int, int]], name: str, size: tuple[int, int]) -> None:
    """Add bytes before and after to the entry of ``name``."""
    before, after = sizes.get(name, (0, 0))
    before += size[0]
    after += size[1]
    sizes[name] = before, after


def _layer_facts(session: CalibrationSession, target: PlannedModule, size: tuple[int, int]) -> LayerFacts:
    """The facts of one planned module, whose tensors take ``size`` bytes before and after."""
    assert session.result is not None
    qparams = session.result.qparams
    weight_args = target.args.get("weight")
    input_args = target.args.get("input")
    weight_scale = qparams.get(f"{target.name}.weight_scale")
    weight_global_scale = qparams.get(f"{target.name}.weight_global_scale")
    outputs, channels = _channels(weight_args, weight_scale, weight_global_scale)
    input_scale = qparams.get(f"{target.name}.input_scale")
    input_zero_point = qparams.get(f"{target.name}.input_zero_point")
    return LayerFacts(
        scheme=describe_scheme(target.scheme),
        weight_width=None if weight_args is None else weight_args.num_bits,
        input_width=None if input_args is None else input_args.num_bits,
        weight_observer=_observer_name(session, target, "weight"),
        input_observer=_observer_name(session, target, "input"),
        before=size[0],
        after=size[1],
        outputs=outputs,
        channels=channels,
        grid=_grid(input_args, input_scale, input_zero_point),
    )


def _observer_name(session: CalibrationSession, target: PlannedModule, base_name: str) -> str:
    """The name of the observer of a module's weight or input; empty without one."""
    observer = session.observers.get((target.name, base_name))
    if observer is None:
        return ""
    return observer_name(base_name, observer.args)


def _sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Bytes before and after of each tensor, by its name in either state dict; tied tensors by their first name."""
    names = identities(model)
    first_names: dict[Any, str] = {}
    for name, identity in names.items():
        first_names.setdefault(identity, name)
    sizes: dict[str, tuple[int, int]] = {}
    for name in first_names.values():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        shape = whole_shape(module, key)
        if shape is not None:
            tensor = getattr(module, key)
            sizes[name] = shape.numel() * tensor.itemsize, 0
    tied = names.keys() - first_names.values()
    for name, value in stored_layout(model).items():
        if name not in tied:
            before, _ = sizes.get(name, (0, 0))
            sizes[name] = before, value.nbytes
    return sizes


def _kind(module: nn.Module, key: str, is_target: bool) -> str:
    """The kind of a tensor, by which the page adds up bytes."""
    if is_target and key != "bias":
        return "quantized weights" if key in ("weight", "weight_packed") else "scales"
    return "embeddings" if isinstance(module, nn.Embedding) else "full precision"


def _channels(
    args: QuantizationArgs | None, scale: torch.Tensor | None, global_scale: torch.Tensor | None
) -> tuple[int, list[float]]:
    """The values of :attr:`LayerFacts.outputs` and :attr:`LayerFacts.channels`; 0 and none if channels share scales.

    The largest weight of a channel is its largest scale times the largest code, as if the zero point were 0.

    Args:
        args: how the weight is quantized; None: it is not.
        scale: its stored scale, ``(R, 1)`` or ``(R, C/g)`` if channels have scales of their own; None: it has none.
        global_scale: the number by which the stored scale was multiplied (tensor_group); None: by none.
    """
    if args is None or scale is None or scale.ndim < 2 or len(scale) < 2:
        return 0, []
    if args.strategy == QuantizationStrategy.BLOCK:  # one row of the scale for each block of channels
        return 0, []
    _, largest_code = calculate_range(args, scale.device)
    largest_scales = scale.detach().float().abs().flatten(1).amax(1)
    if global_scale is not None:
        largest_scales = largest_scales / global_scale
    largest_weights = largest_scales * largest_code.float()
    runs = largest_weights.tensor_split(min(CHANNELS, len(largest_weights)))
    return len(largest_weights), [float(run.max()) for run in runs]


def _grid(
    args: QuantizationArgs | None, scale: torch.Tensor | None, zero_point: torch.Tensor | None
) -> tuple[float, float] | None:
    """The smallest and the largest value that an input with one scale can take, for :attr:`LayerFacts.grid`.

    Args:
        args: how the input is quantized; None: it is not.
        scale: its stored scale; None: it has none.
        zero_point: its stored zero point; None: it has none.
    """
    if args is None or scale is None or scale.numel() != 1:
        return None
    offset = 0.0 if zero_point is None else float(zero_point)
    lowest_code, highest_code = calculate_range(args, torch.device("cpu"))
    lowest = (float(lowest_code) - offset) * float(scale)
    highest = (float(highest_code) - offset) * float(scale)
    return lowest, highest
