"""What is known of the layers of a calibrated model without data: schemes, observers, bytes, ranges of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_range
from torch import nn

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.compress import stored_layout
from lightning_obs.model.weight import identities, whole_shape
from lightning_obs.schemes.config import describe_scheme

#: points of a layer's picture of its channels
CHANNELS = 48


@dataclass(frozen=True)
class LayerFacts:
    """One layer's scheme, and what it takes.

    Attributes:
        scheme: in a few words.
        weight_width, input_width: bits of their numbers; None: full precision.
        weight_observer, input_observer: which found the ranges; empty: none did.
        before, after: bytes of all its tensors, in the model and in a checkpoint.
        outputs: how many output channels the weight has scales of.
        channels: largest weight that the scales of each can hold; of runs of channels where there are many.
        grid: ends of what the input's scale can hold, in the units of the input; None: not one for the whole tensor.
    """

    scheme: str
    weight_width: int | None
    input_width: int | None
    weight_observer: str
    input_observer: str
    before: int
    after: int
    outputs: int
    channels: list[float]
    grid: tuple[float, float] | None


def known_facts(session: CalibrationSession) -> dict[str, Any]:
    """The fields of :class:`~lightning_obs.report.facts.Report` that a calibrated session knows; no data are read."""
    assert session.result is not None
    with session.in_force():
        sizes = _sizes(session.model)
    targets = {target.name: target for target in session.plan.targets if not target.states}
    kinds: dict[str, tuple[int, int]] = {}
    layers: dict[str, tuple[int, int]] = {}
    for name, (before, after) in sizes.items():
        path, _, key = name.rpartition(".")
        kind = _kind(session.model.get_submodule(path), key, path in targets)
        for found, at in ((kinds, kind), (layers, path)):
            had = found.get(at, (0, 0))
            found[at] = had[0] + before, had[1] + after
    own = {"weight": "memoryless_minmax", "input": "minmax"}
    of_observers = {at: str(one.args.observer or own.get(at[1], "")) for at, one in session.observers.items()}
    facts = {}
    for name, target in targets.items():
        weight, read = target.args.get("weight"), target.args.get("input")
        facts[name] = LayerFacts(
            describe_scheme(target.scheme),
            None if weight is None else weight.num_bits,
            None if read is None else read.num_bits,
            of_observers.get((name, "weight"), ""),
            of_observers.get((name, "input"), ""),
            *layers.get(name, (0, 0)),
            *_channels(weight, session.result.qparams.get(f"{name}.weight_scale")),
            _grid(read, *(session.result.qparams.get(f"{name}.input_{key}") for key in ("scale", "zero_point"))),
        )
    return {"result": session.result, "config": session.options.config, "layers": facts, "kinds": kinds}


def _sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Bytes before and after of each tensor, by its name in either state dict; tied ones once."""
    once = {one: name for name, one in reversed(identities(model).items())}
    places = {name: name.rpartition(".") for name in once.values()}
    sizes = {}
    for name, (path, _, key) in places.items():
        module = model.get_submodule(path)
        shape = whole_shape(module, key)
        if shape is not None:
            sizes[name] = shape.numel() * getattr(module, key).itemsize, 0
    tied = set(identities(model)) - set(places)
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
