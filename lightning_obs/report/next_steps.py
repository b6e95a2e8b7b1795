"""What to do after a run: a few steps, each of which can run on this model after this run.

Each function proposes a step from the numbers of the run. Whoever made the run has said with ``Report.can_run`` which
of them can run: that needs the model, and the options of the run are checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_obs.calibration.fit_errors import fit_changes, loses
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.files.read import read_json
from lightning_obs.report.cause import LayerLoss, input_share, percent, total_loss, weight_share
from lightning_obs.report.facts import Report
from lightning_obs.report.grade import Grade, worse_than_calibrated
from lightning_obs.report.numbers import human_size
from lightning_obs.report.step import Step
from lightning_obs.schemes.config import describe_scheme, has_rounding, preset_names

#: steps that are shown
_SHOWN = 3
#: a remedy for less than this share of the noise is not proposed
_WORTH = 0.05
#: bits per weight that a wider budget adds
_MORE_BITS = 0.5
#: schemes with a scale for each token, in place of schemes with one scale for all inputs
_WITH_TOKEN_SCALES = {
    "int8 channel weights, int8 tensor inputs": "W8A8",
    "int8 channel weights, asymmetric int8 tensor inputs": "W8A8",
    "float8 tensor weights, float8 tensor inputs": "FP8_DYNAMIC",
}


def next_steps(report: Report, grade: Grade, losses: Sequence[LayerLoss], folder: Path) -> list[Step]:
    """The steps to show, the best first; called by :func:`~lightning_obs.report.judgement.judge`.

    Args:
        report: the report of the run; without a calibration there are no steps.
        grade: the grade of the run. A good model is exported and used; a model without numbers is measured first. Where
            nobody knows how much a model loses, the only remedy proposed is to leave poor layers in full precision.
        losses: the losses of the layers.
        folder: the folder of the report.
    """
    if report.result is None:
        return []
    if grade == "good":
        proposed = _uses(report)
    else:
        proposed = _remedies(_Run(report, losses, folder))
        if grade in ("not measured", "not graded"):
            proposed = [step for step in proposed if step.name == "leave_out"]
        if grade == "not measured":
            proposed = [_measure(report), *proposed]
    return [step for step in proposed if report.can_run(step)][:_SHOWN]


def _uses(report: Report) -> list[Step]:
    """Export the model; serve and load its checkpoint, if it was exported; nothing if only a file was exported."""
    assert report.result is not None
    if report.written.checkpoint is None and report.written.files:
        return []
    if report.written.checkpoint is None:
        return [Step("export", "Export it", "this run has exported nothing", 'callback.export("checkpoint")')]
    checkpoint = Path(report.written.checkpoint)
    path = path_from_here(checkpoint)
    architecture = _architecture(checkpoint)
    steps = []
    vllm = report.result.plan.engines.get("vLLM")
    generates = architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))
    if vllm is not None and vllm.loads and generates:
        reason = f"it runs on {vllm.text or 'any hardware'}"
        steps.append(Step("serve", "Serve it with vLLM", reason, f'vllm.LLM("{path}")', {"checkpoint": path}))
    transformers = report.result.plan.engines.get("transformers")
    if architecture and transformers is not None and transformers.loads:
        python = f'transformers.{architecture}.from_pretrained("{path}")'
        steps.append(Step("load", "Load it with transformers", "it needs compressed-tensors beside it", python))
    else:
        python = f'load_checkpoint(model, "{path}")'
        steps.append(Step("load", "Load it in Python", "into an unquantized model of the same class", python))
    return steps


def _measure(report: Report) -> Step:
    """Run again and measure the quantized model."""
    python = _calibration(report, evaluate=True)
    reason = "without a number of the quantized model nobody knows whether it is good"
    return Step("measure", "Measure the quantized model", reason, python, {"evaluate": True})


@dataclass(frozen=True)
class _Run:
    """A run that loses: its report, the losses of its layers, the folder of the report.

    :func:`next_steps` makes it for the functions that propose remedies.
    """

    report: Report
    losses: Sequence[LayerLoss]
    folder: Path

    @property
    def input_share(self) -> float:
        """The share of the loss that inputs cause."""
        return input_share(self.losses)

    @property
    def weight_share(self) -> float:
        """The share of the loss that weights cause."""
        return weight_share(self.losses)

    @property
    def schemes(self) -> set[str]:
        """The schemes of the run's modules, in a few words each."""
        options = self.report.options
        if options is None:
            return set()
        return {describe_scheme(group) for group in options.config.config_groups.values()}


