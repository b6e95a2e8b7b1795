"""Backward from a random probe of the logits: how much a model's predictions depend on each of its modules' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_obs.model.offload import at_rest


def random_signs(shape: torch.Size, seed: int, device: torch.device) -> torch.Tensor:
    """A tensor of -1 and 1 in int8."""
    generator = torch.Generator(device).manual_seed(seed)
    bits = torch.empty(shape, dtype=torch.int8, device=device).random_(0, 2, generator=generator)
    return bits.mul_(2).sub_(1)


def fisher_probe(logits: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """A random gradient of logits ``(..., classes)`` whose covariance is the Fisher information, ``diag(p) - p p^T``.

    Backward from it gives gradients g at a module's output with ``1/2 E[(g^T d)^2]`` the Kullback-Leibler divergence,
    to second order, by a change d of the output. ``signs`` are random and independent, -1 or 1, of the logits' shape or
    of the shape of one sample's.
    """
    p = logits.float().softmax(-1)
    signed_roots = p.sqrt().mul_(signs)
    mean = p * signed_roots.sum(-1, keepdim=True)
    return signed_roots.sub_(mean).to(logits.dtype)


def tapped(output: torch.Tensor, see: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """The output of a module; ``see`` is called with its gradient when backward reaches it.

    A call that the model makes without gradients (HRM: all cycles but the last) has no gradient to see.
    """
    if not torch.is_grad_enabled():
        return output
    zero = torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
    tapped_output = output + zero
    tapped_output.register_hook(see)
    return tapped_output


@contextmanager
def parameters_without_gradients(model: nn.Module) -> Iterator[None]:
    """A block in which gradients are computed, but none for a parameter."""
    trained: list[tuple[nn.Module, str]] = []
    with at_rest():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    trained.append((module, name))
        model.requires_grad_(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        with at_rest():  # by name: accelerate replaces offloaded tensors at each call
            for module, name in trained:
                getattr(module, name).requires_grad_(True)
