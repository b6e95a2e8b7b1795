"""A config laid over one model: every module that will be quantized, with its scheme, checked without data.

Whatever can be known to be wrong before data is read is refused here, naming modules and remedy: a run that would fail
after an hour of calibration, or a checkpoint that would not load, is not started.
"""

from __future__ import annotations

from compressed_tensors.utils.match import match_named_modules, match_targets
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.model.lora import base_of, inside_adapted
from lightning_obs.schemes.attention import find_states
from lightning_obs.schemes.config import config_groups
from lightning_obs.schemes.fused_layers import find_fused, require_one_scheme
from lightning_obs.schemes.options import CalibrationOptions
from lightning_obs.schemes.preflight import (
    check_experts,
    check_modules,
    check_shapes,
    check_shared,
    require_matches,
    warn_cast_buffers,
    warn_partly_fused,
)
from lightning_obs.schemes.reload import check_reload
from lightning_obs.schemes.target import Plan, Target, scheme_identity


def build_plan(model: nn.Module, options: CalibrationOptions) -> Plan:
    """Find the modules that are to be quantized, and check all that can be checked without data.

    Args:
        model: the module whose ``named_modules`` the targets name.
        options: what the user chose.

    Raises:
        CalibrationError: see the message; nothing was changed.
    """
    config, fused_groups = options.config.model_copy(deep=True), options.all_fused_groups
    by_target = {target: group for group in config_groups(config) for target in group.targets}
    written = [target for group in config_groups(config) for target in group.targets]
    twice = sorted({target for target in written if written.count(target) > 1})
    if twice:
        raise CalibrationError("a target stands in two groups", where=twice, remedy="keep it in one of them.")
    ignore = list(config.ignore or [])
    require_matches(model, list(by_target), ignore)
    attention = find_states(model, config)
    targets = [Target(found.name, found.module, found.scheme, found.states) for found in attention]
    left_alone = {target.name for target in targets} | set(inside_adapted(model))
    for name, module in match_named_modules(model, list(by_target), ignore):
        if name in left_alone:
            continue
        pattern = match_targets(name, module, list(by_target))[0]
        module = base_of(module)
        if not (pattern.startswith("re:") and _holds_nothing(module)):
            targets.append(Target(name, module, by_target[pattern]))
    check_experts(model, {t.name: t.module for t in targets}, list(by_target), ignore)
    if not targets:
        raise CalibrationError(
            "nothing is left to quantize", got=f"targets {list(by_target)}, all of them matched by ignore {ignore}"
        )
    check_modules(model, targets)
    check_shared(model, targets)
    check_shapes(targets)
    fused = find_fused((t.name for t in targets), fused_groups)
    require_one_scheme({t.name: scheme_identity(t.scheme) for t in targets}, fused)
    warn_partly_fused(model, targets, fused_groups)
    warn_cast_buffers(model)
    check_reload(model, targets, options.reload)
    return Plan(config, targets, fused)


def _holds_nothing(module: nn.Module) -> bool:
    """A container or an activation function: a pattern like ``re:.*mlp.*`` matches it beside what it is meant for."""
    return next(module.parameters(recurse=False), None) is None