def _remedies(run: _Run) -> list[Step]:
    """The remedies that a run offers, in the order in which they are shown; :func:`next_steps` calls it.

    First come the steps that undo something which made the model worse: training, and a fit to the data. They cost
    nothing and remove no known share of the noise. Then come remedies that remove at least :data:`_WORTH` of the noise,
    the largest share first and of equal ones the cheaper first. Training, which takes longest, comes last.
    """
    cheapest_first = (_leave_out, _budget, _smooth, _token_scales, _observers, _rounding)
    steps: list[Step] = []
    for propose in cheapest_first:
        steps += [step for step in propose(run) if step.share >= _WORTH]
    steps.sort(key=lambda step: -round(step.share, 2))
    return [*_untrained(run), *_without_data(run), *steps, *_fine_tune(run)]


def _leave_out(run: _Run) -> Iterator[Step]:
    """Leave poor layers in full precision, if they are few, and no plan has chosen the schemes of layers."""
    report = run.report
    poor = report.poor_layers
    are_few = 0 < len(poor) < len(run.losses) / 2
    if report.decisions.choices or report.options is None or not are_few:
        return
    poor_loss = total_loss(layer for layer in run.losses if layer.name in poor)
    share = poor_loss / (total_loss(run.losses) or 1.0)
    more_bytes = 0
    for name in poor:
        if name in report.layers:
            layer = report.layers[name]
            more_bytes += layer.before - layer.after
    reason = f"removes {percent(share)} of the {report.lost}"
    if more_bytes:
        reason += f", costs {human_size(more_bytes)}"
    file = path_from_here(run.folder / "report.json")
    python = f'ignore = json.load(open("{file}"))["ignore"]\n{_calibration(report, ignore=_Name("ignore"))}'
    title = f"Leave the {len(poor)} worst layers in full precision" if len(poor) > 1 else f"Leave {poor[0]} out"
    changes = {"ignore": [*report.options.ignore, *poor]}
    yield Step("leave_out", title, reason, python, changes, share)


def _budget(run: _Run) -> Iterator[Step]:
    """A larger budget of bits for a plan of mixed schemes, if the frontier's best plan within it loses less.

    The frontier is a list of plans with their estimated losses; one of them was chosen. A point marked "measured" is
    the chosen plan once more with its measured loss, and cannot be compared with estimates. In the step's Python,
    ``measured`` is the result of :func:`~lightning_obs.sensitivity`.
    """
    plan = None
    plans = []
    for point in run.report.decisions.frontier:
        if math.isfinite(point["loss"]) and point.get("mark") != "measured":
            plans.append(point)
            if plan is None and point.get("mark") == "chosen":
                plan = point
    if not run.report.decisions.choices or plan is None or plan["loss"] <= 0:
        return
    bits = plan["bits_per_weight"] + _MORE_BITS
    least_loss = min(point["loss"] for point in plans if point["bits_per_weight"] <= bits)
    share = 1 - least_loss / plan["loss"]
    reason = f"lowers the estimated loss by {percent(share)}"
    python = f"choose_schemes(measured, {bits:.2f})"
    title = f"A budget of {bits:.2f} bits per weight"
    yield Step("budget", title, reason, python, {"budget": bits}, share)


def _smooth(run: _Run) -> Iterator[Step]:
    """Outliers of inputs moved into weights that were not trained.

    For inputs of integers with one scale, and for inputs of fewer than eight bits.
    """
    report = run.report
    if report.options is None or report.quality.was_trained:
        return
    has_one_scale = _scheme_with_token_scales(run) is not None and "float" not in "".join(run.schemes)
    if not has_one_scale and not _has_narrow_inputs(report.options):
        return
    reason = f"inputs make {percent(run.input_share)} of the noise; the unquantized model's outputs stay the same"
    smoothing = f"smooth_inputs(model, batches, callback.options{_keywords(_mask_argument(report))})"
    python = f"{smoothing}\n{_calibration(report)}"
    yield Step("smooth", "Move outliers of inputs into weights", reason, python, {}, run.input_share)


