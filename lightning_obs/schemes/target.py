"""What will be quantized: one module with its scheme, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from torch import nn

from lightning_obs.model.qparams import scheme_args


@dataclass(frozen=True)
class Target:
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
        """What is quantized: ``{base name: args}``."""
        return dict(self.states or scheme_args(self.scheme))


@dataclass(frozen=True)
class Verdict:
    """What an engine does with a checkpoint, known before it is written.

    Attributes:
        loads: whether it gives the calibrated model.
        text: on what hardware it runs, if that is known; or why it does not load.
    """

    loads: bool
    text: str = ""


@dataclass(frozen=True)
class Plan:
    """A config laid over a model.

    Attributes:
        config: the config.
        targets: what will be quantized.
        fused: groups of modules that an engine takes quantized as a whole or not at all.
        engines: what transformers and vLLM do with the checkpoint; empty for a model that is not of transformers.
    """

    config: QuantizationConfig
    targets: list[Target]
    fused: list[list[str]] = field(default_factory=list)
    engines: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def needs_data(self) -> bool:
        """Whether any activation has to be observed."""
        return any(
            base_name != "weight" and args.dynamic is not True
            for target in self.targets
            for base_name, args in target.args.items()
        )


def scheme_identity(scheme: QuantizationScheme) -> str:
    """Equal for schemes that quantize alike, whatever they target."""
    return str(scheme.model_dump_json(exclude={"targets"}))
