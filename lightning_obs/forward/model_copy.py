"""Copy a model for one extra call: the copy shares only the memory of the weights with the model.

A second forward of the model itself would have effects: it fills a cache a second time, counts in buffers and
attributes, and calls the user's hooks. So the model and the arguments of the call are copied together, since a cache
may be in both, and the copy is thrown away after the call.

Hooks whose state belongs to the model (pruning, weight normalization, methods of its modules) are a part of its
arithmetic, and are copied with it. Other hooks (functions, methods of other objects) watch the model: they would see a
call that the user did not make, and are left out.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from lightning_obs.errors import CalibrationError
from lightning_obs.model.kinds import CAPTURES_OUTPUTS
from lightning_obs.model.mark import keep_out_of_copies

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ModelCopy:
    """A copy of a model and of the arguments of a call. No parameter of the copy gets a gradient.

    Made to weigh tokens (``calibration/token_weights.py``): each call of the model runs once more, backward too.

    Args:
        model: the model, in memory; it is not changed.
        args, kwargs: the arguments of the call; tensors in them are detached.

    Attributes:
        model, args, kwargs: the copies.

    Raises:
        CalibrationError: a part of the model, or of the arguments, cannot be copied.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        shared = _shared(model)
        self._memo = dict(shared)
        objects = _objects_of(model)
        with ExitStack() as stack, _DetachedCopies():
            for module in model.modules():
                take_out = functools.partial(_take_out_watchers, objects)
                # The model itself keeps its hooks, so there is nothing to take off. At the end of the block the
                # callback only ends ``take_out`` for later copies.
                stack.callback(keep_out_of_copies(module, take_out, lambda: None))
            try:
                copies = deepcopy((model, args, dict(kwargs)), self._memo)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # of any class that refuses to be copied
                raise _refused(_find_uncopyable(model, shared), f"{type(error).__name__}: {error}") from error
        self.model, self.args, self.kwargs = copies

    def copy_of(self, module: nn.Module) -> nn.Module:
        """Return the copy of one of the model's modules; ``TokenWeights`` registers its hooks on the copy.

        Raises:
            CalibrationError: the model's ``__deepcopy__`` did not copy this module.
        """
        copied = self._memo.get(id(module))
        if not isinstance(copied, nn.Module):
            raise _refused(type(module).__name__, "a __deepcopy__ of the model that copies its modules in another way")
        return copied


def _refused(part: str, got: str) -> CalibrationError:
    """The error to raise for a part of the model that cannot be copied.

    Args:
        part: names the attribute or the class of the part.
        got: the error that copying raised, or the reason, for the message.
    """
    return CalibrationError(
        "the model is run once more as a copy, and a part of it cannot be copied",
        where=[part],
        got=got,
        remedy="give the class of that part a __deepcopy__, keep it outside of the model, or leave out weigh_tokens, "
        "which asks for the copy.",
    )


class _DetachedCopies(TorchFunctionMode):
    """A mode in which ``deepcopy`` gives plain tensors without a history, whatever it copies.

    torch refuses to copy tensors with a history, and copies inference tensors to inference tensors. In this mode both
    are copied to detached clones; torch itself copies all other tensors. :class:`ModelCopy` enters it for its copy.
    """

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if not tensor.is_leaf or tensor.is_inference():
                if id(tensor) not in memo:
                    memo[id(tensor)] = tensor.detach().clone()
                return memo[id(tensor)]
        return function(*args, **(kwargs or {}))


def _shared(model: nn.Module) -> dict[int, Any]:
    """The objects that are not copied, for ``deepcopy``'s memo: by the id of the model's object, the copy's.

    Parameters become new ones on the same memory. Datasets, loaders and tokenizers are shared as they are: a
    LightningModule may hold whole datasets, and tokenizers take long to copy; a forward only reads them.
    """
    shared: dict[int, Any] = {}
    for parameter in model.parameters():
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for module in model.modules():
        for value in vars(module).values():
            if _is_tokenizer(value) or isinstance(value, (Dataset, DataLoader)):
                shared[id(value)] = value
    return shared


def _is_tokenizer(value: Any) -> bool:
    """Whether an attribute has the methods of transformers' tokenizers and processors."""
    return hasattr(value, "save_pretrained") and callable(value) and not isinstance(value, nn.Module)


def _objects_of(model: nn.Module) -> set[int]:
    """The ids of a model's modules and of the objects in their attributes: the owners of hooks that are copied."""
    ids = set()
    for module in model.modules():
        ids.add(id(module))
        ids.update(map(id, vars(module).values()))
    return ids


def _take_out_watchers(objects: set[int], attributes: dict[str, Any]) -> None:
    """Take hooks whose state does not belong to the model out of a copy of a module's ``__dict__``.

    Called for each module while the model is copied, by the module's mark. Hooks of ``torch.nn.utils`` (pruning, weight
    norm) stay. A copied model of transformers installs its hooks that capture hidden states anew.

    Args:
        objects: :func:`_objects_of` the model.
        attributes: the copy of the ``__dict__``. Its tables of hooks are copies as well (:func:`keep_out_of_copies`),
            so the model keeps its hooks.
    """
    for table in _HOOKS:
        for number, hook in list(attributes[table].items()):
            owner = _owner_of(hook)
            is_of_torch = type(owner).__module__.startswith("torch.nn.utils.")
            if owner is None or not (is_of_torch or id(owner) in objects):
                del attributes[table][number]
    attributes.pop(CAPTURES_OUTPUTS, None)


def _owner_of(hook: Callable[..., Any]) -> Any:
    """The object that holds a hook's state; None for a function."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    if isinstance(hook, types.MethodType):
        return hook.__self__
    return None if isinstance(hook, (types.FunctionType, types.BuiltinFunctionType)) else hook


def _find_uncopyable(model: nn.Module, shared: Mapping[int, Any]) -> str:
    """The name of the first attribute of the model's modules that cannot be copied, for the error.

    Called after the copy of the whole model has failed.

    Args:
        model: could not be copied.
        shared: the objects that are not copied (:func:`_shared`).
    """
    modules = {id(module): module for module in model.modules()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules" or attribute in _HOOKS:
                continue
            try:
                deepcopy(value, {**shared, **modules})
            except Exception:
                return f"{name}.{attribute}".lstrip(".")
    return "the arguments of the call"
