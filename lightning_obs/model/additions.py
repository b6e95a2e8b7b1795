"""Temporary additions to a user's modules (hooks, forwards, switches), and copies of modules without them.

A model may be copied or pickled at any moment: for weight averaging, as a teacher, by a logger. nn.Module copies its
whole ``__dict__``, hooks included, and the hooks of a copy would go on feeding the original's observers.

``copy``, ``deepcopy`` and ``pickle`` look up ``__reduce_ex__`` (``deepcopy`` first ``__deepcopy__``) on the *instance*.
While anything is on a module, the instance has its own, which runs the class's with a ``__dict__`` from which all of it
is taken out. So nothing has to be removed from a copy later, and its pickle does not need this package.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, TypeAlias

from torch import nn
from torch.utils.hooks import RemovableHandle

#: takes one addition out of a module's ``__dict__``, or of a copy of it
TakeOut: TypeAlias = Callable[[dict[str, Any]], None]

_COPYING = ("__reduce_ex__", "__deepcopy__")
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]


def add(module: nn.Module, take_out: TakeOut, undo: Callable[[], None] | None = None) -> Callable[[], None]:
    """Keep an addition to a module out of its copies; returns a function that removes it, in any order with others.

    ``take_out`` gets the module's ``__dict__``, or a copy of it and of torch's own tables in it, without later
    additions. ``undo`` removes the addition from the module; by default ``take_out`` does.
    """
    return _of(module).add(take_out, lambda later: take_out(vars(module)) if undo is None else undo())


def keep_hook_out(module: nn.Module, handle: RemovableHandle) -> Callable[[], None]:
    """Keep a hook of ``module`` out of its copies; returns a function that removes the hook."""

    def take_out(own: dict[str, Any]) -> None:
        for name in _TABLES:
            if isinstance(own[name], dict):
                own[name].pop(handle.id, None)  # no two hooks of a process have the same id

    return add(module, take_out, handle.remove)


def set_attributes(module: nn.Module, **attributes: Any) -> Callable[[], None]:
    """Set attributes of the instance, and return a function that restores their earlier values."""
    mine = _Attributes(vars(module), attributes)
    return _of(module).add(mine, partial(mine.undo, vars(module)))


class _Attributes:
    """Attributes that were set, and their earlier values."""

    def __init__(self, own: dict[str, Any], values: dict[str, Any]) -> None:
        self.names = values.keys()
        self.before = {name: own[name] for name in values if name in own}
        own.update(values)

    def __call__(self, own: dict[str, Any]) -> None:
        for name in self.names:
            own.pop(name, None)
        own.update(self.before)

    def undo(self, own: dict[str, Any], later: list[TakeOut]) -> None:
        """Restore the earlier values; an attribute that was set again since is restored by its last setter."""
        for name in self.names:
            heirs = (other.before for other in later if isinstance(other, _Attributes) and name in other.names)
            held = next(heirs, own)
            held.pop(name, None)
            if name in self.before:
                held[name] = self.before[name]


class _Additions:
    """All that is on one module now, in the order in which it came."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.all: list[TakeOut] = []

    def add(self, take_out: TakeOut, undo: Callable[[list[TakeOut]], None]) -> Callable[[], None]:
        self.all.append(take_out)

        def remove() -> None:
            at = self.all.index(take_out)
            undo(self.all[at + 1 :])
            del self.all[at]
            if not self.all:
                for name in _COPYING:
                    vars(self.module).pop(name, None)

        return remove

    def copied_by(self, name: str, argument: Any) -> Any:
        """The result of the class's ``__reduce_ex__`` or ``__deepcopy__`` for the module without additions."""
        everything = vars(self.module)
        own = everything | {table: copy(everything[table]) for table in _TABLES}
        for take_out in reversed(self.all):
            take_out(own)
        for copying in _COPYING:
            own.pop(copying, None)
        # A shallow copy shares the tables, as any attribute.
        own |= {table: everything[table] for table in _TABLES if len(own[table]) == len(everything[table])}
        object.__setattr__(self.module, "__dict__", own)
        try:
            return getattr(type(self.module), name)(self.module, argument)
        finally:
            object.__setattr__(self.module, "__dict__", everything)


def _of(module: nn.Module) -> _Additions:
    found = getattr(getattr(vars(module).get("__reduce_ex__"), "func", None), "__self__", None)
    if isinstance(found, _Additions):
        return found
    additions = _Additions(module)
    for name in _COPYING:
        if hasattr(type(module), name):
            vars(module)[name] = partial(additions.copied_by, name)
    return additions
