"""Copies of the state of user code, and batches kept on the CPU.

``copy.deepcopy`` copies a teacher's weights with the list that holds it, and fails on an object that holds a lock. Here
modules, parameters and what cannot be copied are shared.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_obs.report.predictions import KEPT_BYTES

#: exact types of values that do not change
_VALUES = {type(None), bool, int, float, complex, str, bytes, range, slice}
_NAMES = (type, types.FunctionType, types.ModuleType, weakref.ReferenceType, *weakref.ProxyTypes)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserDict, UserList)
#: packages whose objects belong to the run or to the system: Trainer, loggers, optimizers, datasets, loaders, process
#: groups, tokenizers, offloaded weights, threads, queues, locks, files
_SHARED = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_obs", "accelerate", "compressed_tensors",
    "transformers", "tokenizers",
    "threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "socket", "_socket",
    "io", "_io", "tempfile", "logging",
}  # fmt: skip


class Copier:
    """Deep copies with one memo.

    ``tensor`` copies a tensor that is not a parameter; ``found`` is told of every module that is met, which is shared.
    """

    def __init__(
        self, tensor: Callable[[torch.Tensor], torch.Tensor], found: Callable[[nn.Module], Any] = lambda module: None
    ) -> None:
        self._tensor, self._found = tensor, found
        self._memo: dict[int, Any] = {}  # as __deepcopy__ is given it
        self.size = 0  # of the copies [bytes], about
        self._originals: list[Any] = []  # kept alive: another object would get the id of one that is gone

    def __call__(self, value: Any, _: Any = None) -> Any:
        """The copy of a value; the value itself where it cannot be copied."""
        if type(value) in _VALUES:
            self.size += sys.getsizeof(value)
            return value
        if isinstance(value, (*_NAMES, nn.Parameter)):
            return value
        if id(value) not in self._memo:
            self._originals.append(value)
            self._memo[id(value)] = value
            try:
                self._memo[id(value)] = self._copy(value)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # a lock, a generator, a file, or a class that refuses in its own way
                self._memo[id(value)] = value
        return self._memo[id(value)]

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, nn.Module):
            self._found(value)
            return value
        if isinstance(value, torch.Tensor):
            self.size += value.nbytes if value.layout == torch.strided else 0
            return self._tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            owner = self(value.__self__)
            if owner is not value.__self__ and isinstance(value, types.MethodType):
                return types.MethodType(value.__func__, owner)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if not isinstance(value, _CONTAINERS) and _is_shared(kind):
            return value
        self.size += value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value)
        if kind is tuple:
            return tuple(map(self, value))
        if hasattr(kind, "__deepcopy__"):
            return value.__deepcopy__(self._memo)
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            return value
        return copy._reconstruct(value, self._memo, *reduced, deepcopy=self)  # type: ignore[attr-defined]


def _is_shared(kind: type) -> bool:
    # The end of a copy would run __del__, and close or remove resources that the original still uses.
    return hasattr(kind, "__del__") or any(base.__module__.partition(".")[0] in _SHARED for base in kind.__mro__)


class KeptBatches:
    """The first ``wanted`` batches of many, on the CPU, as far as they fit in ``limit`` bytes."""

    def __init__(self, limit: float = KEPT_BYTES, wanted: float = float("inf")) -> None:
        self._left, self._wanted = limit, wanted
        self._kept: deque[tuple[Any, dict[int, torch.device], Any]] = deque()
        self.seen = 0  # how many of the wanted batches were offered

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, batch: Any, note: Any = None) -> None:
        """Keep a copy of a batch, and ``note`` as it is, unless this or an earlier batch does not fit."""
        if self.seen >= self._wanted:
            return
        self.seen += 1
        if len(self) < self.seen - 1:
            return
        devices: dict[int, torch.device] = {}

        def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().to("cpu", copy=True)
            devices[id(copied)] = tensor.device
            return copied

        with torch.inference_mode(False), torch.no_grad():
            copier = Copier(to_cpu)
            copied = copier(batch)
        self._left -= copier.size
        if self._left >= 0:
            self._kept.append((copied, devices, note))

    def cut(self, length: int) -> None:
        """Keep the first ``length`` batches only."""
        while len(self) > length:
            self._kept.pop()

    def taken(self) -> Iterator[tuple[Any, Any]]:
        """Take out ``(batch, note)``, one by one, each batch on the device where it was."""
        while self._kept:
            batch, devices, note = self._kept.popleft()
            if not {torch.device("cpu")}.issuperset(devices.values()):
                batch = Copier(partial(_back, devices))(batch)
            yield batch, note


def _back(devices: dict[int, torch.device], tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(devices.get(id(tensor), tensor.device))
