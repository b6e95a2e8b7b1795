"""Batches kept on the CPU, to be run a second time.

``validation_step`` may change its batch, and the accelerator has no room for many. So each batch is deep-copied while
a mode of torch sends every tensor of the copy to the CPU, whatever class of batch holds it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_obs.errors import CalibrationError

#: memory on each rank for batches that are kept [bytes]
KEPT_BYTES = 2 * 2**30


@dataclass(frozen=True)
class _KeptBatch:
    """A batch that :class:`KeptBatches` holds until it is run again.

    Attributes:
        batch: the copy, with all its tensors on the CPU.
        devices: the device that each tensor came from, by the id of its copy.
        note: the object that :meth:`KeptBatches.add` got with the batch.
    """

    batch: Any
    devices: Mapping[int, torch.device]
    note: Any


class KeptBatches:
    """The first batches of a loader, copied to the CPU, as long as their tensors fit in the memory allowed.

    A second pass of a validation makes one for each loader, ``observers="auto"`` one for the model's inputs, and
    ``calibration/kept_calls.py`` one for the calls of a module.

    Args:
        byte_limit: memory for the tensors of all batches [bytes].
        batch_limit: largest number of batches to keep.

    Attributes:
        offered: how many batches were offered, up to ``batch_limit``; more than ``len(self)`` if memory was short.

    Examples:
        >>> batches = KeptBatches(byte_limit=100)
        >>> batches.add({"x": torch.zeros(20)}), batches.add({"x": torch.zeros(20)})
        (None, None)
        >>> len(batches), batches.offered
        (1, 2)
    """

    def __init__(self, byte_limit: float = KEPT_BYTES, batch_limit: float = float("inf")) -> None:
        self._bytes_left = byte_limit
        self._batch_limit = batch_limit
        self._kept: deque[_KeptBatch] = deque()
        self.offered = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, batch: Any, note: Any = None) -> None:
        """Keep a copy of a batch, unless this batch or an earlier one did not fit.

        Called for each batch of a pass, or for each call of a module (``calibration/kept_calls.py``).

        Args:
            batch: any structure of tensors that ``copy.deepcopy`` copies.
            note: kept as it is, not copied; :meth:`note` and :meth:`pop_all` return it.

        Raises:
            CalibrationError: the batch holds an object that cannot be copied.
        """
        if self.offered >= self._batch_limit:
            return
        an_earlier_one_did_not_fit = len(self) < self.offered
        self.offered += 1
        if an_earlier_one_did_not_fit:
            return
        to_cpu = _TensorsToCpu()
        copied = _deep_copy(batch, to_cpu)
        self._bytes_left -= to_cpu.copied_bytes
        if self._bytes_left >= 0:
            self._kept.append(_KeptBatch(copied, to_cpu.devices, note))

    def shorten(self, length: int) -> None:
        """Keep only the first ``length`` batches.

        ``QuantizedValidation`` calls it before its second pass, so that all ranks have the same number.
        """
        while len(self) > length:
            self._kept.pop()

    def note(self, index: int) -> Any:
        """Return the note that :meth:`add` got with the batch at ``index``; ``KeptCalls`` reads it to repeat a call."""
        return self._kept[index].note

    def copy(self, index: int) -> Any:
        """Return a copy of the batch at ``index`` on its original devices; the kept batch stays.

        ``KeptCalls`` repeats a call with it, more than once.
        """
        entry = self._kept[index]
        return _deep_copy(entry.batch, _TensorsToDevices(entry.devices))

    def pop_all(self) -> Iterator[tuple[Any, Any]]:
        """Yield ``(batch, note)`` in order, each batch on its original devices, and release each batch at the next one.

        Read where the kept batches run a second time: in ``callbacks/replayed_loop.py``, and after
        ``observers="auto"`` has chosen.
        """
        while self._kept:
            entry = self._kept.popleft()
            yield _on_its_devices(entry), entry.note


class _TensorsToCpu(TorchFunctionMode):
    """Inside this mode ``copy.deepcopy`` copies tensors to the CPU, without their history.

    :meth:`KeptBatches.add` makes one for each batch, and reads the attributes afterwards.

    Attributes:
        devices: the device of each original, by the id of its copy.
        copied_bytes: size of all copies with the layout ``torch.strided`` [bytes]. Others (sparse tensors) are not
            counted: torch defines no ``nbytes`` for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.devices: dict[int, torch.device] = {}
        self.copied_bytes = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor = args[0]
        copied = tensor.detach().to("cpu", copy=True)
        self.devices[id(copied)] = tensor.device
        if copied.layout == torch.strided:
            self.copied_bytes += copied.nbytes
        return copied


class _TensorsToDevices(TorchFunctionMode):
    """Inside this mode ``copy.deepcopy`` copies each tensor to the device listed for its id.

    Made when a kept batch is to run again, with the ``devices`` of its :class:`_KeptBatch`.
    """

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor = args[0]
        return tensor.to(self._devices.get(id(tensor), tensor.device), copy=True)


def _deep_copy(batch: Any, mode: TorchFunctionMode) -> Any:
    """Copy a batch with its tensors moved as ``mode`` says; raise a CalibrationError if it cannot be copied."""
    with torch.inference_mode(False), torch.no_grad(), mode:
        try:
            return copy.deepcopy(batch)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # every class refuses in its own way
            raise CalibrationError(
                "a batch is kept to be run a second time, and it cannot be copied",
                got=f"{type(batch).__name__}: {type(error).__name__}: {error}",
                remedy="a batch that copy.deepcopy copies.",
            ) from error


def _on_its_devices(entry: _KeptBatch) -> Any:
    """The kept batch itself if all its tensors came from the CPU, else a copy on the original devices."""
    if all(device.type == "cpu" for device in entry.devices.values()):
        return entry.batch
    return _deep_copy(entry.batch, _TensorsToDevices(entry.devices))
