"""Where a run loses: the loss of each layer, and the layers that hold most of it.

A layer's loss is the noise in a unit of its output, ``10^(-SQNR / 10)``, or the loss that a plan has estimated. It is
split between weight and input in proportion to their own noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from lightning_obs.errors import name_list
from lightning_obs.numerics.histogram import median_size
from lightning_obs.report.facts import POOR_SQNR, Report
from lightning_obs.report.layer_errors import LayerError

#: share of the loss that the named layers hold, where it is spread over many
_MOST = 0.8
#: kinds of layers that the sentence names; more would make it hard to read
_KINDS_SHOWN = 4


class LayerLoss(NamedTuple):
    """The loss of one layer, and the shares of its noise (0 to 1) that its weight and its input make.

    :func:`layer_losses` makes it; the cause, the next steps and the page's column of shares read it.
    """

    name: str  # of the layer's module
    loss: float  # its noise, or the loss that a plan has estimated
    weight: float  # the weight's share of the noise of weight and input; 0 where neither is known
    input: float  # the input's share, the rest; 0 where neither is known


def layer_losses(report: Report) -> list[LayerLoss]:
    """The loss of each layer, the largest first: noise, or the loss that a plan has estimated.

    Called for the judgement (``judge``) and for the page's table.
    """
    losses = [_layer_loss(report, error) for error in report.errors]
    return sorted(losses, key=lambda layer: -layer.loss)


def total_loss(layers: Iterable[LayerLoss]) -> float:
    """The sum of the layers' losses.

    Causes and next steps are judged by shares of it.
    """
    return sum(layer.loss for layer in layers)


def input_share(layers: Sequence[LayerLoss]) -> float:
    """The share of the layers' loss that their inputs cause, 0 to 1; for the cause and the next steps."""
    by_inputs = sum(layer.loss * layer.input for layer in layers)
    return by_inputs / (total_loss(layers) or 1.0)


def weight_share(layers: Sequence[LayerLoss]) -> float:
    """The share of the layers' loss that their weights cause, 0 to 1; the next step "rounding" is judged by it."""
    by_weights = sum(layer.loss * layer.weight for layer in layers)
    return by_weights / (total_loss(layers) or 1.0)


def _layer_loss(report: Report, error: LayerError) -> LayerLoss:
    """The loss of the layer that ``error`` measured."""
    noise = noise_share(error.sqnr)
    weight_noise = 0.0 if error.weight is None else noise_share(error.weight.sqnr)
    if error.input is not None and error.input.sqnr is not None:
        input_noise = noise_share(error.input.sqnr)
    elif _has_unquantized_input(report, error.name):
        input_noise = 0.0
    else:  # a dynamic input was not measured: what the weight does not cause is taken for the input's noise
        further_noise = noise - weight_noise
        input_noise = max(0.0, further_noise)
    loss = report.decisions.losses.get(error.name, noise)
    if not math.isfinite(loss):  # an estimate that is no number counts as no loss
        loss = 0.0
    both = weight_noise + input_noise or 1.0
    return LayerLoss(error.name, loss, weight_noise / both, input_noise / both)


def _has_unquantized_input(report: Report, name: str) -> bool:
    """Whether a layer of this name is known, and its inputs are in full precision."""
    layer = report.layers.get(name)
    return layer is not None and layer.input_width is None


def noise_share(sqnr: float | None) -> float:
    """Noise for a unit of signal, from an SQNR in dB; at most 1, since a layer loses no more than all.

    It is the loss of a layer where no plan has estimated one. NaN and None, an unknown SQNR, give 0.

    >>> noise_share(10.0), noise_share(-3.0), noise_share(None)
    (0.1, 1.0, 0.0)
    """
    if sqnr is None or math.isnan(sqnr):
        return 0.0
    return min(1.0, 10 ** (-sqnr / 10))


def percent(share: float) -> str:
    """A share in percent, without digits behind the point; for the cause and the reasons of next steps.

    >>> percent(0.734)
    '73 %'
    """
    return f"{100 * share:.0f} %"


