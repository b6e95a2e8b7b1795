"""A calibration as tensors and strings, for a checkpoint, and back onto a model.

Nothing is written to the model before all of the state was found to fit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.modules import matrix_shape, write_qparams
from lightning_obs.numerics.reshape import flatten_for_calibration
from lightning_obs.plan import Plan, Target

_FORMAT = 1


def dump_state(plan: Plan, qparams: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Everything a resumed run needs to have the same qparams: tensors, strings and numbers only.

    Args:
        plan: what was calibrated.
        qparams: ``{"layer.weight_scale": tensor, ...}``.
    """
    return {
        "format": _FORMAT,
        "config": plan.config.model_dump_json(),
        "qparams": {name: value.clone() for name, value in qparams.items()},
        "checksums": {t.name: getattr(t.module, "calibrated_weight_checksum", None) for t in plan.targets},
    }


def load_state(plan: Plan, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Write the qparams of a :func:`dump_state` to the plan's modules, and return them.

    Raises:
        CalibrationError: the state was made with another scheme or for another model. Nothing was written then.
    """
    if state.get("format") != _FORMAT:
        raise CalibrationError(
            "the saved calibration has a format that this version does not know",
            got=state.get("format"),
            expected=_FORMAT,
            remedy="load it with the version of lightning_obs that wrote it, or calibrate again.",
        )
    config = plan.config.model_dump_json()
    if state.get("config") != config:
        raise CalibrationError(
            "the saved calibration was made with another scheme, other observers or another ignore list",
            got=state.get("config"),
            expected=config,
            remedy="use the configuration that the checkpoint was calibrated with, or calibrate again.",
        )
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state["qparams"].items():
        name, _, key = key.rpartition(".")
        by_module.setdefault(name, {})[key] = value
    unknown = sorted(set(by_module) - {target.name for target in plan.targets})
    if unknown:
        raise CalibrationError("the saved calibration has modules that this model has not", where=unknown)
    wrong = [t.name for t in plan.targets if not _scale_fits(t, by_module.get(t.name, {}))]
    if wrong:
        raise CalibrationError("the saved calibration is of weights with other shapes", where=wrong)
    with torch.inference_mode(False), torch.no_grad():
        for target in plan.targets:
            if target.name in by_module:
                checksum = state["checksums"].get(target.name)
                write_qparams(target.module, target.scheme, by_module[target.name], checksum)
    return dict(state["qparams"])


def _scale_fits(target: Target, qparams: dict[str, torch.Tensor]) -> bool:
    args, scale, shape = target.scheme.weights, qparams.get("weight_scale"), matrix_shape(target.module)
    if args is None or scale is None or shape is None:
        return True
    weight = torch.empty(shape, device="meta")
    return bool(scale.shape == flatten_for_calibration(weight, "weight", args).shape[1:-1])
