"""Run a user's model beside the user's own loop, and leave no trace of it.

Lightning puts a model into evaluation mode for a validation and takes it out afterwards. A run at another time (layer
errors after a fit, a choice by measurement, an export that traces the model) finds it as the user left it, often in
training: batch norms would change, dropout would be in the numbers, and random numbers would be used up.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from compressed_tensors.utils.helpers import patch_attrs
from torch import nn

from lightning_obs.forward.calls import in_evaluation_mode
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.offload import at_rest, execution_device


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """For a ``with`` block that runs the model in evaluation mode; then modes, buffers, random numbers are as before.

    Entered for each measurement outside of Lightning's loops (layer errors, choices of observers and schemes), for a
    rounding on quantized inputs, and for the tracing for ONNX. Buffers of dispatched
    modules (offloaded by accelerate) are not restored. Other state that a ``forward`` changes is not restored either.
    """
    buffers = _copies_of_buffers(model)
    with in_evaluation_mode(model), random_numbers_restored(model):
        try:
            yield
        finally:
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(value)


def _copies_of_buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    """Each buffer of a model: its module and name there, the tensor, and a copy of its values.

    Buffers of dispatched modules are left out.
    """
    copies = []
    with at_rest():
        for module in model.modules():
            if is_dispatched(module):
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copies.append((module, name, buffer, buffer.detach().clone()))
    return copies


@contextmanager
def random_numbers_restored(model: nn.Module) -> Iterator[None]:
    """For a ``with`` block that runs a model; afterwards all random generators have their former state.

    These are the generators of Python, NumPy and torch, and of the model's devices. Entered by :func:`left_as_it_was`
    and for the extra calls that weigh tokens (``calibration/token_weights.py``).
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    host_state = torch.get_rng_state()
    device_states = {}
    for device in _accelerators_of(model):
        device_states[device] = torch.get_device_module(device).get_rng_state(device)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(host_state)
        for device, state in device_states.items():
            torch.get_device_module(device).set_rng_state(state, device)


def _accelerators_of(model: nn.Module) -> set[torch.device]:
    """The accelerators on which a model computes, without "mps": torch's one generator for it takes no device."""
    devices = set()
    with at_rest():
        for tensor in (*model.parameters(), *model.buffers()):
            devices.add(tensor.device)
        dispatched_to = execution_device(model)
    if dispatched_to is not None:
        devices.add(dispatched_to)
    return {device for device in devices if device.type not in ("cpu", "meta", "mps")}


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Set ``use_cache=False`` in the configs of transformers models inside the ``with`` block.

    Entered where a module of a model runs by itself or twice (quantized inputs, smoothing): it would otherwise fill
    key-value caches that nothing reads.
    """
    configs: list[Any] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache") and not any(config is known for known in configs):
            configs.append(config)
    with patch_attrs(configs, "use_cache", [False] * len(configs)):
        yield