def cause_of(report: Report, losses: Sequence[LayerLoss]) -> str:
    """The layers that lose most, and whether weights or inputs cause it; empty where nothing is lost.

    Poor layers are named if they hold half of the loss; else the fewest layers that hold four fifths. The sentence
    calls the loss "noise" or "estimated loss" (``report.lost``). Then the larger share is named, that of the layers'
    weights or that of their inputs; neither where the noise of neither is known, as in a layer that quantizes its
    output alone. Called by ``judge`` for the sentence below the page's headline.
    """
    total = total_loss(losses)
    if not total:
        return ""
    worst, names = _poor_layers(report, losses)
    if total_loss(worst) < total / 2:
        most = _MOST * total
        worst = _fewest_with(losses, most)
        names = [layer.name for layer in worst]
    subject = f"{len(worst)} of {len(losses)} layers hold" if len(worst) > 1 else f"{worst[0].name} holds"
    share = percent(total_loss(worst) / total)
    sentence = f"{subject} {share} of the {report.lost}{_kinds(names, len(worst))}."
    by_inputs = input_share(worst)
    by_weights = weight_share(worst)
    if not by_inputs and not by_weights:
        return sentence
    if by_inputs < by_weights:
        return f"{sentence} {percent(by_weights)} of it comes from their weights."
    return f"{sentence} {percent(by_inputs)} of it comes from their inputs{_stretched(report, worst)}."


def _poor_layers(report: Report, losses: Sequence[LayerLoss]) -> tuple[list[LayerLoss], list[str]]:
    """The losses of the report's poor layers, and the names of those that are poor by themselves.

    The others share a scheme with a poor layer. Both are empty where a plan has chosen the schemes.
    """
    poor = [] if report.decisions.choices else report.poor_layers
    below_limit = {error.name for error in report.errors if error.sqnr < POOR_SQNR}
    layers = []
    names = []
    for layer in losses:
        if layer.name in poor:
            layers.append(layer)
            if layer.name in below_limit:
                names.append(layer.name)
    return layers, names


def _fewest_with(losses: Sequence[LayerLoss], loss: float) -> list[LayerLoss]:
    """The first layers of ``losses`` that together have at least this loss."""
    layers: list[LayerLoss] = []
    for layer in losses:
        if total_loss(layers) >= loss:
            break
        layers.append(layer)
    return layers


def _kinds(names: Sequence[str], count: int) -> str:
    """How many of ``count`` layers are of which kind; for :func:`cause_of`. Empty for a single layer.

    The kind of a layer is the last part of its name. The only layer of a kind is shown by its whole name. The layers
    that ``names`` lacks are counted as fused with the named ones.

    >>> _kinds(["1.down_proj", "2.down_proj", "2.v_proj"], 5)
    ': 2 down_proj, 2.v_proj, 2 fused with these'
    """
    if count < 2:
        return ""
    name_of_kind: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for name in names:
        _, _, kind = name.rpartition(".")
        name_of_kind[kind] = name
        kinds[kind] += 1
    if len(kinds) == 1 and len(names) == count:
        return f": all {next(iter(kinds))}"
    texts = []
    for kind, number in kinds.most_common():
        text = f"{number} {kind}" if number > 1 else name_of_kind[kind]
        texts.append(text)
    fused = f", {count - len(names)} fused with these" if len(names) < count else ""
    return f": {name_list(texts, _KINDS_SHOWN)}{fused}"


def _stretched(report: Report, layers: Sequence[LayerLoss]) -> str:
    """How far single values stretch the one scale of an input; empty where that is not known.

    :func:`cause_of` calls it where inputs cause most of the loss. The text gives the largest magnitude among the
    inputs, the median magnitude of the values in that layer, and the median over the layers of the bits that they
    use. It also gives the width of their inputs, if all have the same.

    Args:
        report: of the run.
        layers: the losses of the layers to speak of.
    """
    names = {layer.name for layer in layers}
    ends: list[tuple[float, str]] = []
    bits: list[float] = []
    widths: set[int] = set()
    for error in report.errors:
        if error.name not in names or error.input is None:
            continue
        facts = report.layers.get(error.name)
        if error.input.bits is not None:
            bits.append(error.input.bits)
            if facts is not None and facts.input_width is not None:
                widths.add(facts.input_width)
        if error.input.low is not None and error.input.high is not None:
            magnitude = max(-error.input.low, error.input.high)
            ends.append((magnitude, error.name))
    if not ends or not bits or not widths:
        return ""
    widest, name_of_widest = max(ends)
    counts = report.counts.get(name_of_widest)
    half = "" if counts is None else f" (half of all in that layer are below {median_size(counts):.2g})"
    of_width = f" of its {widths.pop()} bits" if len(widths) == 1 else " bits"
    return (
        f": single values of up to {widest:,.4g}{half} stretch the scale that all values share, "
        f"and their median layer uses {median(bits):.1f}{of_width}"
    )
