"""Run a teacher for its predictions, without the largest tensor of the run: its logits.

The head of a language model is a matrix product, after which most models do nothing. Then the logits follow from what
the head reads, block by block (:class:`~lightning_obs.numerics.divergence.HeadLogits`). Whether a model does nothing
more is seen in each call: the head returns what it reads, and that tensor must come out as the model's ``logits``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from lightning_obs.forward.calls import named_logits
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import set_attributes
from lightning_obs.model.weight import adapters_of, in_shards
from lightning_obs.numerics.divergence import HeadLogits

#: the argument from which transformers' models compute a loss, which a teacher does not need
_LABELS = "labels"


def call_for_head(teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HeadLogits | None:
    """Call a teacher up to its head, in the mode that it is in.

    Distillation (``callbacks/distillation.py``) calls it in each training step.

    Args:
        teacher: a model, of transformers or any other.
        args, kwargs: the arguments of the call; transformers' ``labels`` are left out.

    Returns:
        The head's input, weight and bias, from which the logits follow. None where the logits are not the product of
        the head alone, or this cannot be seen: the teacher has no head of its own (``get_output_embeddings``); the head
        is wrapped, hooked, sharded, offloaded or has adapters; the teacher is compiled, or an encoder and decoder,
        whose inputs come from ``labels``; or this call of the teacher raises an error. Distillation then calls the
        whole teacher, in this step and in all later steps.
    """
    head = _plain_head(teacher)
    if head is None or _has_positional_labels(teacher, args):
        return None
    if _LABELS in kwargs:
        kwargs = {**kwargs, _LABELS: None}
    inputs: list[tuple[torch.Tensor, int]] = []

    def return_input(input: torch.Tensor) -> torch.Tensor:
        inputs.append((input, input._version))
        return input

    restore = set_attributes(head, forward=return_input)
    try:
        output = teacher(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError):
        # The teacher probably computes with its logits, whose shape is wrong here. An error of another cause is raised
        # again when the caller calls the whole teacher.
        return None
    finally:
        restore()
    if len(inputs) != 1:
        return None
    hidden, version = inputs[0]
    if named_logits(output) is not hidden or hidden._version != version:
        return None
    hidden = hidden.detach()
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    bias = None if head.bias is None else head.bias.detach()
    return HeadLogits(hidden, head.weight.detach(), bias)


def _plain_head(teacher: nn.Module) -> nn.Linear | None:
    """The Linear that gives the teacher's logits; None if something else takes part in its call.

    :func:`call_for_head` lists the cases.
    """
    get_head = getattr(teacher, "get_output_embeddings", None)
    if get_head is None or getattr(getattr(teacher, "config", None), "is_encoder_decoder", False):
        return None
    head = get_head()
    if type(head) is not nn.Linear or teacher._compiled_call_impl is not None:
        return None
    if head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head):
        return None
    if is_dispatched(head) or in_shards(head) or adapters_of(head) is not None:
        return None
    return head


def _has_positional_labels(teacher: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether one of the positional arguments of a call may be the labels."""
    names = list(inspect.signature(teacher.forward).parameters)
    return _LABELS in names[: len(args)]
