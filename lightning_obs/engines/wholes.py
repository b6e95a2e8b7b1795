"""Modules that engines run as a whole, fused sets and the experts of a layer, of which only a part was chosen."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from lightning_obs.engines.engine import FusedSets
from lightning_obs.moe.experts import expert_containers, linear_experts, modules_beside
from lightning_obs.schemes.fused_sets import find_fused
from lightning_obs.schemes.planned_modules import PlannedModule


def split_sets(model: nn.Module, targets: list[PlannedModule], fused_sets: FusedSets) -> list[str]:
    """Fused sets of which only some modules will be quantized: ``"q_proj/k_proj/v_proj in layers.0.self_attn"``."""
    planned, kinds = {t.name for t in targets}, {type(t.module) for t in targets}
    return [
        f"{'/'.join(n.rpartition('.')[2] for n in fused)} in {fused[0].rpartition('.')[0]}"
        for fused in find_fused((n for n, m in model.named_modules() if type(m) in kinds), fused_sets)
        if 0 < sum(name in planned for name in fused) < len(fused)
    ]


def split_experts(model: nn.Module, planned: Container[str]) -> list[str]:
    """Layers whose experts have modules that will be quantized and modules that will not."""
    split = []
    for name, experts in linear_experts(model).items():
        linears = [f"{name}.{n}" for n, m in experts.named_modules() if isinstance(m, nn.Linear)]
        if 0 < sum(linear in planned for linear in linears) < len(linears):
            split.append(name)
    return split


def quantized_gates(model: nn.Module, planned: Container[str]) -> list[str]:
    """Modules that will be quantized and look like routers or gates of experts."""
    return [
        other
        for name, experts in expert_containers(model).items()
        for other, module in modules_beside(model, name)
        if isinstance(module, nn.Linear) and other in planned and module.out_features in (1, len(experts))
    ]
