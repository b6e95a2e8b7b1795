"""From a config and a model to the plan: every module that will be quantized, with its scheme, checked without data.

A run that would fail after an hour of calibration is refused here, before it starts. Whether an engine loads the
checkpoint is asked afterwards (``engines/``).
"""

from __future__ import annotations

from collections.abc import Sequence

from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_named_modules, match_targets
from torch import nn

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import holds_parameters
from lightning_obs.model.wrappers import adopt_adapters, base_of, inside_adapted
from lightning_obs.schemes.attention_states import find_states
from lightning_obs.schemes.checks_before_data import (
    check_patterns,
    check_stacked_experts,
    check_targets,
    tied_heads,
    warn_cast_buffers,
    warn_left_in_float,
)
from lightning_obs.schemes.config import config_groups
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, find_fused, scheme_identity


def build_plan(model: nn.Module, config: QuantizationConfig, fused_sets: Sequence[Sequence[str]] = ()) -> Plan:
    """Find the modules to quantize, and check them without data.

    Args:
        model: the module whose ``named_modules`` the targets name.
        config: what the user asks for; it is copied.
        fused_sets: attribute names, under one parent, of the modules that an engine fuses.

    Raises:
        CalibrationError: see the message; nothing was changed.
    """
    config, ignore = config.model_copy(deep=True), list(config.ignore or [])
    by_target = {target: group for group in config_groups(config) for target in group.targets}
    written = [target for group in config_groups(config) for target in group.targets]
    refuse(
        sorted(target for target in by_target if written.count(target) > 1),
        "a target stands in two groups",
        remedy="keep it in one of them.",
    )
    check_patterns(model, list(by_target), ignore)
    adopt_adapters(model)
    targets = find_states(model, config, by_target)
    left_alone, by_class = {target.name for target in targets} | inside_adapted(model), set[str]()
    for name, module in match_named_modules(model, by_target, ignore):
        if name not in left_alone:
            pattern, module = match_targets(name, module, by_target)[0], base_of(module)
            if is_meant(pattern, module):
                targets.append(PlannedModule(name, module, by_target[pattern]))
                by_class |= {name} if pattern in {kind.__name__ for kind in type(module).__mro__} else set()
    tied = tied_heads(model, targets, by_class)
    targets = [target for target in targets if target.name not in tied]
    config.ignore = ignore = [*ignore, *tied]
    check_stacked_experts(model, list(by_target), ignore)
    if not targets:
        raise CalibrationError(
            "nothing is left to quantize", got=f"targets {list(by_target)}, all of them matched by ignore {ignore}"
        )
    check_targets(model, targets)
    fused = find_fused((t.name for t in targets), fused_sets)
    schemes = {t.name: scheme_identity(t.scheme) for t in targets}
    refuse(
        [name for members in fused if len({schemes[name] for name in members}) > 1 for name in members],
        "modules that are fused at inference have different schemes",
        expected="one scheme for all members of a fused set (q, k, v; gate, up; your fused_sets)",
        remedy="target or ignore them together.",
    )
    warn_cast_buffers(model)
    warn_left_in_float(model, targets, by_target, ignore)
    return Plan(config, targets, fused, tied)


def is_meant(target: str, module: nn.Module) -> bool:
    """Whether a pattern that matches a module is meant for it: ``re:.*mlp.*`` also matches containers and activation
    functions, which hold no parameters."""
    return not target.startswith("re:") or holds_parameters(module)
