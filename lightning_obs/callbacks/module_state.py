"""The state of a LightningModule at one time, except its weights, for a second pass that starts as the first did.

``validation_step`` appends to lists of the module, updates its metrics, counts in its buffers. A second pass must find
all of this as it was before the first batch, and nothing that it changed may stay afterwards.

So the attributes and buffers of every module are recorded. Metrics of torchmetrics are modules, and their state is
recorded like any other. Modules stay the same objects: wrappers (DDP, FSDP), compiled code and hooks go on working, and
``self.log`` recognizes its metrics. Values of Python's, NumPy's and torch's own types are copied (:meth:`_Copies.of`).
An object of another class is recorded, in place, where its attributes hold plain data alone, as an ``AverageMeter``'s
do. All others are shared by both passes: it is unknown what a copy of a dataset, a lock or a logger would do.

A weight that is computed from a parameter (``torch.nn.utils.prune``, ``spectral_norm``) lies in attributes and buffers.
These stay as they are, too: a ``ModelPruning`` may begin, prune further, or end between the two passes.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from compressed_tensors.modeling import IMPL_ATTR, KV_CACHE_ATTR
from torch import nn
from torch.utils.data import Dataset

from lightning_obs.model.kinds import CAPTURES_OUTPUTS, inside
from lightning_obs.model.module_qparams import CALIBRATED, CHECKSUMS

#: attributes that stay as they are: the tables of ``nn.Module`` itself and the mark that hooks of transformers are in
#: them, results of the calibration in between, and the submodule that computes weights
_UNTOUCHED = frozenset(
    {*vars(nn.Module()), CAPTURES_OUTPUTS, *CALIBRATED, IMPL_ATTR, KV_CACHE_ATTR, "parametrizations"}
)
#: behind the name of a weight that is computed from ``<weight>_orig``: itself, pruning's mask, spectral norm's vectors
_COMPUTED = ("", "_mask", "_u", "_v")
#: dicts that are copied; a user's subclass is shared by both passes
_DICTS = (dict, OrderedDict, defaultdict, Counter)
#: bytes of an object that has a ``__dict__`` and nothing beside it: no slots, no state of a class written in C
_PLAIN_SIZE = type("_Plain", (), {}).__basicsize__
#: random generators of NumPy and Python, which are copied; torch's has a method of its own
_RANDOM_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


class ModuleState:
    """The attributes and buffers of a module, of its submodules, and of modules in lists and dicts that these hold.

    Made by `QuantizedValidation` before the first batch; :meth:`restored` is the block of the second pass.

    Args:
        root: its state is recorded now.
    """

    def __init__(self, root: nn.Module) -> None:
        copies = _Copies()
        self._namespaces = copies.namespaces
        recorded_modules: set[int] = set()  # by id: metrics define == and hash in their own way
        waiting = [root]
        with torch.inference_mode(False), torch.no_grad():
            while waiting:
                module = waiting.pop()
                if id(module) in recorded_modules:
                    continue
                recorded_modules.add(id(module))
                if not _belongs_to_torch(module):
                    self._record(module, copies)
                waiting.extend(module.children())
                waiting.extend(copies.pop_modules())

    def _record(self, module: nn.Module, copies: _Copies) -> None:
        """Record the attributes, buffers and table of submodules of one module.

        Left out are the names that keep their present values in a second pass (:data:`_UNTOUCHED` and weights), and
        names that begin with two underscores: these describe the object for Python and libraries (``__wrapped__`` of
        ``functools.update_wrapper``), and no step changes them.
        """
        special_names = {name for name in vars(module) if name.startswith("__")}
        untouched = _UNTOUCHED.union(special_names, _weight_names(module._parameters))
        for values in (vars(module), module._buffers, module._modules):
            copies.record(values, untouched, module._parameters)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A block in which the modules have the recorded state; afterwards they have their present state again.

        `QuantizedValidation` runs its second pass in it. Everything that changes in the block is lost. Use it once: the
        block changes the recorded state.
        """
        present_values = [dict(namespace.values) for namespace in self._namespaces]
        try:
            for namespace in self._namespaces:
                namespace.restore()
            yield
        finally:
            for namespace, values in zip(self._namespaces, present_values, strict=True):
                namespace.replace(values)


@dataclass(frozen=True)
class _Namespace:
    """A dict in which a module holds its attributes, its buffers or its submodules, or a record its attributes.

    Made by :meth:`_Copies.record` when the state is recorded; :meth:`ModuleState.restored` puts the values back.

    Attributes:
        values: the dict itself.
        recorded: copies of the values, by name.
        untouched: the names whose present values stay.
        parameters: the parameters of the module. After the state was recorded, pruning may have begun to compute a
            weight from a parameter; then the present value of this weight stays as well.
    """

    values: dict[str, Any]
    recorded: dict[str, Any]
    untouched: frozenset[str]
    parameters: dict[str, Any]

    def restore(self) -> None:
        """Put the recorded values in place, and remove names that came since; called when a second pass begins.

        Untouched names, and those of computed weights, keep their present values.
        """
        untouched = self.untouched | _weight_names(self.parameters)
        restored = {}
        for name, value in self.recorded.items():
            if name not in untouched:
                restored[name] = value
        for name, value in self.values.items():
            if name in untouched:
                restored[name] = value
        # The second pass runs quantized, and that is refused for weights that do not have the checksums of their
        # calibration (``module_qparams.changed_since``). In a fit, weights that were trained since then are measured
        # with the earlier scales on purpose; without checksums there is no refusal.
        restored.pop(CHECKSUMS, None)
        self.replace(restored)

    def replace(self, values: dict[str, Any]) -> None:
        """Make the dict hold exactly these ``values``.

        They are the recorded values when a second pass begins, and those from before it when it has ended.
        """
        self.values.clear()
        self.values.update(values)


