"""What a calibration did, for a person and for a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_obs.schemes.target import Verdict


@dataclass
class CalibrationResult:
    """What a calibration did.

    Attributes:
        scheme: short name of the scheme.
        modules: names of the modules that were quantized.
        observers: how many observers took part.
        batches: how many batches (calls of the model) this rank saw.
        measurements: how often an activation was reduced; fewer than the observers' calls where modules share inputs.
        seconds: wall time from attaching to finishing, the user's forward passes included.
        qparams: ``{"layer.weight_scale": tensor, ...}`` on the CPU.
        input_ranges: smallest and largest input of each module that was observed, in the units of the activation.
        chosen_input_ranges: the range that each module's input scale was computed from, in the same units: an observer
            may choose less than what it observed, or more.
        skipped: modules left in full precision because no data reached them (``on_missing="warn"``).
        expert_tokens: how many tokens the router sent to each expert, by the name of what holds the experts. Without
            padding where there is a token mask, except in experts that are not of this package: which of the tokens
            they get are padding is not known, and they count.
        fallback: modules of experts that no data reached, whose activations' ranges are those of their siblings
            (``on_missing="siblings"``).
        fused: groups of modules that an engine takes quantized as a whole or not at all.
        engines: what transformers and vLLM do with the checkpoint; empty for a model that is not of transformers.
        ranks: how many ranks took part.
        collectives: how many collectives made their statistics one.
    """

    scheme: str
    modules: list[str]
    observers: int
    batches: int
    measurements: int
    seconds: float
    qparams: dict[str, torch.Tensor]
    input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    chosen_input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    fused: list[list[str]] = field(default_factory=list)
    engines: Mapping[str, Verdict] = field(default_factory=dict)
    ranks: int = 1
    collectives: int = 0
