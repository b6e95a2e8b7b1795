"""Questions about many tensors, and copies of many tensors, with one wait for each device.

The host waits for an accelerator whenever it reads a number from it. A calibration has hundreds of small statistics, so
here all of them are looked at on their device first, and the host reads once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

#: number of elements up to which a tensor is concatenated with others; copying a larger one costs more than a launch
_SMALL = 2**16


def all_finite(values: Iterable[Any]) -> bool:
    """Whether no floating point tensor among ``values`` holds NaN or infinity. Other values count as finite.

    Called with one observer's statistics before qparams are computed, and with all observers' before ranks reduce them.

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
    """Flat tensors with all the values: small tensors of one dtype and device concatenated, large ones as they are."""
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

    Called by finalize with all scales of a calibration. Small tensors are joined, so that hundreds of them take few
    launches. A large one is not copied.

    Args:
        tensors: of any shapes, dtypes and devices.
        absolute: look at absolute values.

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
    """Whether every value is positive and finite, as a tensor on the device. NaN is neither."""
    values = widened(tensor)
    if absolute:
        values = values.abs()
    low, high = torch.aminmax(values)  # both are NaN if any value is
    return (low > 0) & (high < torch.inf)


def all_zero(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each floating point tensor, whether it is zero everywhere.

    Called before weights are searched, with the squares of their inputs: inputs that are all zero weigh no column.
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
    """Copies on the CPU, of any shapes and dtypes, in one transfer for each device, and one for each large tensor.

    Called by finalize and export for qparams, statistics and the rows of small weights, by the report and by the mixed
    plan's measurements for their sums.
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
    """Copies of one accelerator's tensors on the CPU: their bytes are concatenated there."""
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
    """The tensor in a dtype that torch can subtract: float8 becomes float32."""
    if tensor.itemsize == 1:
        return tensor.float()
    return tensor


def _indices_by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """The indices of each device's tensors."""
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(index)
    return indices
