"""The result of a calibration, for a person and for a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_obs.engines import Verdict
from lightning_obs.errors import name_list, printable
from lightning_obs.schemes.left_in_float import shares_text

#: facts that are a number of things, and the name of one
_COUNTED = {"modules": "module", "observers": "observer", "batches": "batch", "collectives": "collective"}


@dataclass(repr=False)
class CalibrationResult:
    """The result of a calibration.

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
            may choose a smaller range than it observed, or a larger one.
        skipped: modules left in full precision because no data reached them (``on_missing="warn"``, or in a fit).
        expert_tokens: how many tokens the router sent to each expert, by the name of the experts' container. A token
            mask leaves padding out, except in experts that are not of this package.
        fallback: modules of experts that no data reached, whose activations have their siblings' ranges
            (``on_missing="siblings"``).
        fused: groups of modules that an engine takes quantized as a whole or not at all.
        left_out: modules of a targeted class that cannot be quantized, by name the reason (tied to an embedding, say).
        in_float: the share of the model's bytes that stays in float, by class of module, largest first; biases of
            quantized modules do not count. None: not known.
        engines: each engine's verdict on the checkpoint; empty for a model that is not of transformers.
        ranks: how many ranks took part.
        collectives: how many collectives reduced their statistics.
    """

    scheme: str
    modules: list[str]
    observers: int
    batches: int = 0
    measurements: int = 0
    seconds: float = 0.0
    qparams: dict[str, torch.Tensor] = field(default_factory=dict)
    input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    chosen_input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    fused: list[list[str]] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    in_float: Mapping[str, float] | None = None
    engines: Mapping[str, Verdict] = field(default_factory=dict)
    ranks: int = 1
    collectives: int = 0

    def facts(self) -> dict[str, str]:
        """The facts by name, in the order of every report: closing summary, page, log, ``repr``."""
        has_ranks = self.ranks > 1
        facts = {
            "scheme": self.scheme,
            "modules": f"{len(self.modules):,}",
            "observers": f"{self.observers:,}",
            "batches": f"{self.batches:,}" + (f" x {self.ranks} ranks" if has_ranks else ""),
        }
        if has_ranks:
            facts["collectives"] = str(self.collectives)
        facts["calibration"] = f"{self.seconds:.1f} s"
        if self.in_float is not None:
            facts["left in float"] = shares_text(self.in_float)
        return facts

    def line(self, between: str) -> str:
        """The facts but for the scheme as one line: 14 modules, 28 observers, 2 batches x 2 ranks, 0.3 s..."""
        facts = self.facts()
        texts = []
        for plural, singular in _COUNTED.items():
            if plural in facts:
                number, _, ranks = facts[plural].partition(" ")
                noun = singular if number == "1" else plural
                texts.append(f"{number} {noun} {ranks}".strip())
        texts.append(facts["calibration"])
        if "left in float" in facts:
            texts.append(f"left in float: {facts['left in float']}")
        return between.join(texts)

    def __repr__(self) -> str:
        """Ten lines at most; the tensors are in :attr:`qparams`."""
        facts = self.facts()
        total = sum(value.nbytes for value in self.qparams.values())
        left_out = [f"{name} ({reason})" for name, reason in self.left_out.items()]
        rows = facts | {
            "modules": f"{facts['modules']}: {name_list(self.modules, 3)}",
            "observers": f"{facts['observers']}, {self.measurements} measurements of activations",
            "qparams": f"{len(self.qparams)} tensors, {total:,} bytes",
            "widest input": self._widest_input(),
            "skipped": name_list(self.skipped, 3),
            "left out": name_list(left_out, 3),
            "fallback": name_list(self.fallback, 3),
        }
        lines = [f"  {key}: {value}" for key, value in rows.items() if value]
        return printable("\n".join(["CalibrationResult", *lines]))

    def _widest_input(self) -> str:
        """The module whose input has the largest value, and the range of that input; empty if none was observed."""
        widest = ""
        largest = -1.0
        for name, (low, high) in self.input_ranges.items():
            if max(-low, high) > largest:
                largest = max(-low, high)
                widest = f"{name} [{low:.4g}, {high:.4g}]"
        return widest
