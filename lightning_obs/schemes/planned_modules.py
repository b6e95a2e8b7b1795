"""The plan: the modules that will be quantized, each with its scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from torch import nn

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

    @property
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

    @property
    def needs_data(self) -> bool:
        """Whether any activation has to be observed."""
        return any(
            base_name != "weight" and args.dynamic is not True
            for target in self.targets
            for base_name, args in target.args.items()
        )


def scheme_identity(scheme: QuantizationScheme) -> str:
    """A text that is equal for schemes that quantize alike, whatever they target."""
    return str(scheme.model_dump_json(exclude={"targets"}))
