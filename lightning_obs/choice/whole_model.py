"""Measure how far the predictions of a whole model move if all of its modules are quantized at once.

:mod:`.divergence` estimates what each layer does alone, for all candidates at once, and to second order. Here every
calibration takes a forward of its own, and the layers' errors meet as they do at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_obs.calibration.token_mask import PADDING
from lightning_obs.choice.divergence import Twins
from lightning_obs.forward.calls import call_on, logits_of
from lightning_obs.forward.class_axis import LastLayer
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_forward import quantize_forward, unobserved
from lightning_obs.model.module_qparams import CALIBRATED, Calibration, calibration_of, put_back
from lightning_obs.numerics.divergence import compare
from lightning_obs.numerics.many_tensors import to_host
from lightning_obs.numerics.qparams import SCHEME_FIELDS

#: by module name and base name, the name of a candidate
Names: TypeAlias = dict[str, dict[str, str]]


@torch.no_grad()
def whole_divergences(model: nn.Module, batches: Sequence[Any], calibrations: Sequence[Calibration]) -> list[float]:
    """Measure the KL divergence of the quantized model's predictions from the unquantized model's.

    Each batch runs once unquantized and once with each calibration, so the logits of two runs are in memory. Called by
    :mod:`.observer_choice`.

    Args:
        model: the unquantized model; it is left as it was, and so are the calibrations on its modules.
        batches: the arguments of the model for each call. Positions that an ``attention_mask`` leaves out do not count.
        calibrations: by module, the values that make it a calibrated one; modules that are not in it run unquantized.

    Returns:
        For each calibration, nats per prediction.
    """
    sums = [torch.zeros((), dtype=torch.float64) for _ in calibrations]  # on the model's device once a batch has run
    positions = 0
    calibration_before = calibration_of(model)
    with run_eagerly(), unfused(model), left_as_it_was(model), unobserved(model), ExitStack() as stack:
        last_layer = LastLayer()
        last_layer.watch(model, stack)
        for batch in batches:
            original = _counted_logits(model, batch, last_layer)
            positions += len(original)
            for number, calibration in enumerate(calibrations):
                with _calibrated(calibration, calibration_before):
                    divergence, _ = compare(_counted_logits(model, batch, last_layer), original)
                sums[number] = sums[number] + divergence
    return [float(total) / max(1, positions) for total in to_host(sums)]


@contextmanager
def _calibrated(calibration: Calibration, calibration_before: Calibration) -> Iterator[None]:
    """For a ``with`` block in which the modules of ``calibration`` run quantized by it, and not by the one before."""
    with ExitStack() as stack:
        stack.callback(put_back, {module: calibration_before[module] for module in calibration})
        put_back(calibration)
        for module in calibration:
            stack.callback(quantize_forward(module))
        yield


def _counted_logits(model: nn.Module, batch: Any, last_layer: LastLayer) -> torch.Tensor:
    """Run the model on a batch; the logits ``(positions, classes)`` of the positions that count."""
    logits = last_layer.classes_last(logits_of(call_on(model, batch)))
    mask = batch.get(PADDING) if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor) and mask.shape == logits.shape[:-1]:
        return logits[mask.bool()]
    return logits.flatten(0, -2)


def combined(twins: Twins, names: Names) -> Calibration:
    """Make the calibration in which tensors of a module have the qparams of different candidates.

    :mod:`.observer_choice` calls it for each assignment of observers that it measures.

    Args:
        twins: the calibrated modules.
        names: the candidate of each tensor. Tensors of a module that are not in it have the qparams of the module's
            last candidate. A module is left out if no data reached it under one of its candidates.
    """
    calibration: Calibration = {}
    for module_name, name_by_base in names.items():
        if module_name not in twins:
            continue
        by_scheme = twins[module_name].by_scheme
        if not all(name in by_scheme for name in name_by_base.values()):
            continue
        *first_names, (_, last_name) = name_by_base.items()
        values = _calibrated_values(by_scheme[last_name])
        scheme = values["quantization_scheme"]
        arguments = {}
        for base_name, name in first_names:
            values_of_candidate = _calibrated_values(by_scheme[name])
            for key in [key for key in values if key.startswith(f"{base_name}_")]:
                del values[key]
            for key, value in values_of_candidate.items():
                if key.startswith(f"{base_name}_"):
                    values[key] = value
            field = SCHEME_FIELDS[base_name]
            arguments[field] = getattr(values_of_candidate["quantization_scheme"], field)
        values["quantization_scheme"] = scheme.model_copy(update=arguments)
        calibration[twins[module_name].module] = values
    return calibration


def _calibrated_values(twin: nn.Module) -> dict[str, Any]:
    """What calibration has set on a twin, by name of the attribute."""
    return {name: value for name, value in vars(twin).items() if name in CALIBRATED}
