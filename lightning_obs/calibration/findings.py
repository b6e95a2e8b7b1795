"""What observers found, as the tensors that go on a module and the numbers that a person reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from lightning_obs.model.qparams import read_qparams
from lightning_obs.observers import Key, Observer
from lightning_obs.schemes.target import Target


def new_qparams(target: Target, asked: Mapping[Key, Observer]) -> dict[str, torch.Tensor]:
    """The qparams of what is asked: ``{"weight_scale": ...}``."""
    found: dict[str, torch.Tensor] = {}
    for base_name in target.args:
        observer = asked.get((target.name, base_name))
        if observer is None:
            continue
        qparams = observer.get_qparams()
        global_scale = qparams.get("global_scale")
        if global_scale is not None:
            found[f"{base_name}_global_scale"] = global_scale
        if observer.args.dynamic is False:
            found[f"{base_name}_scale"] = qparams["scale"]
            if not observer.args.symmetric:
                found[f"{base_name}_zero_point"] = qparams["zero_point"]
    return found


def kept_qparams(target: Target, asked: Collection[Key]) -> dict[str, torch.Tensor]:
    """The qparams of what is not asked anew, as they stand on the module."""
    kept = tuple(f"{base_name}_" for base_name in target.args if (target.name, base_name) not in asked)
    return {key: value for key, value in read_qparams(target.module).items() if kept and key.startswith(kept)}


def input_ranges(observers: Mapping[Key, Observer]) -> dict[str, tuple[float, float]]:
    """The smallest and largest input of each module whose input was observed."""
    ranges = {}
    for (name, base_name), observer in observers.items():
        if base_name == "input" and observer.has_statistics:
            low, high = observer.get_min_max()
            ranges[name] = (float(low.min()), float(high.max()))
    return ranges
