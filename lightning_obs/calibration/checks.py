"""What has to hold before a calibration writes anything: data everywhere, every scale usable."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.reshape import ATTENTION
from lightning_obs.schemes.attention import count_heads


def check_scales(qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise a CalibrationError that names every scale (by module and parameter) that is not finite and positive."""
    bad = [
        f"{name}.{key}"
        for name, values in qparams.items()
        for key, value in values.items()
        if key.endswith("scale") and not bool((torch.isfinite(value) & (value > 0)).all())
    ]
    if bad:
        raise CalibrationError(
            "scales are not finite and positive",
            where=bad,
            remedy="look at the observer's range; the values may not fit the scale's dtype.",
        )


def check_heads(model: nn.Module, qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise a CalibrationError where scales per head do not fit the config, by which a checkpoint is loaded."""
    per_head = [
        (name, key, value.shape[0])
        for name, values in qparams.items()
        for key, value in values.items()
        if key.partition("_")[0] in ATTENTION and value.ndim == 3
    ]
    expected = count_heads(model) if per_head else {}
    bad = [f"{name}.{key} ({heads})" for name, key, heads in per_head if heads != expected[key[0]]]
    if bad:
        raise CalibrationError(
            "attention has other heads than the config says, so the checkpoint would not load",
            where=bad,
            expected=", ".join(f"{base} {heads}" for base, heads in expected.items()),
            remedy="one scale per tensor (kv_cache='FP8').",
        )
