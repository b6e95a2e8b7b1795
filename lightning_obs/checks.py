"""What has to hold before a calibration writes anything: data everywhere, every scale usable."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from lightning_obs.attention import count_heads
from lightning_obs.errors import CalibrationError, CalibrationWarning, name_list
from lightning_obs.flat_shards import whole_shape
from lightning_obs.numerics.reshape import ATTENTION
from lightning_obs.observers import Observer
from lightning_obs.plan import Target

Key: TypeAlias = tuple[str, str]
#: (module name, base name) -> observer
Observers: TypeAlias = Mapping[Key, Observer]


def check_coverage(
    observers: Observers,
    unreached: Collection[Key],
    fused: Sequence[Sequence[str]],
    scheme: str,
    batches: int,
    on_missing: str,
    experts: bool = False,
) -> set[str]:
    """Names of modules to leave in full precision, because no data reached them.

    Args:
        observers: all of them.
        unreached: those that no data reached, on any rank; weights count only where their observer needs inputs.
        fused: names of modules that are quantized together or not at all.
        scheme: its name, for the error.
        batches: how many were seen, for the error.
        on_missing: ``"warn"`` leaves them out, anything else is an error.
        experts: the model has some; the error says what can be done for them.

    Raises:
        CalibrationError: no observer saw any data, or one saw none and ``on_missing`` is ``"error"``.
    """
    needing = [key for key, observer in observers.items() if key[1] != "weight" or observer.needs_inputs]
    unreached = [key for key in needing if key in unreached]
    if not unreached:
        return set()
    missing = [f"{name} ({base if base != 'weight' else 'inputs for its weight'})" for name, base in unreached]
    if len(unreached) == len(needing):
        static = any(base != "weight" for _, base in needing)
        raise CalibrationError(
            f"{scheme} has {'static activations' if static else 'weights that are observed with their inputs'} "
            "and saw no data",
            where=missing,
            got=f"{batches} batches",
            expected="calibration batches that run these modules",
            remedy="run the model inside the session (in Lightning: validation batches), "
            + (
                "or choose a scheme that needs no data (FP8_DYNAMIC, W8A8, W4A16)."
                if static
                else "or choose an observer that needs no inputs (memoryless_mse)."
            ),
        )
    # An attention module without scales would be loaded with uninitialized ones: there, nothing can be left out.
    if on_missing != "warn" or any(base in ATTENTION for _, base in unreached):
        raise CalibrationError(
            f"no data reached {len(unreached)} of {len(needing)} observers",
            where=missing,
            remedy="add calibration batches, list them in `ignore`, or set on_missing='warn' "
            "to leave them in full precision."
            + (" For experts there are on_missing='siblings' and calibrate_all_experts=True." if experts else ""),
        )
    names = {name for name, _ in unreached}
    # A fused group is quantized whole or not at all.
    mates = {name for group in fused if names & set(group) for name in group} - names
    with_them = f"; and, fused with them: {name_list(sorted(mates))}" if mates else ""
    warnings.warn(
        f"left in full precision, because no data reached them: {name_list(missing)}{with_them}",
        CalibrationWarning,
        stacklevel=5,
    )
    return names | mates


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


def check_inputs_fit(targets: Sequence[Target], observers: Observers) -> None:
    """An observer that weighs a weight's columns by inputs needs one column per input channel."""
    wrong = [
        f"{target.name} ({type(target.module).__name__})"
        for target in targets
        if (target.name, "weight") in observers
        and observers[target.name, "weight"].needs_inputs
        and (isinstance(target.module, nn.Embedding) or len(whole_shape(target.module, "weight") or ()) != 2)
    ]
    if wrong:
        raise CalibrationError(
            "the observer of the weight needs inputs with one channel per column of the weight",
            where=wrong,
            expected="Linear modules",
            remedy="give these modules a group of their own with another observer (memoryless_mse), or ignore them.",
        )
