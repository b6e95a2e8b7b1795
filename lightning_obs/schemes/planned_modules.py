"""The plan: the modules that will be quantized, each with its scheme, and the sets of them that are fused.

Modules of a fused set are multiplied as one matrix by an inference engine, which says which they are
(:data:`~lightning_obs.engines.engine.FUSED_SETS`: q, k, v; gate, up). So they must have one scheme, and with two-level
scales (tensor_group, NVFP4) one global scale for the weight and one for the input, which their observers compute
together. Gate and up of one expert are fused; different experts are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from torch import nn

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.qparams import scheme_args


@dataclass(frozen=True)
class PlannedModule:
    """One module that will be quantized.

    Attributes:
        states: of an attention module, ``{"q": args, "k": args, "v": args}`` or k and v only; else empty.
    """

    name: str
    module: nn.Module
    scheme: QuantizationScheme
    states: Mapping[str, QuantizationArgs] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"

    @cached_property
    def args(self) -> dict[str, QuantizationArgs]:
        """The quantized tensors: ``{base name: args}``."""
        return dict(self.states or scheme_args(self.scheme))


@dataclass(frozen=True)
class Plan:
    """A config laid over a model.

    Attributes:
        config: what the user asked for.
        targets: the modules that will be quantized.
        fused: names of the modules of each fused set.
    """

    config: QuantizationConfig
    targets: list[PlannedModule]
    fused: list[list[str]] = field(default_factory=list)


def scheme_identity(scheme: QuantizationScheme) -> str:
    """A text that is equal for schemes that quantize alike, whatever they target."""
    return str(scheme.model_dump_json(exclude={"targets"}))


def check_own_sets(own: Sequence[Sequence[str]]) -> None:
    """Refuse what is not a list of fused sets: two or more attribute names each, no name in two of them."""
    if isinstance(own, str) or any(isinstance(fused, str) for fused in own):
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
