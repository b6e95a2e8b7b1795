"""What has to hold before a calibration writes anything: data everywhere, everything finite, every scale usable."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch

from lightning_obs.errors import CalibrationError, CalibrationWarning, name_list
from lightning_obs.observers import Observer

#: (module name, base name) -> observer
Observers = Mapping[tuple[str, str], Observer]


def check_coverage(
    observers: Observers,
    fused: Sequence[Sequence[str]],
    scheme: str,
    batches: int,
    on_missing: str,
    experts: bool = False,
) -> set[str]:
    """Names of modules to leave in full precision, because no data reached them.

    With ``experts`` the model has some, and the error says what can be done for them.

    Raises:
        CalibrationError: no observer saw any data, or one saw none and ``on_missing`` is ``"error"``.
    """
    needing = {key: obs for key, obs in observers.items() if key[1] != "weight" or obs.needs_inputs}
    unreached = [key for key, obs in needing.items() if not is_reached(key[1], obs)]
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
    if on_missing != "warn":
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
        stacklevel=4,
    )
    return names | mates


def is_reached(base_name: str, observer: Observer) -> bool:
    """Whether the data that an observer needs has come; a weight needs none, or its module's inputs."""
    return not observer.lacks_inputs if base_name == "weight" else observer.has_statistics


def check_finite(observers: Observers, chosen: Collection[str]) -> None:
    """Raise a CalibrationError that names every observer of the chosen modules that saw a NaN or infinity."""
    bad = {
        f"{name} ({base}: {found})"
        for (name, base), observer in observers.items()
        if name in chosen and (found := observer.nonfinite_statistics())
    }
    if bad:
        raise CalibrationError(
            "what was observed is not finite",
            where=sorted(bad),
            expected="finite weights and activations",
            remedy="find the NaN or infinity in these modules' weights or in the data; nothing was written.",
        )


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