def _token_scales(run: _Run) -> Iterator[Step]:
    """A scale for each token in place of one for all inputs, if the run's only scheme has a preset that does so."""
    scheme = _scheme_with_token_scales(run)
    if scheme is None or run.report.options is None:
        return
    changes: dict[str, Any] = {"scheme": scheme, "observers": _weight_observers(run.report.options)}
    share = percent(run.input_share)
    reason = f"removes up to {share} of the noise, the inputs' part; dynamic: computed as the model runs"
    title = "Give each token a scale of its own"
    python = _calibration(run.report, **changes)
    yield Step("token_scales", title, reason, python, changes, run.input_share)


def _observers(run: _Run) -> Iterator[Step]:
    """Observers chosen by measurement, for inputs with one scale, unless the run has chosen observers or schemes."""
    decisions = run.report.decisions
    if _scheme_with_token_scales(run) is None or decisions.scores or decisions.choices:
        return
    reason = f"inputs make {percent(run.input_share)} of the noise, and another range may suit them"
    python = _calibration(run.report, observers="auto")
    title = "Choose the best observer for each layer"
    yield Step("observers", title, reason, python, {"observers": "auto"}, run.input_share)


def _rounding(run: _Run) -> Iterator[Step]:
    """Weights of fewer than eight bits rounded to the integers that their inputs need, unless the run did so.

    The recipe ``accurate`` brings the rounding and the observer of weights that belongs to it. An observer of weights
    that the user has named would keep the recipe from weights, so the proposed call does not name it.
    """
    report = run.report
    if (
        report.options is None
        or report.decisions.choices
        or report.quality.was_trained
        or has_rounding(report.options.config)
    ):
        return
    if not _has_narrow_integers(report.options):
        return
    observers = _plain_observers(report.options)
    observers.pop("weight", None)
    changes: dict[str, Any] = {"observers": observers or None, "recipe": "accurate"}
    reason = f"weights make {percent(run.weight_share)} of the {report.lost}"
    title = "Round the weights by what their inputs need"
    python = _calibration(report, **changes)
    yield Step("rounding", title, reason, python, changes, run.weight_share)


def _without_data(run: _Run) -> Iterator[Step]:
    """Weights that are not fitted to data, where fitting them loses on batches that were kept out.

    The fit of a few layers was judged on every fourth batch, which it did not see (``calibration/fit_errors.py``):
    fitted weights lose if the errors of the layers' outputs are larger there than with weights chosen without data. The
    recipe ``fast`` chooses weights without data. An observer of weights that the user has named would keep the recipe
    from weights, so the proposed call does not name it.
    """
    report = run.report
    result = report.result
    if report.options is None or result is None or not loses(result.fit_errors):
        return
    if report.quality.was_trained or not _has_narrow_integers(report.options):
        return
    observers = _plain_observers(report.options)
    observers.pop("weight", None)
    changes: dict[str, Any] = {"observers": observers or None, "rounding": None, "recipe": "fast"}
    _, change_on_kept_out = fit_changes(result.fit_errors)  # the first number is that on batches fitted to
    larger = percent(change_on_kept_out)
    reason = f"fitted to this calibration data, errors on other data of its kind are {larger} larger"
    python = _calibration(report, **changes)
    yield Step("without_data", "Choose the weights without data", reason, python, changes)


def _has_narrow_integers(options: CalibrationOptions) -> bool:
    """Whether all weights are integers of fewer than eight bits."""
    for group in options.config.config_groups.values():
        weights = group.weights
        if weights is None or weights.type != "int" or weights.num_bits >= 8:
            return False
    return True


def _untrained(run: _Run) -> Iterator[Step]:
    """The calibrated model without training, where training made it worse."""
    if worse_than_calibrated(run.report):
        python = call_text("CalibrationCallback", run.report.options, {}, _mask_argument(run.report))
        yield Step("untrained", "Calibrate without training", "the calibrated model was better", python)


def _fine_tune(run: _Run) -> Iterator[Step]:
    """Train through the quantization, unless the run has trained."""
    if not run.report.quality.was_trained:
        python = call_text("QuantizationAwareTraining", run.report.options, {}, _mask_argument(run.report))
        yield Step("fine_tune", "Fine-tune it", "trains the weights through the quantization; it takes longest", python)


def _scheme_with_token_scales(run: _Run) -> str | None:
    """The preset with a scale for each token that can replace the run's only scheme; None without one."""
    if len(run.schemes) != 1:
        return None
    (scheme,) = run.schemes
    return _WITH_TOKEN_SCALES.get(scheme)


def _has_narrow_inputs(options: CalibrationOptions) -> bool:
    """Whether inputs have fewer than eight bits."""
    inputs = [group.input_activations for group in options.config.config_groups.values()]
    return any(args is not None and args.num_bits < 8 for args in inputs)


