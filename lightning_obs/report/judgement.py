"""Judge a run by its own numbers: is the quantized model good, which layers lose most, which steps would help.

A run is as good as its worst sign: the metric, the divergence of its predictions, the share of equal most likely
classes. A layer's loss is the noise in a unit of its output, ``10^(-SQNR / 10)``, or the loss that a plan has
estimated, split between weight and input in proportion to their own noise. The three best remedies are named.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.errors import name_list
from lightning_obs.files.read import read_json
from lightning_obs.numerics.histogram import median_size
from lightning_obs.report.facts import POOR_SQNR, Report, facts
from lightning_obs.report.numbers import human_size
from lightning_obs.schemes.config import describe_scheme, has_rounding, preset_names

Grade: TypeAlias = Literal["good", "usable", "broken", "not measured"]

#: nats per token by which the loss grows, or predictions diverge: above the first, usable; above the second, broken.
#: README's runs: FP8 grows by 0.026, rounded 4 bits by 0.07, 4 bits by 0.22, static INT8 by 0.8
NATS = (0.05, 0.3)
#: least share of the positions with the same most likely class; in README's table of four bits, 88 % go with 0.05 nats
AGREEMENT = (0.88, 0.70)
#: least share of another metric that is kept; MLPerf Inference asks for 99 % of the reference's
KEPT = (0.99, 0.95)
#: parts of the added loss that remedies took away: docs/choosing.md, README.md (two), docs/finetuning.md
OBSERVERS_BRING, ZERO_POINT_BRINGS, HESSIAN_BRINGS, TUNING_BRINGS = 0.66, 0.57, 0.72, 0.83
_MEASURED = "measured for the docs, static INT8 of SmolLM2-135M-Instruct: perplexity"
#: schemes with a scale for each token, in place of schemes with one scale for all inputs
_BY_TOKEN = {
    "int8 channel weights, int8 tensor inputs": "W8A8",
    "int8 channel weights, asymmetric int8 tensor inputs": "W8A8",
    "float8 tensor weights, float8 tensor inputs": "FP8_DYNAMIC",
}
_LOWER_IS_BETTER = r"loss|error|perplexity|(^|[_/])(ppl|nll|r?mse|mae|wer|cer)($|[_/])"
#: a remedy for less than this share of the noise is not named
_WORTH = 0.05
_SAID = {
    "good": "Good: it says what the original says.",
    "usable": "Usable: it loses something.",
    "broken": "Broken: it no longer says what the original says.",
    "not measured": "Not measured: no metric and no predictions were compared.",
}


@dataclass(frozen=True)
class Step:
    """One thing to do next."""

    key: str  # a short name, which the folder of its run gets
    what: str  # in a sentence
    why: str  # its effect and its cost
    command: str | None  # to type; None: the run was not made by a command
    python: str  # to copy
    share: float  # of the noise that it removes, by estimate


@dataclass(frozen=True)
class Judgement:
    """The judgement that a reader needs first."""

    grade: Grade  # of the run: its worst sign's
    headline: str  # the grade in a sentence
    signs: list[dict[str, str]]  # the numbers that it follows from, {"label", "value", "grade"}
    cause: str  # where it loses, in a sentence; empty: not known, or not worth a word
    steps: list[Step]  # next steps, the best first


class LayerLoss(NamedTuple):
    """The loss of one layer: noise or estimated loss, and the shares of its noise (0 to 1) in weight and input."""

    name: str
    loss: float
    weight: float
    input: float


def judge(report: Report, folder: str | Path = ".") -> Judgement:
    """The judgement of a run whose report lies in ``folder``."""
    signs = _signs(report)
    grades: list[Grade] = [sign["grade"] for sign in signs]
    grade: Grade = max(grades, key=["good", "usable", "broken"].index, default="not measured")
    losses, steps = layer_losses(report), list[Step]()
    if report.result is not None:
        remedies = _Remedies(report, report.result, Path(folder), losses)
        steps = list(remedies.of_use()) if grade == "good" else remedies.best()
    return Judgement(grade, _SAID[grade], signs, "" if grade == "good" else _cause(report, losses), steps)


def layer_losses(report: Report) -> list[LayerLoss]:
    """The loss of each layer, the largest first: noise, or the loss that a plan has estimated."""
    found = []
    for error in report.errors:
        whole = _share_of(error.sqnr)
        weight, read = (0.0 if part is None else _share_of(part.sqnr) for part in (error.weight, error.input))
        layer = report.layers.get(error.name)
        if error.input is None or error.input.sqnr is None:  # dynamic: the rest, beside the weight's
            is_plain = layer is not None and layer.input_width is None
            read = 0.0 if is_plain else max(0.0, whole - weight)
        loss = report.losses.get(error.name, whole)
        both = weight + read or 1.0
        found.append(LayerLoss(error.name, loss if math.isfinite(loss) else 0.0, weight / both, read / both))
    return sorted(found, key=lambda one: -one.loss)


def _share_of(sqnr: float | None) -> float:
    """Noise for a unit of signal; a layer loses no more than all.

    >>> _share_of(10.0), _share_of(-3.0), _share_of(None)
    (0.1, 1.0, 0.0)
    """
    return 0.0 if sqnr is None or math.isnan(sqnr) else min(1.0, 10 ** (-sqnr / 10))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ---------------------------------------------------------------------- how good


def _graded(value: float, limits: tuple[float, float]) -> Grade:
    """By limits that rise (less is better) or fall (more is better); NaN and infinity are broken.

    >>> _graded(0.1, NATS), _graded(0.1, AGREEMENT), _graded(math.nan, NATS)
    ('usable', 'broken', 'broken')
    """
    sign = 1 if limits[0] < limits[1] else -1
    if not sign * value <= sign * limits[1]:
        return "broken"
    return "good" if sign * value <= sign * limits[0] else "usable"


def _signs(report: Report) -> list[Any]:
    grades: dict[str, Grade] = {}
    for name, (before, after) in list(report.metrics.items())[:1]:
        if before is not None and after is not None:
            grades[name] = _metric_grade(name, before, after, report)
    if report.moved is not None and not report.was_trained:
        grades["KL [nats]"] = _graded(report.moved.divergence, NATS)
        grades["same top-1 [%]"] = _graded(report.moved.agreement, AGREEMENT)
    values = facts(report, "\N{RIGHTWARDS ARROW}") if grades else {}
    return [{"label": label, "value": values[label], "grade": grade} for label, grade in grades.items()]


def _metric_grade(name: str, before: float, after: float, report: Report) -> Grade:
    if "perplexity" in name and before > 0 and after > 0:
        return _graded(math.log(after / before), NATS)
    lower = report.higher_is_better is False or bool(re.search(_LOWER_IS_BETTER, name.lower()))
    kept = (before, after) if lower and report.higher_is_better is not True else (after, before)
    return _graded(kept[0] / kept[1] if kept[1] else math.nan, KEPT)


# ---------------------------------------------------------------------- where


def _cause(report: Report, losses: Sequence[LayerLoss]) -> str:
    """The layers that lose most, those to leave out if they hold half of it, and whether weights or inputs cause it."""
    total = sum(one.loss for one in losses)
    if not total:
        return ""
    poor = () if report.choices else report.poor_layers
    own = {error.name for error in report.errors if error.sqnr < POOR_SQNR}
    most = [one for one in losses if one.name in poor]
    named = [one.name for one in most if one.name in own]  # the others must share their scheme
    if sum(one.loss for one in most) < total / 2:
        ends = accumulate(one.loss for one in losses)
        most = list(losses[: next(at for at, held in enumerate(ends, 1) if held >= 0.8 * total)])
        named = [one.name for one in most]
    held = sum(one.loss for one in most)
    who = f"{len(most)} of {len(losses)} layers hold" if len(most) > 1 else f"{most[0].name} holds"
    said = f"{who} {_percent(held / total)} of the {report.lost}{_kinds(named, len(most))}."
    by_input = sum(one.input * one.loss for one in most) / held
    if by_input < 0.5:
        return f"{said} {_percent(1 - by_input)} of it comes from their weights."
    return f"{said} {_percent(by_input)} of it comes from their inputs{_stretched(report, most)}."


def _kinds(names: Sequence[str], count: int) -> str:
    """How many of ``count`` layers are of which kind; one alone of its kind by its name.

    >>> _kinds(["1.down_proj", "2.down_proj", "2.v_proj"], 5)
    ': 2 down_proj, 2.v_proj, 2 fused with these'
    """
    one = {name.rpartition(".")[2]: name for name in names}
    kinds = Counter(name.rpartition(".")[2] for name in names)
    said = [f"{many} {kind}" if many > 1 else one[kind] for kind, many in kinds.most_common()]
    fused = f", {count - len(names)} fused with these" if len(names) < count else ""
    shown = f"all {next(iter(kinds))}" if len(kinds) == 1 and len(names) == count else name_list(said, 4)
    return f": {shown}{fused}" if count > 1 else ""


def _stretched(report: Report, most: Sequence[LayerLoss]) -> str:
    """How far single values stretch the one scale of an input."""
    names, layer = {one.name for one in most}, report.layers.get(most[0].name)
    inputs = [(e.input, e.name) for e in report.errors if e.input is not None and e.name in names]
    bits = [read.bits for read, _ in inputs if read.bits is not None]
    ends = [(max(-read.low, read.high), n) for read, n in inputs if read.low is not None and read.high is not None]
    if not ends or not bits or layer is None or layer.input_width is None:
        return ""
    end, name = max(ends)
    seen = report.counts.get(name)
    half = "" if seen is None else f" (half of all in that layer are below {median_size(seen):.2g})"
    return (
        f": single values of up to {end:,.4g}{half} stretch the scale that all values share, "
        f"and their median layer uses {median(bits):.1f} of its {layer.input_width} bits"
    )


# ---------------------------------------------------------------------- next steps


def command(words: Sequence[str], *changes: str, drop: Sequence[str] = (), name: str = "next") -> str:
    """The command of a run with some words changed, its results in a folder of their own.

    >>> command(["scheme=fp8", "output_dir=out"], "scheme=w4a16", name="small")
    'python -m lightning_obs scheme=w4a16 output_dir=out-small'
    """

    def key(word: str) -> str:
        return word.lstrip("+~").partition("=")[0]

    replaced, kept = {key(change) for change in changes} | {*drop}, []
    for word in words:
        if any(key(word) == one or key(word).startswith((f"{one}.", f"{one}@")) for one in replaced):
            continue
        is_folder = key(word) in ("output_dir", "export.folder") and "=" in word
        kept.append(f"{word.rstrip('/')}-{name}" if is_folder else word)
    place = next((at for at, word in enumerate(kept) if key(word) in ("output_dir", "export.folder")), len(kept))
    line = sorted([*kept[:place], *changes, *kept[place:]], key=lambda word: not word.startswith("--"))
    return shlex.join(["python", "-m", "lightning_obs", *line])


class _Remedies:
    """Remedies for a run that loses."""

    def __init__(self, report: Report, result: CalibrationResult, folder: Path, losses: Sequence[LayerLoss]) -> None:
        self.report, self.result, self.losses = report, result, losses
        self.total = sum(one.loss for one in losses) or 1.0
        self.inputs = sum(one.loss * one.input for one in losses) / self.total
        self.weights = sum(one.loss * one.weight for one in losses) / self.total
        self.scheme = f'"{result.scheme}"' if result.scheme in preset_names() else "scheme"
        self.file = _from_here(folder / "report.json")

    def best(self) -> list[Step]:
        """The three that remove most noise."""
        found = [*self.of_layers(), *self.of_inputs(), *self.of_weights(), *self.of_training()]
        worth = (one for one in found if one.share >= _WORTH)
        # training costs most; of equals the one that costs least is first
        return sorted(worth, key=lambda one: (one.key == "tuned", -round(one.share, 2)))[:3]

    def step(self, key: str, what: str, why: str, share: float, python: str, *words: str, drop: str = "") -> Step:
        """One of them; ``words`` of its command."""
        typed = self.report.words
        line = None if typed is None else command(typed, *words, drop=drop.split(), name=key)
        return Step(key, what, why, line, python, share)

    def of_use(self) -> Iterator[Step]:
        """Next steps after a good run: serve its checkpoint, load it; where there is none, write one."""
        if self.report.checkpoint is None:
            python, why = 'callback.export("checkpoint")', "this run has exported nothing"
            yield self.step("exported", "Export it", why, 1.0, python, "export=checkpoint")
            return
        folder, takes = Path(self.report.checkpoint), self.result.engines
        shown, config = _from_here(folder), folder / "config.json"
        kind = ([*(read_json(config).get("architectures") or []), ""] if config.is_file() else [""])[0]
        if "vLLM" in takes and takes["vLLM"].loads and kind.endswith(("ForCausalLM", "ForConditionalGeneration")):
            why, line = f"it runs on {takes['vLLM'].text or 'any hardware'}", shlex.join(["vllm", "serve", shown])
            yield Step("serve", "Serve it with vLLM", why, line, f'vllm.LLM("{shown}")', 1.0)
        what, why = "Load it in Python", "into an unquantized model of the same class"
        python = f'load_checkpoint(model, "{shown}")'
        if kind and "transformers" in takes and takes["transformers"].loads:
            what, why = "Load it with transformers", "it needs compressed-tensors beside it"
            python = f'transformers.{kind}.from_pretrained("{shown}")'
        yield Step("load", what, why, None, python, 1.0)

    def of_layers(self) -> Iterator[Step]:
        """Leave the worst out. A plan has decided about its layers: more bits are another budget."""
        report, poor = self.report, set(self.report.poor_layers)
        held = sum(one.loss for one in self.losses if one.name in poor) / self.total
        if report.choices:
            bits = next((point["bits_per_weight"] for point in report.frontier if point.get("mark") == "chosen"), None)
            if bits is not None:
                python = f"choose_schemes(measured, {bits + 0.5:.2f})"
                share = 1 - self.loss_at(bits + 0.5)
                why = f"lowers the estimated loss by {_percent(share)}"
                yield self.step("wider", "Half a bit more", why, share, python, f"budget={bits + 0.5:.2f}")
        elif poor and len(poor) < len(self.losses) / 2:
            more = sum(report.layers[name].before - report.layers[name].after for name in poor & set(report.layers))
            cost = f", costs {human_size(more)}" if more else ""
            python = (
                f'ignore = json.load(open("{self.file}"))["ignore"]\nCalibrationCallback({self.scheme}, ignore=ignore)'
            )
            why = f"removes {_percent(held)} of the {report.lost}{cost}"
            what = f"Leave the {len(poor)} worst layers in full precision"
            yield self.step("without", what, why, held, python, f"ignore_from={_value(self.file)}")

    def of_inputs(self) -> Iterator[Step]:
        """Remedies for inputs with a few outliers: a scale for each token, or a better range."""
        config, share = self.report.config, self.inputs
        found = {describe_scheme(group) for group in ({} if config is None else config.config_groups).values()}
        scheme = found.pop() if len(found) == 1 else ""
        if scheme not in _BY_TOKEN:
            return
        other, drop = _BY_TOKEN[scheme], "observer task" if self.report.scores else "observer"
        why = f"removes up to {_percent(share)} of the noise, the inputs' part; dynamic: computed as the model runs"
        python, what = f'CalibrationCallback("{other}")', "Give each token a scale of its own"
        yield self.step("dynamic", what, why, share, python, f"scheme={other.lower()}", drop=drop)
        if other == "W8A8" and not self.report.scores and not self.report.was_trained:
            why = f"{_MEASURED} 33.0 to 19.4 (full precision 14.8)"
            python = f'CalibrationCallback({self.scheme}, observers="auto")'
            what, drop = "Choose the best observer for each layer", "task observer data.train_batches budget"
            yield self.step("observers", what, why, OBSERVERS_BRING * share, python, "task=observers", drop=drop)
        if other == "W8A8" and "asymmetric" not in scheme:
            why = f"{_MEASURED} 33.0 to 20.9 (full precision 14.8)"
            python, what = 'CalibrationCallback("INT8_STATIC_ASYM")', "Give the inputs a zero point"
            share = ZERO_POINT_BRINGS * share
            yield self.step("asym", what, why, share, python, "scheme=int8_static_asym", drop="observer")

    def of_weights(self) -> Iterator[Step]:
        """Remedies for weights of few bits: better integers."""
        config = self.report.config
        groups = [] if config is None else [group.weights for group in config.config_groups.values()]
        small = groups and all(args is not None and args.type == "int" and args.num_bits < 8 for args in groups)
        if config is None or not small or has_rounding(config) or self.report.choices:
            return
        share = HESSIAN_BRINGS * self.weights
        python = f'CalibrationCallback({self.scheme}, observers={{"weight": {{"name": "hessian"}}}}, rounding="gptq")'
        words = ["weight_observer=hessian", "rounding=gptq"]
        brought = "SmolLM2 in 4 bits, with signed scales, then loses 0.06 nats instead of 0.22"
        why = f"weights make {_percent(self.weights)} of the {self.report.lost}; {brought}"
        yield self.step("hessian", "Round the weights by what their inputs need", why, share, python, *words)

    def of_training(self) -> Iterator[Step]:
        """Train through the quantization; commands do it for causal language models."""
        report, words = self.report, ["task=finetune"]
        is_language = not any(word.startswith(("model=", "data=", "kv_cache=")) for word in report.words or ())
        if report.was_trained or not is_language:
            return
        if report.choices or report.scores:  # with the run's choice, as the run has written it
            folder = Path(self.file).parent / "configs"
            words += [f"--config-dir={folder}", f"scheme={'plan' if report.choices else 'observers'}"]
        why = f"{_MEASURED} 42.6 to 22.3 (full precision 19.6) in 5 minutes"
        python = f"QuantizationAwareTraining({self.scheme})"
        yield self.step("tuned", "Fine-tune it", why, TUNING_BRINGS, python, *words, drop="task budget")

    def loss_at(self, bits: float) -> float:
        """The loss that the frontier expects at a size, as a share of the chosen plan's loss."""
        points: list[Mapping[str, Any]] = [one for one in self.report.frontier if math.isfinite(one["loss"])]
        chosen = next(one["loss"] for one in points if one.get("mark") == "chosen")
        reachable = [one["loss"] for one in points if one["bits_per_weight"] <= bits and one.get("mark") != "measured"]
        return min(1.0, min(reachable) / chosen) if chosen > 0 else 1.0


def _from_here(path: Path) -> str:
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _value(text: str) -> str:
    """A value of an override as Hydra's grammar takes it."""
    quoted = text.replace("'", "\\'")
    return text if re.fullmatch(r"[\w./\\+@%-]+", text) else f"'{quoted}'"
