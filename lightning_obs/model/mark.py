"""The one record that this package keeps on a module of the user's: :class:`Mark`, at one attribute of the module.

It holds facts that only the whole model can tell a module (which LoRA layer surrounds it, where FSDP1 has put its
parameters), and everything that is on the module for a while (hooks, forwards, switches). A module without any of these
has no mark.

Functions put hooks and attributes on a module; each returns another one that takes the thing off again. Things may be
taken off in any order.

A model may be copied or pickled at any moment: for weight averaging, as a teacher, by a logger. nn.Module copies its
whole ``__dict__``, hooks included, and the hooks of a copy would go on feeding the original's observers.

``copy``, ``deepcopy`` and ``pickle`` look up ``__reduce_ex__`` (``deepcopy`` first ``__deepcopy__``) on the *instance*.
So an instance with a mark overrides them: they call the method of the class while the instance has a ``__dict__``
without the mark and without all that the mark says is there for a while. Nothing has to be removed from a copy later,
and its pickle does not need this package. A copied model is marked anew when it is used
(:func:`~lightning_obs.model.weight.register_surroundings`).

Three things are plain attributes of a module instead, because its copies must have them: the quantization parameters
with ``weight_rounded``, their checksums (both :mod:`.module_qparams`), and, beside a replaced ``forward``, its state
(:mod:`lightning_obs.forward.quantized_module`): a module of a loaded checkpoint keeps both for good, and a compiled
forward reads that state.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_obs.model.place import Place

#: the attribute of a module that holds its :class:`Mark`
_ATTRIBUTE = "__lightning_obs__"
#: methods that ``copy``, ``deepcopy`` and ``pickle`` call
_COPYING = ("__reduce_ex__", "__deepcopy__")
#: attributes of every nn.Module that are dicts or sets: its hooks, parameters, buffers, submodules
TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]

#: takes one addition out of a module's ``__dict__``, or of a copy of it
TakeOut: TypeAlias = Callable[[dict[str, Any]], None]


class AttributeSetting:
    """Attributes that were set on a module together, and the values that they replaced.

    :func:`set_attributes` makes one for each call; it is on the module's :class:`Mark` until the call is undone.

    Args:
        attributes: the ``__dict__`` of the module; it is changed.
        values: the attributes to set in it.
    """

    def __init__(self, attributes: dict[str, Any], values: dict[str, Any]) -> None:
        self.names = set(values)
        #: the values that the attributes had before; without attributes that did not exist
        self.replaced: dict[str, Any] = {}
        for name in values:
            if name in attributes:
                self.replaced[name] = attributes[name]
        attributes.update(values)

    def restore(self, name: str, attributes: dict[str, Any]) -> None:
        """Give one of the attributes its replaced value in ``attributes``, or remove the attribute if it had no value.

        Called when the setting is undone, and while a module is copied.

        Args:
            name: the name of the attribute.
            attributes: the module's ``__dict__``, a copy of it, or the replaced values of a later setting.
        """
        attributes.pop(name, None)
        if name in self.replaced:
            attributes[name] = self.replaced[name]

    def take_out(self, attributes: dict[str, Any]) -> None:
        """Restore all replaced values in a copy of the module's ``__dict__``; called while the module is copied."""
        for name in self.names:
            self.restore(name, attributes)


