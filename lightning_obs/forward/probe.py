"""Backward from a random probe of the logits: how much a model's predictions depend on each of its modules' outputs.

Sensitivities of layers (``choice/divergence.py``) and weights of tokens (``calibration/token_weights.py``) are measured
by it: a module's output is :func:`tapped`, and backward runs from :func:`fisher_probe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_obs.model.offload import at_rest


def random_signs(shape: torch.Size, seed: int, device: torch.device) -> torch.Tensor:
    """Return a random tensor of -1 and 1 in int8, for :func:`fisher_probe`; an equal seed gives an equal tensor.

    ``choice/divergence.py`` calls it for each batch whose sensitivities it measures.
    """
    generator = torch.Generator(device).manual_seed(seed)
    bits = torch.empty(shape, dtype=torch.int8, device=device).random_(0, 2, generator=generator)
    return bits.mul_(2).sub_(1)


def fisher_probe(logits: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return a random gradient of logits ``(..., classes)`` whose covariance is the Fisher information.

    The Fisher information of the logits is ``diag(p) - p p^T``, with the softmax p of the logits.

    Sensitivities and weights of tokens are measured by it: backward from the returned gradient gives a gradient g at a
    module's output. ``1/2 E[(g^T d)^2]`` is then, to second order, the Kullback-Leibler divergence that a change d of
    the output causes.

    Args:
        logits: the logits of a batch.
        signs: random and independent, -1 or 1, in the shape of the logits or of one sample's logits.

    Returns:
        The gradient, in the shape and dtype of the logits.
    """
    p = logits.float().softmax(-1)
    signed_roots = p.sqrt().mul_(signs)
    mean = p * signed_roots.sum(-1, keepdim=True)
    return signed_roots.sub_(mean).to(logits.dtype)


def tapped(output: torch.Tensor, see: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Watch the gradient at a module's output; a forward hook returns this in place of the output.

    Where the model calls the module without gradients, the output is returned as it is: there is no gradient to see. A
    recurrent model may do so in all cycles but the last (HRM does).

    Args:
        output: the output of the module.
        see: called with the gradient, in the shape of the output, when backward reaches it.

    Returns:
        The output, with equal values.
    """
    if not torch.is_grad_enabled():
        return output
    zero = torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
    tapped_output = output + zero
    tapped_output.register_hook(see)
    return tapped_output


@contextmanager
def parameters_without_gradients(model: nn.Module) -> Iterator[None]:
    """For a ``with`` block in which gradients are computed, but none for a parameter; then parameters are as before.

    Sensitivities of an offloaded model are measured in it: only the modules' outputs need gradients.
    """
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