class _Copies:
    """Copies of values, in which an object that two values share is again one object.

    :class:`ModuleState` makes one for all modules that it records.

    Attributes:
        namespaces: dicts whose values were copied, which stay the same dicts.
    """

    def __init__(self) -> None:
        self.namespaces: list[_Namespace] = []
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept alive, so that no other object gets the id of one
        self._modules: list[nn.Module] = []

    def pop_modules(self) -> list[nn.Module]:
        """The modules that were met in values since the last call, not copied; :class:`ModuleState` records them."""
        modules = self._modules
        self._modules = []
        return modules

    def record(
        self,
        values: dict[str, Any],
        untouched: frozenset[str] = frozenset(),
        parameters: dict[str, Any] | None = None,
    ) -> None:
        """Copy the values of a dict, except the ``untouched`` names; the dict becomes one of ``namespaces``.

        Called for the dicts of a module, and for the attributes of a record. ``parameters`` are the module's, as in
        :class:`_Namespace`; None for a record.
        """
        recorded: dict[str, Any] = {}
        self.namespaces.append(_Namespace(values, recorded, untouched, {} if parameters is None else parameters))
        for name, value in values.items():
            if name not in untouched:
                recorded[name] = self.of(value)

    def of(self, value: Any) -> Any:
        """Return a copy of a tensor, an array, a random generator, or of a list, tuple, dict, set or deque.

        Called for each recorded value, and for the items of lists, tuples (named tuples, too), deques and dicts, which
        are copied in the same way. The items of arrays and sets are not copied.

        Everything else is returned as it is: parameters, modules, numbers, strings, objects of all other classes, and
        of a user's subclasses of arrays, lists, dicts, sets and deques. Modules are noted for :meth:`pop_modules`. The
        attributes of a record (:func:`_is_record`) become one of ``namespaces``.

        An object that was met before gives the same result as then.
        """
        if id(value) in self._copies:
            return self._copies[id(value)]
        if _is_record(value):
            self._originals.append(value)
            self._copies[id(value)] = value
            self.record(vars(value))
            return value
        copied = self._copy(value)
        if copied is not value:
            self._originals.append(value)
            self._copies[id(value)] = copied
        return copied

    def _copy(self, value: Any) -> Any:
        """Copy one value that was not met before and is no record, as :meth:`of` says."""
        if isinstance(value, nn.Module):
            self._modules.append(value)
            return value
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, _RANDOM_GENERATORS):
            return copy.deepcopy(value)
        if type(value) in (np.ndarray, set):
            return value.copy()
        if type(value) is tuple:
            return tuple([self.of(item) for item in value])
        if hasattr(type(value), "_make"):  # a named tuple
            return value._make([self.of(item) for item in value])
        if type(value) in (list, deque, *_DICTS):
            return self._copy_container(value)
        return value

    def _copy_container(self, value: Any) -> Any:
        """Copy a list, deque or dict, and its items by :meth:`of`."""
        copied = copy.copy(value)
        self._copies[id(value)] = copied  # the container may hold itself
        places = value.keys() if isinstance(value, dict) else range(len(value))
        for place in places:
            copied[place] = self.of(value[place])
        return copied


def _weight_names(parameters: dict[str, Any]) -> frozenset[str]:
    """The names under which a module may hold its weights: its parameters', and those of weights computed from them.

    Asked when the state is recorded, and again when it is restored, as pruning may have begun in between.
    """
    names = set(parameters)  # FSDP1 sets whole weights as attributes under these names
    for name in parameters:
        if name.endswith("_orig"):
            weight = name.removesuffix("_orig")
            names.update(weight + ending for ending in _COMPUTED)
    return frozenset(names)


def _is_record(value: Any) -> bool:
    """Whether a value is an object of a Python class whose attributes, all plain data, are its whole state."""
    if isinstance(value, (type, nn.Module, Dataset)) or type(value).__basicsize__ != _PLAIN_SIZE:
        return False
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return bool(attributes) and all(map(_is_data, attributes.values()))


def _is_data(value: Any, containers: frozenset[int] = frozenset()) -> bool:
    """Whether a value is None, a number, a text, a tensor that is no Parameter, an array, or a container of these.

    :func:`_is_record` asks it of each attribute, and the function of each item of a container.

    Args:
        value: the value.
        containers: ids of the containers that hold the value; a container that holds itself is not read again.
    """
    if id(value) in containers:
        return True
    if isinstance(value, dict):
        is_item_data = partial(_is_data, containers=containers | {id(value)})
        return type(value) in _DICTS and all(map(is_item_data, value.values()))
    if type(value) in (list, tuple, set, deque):
        is_item_data = partial(_is_data, containers=containers | {id(value)})
        return all(map(is_item_data, value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return True
    return type(value) is np.ndarray or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


def _belongs_to_torch(module: nn.Module) -> bool:
    """Whether the module's attributes are torch's, and so are not recorded: a wrapper, or compiled code.

    :class:`ModuleState` asks this of each module; the modules inside a wrapper are recorded. A wrapper keeps the state
    of its own work in attributes: FSDP1, say, sets some in its first forward, which a second pass must not take away.
    """
    return inside(module) is not None or isinstance(module, torch.jit.ScriptModule)
