"""The plan: the modules that will be quantized, each with its scheme, and the sets of them that are fused.

A planned module determines the names and shapes of its quantization parameters. Parameters from a file or a user are
checked against them (:func:`find_misfits`): others would broadcast where they should not, or give NaN.

Modules of a fused set are multiplied as one matrix by an inference engine, which says which they are
(:data:`~lightning_obs.engines.engine.FUSED_SETS`: q, k, v; gate, up). So they must have one scheme, and with two-level
scales (tensor_group, NVFP4) one global scale for the weight and one for the input, which their observers compute
together. Gate and up of one expert are fused; different experts are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_range
from torch import nn

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import count_heads
from lightning_obs.model.module_qparams import ROUNDED, scheme_args
from lightning_obs.model.weight import matrix_shape, whole_shape
from lightning_obs.numerics.qparams import ATTENTION, can_be_signed, flatten_for_calibration


@dataclass(frozen=True)
class PlannedModule:
    """One module that will be quantized."""

    name: str
    module: nn.Module
    scheme: QuantizationScheme
    #: of an attention module, ``{"q": args, "k": args, "v": args}`` or k and v only; else empty
    states: Mapping[str, QuantizationArgs] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"

    @cached_property
    def args(self) -> dict[str, QuantizationArgs]:
        """The quantized tensors: ``{base name: args}``."""
        return dict(self.states or scheme_args(self.scheme))


@dataclass(frozen=True)
class Plan:
    """A config laid over a model."""

    config: QuantizationConfig  # the user's; its ``ignore`` also names ``left_out``
    targets: list[PlannedModule]  # the modules that will be quantized
    fused: list[list[str]] = field(default_factory=list)  # names of the modules of each fused set
    #: modules of a targeted class that cannot be quantized, by name the reason
    left_out: dict[str, str] = field(default_factory=dict)


def scheme_identity(scheme: QuantizationScheme) -> str:
    """A text that is equal for schemes that differ in their targets only."""
    return str(scheme.model_dump_json(exclude={"targets"}))


def check_own_sets(own: Sequence[Sequence[str]]) -> None:
    """Refuse values other than a list of fused sets: two or more attribute names each, and no name in two sets."""
    if not isinstance(own, (list, tuple)) or not all(isinstance(fused, (list, tuple)) for fused in own):
        raise CalibrationError("fused_sets", got=repr(own), expected="a list of lists of names, [['a', 'b']]")
    names = [name for fused in own for name in fused]
    bad = [str(name) for name in names if not isinstance(name, str) or not name or "." in name]
    refuse(
        [*bad, *(str(list(fused)) for fused in own if len(set(fused)) < 2)],
        "not a fused set",
        expected="two or more attribute names under one parent, without dots: ['gate_proj', 'up_proj']",
    )
    twice = sorted({name for name in names if names.count(name) > 1})
    refuse(twice, "a name stands in two fused sets", remedy="make them one set.")


def find_fused(names: Iterable[str], sets: Sequence[Sequence[str]]) -> list[list[str]]:
    """The module names that are fused: same parent, last parts in one of ``sets``, of which members may be missing.

    A name that stands in two sets belongs to the later one.

    >>> find_fused(["0.k", "0.q", "0.o", "1.up", "1.gate", "2.up"], [("q", "k", "v"), ("gate", "up")])
    [['0.q', '0.k'], ['1.gate', '1.up']]
    """
    rank = {member: (index, place) for index, fused in enumerate(sets) for place, member in enumerate(fused)}
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in rank:
            index, place = rank[leaf]
            found.setdefault((parent, index), []).append((place, name))
    return [[name for _, name in sorted(members)] for members in found.values() if len(members) > 1]


# ---------------------------------------------------------------------- qparams of a quantized module


def expected_shapes(target: PlannedModule, base_name: str) -> dict[str, tuple[int, ...] | None]:
    """The parameters that quantizing a tensor takes: ``{"weight_scale": shape}``; None: the shape is not known."""
    args, shapes = target.args[base_name], dict[str, tuple[int, ...] | None]()
    if args.strategy == "tensor_group":
        shapes["global_scale"] = (1,)
    if args.dynamic is False:
        shapes["scale"] = scale_shape(target, base_name, args)
        if not args.symmetric:
            shapes["zero_point"] = shapes["scale"]
    return {f"{base_name}_{suffix}": shape for suffix, shape in shapes.items() if args.dynamic is not True}


def find_misfits(
    target: PlannedModule, qparams: Mapping[str, Any], bases: Collection[str] | None = None
) -> Iterator[str]:
    """A message for each of ``qparams`` (``{"weight_scale": tensor}``) that is missing, unexpected or wrong.

    ``bases`` are the tensors (base names) whose parameters must be there, and no others; default: all that the scheme
    quantizes.
    """
    expected = {
        name: (shape, args)
        for base, args in target.args.items()
        if bases is None or base in bases
        for name, shape in expected_shapes(target, base).items()
    }
    if "weight" in target.args and ROUNDED in qparams:
        expected[ROUNDED] = matrix_shape(target.module), target.args["weight"]
    prefix = f"{target.name}." if target.name else ""
    for name in sorted(expected.keys() | qparams.keys()):
        if name not in expected:
            yield f"{prefix}{name} belongs to nothing that is quantized"
        elif (wrong := _misfit(name, qparams.get(name), *expected[name])) is not None:
            yield f"{prefix}{name} {wrong}"


def _misfit(name: str, value: Any, shape: tuple[int, ...] | None, args: QuantizationArgs) -> str | None:
    if not isinstance(value, torch.Tensor):
        return "is missing" if value is None else f"is a {type(value).__name__}, not a tensor"
    if shape is not None and value.shape != shape:
        return f"has shape {tuple(value.shape)} instead of {tuple(shape)}"
    if name.endswith("scale"):
        if not value.is_floating_point():
            return f"is {value.dtype}"
        wide = value.float()  # torch asks nothing of float8
        signed = can_be_signed(name.removesuffix("_scale"), args)
        positive = bool((torch.isfinite(wide) & ((wide.abs() if signed else wide) > 0)).all())
        return None if positive else f"is not finite and {'other than zero' if signed else 'positive'}"
    low, high = calculate_range(args, value.device)
    inside = bool(((value.float() >= low) & (value.float() <= high)).all())
    return None if inside else f"is not from {low:g} to {high:g}"


def scale_shape(target: PlannedModule, base_name: str, args: QuantizationArgs) -> tuple[int, ...] | None:
    """The shape of a scale as it is stored; None where it depends on the data's shape."""
    if base_name in ATTENTION:
        return (count_heads(target.module)[base_name], 1, 1) if args.strategy == "attn_head" else (1,)
    matrix = matrix_shape(target.module)
    if base_name == "weight" and matrix is not None:
        return tuple(flatten_for_calibration(torch.empty(matrix, device="meta"), "weight", args).shape[1:-1])
    if args.strategy not in ("group", "tensor_group"):
        return (1,)
    if matrix is None or len(whole_shape(target.module) or ()) != 2:
        return None
    return (matrix[1 if base_name == "input" else 0] // int(args.group_size or 1),)
