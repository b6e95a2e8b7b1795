"""Compare the names in a checkpoint's folder with the names of the module that it is loaded into.

A LightningModule is exported with its own names (``model.encoder.weight``), and often only the module inside it is
wanted later, or the other way round. ``load.py`` asks :func:`prefix_in_folder` for the prefix under which the folder
stores the module's names; if the tensors still do not fit, :func:`hint_of_names` tells the user why.

A path is the name of a module (``model.encoder``); a prefix of a path is a module around it, or the module itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from torch import nn


def prefix_in_folder(model: nn.Module, stored: Sequence[str]) -> str:
    """Return the path at which the exported module held ``model``.

    ``load_checkpoint`` calls it before it compares tensors. The result is empty if the exported module was ``model``
    itself, or if several paths, or no path, are possible.

    Args:
        model: the module to load into.
        stored: the names of the tensors in the folder.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> prefix_in_folder(net, ["model.net.0.weight_packed", "model.net.0.bias"]), prefix_in_folder(net, ["0.weight"])
    ('model.net', '')
    """
    model_paths = _paths_with_tensors(model)
    stored_paths = _paths(stored)
    fitting = []
    for prefix in _common_prefixes(stored_paths):
        inner_paths = {_path_below(prefix, path) for path in stored_paths}
        if inner_paths <= model_paths:
            fitting.append(prefix)
    return fitting[0] if len(fitting) == 1 else ""


def module_around(model: nn.Module, prefix: str) -> nn.Module:
    """Return a new module that holds nothing but ``model``, at the path ``prefix``.

    ``load_checkpoint`` loads into the new module, because its state dict has the names of the folder.
    """
    for name in reversed(prefix.split(".")):
        parent = nn.Module()
        parent.add_module(name, model)
        model = parent
    return model


def hint_of_names(model: nn.Module, stored: Sequence[str]) -> str | None:
    """Return a remedy for loading a folder of a module around ``model``, or of a module inside it.

    Called when the folder's tensors do not fit. None if the names show neither case.

    Args:
        model: the module to load into, which the folder does not fit.
        stored: the names of the tensors in the folder.
    """
    stored_paths = _paths(stored)
    for name, child in model.named_modules():
        if name and stored_paths == _paths_with_tensors(child):
            return f"the folder holds `{name}` of this module: load_checkpoint(module.{name}, folder)."
    model_paths = _paths_with_tensors(model)
    for prefix in _all_prefixes(stored_paths):
        paths_inside = [path for path in stored_paths if _is_below(prefix, path)]
        if model_paths == {_path_below(prefix, path) for path in paths_inside}:
            paths_beside = stored_paths.difference(paths_inside)
            return (
                f"the exported module held this one as `{prefix}`, beside others ({min(paths_beside)}): build that "
                f"module, load_checkpoint(module, folder), and take module.{prefix}."
            )
    return None


def _paths(names: Iterable[str]) -> set[str]:
    """The paths of the modules that have tensors of these names."""
    return {name.rpartition(".")[0] for name in names}


def _paths_with_tensors(model: nn.Module) -> set[str]:
    """The paths of the modules that have tensors in the state dict."""
    return _paths(model.state_dict())


def _is_below(prefix: str, path: str) -> bool:
    """Whether a path is ``prefix`` itself, or the path of a module inside it."""
    return path == prefix or path.startswith(f"{prefix}.")


def _path_below(prefix: str, path: str) -> str:
    """The rest of a path behind ``prefix``: ``"b"`` for ``"a"`` and ``"a.b"``."""
    return path.removeprefix(prefix).removeprefix(".") if prefix else path


def _prefixes(path: str) -> list[str]:
    """Every module on the way to ``path``, itself included: ``["a", "a.b"]`` for ``"a.b"``."""
    return list(accumulate(path.split("."), "{}.{}".format)) if path else []


def _all_prefixes(paths: Collection[str]) -> list[str]:
    """The prefixes of all paths, each once, in an order that depends on the paths alone."""
    prefixes: dict[str, None] = {}
    for path in sorted(paths):
        prefixes |= dict.fromkeys(_prefixes(path))
    return list(prefixes)


def _common_prefixes(paths: Collection[str]) -> list[str]:
    """The prefixes that all paths have in common: the empty prefix, then longer and longer ones."""
    shortest = min(paths, key=len, default="")
    common = [""]
    for prefix in _prefixes(shortest):
        if all(_is_below(prefix, path) for path in paths):
            common.append(prefix)
    return common
