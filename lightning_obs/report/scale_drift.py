"""How far scales have moved since they were first found, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class ScaleDrift:
    """The history of a model's scales, in powers of two: a drift of 1 is a scale that has doubled or halved.

    Attributes:
        steps: when scales were added.
        drifts: by name of the scale, the mean of ``|log2(scale / first scale)|`` at each of these steps.
    """

    steps: list[int] = field(default_factory=list)
    drifts: dict[str, list[float]] = field(default_factory=dict)
    _first: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, step: int, qparams: Mapping[str, torch.Tensor]) -> None:
        """Add the scales of ``{"layer.weight_scale": tensor}`` at a step; those that changed their shape start anew."""
        self.steps.append(step)
        for name, scale in qparams.items():
            if not name.endswith("_scale") or name.endswith("_global_scale"):
                continue
            now = scale.detach().float().cpu().log2()
            first = self._first.get(name)
            if first is None or first.shape != now.shape:
                first = self._first[name] = now
            history = self.drifts.setdefault(name, [0.0] * (len(self.steps) - 1))
            history.append(float((now - first).abs().nan_to_num(nan=0.0, posinf=0.0).mean()))

    def numbers(self) -> dict[str, float]:
        """The largest drift and the mean one, now; nothing before there are two to compare.

        >>> drift = ScaleDrift()
        >>> for step, scale in enumerate((1.0, 2.0)):
        ...     drift.add(step, {"fc.weight_scale": torch.tensor([scale]), "fc.weight_zero_point": torch.zeros(1)})
        >>> drift.numbers()
        {'scale_drift_max': 1.0, 'scale_drift_mean': 1.0}
        """
        last = [history[-1] for history in self.drifts.values() if len(history) == len(self.steps)]
        if len(self.steps) < 2 or not last:
            return {}
        return {"scale_drift_max": max(last), "scale_drift_mean": sum(last) / len(last)}
