"""Questions about many tensors, and copies of many tensors, with one wait for each device.

The host waits for an accelerator whenever it reads a number from it. A calibration has hundreds of small statistics, so
here all of them are looked at on their device first, and the host reads once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

#: number of elements up to which a tensor is concatenated with others; copying a larger one costs more than a launch
_SMALL = 2**16


def all_finite(values: Iterable[Any]) -> bool:
    """Whether no floating point tensor among ``values`` holds NaN or infinity. Other values count as finite.

    >>> all_finite([torch.ones(2), "text", torch.tensor([1, 2])])
    True
    >>> all_finite([torch.ones(2), torch.tensor(torch.inf)])
    False
    """
    batches: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            batch: tuple[Any, ...] = (value.dtype, value.device)
            if value.numel() > _SMALL:  # by itself
                batch = (*batch, len(batches))
            batches.setdefault(batch, []).append(value.reshape(-1))
    answers: dict[torch.device, list[torch.Tensor]] = {}
    for tensors in batches.values():
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        joined = widened(joined)
        # x - x is NaN where x is not finite and else zero: two operations where isfinite takes five.
        has_nonfinite = (joined - joined).any()
        answers.setdefault(joined.device, []).append(has_nonfinite)
    for device_answers in answers.values():
        if bool(device_answers[0] if len(device_answers) == 1 else torch.stack(device_answers).any()):
            return False
    return True


def all_positive(tensors: Iterable[torch.Tensor], absolute: bool = False) -> bool:
    """Whether every value of floating point tensors is positive and finite; of none, True.

    Small tensors are joined, so that hundreds of them take few launches. A large one is not copied.

    Args:
        tensors: of any shapes, dtypes and devices.
        absolute: ask it of the absolute values.

    >>> all_positive([torch.ones(2), torch.tensor([0.5])])
    True
    >>> all_positive([torch.tensor([1.0, 0.0])])
    False
    """
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    answers: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > _SMALL:
            answers.setdefault(tensor.device, []).append(_is_positive(tensor, absolute))
        elif tensor.numel() > 0:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.reshape(-1))
    for (_, device), of_one_dtype in small.items():
        joined = of_one_dtype[0] if len(of_one_dtype) == 1 else torch.cat(of_one_dtype)
        answers.setdefault(device, []).append(_is_positive(joined, absolute))
    for device_answers in answers.values():
        if not bool(device_answers[0] if len(device_answers) == 1 else torch.stack(device_answers).all()):
            return False
    return True


def _is_positive(tensor: torch.Tensor, absolute: bool) -> torch.Tensor:
    """Whether every value is positive and finite, as a tensor on the device. NaN is neither."""
    values = widened(tensor)
    low, high = torch.aminmax(values.abs() if absolute else values)  # both are NaN if any value is
    return (low > 0) & (high < torch.inf)


def all_zero(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each floating point tensor, whether it is zero everywhere."""
    answers = [False] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        indices = _indices_on(device, tensors)
        magnitudes = torch._foreach_norm([tensors[index] for index in indices], torch.inf)
        for index, magnitude in zip(indices, torch.stack(magnitudes).tolist(), strict=True):
            answers[index] = magnitude == 0
    return answers


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the CPU, of any shapes and dtypes, in one transfer for each device, and one for each large tensor."""
    copies = list(tensors)
    for device in {tensor.device for tensor in tensors}:
        indices = _indices_on(device, tensors)
        if device.type == "cpu":
            for index in indices:
                copies[index] = tensors[index].detach().clone()
            continue
        small = []
        for index in indices:
            if tensors[index].numel() > _SMALL:
                copies[index] = tensors[index].detach().cpu()
            else:
                small.append(index)
        as_bytes = [tensors[index].detach().contiguous().view(-1).view(torch.uint8) for index in small]
        transferred = torch.cat(as_bytes).cpu() if as_bytes else torch.empty(0, dtype=torch.uint8)
        pieces = transferred.split([len(piece) for piece in as_bytes])
        for index, piece in zip(small, pieces, strict=True):
            tensor = tensors[index]
            copies[index] = piece.clone().view(tensor.dtype).view(tensor.shape)
    return copies


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that torch can subtract: float8 becomes float32."""
    return tensor.float() if tensor.itemsize == 1 else tensor


def _indices_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[int]:
    return [index for index, tensor in enumerate(tensors) if tensor.device == device]
