"""Sets of observers whose modules engines run as one: q, k and v; gate and up.

Such modules are stored with one global scale (NVFP4), and some engines want one scale per tensor for all of them. Each
observer keeps the others of its set in ``_fused_observers``, as the ecosystem's guide has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy

from lightning_obs.numerics.qparams import compute_global_scale, power_of_two


def fuse(observers: Sequence[Any], join_ranges: bool) -> None:
    """Make a set of the observers, which then know each other; :meth:`.Observer.fuse` calls this."""
    for observer in observers:
        observer._fused_observers = [member for member in observers if member is not observer]
        observer._joins_ranges = join_ranges and observer.args.strategy == QuantizationStrategy.TENSOR


def joined_range_of(observer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The range that covers the ranges of all members of an observer's set, ``(*Q,)`` each, for its scale."""
    low, high = observer.get_min_max()
    for member in observer._fused_observers:
        member_low, member_high = member.get_min_max()
        low = torch.minimum(low, member_low)
        high = torch.maximum(high, member_high)
    return low, high


def global_scale_of(observer: Any) -> torch.Tensor | None:
    """The global scale ``(1,)`` of an observer's set; None unless the strategy is tensor_group."""
    if observer.args.strategy != QuantizationStrategy.TENSOR_GROUP:
        return None
    members = [observer, *observer._fused_observers]
    global_scale = compute_global_scale([member.get_min_max() for member in members], observer.args)
    if global_scale is not None and any(member._rounds_global_scale for member in members):
        return power_of_two(global_scale)
    return global_scale
