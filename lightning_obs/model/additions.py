"""Put hooks, attributes and other things on a user's module for a while.

Each function here returns another one that takes the thing off again. Things may be taken off in any order. Copies of
the module that are made meanwhile are without them (:mod:`.mark`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_obs.model.mark import TABLES, AttributeSetting, Mark, TakeOut, make_mark, mark_of


def keep_out_of_copies(
    module: nn.Module, take_out: TakeOut, remove: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Keep something that the caller has put on a module out of the module's copies.

    Args:
        module: any module of the user's.
        take_out: takes the thing out of a copy of the module's ``__dict__``. The tables of torch in it (hooks,
            submodules) are copies, too.
        remove: takes the thing off the module itself. By default ``take_out`` does, from the ``__dict__``.

    Returns:
        A function that calls ``remove``; copies are then no longer changed.
    """
    mark = make_mark(module)
    mark.take_outs.append(take_out)

    def undo() -> None:
        if remove is None:
            take_out(vars(module))
        else:
            remove()
        mark.take_outs.remove(take_out)
        mark.remove_if_empty()

    return undo


def keep_hook_out(module: nn.Module, handle: RemovableHandle) -> Callable[[], None]:
    """Keep a hook of ``module`` out of its copies; returns a function that removes the hook."""

    def take_out(attributes: dict[str, Any]) -> None:
        for name in TABLES:
            if isinstance(attributes[name], dict):
                attributes[name].pop(handle.id, None)  # no two hooks of a process have the same id

    return keep_out_of_copies(module, take_out, handle.remove)


def set_attributes(module: nn.Module, **attributes: Any) -> Callable[[], None]:
    """Set attributes of the instance, and return a function that restores their earlier values."""
    mark = make_mark(module)
    setting = AttributeSetting(vars(module), attributes)
    mark.settings.append(setting)
    return partial(_undo_setting, mark, setting)


def _undo_setting(mark: Mark, setting: AttributeSetting) -> None:
    """Restore the values from before a setting.

    Where a later setting has set an attribute again, its value stays, and the later setting restores in the end what
    this one had replaced.
    """
    position = mark.settings.index(setting)
    for name in setting.names:
        attributes = vars(mark.module)
        for later in mark.settings[position + 1 :]:
            if name in later.names:
                attributes = later.replaced
                break
        setting.restore(name, attributes)
    del mark.settings[position]
    mark.remove_if_empty()


def value_before(module: nn.Module, name: str) -> Any:
    """An attribute's value from before all :func:`set_attributes` that are in force; None if it had none.

    Settings are kept in the order in which they were made, so the first that names the attribute replaced its value.
    """
    mark = mark_of(module)
    for setting in [] if mark is None else mark.settings:
        if name in setting.names:
            return setting.replaced.get(name)
    return vars(module).get(name)
