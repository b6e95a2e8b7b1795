"""What tests of a calibration session share."""

from __future__ import annotations

import torch
from torch import nn

from lightning_obs import CalibrationSession

STATIC = "INT8_STATIC"


def attributes(model: nn.Module) -> dict[str, set[str]]:
    """What stands on every module, to see that nothing was written."""
    return {name: set(vars(module)) for name, module in model.named_modules()}


def hooks(model: nn.Module) -> int:
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def input_scale(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack([v.detach().abs().max() for v in values]).max().reshape(1) / 127.5


def calibrate(model: nn.Module, scheme=STATIC, *inputs: torch.Tensor, **options) -> CalibrationSession:
    with CalibrationSession(model, scheme, **options) as session:
        for x in inputs:
            model(x)
    return session


class Shared(nn.Module):
    """q, k and v read one tensor; optionally it is changed in place before v."""

    def __init__(self, change: bool = False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.change = change

    def forward(self, x):
        q, k = self.q_proj(x), self.k_proj(x)
        if self.change:
            x.mul_(3)
        return q + k + self.v_proj(x)


class Experts(nn.Module):
    """The first expert always runs, the others when asked."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, chosen=(0,)):
        return sum(self.experts[i](x) for i in chosen)