@dataclass(eq=False)
class Mark:
    """All that this package knows about one module of the user's and has put on it for a while.

    :func:`make_mark` makes it when the first thing is noted or put on the module. Functions that note facts or put
    things on the module write to it; functions that take them off remove it once it is empty.
    """

    #: the module that has the mark
    module: nn.Module

    # ---- facts that the whole model tells, for as long as the module lives

    #: the module whose accelerate hook brings in this module's parameters; None: it has a hook itself, or needs none
    offload_owner: nn.Module | None = None
    #: parameters that an offloaded model ties to another module's: the name here -> (that module, the name there)
    tied_parameters: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    #: where FSDP1 keeps the parameters that it shards, by name; empty if it keeps them whole on each rank; None: the
    #: module is not known to be under FSDP1
    fsdp_places: dict[str, Place] | None = None
    #: the LoRA layer around this base layer. As a submodule it would make two modules contain each other.
    lora_layer: Any = None
    #: whether the module reads an input whose outliers were moved into its weight (``smooth_inputs``)
    reads_smooth_input: bool = False

    # ---- things that are on the module for a while

    #: the thread of each open ``quantized`` block; it is the same thread in all of them
    quantizing_threads: list[int] = field(default_factory=list)
    #: attributes that are set now, in the order in which they were set
    settings: list[AttributeSetting] = field(default_factory=list)
    #: functions that take hooks, submodules... out of a copy's ``__dict__``, in the order in which these were put on
    take_outs: list[TakeOut] = field(default_factory=list)

    def remove_if_empty(self) -> None:
        """Take the mark off the module if it holds nothing any more; called by all that take a thing off the module."""
        has_owners = self.offload_owner is not None or self.fsdp_places is not None or self.lora_layer is not None
        has_facts = has_owners or self.reads_smooth_input or bool(self.tied_parameters)
        if has_facts or self.quantizing_threads or self.settings or self.take_outs:
            return
        for name in (_ATTRIBUTE, *_COPYING):
            vars(self.module).pop(name, None)

    def copy_by(self, method: str, argument: Any) -> Any:
        """Copy or pickle the module as it is without this package; called by ``copy``, ``deepcopy`` and ``pickle``.

        Args:
            method: ``"__reduce_ex__"`` or ``"__deepcopy__"``, the method of the module's class to call.
            argument: the argument of that method.

        Returns:
            The result of that method.
        """
        attributes = vars(self.module)
        tables = {name: attributes[name] for name in TABLES}
        plain = dict(attributes)
        for name, table in tables.items():
            plain[name] = copy(table)
        for take_out in reversed(self.take_outs):
            take_out(plain)
        for setting in reversed(self.settings):
            setting.take_out(plain)
        for name in (_ATTRIBUTE, *_COPYING):
            plain.pop(name, None)
        for name, table in tables.items():
            if len(plain[name]) == len(table):
                plain[name] = table  # unchanged: a shallow copy shares it, as any attribute
        object.__setattr__(self.module, "__dict__", plain)
        try:
            return getattr(type(self.module), method)(self.module, argument)
        finally:
            object.__setattr__(self.module, "__dict__", attributes)


def mark_of(module: nn.Module) -> Mark | None:
    """The mark of a module; None if it has none.

    A module has a mark only while a fact about it is noted, or something is on it. Called by all that read such facts.
    """
    return vars(module).get(_ATTRIBUTE)


def make_mark(module: nn.Module) -> Mark:
    """The mark of a module; a new one is put on it if it has none.

    Called by every function that notes a fact about a module or puts something on it for a while.
    """
    mark = mark_of(module)
    if mark is None:
        mark = Mark(module)
        vars(module)[_ATTRIBUTE] = mark
        for method in _COPYING:
            if hasattr(type(module), method):
                vars(module)[method] = partial(mark.copy_by, method)
    return mark


def is_inside_quantized(module: nn.Module) -> bool:
    """Whether the module is in a :func:`~lightning_obs.quantized` block now.

    The hooks of a calibration ask it at each call of a module, because calls in such a block are not observed.
    """
    mark = mark_of(module)
    return mark is not None and bool(mark.quantizing_threads)


# ---------------------------------------------------------------------- things that are on a module for a while


def keep_out_of_copies(
    module: nn.Module, take_out: TakeOut, remove: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Keep something that is on a module out of the module's copies.

    Called right after the thing was put on the module: for hooks by :func:`keep_hook_out`, for submodules and attention
    functions by ``forward/attention.py``, and while a model is copied by ``forward/model_copy.py``.

    Args:
        module: any module of the user's.
        take_out: takes the thing out of a copy of the module's ``__dict__``. The tables of torch in this dict (hooks,
            submodules) are copies as well.
        remove: takes the thing off the module itself, if that is another work than for a copy: a hook is removed by its
            handle, and a thing that its caller takes off has a function that does nothing. None: ``take_out`` is called
            with the module's own ``__dict__``.

    Returns:
        A function that takes the thing off the module; ``take_out`` is no longer called for copies then.
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
    """Keep a hook of ``module`` out of its copies; returns a function that removes the hook.

    Called right after each hook of this package is registered on a module of the user's.

    Args:
        module: the module that has the hook.
        handle: the handle that torch returned when the hook was registered.
    """

    def take_out(attributes: dict[str, Any]) -> None:
        for name in TABLES:
            if isinstance(attributes[name], dict):
                attributes[name].pop(handle.id, None)  # no two hooks of a process have the same id

    return keep_out_of_copies(module, take_out, handle.remove)


def set_attributes(module: nn.Module, **attributes: Any) -> Callable[[], None]:
    """Set attributes of the instance, and return a function that restores their earlier values.

    Called to replace a ``forward`` or to set a switch of a user's module for a while.
    """
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
    """An attribute's value from before all :func:`set_attributes` that are in force; None if it had no value.

    ``register_state_change`` (``forward/attention.py``) calls it to see whether the user had switched off the
    quantization of an attention module, by compressed-tensors' attribute ``quantization_enabled``. Settings are kept in
    the order in which they were made, so the first that names the attribute has replaced the user's value.
    """
    mark = mark_of(module)
    for setting in [] if mark is None else mark.settings:
        if name in setting.names:
            return setting.replaced.get(name)
    return vars(module).get(name)
