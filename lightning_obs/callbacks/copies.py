"""Copies of what user code holds, and batches kept on the CPU.

``copy.deepcopy`` copies a teacher's weights with the list that holds it, and gives up on an object for the one lock in
it. Here modules and parameters are shared, and an object that cannot be copied is shared alone: its neighbours are
copied. A :class:`Copier` copies an object once, so two names of it stay two names of its copy.
"""

from __future__ import annotations

import copyreg
import sys
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

#: memory for the batches of one validation, on each rank [bytes]
KEPT_BYTES = 2 * 2**30

_ON_CPU = {torch.device("cpu")}
#: exact types of values that do not change
_VALUES = {type(None), bool, int, float, complex, str, bytes, range, slice}
_NAMES = (type, types.FunctionType, types.ModuleType, weakref.ReferenceType, *weakref.ProxyTypes)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserDict, UserList)
#: packages whose objects belong to the run or to the system: Trainer, loggers, optimizers, datasets, loaders, process
#: groups, tokenizers, offloaded weights, threads, queues, locks, files
_SHARED = {
    "torch", "lightning", "lightning_obs", "accelerate", "compressed_tensors", "transformers", "tokenizers",
    "threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "socket", "_socket",
    "io", "_io", "tempfile", "logging",
}  # fmt: skip


class Copier:
    """Deep copies with one memory.

    Args:
        tensor: copies a tensor that is no parameter.
        found: told of every module that is met; it is shared.

    Attributes:
        memo: ``{id: copy}``, as ``__deepcopy__`` is given it.
        size: of what was copied [bytes], about.
    """

    def __init__(
        self, tensor: Callable[[torch.Tensor], torch.Tensor], found: Callable[[nn.Module], Any] = lambda module: None
    ) -> None:
        self._tensor, self._found = tensor, found
        self.memo: dict[int, Any] = {}
        self.size = 0
        self._originals: list[Any] = []  # kept alive: another object would get the id of one that is gone

    def __call__(self, value: Any) -> Any:
        """The copy of a value; the value itself where it cannot be copied."""
        if type(value) in _VALUES:
            self.size += sys.getsizeof(value)
            return value
        if isinstance(value, (*_NAMES, nn.Parameter)):
            return value
        if id(value) not in self.memo:
            self._originals.append(value)
            self.memo[id(value)] = value
            try:
                self.memo[id(value)] = self._copy(value)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # a lock, a generator, a file, or a class that refuses in its own way
                self.memo[id(value)] = value
        return self.memo[id(value)]

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
            return self._method(value)
        if not isinstance(value, _CONTAINERS) and _is_shared(kind):
            return value
        self.size += value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value)
        if kind is tuple:
            return tuple(map(self, value))
        if hasattr(kind, "__deepcopy__"):
            return value.__deepcopy__(self.memo)
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        return value if isinstance(reduced, str) else self._rebuild(value, *reduced)

    def _method(self, method: Any) -> Any:
        owner = self(method.__self__)
        if owner is method.__self__:
            return method
        return (
            types.MethodType(method.__func__, owner) if hasattr(method, "__func__") else getattr(owner, method.__name__)
        )

    def _rebuild(
        self, value: Any, make: Any, args: Any, state: Any = None, items: Any = (), pairs: Any = (), put: Any = None
    ) -> Any:
        """Follow the protocol of ``object.__reduce__``."""
        made = self.memo[id(value)] = make(*map(self, args))
        if state is not None:
            _set_state(made, self(state), put)
        for item in items or ():
            made.append(self(item))
        for key, held in pairs or ():
            made[self(key)] = self(held)
        return made


def _set_state(made: Any, state: Any, put: Any) -> None:
    if put is not None:
        put(made, state)
    elif hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            vars(made).update(attributes)
        for name, held in (slots or {}).items():
            object.__setattr__(made, name, held)


def _is_shared(kind: type) -> bool:
    # The end of a copy would run __del__, and close or remove what the original still uses.
    return hasattr(kind, "__del__") or any(base.__module__.partition(".")[0] in _SHARED for base in kind.__mro__)


class KeptBatches:
    """The first batches of many, on the CPU, as far as they fit; each can be taken out once.

    Args:
        limit: of their size [bytes].
        wanted: of their number.

    Attributes:
        seen: how many were offered, of those that are wanted.
    """

    def __init__(self, limit: float = KEPT_BYTES, wanted: float = float("inf")) -> None:
        self._left, self._wanted = limit, wanted
        self._kept: deque[tuple[Any, dict[int, torch.device], Any]] = deque()
        self.seen = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, batch: Any, note: Any = None) -> None:
        """Keep a copy of a batch, unless this or an earlier one does not fit.

        Args:
            batch: whatever a loader gives.
            note: kept with it, as it is.
        """
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
            yield batch if _ON_CPU.issuperset(devices.values()) else Copier(_back_to(devices))(batch), note


def _back_to(devices: dict[int, torch.device]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(devices.get(id(tensor), tensor.device))