def _plain_observers(options: CalibrationOptions) -> dict[str, Any]:
    """The observers that the user named, by base name (weight, input); none if they are chosen (``"auto"``)."""
    observers = options.observers if isinstance(options.observers, Mapping) else {}
    return {base_name: observer for base_name, observer in observers.items() if observer is not None}


def _weight_observers(options: CalibrationOptions) -> dict[str, Any] | None:
    """The observers of weights alone; None without any."""
    observers = _plain_observers(options)
    if "weight" in observers:
        return {"weight": observers["weight"]}
    return None


# ---------------------------------------------------------------------- the words of Python


class _Name(str):
    """The name of a variable, which :func:`call_text` writes without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _calibration(report: Report, **changes: Any) -> str:
    """Python that calibrates, or trains, as the run did with some arguments changed."""
    callback = "QuantizationAwareTraining" if report.quality.was_trained else "CalibrationCallback"
    return call_text(callback, report.options, changes, _mask_argument(report))


def _mask_argument(report: Report) -> dict[str, Any]:
    """The argument ``token_mask`` of the run, of which the calibration's options know nothing; empty without a mask.

    A function has no text, so it is read from the callback that the user has made for the run.
    """
    if report.token_mask is None:
        return {}
    if isinstance(report.token_mask, str):
        return {"token_mask": report.token_mask}
    return {"token_mask": _Name("callback.batches.token_mask")}


def call_text(
    callback: str,
    options: CalibrationOptions | None,
    changes: Mapping[str, Any],
    further: Mapping[str, Any] | None = None,
) -> str:
    """The call of a callback with the options of the run and ``changes``; options with default values are left out.

    ``further`` are arguments of the callback that are no options of the calibration.

    Text is written for options that are strings, bools, whole numbers (no option is a float), lists, tuples and dicts,
    and for a scheme that is a preset's name. With any other option, such as a :class:`.Recipe`, the call reads
    ``callback.options``: the options of the callback that the user has made for the run. Next steps call this for
    their Python, and the provenance of a report for its options, with ``CalibrationOptions`` as ``callback``.

    >>> call_text("CalibrationCallback", CalibrationOptions("FP8", ignore="lm_head"), {"evaluate": True})
    "CalibrationCallback('FP8', ignore=['lm_head'], evaluate=True)"
    """
    further = further or {}
    if options is None:
        return f"{callback}(scheme{_keywords({**changes, **further})})"
    arguments = _options_that_differ(options)
    scheme = changes.get("scheme", options.scheme)
    are_plain = all(isinstance(value, (str, int, list, tuple, dict)) for value in arguments.values())
    if are_plain and isinstance(scheme, str) and scheme.upper() in preset_names():
        arguments |= {name: value for name, value in changes.items() if name != "scheme"}
        needed = {name: value for name, value in arguments.items() if value is not None}
        return f"{callback}({scheme!r}{_keywords({**needed, **further})})"
    if "scheme" in changes:
        return f"{callback}(dataclasses.replace(callback.options{_keywords(changes)}){_keywords(further)})"
    return f"{callback}(callback.options{_keywords({**changes, **further})})"


def _keywords(arguments: Mapping[str, Any]) -> str:
    """Further arguments of a call.

    >>> _keywords({"rounding": "gptq"})
    ", rounding='gptq'"
    """
    return "".join(f", {name}={value!r}" for name, value in arguments.items())


def _options_that_differ(options: CalibrationOptions) -> dict[str, Any]:
    """The options beside the scheme that differ from their defaults, by name."""
    arguments: dict[str, Any] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if not option.init or option.name == "scheme":
            continue
        if option.name == "observers":
            value = _plain_observers(options) or None
        if option.name in ("ignore", "engines", "fused_sets"):
            value = list(value) or None
        if value is not None and value != option.default:
            arguments[option.name] = value
    return arguments


def _architecture(checkpoint: Path) -> str:
    """The class of transformers that a checkpoint names; empty where it names none."""
    config = checkpoint / "config.json"
    if not config.is_file():
        return ""
    architectures = read_json(config).get("architectures")
    return architectures[0] if architectures else ""


def path_from_here(path: Path) -> str:
    """A path as a user types it in the current folder; for the Python and the commands of next steps."""
    path = path.resolve()
    current_folder = Path.cwd()
    return str(path.relative_to(current_folder) if path.is_relative_to(current_folder) else path)
