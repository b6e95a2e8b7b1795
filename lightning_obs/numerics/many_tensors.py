"""Check many tensors at once, and copy many tensors to the CPU, with one wait for each device.

The host waits for an accelerator whenever it reads a number from it. A calibration has hundreds of small statistics, so
here all tensors of a device are reduced on that device first, and the host reads once. Observers, ranks, calibration's
finalization, export and the report call these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

#: tensors of up to this many elements are concatenated; copying a larger one costs more time than one more launch
_SMALL = 2**16


def all_finite(values: Iterable[Any]) -> bool:
    """Whether no floating point tensor among ``values`` holds NaN or infinity. Other values count as finite.

    Called with the statistics of one observer before its qparams are computed, and with those of all observers before
    ranks reduce them.

    >>> all_finite([torch.ones(2), "text", torch.tensor([1, 2])])
    True
    >>> all_finite([torch.ones(2), torch.tensor(torch.inf)])
    False
    """
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            tensors.append(value)
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for joined in _joined(tensors):
        joined = widened(joined)
        # x - x is NaN where x is not finite and else zero: two operations where isfinite takes five.
        has_nonfinite = (joined - joined).any()
        flags.setdefault(joined.device, []).append(has_nonfinite)
    for device_flags in flags.values():
        any_nonfinite = device_flags[0] if len(device_flags) == 1 else torch.stack(device_flags).any()
        if any_nonfinite:
            return False
    return True


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flatten tensors, and concatenate small ones of the same dtype and device; empty tensors are left out."""
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > _SMALL:
            yield tensor.reshape(-1)
        elif tensor.numel() > 0:
            kind = tensor.dtype, tensor.device
            small.setdefault(kind, []).append(tensor.reshape(-1))
    for alike in small.values():
        yield alike[0] if len(alike) == 1 else torch.cat(alike)


def all_positive(tensors: Iterable[torch.Tensor], absolute: bool = False) -> bool:
    """Whether every value of floating point tensors is positive and finite; True if there are no tensors.

    Called by finalize with all scales of a calibration. Small tensors are concatenated, so that hundreds of tensors
    take few launches; large tensors are not copied.

    Args:
        tensors: tensors of any shapes, dtypes and devices.
        absolute: check the absolute values, for scales that may be negative.

    >>> all_positive([torch.ones(2), torch.tensor([0.5])])
    True
    >>> all_positive([torch.tensor([1.0, 0.0])])
    False
    """
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for joined in _joined(tensors):
        is_positive = _is_positive(joined, absolute)
        flags.setdefault(joined.device, []).append(is_positive)
    for device_flags in flags.values():
        all_of_device = device_flags[0] if len(device_flags) == 1 else torch.stack(device_flags).all()
        if not all_of_device:
            return False
    return True


def _is_positive(tensor: torch.Tensor, absolute: bool) -> torch.Tensor:
    """Whether every value is positive and finite, as a boolean tensor on the device; False if there is a NaN."""
    values = widened(tensor)
    if absolute:
        values = values.abs()
    low, high = torch.aminmax(values)  # both are NaN if any value is
    is_above_zero = low > 0
    is_finite = high < torch.inf
    return is_above_zero & is_finite


def all_zero(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each floating point tensor, whether it is zero everywhere.

    Called with the statistics of inputs before weights are searched by them (``observers/by_inputs.py``): inputs that
    are all zero say nothing about which columns matter.
    """
    answers = [False] * len(tensors)
    for indices in _indices_by_device(tensors).values():
        tensors_of_device = [tensors[index] for index in indices]
        magnitudes = torch._foreach_norm(tensors_of_device, torch.inf)
        largest = torch.stack(magnitudes)
        numbers = largest.tolist()
        for index, number in zip(indices, numbers, strict=True):
            answers[index] = number == 0
    return answers


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of any shapes and dtypes to the CPU: one transfer for each device, and one for each large tensor.

    Called by finalize and export for qparams, statistics and small weights, and by the report and the measurements of
    a mixed plan for their sums.
    """
    copies = list(tensors)
    for device, indices in _indices_by_device(tensors).items():
        small = []
        for index in indices:
            tensor = tensors[index].detach()
            if device.type == "cpu":
                copies[index] = tensor.clone()
            elif tensor.numel() > _SMALL:
                copies[index] = tensor.cpu()
            else:
                small.append(index)
        transferred = _in_one_transfer([tensors[index].detach() for index in small])
        for index, copy in zip(small, transferred, strict=True):
            copies[index] = copy
    return copies


def _in_one_transfer(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of one accelerator to the CPU: their bytes are concatenated on the accelerator and sent at once."""
    if not tensors:
        return []
    as_bytes = []
    sizes = []
    for tensor in tensors:
        flat = tensor.contiguous().view(-1)
        as_bytes.append(flat.view(torch.uint8))
        sizes.append(tensor.nbytes)
    all_bytes = torch.cat(as_bytes)
    transferred = all_bytes.cpu()
    pieces = transferred.split(sizes)
    copies = []
    for tensor, piece in zip(tensors, pieces, strict=True):
        flat = piece.clone().view(tensor.dtype)
        copies.append(flat.view(tensor.shape))
    return copies


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that torch can subtract: a dtype of one byte (float8) becomes float32.

    Called wherever statistics are checked for NaN and infinity.
    """
    if tensor.itemsize == 1:
        return tensor.float()
    return tensor


def _indices_by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """Group the indices of the tensors by their device."""
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(index)
    return indices
