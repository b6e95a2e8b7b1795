"""Names in a checkpoint's folder beside the names of the module that it is loaded into.

A LightningModule is exported with its own names (``model.encoder.weight``), and often only the module inside it is
wanted later, or the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn


def prefix_in_folder(model: nn.Module, stored: Sequence[str]) -> str:
    """The path at which the exported module held ``model``; empty if it was the model itself, or this is not clear.

    Args:
        model: the module to load into.
        stored: the names of the tensors in the folder.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> prefix_in_folder(net, ["model.net.0.weight_packed", "model.net.0.bias"]), prefix_in_folder(net, ["0.weight"])
    ('model.net', '')
    """
    own_paths = _paths_with_tensors(model)
    stored_paths = {_path(name) for name in stored}
    fitting = []
    for prefix in _common_prefixes(stored_paths):
        inner_paths = [_path_below(prefix, path) for path in stored_paths]
        if all(path in own_paths for path in inner_paths):
            fitting.append(prefix)
    return fitting[0] if len(fitting) == 1 else ""


def held_at(prefix: str, model: nn.Module) -> nn.Module:
    """A module that holds ``model`` at the path ``prefix``, and nothing else."""
    for name in reversed(prefix.split(".")):
        holder = nn.Module()
        holder.add_module(name, model)
        model = holder
    return model


def hint_of_names(model: nn.Module, stored: Sequence[str]) -> str | None:
    """A remedy for a folder of a module around ``model``, or inside it; None where the names show neither."""
    stored_paths = {_path(name) for name in stored}
    for name, child in model.named_modules():
        if name and stored_paths == _paths_with_tensors(child):
            return f"the folder holds `{name}` of this module: load_checkpoint(module.{name}, folder)."
    own_paths = _paths_with_tensors(model)
    for prefix in dict.fromkeys(prefix for path in sorted(stored_paths) for prefix in _prefixes(path)):
        inner_paths = {_path_below(prefix, path) for path in stored_paths if _is_below(prefix, path)}
        if own_paths == inner_paths:
            others = sorted(path for path in stored_paths if not _is_below(prefix, path))
            return (
                f"the exported module held this one as `{prefix}`, beside others ({others[0]}): build that module, "
                f"load_checkpoint(module, folder), and take module.{prefix}."
            )
    return None


def _path(name: str) -> str:
    """The path of the module that holds a tensor."""
    return name.rpartition(".")[0]


def _paths_with_tensors(model: nn.Module) -> set[str]:
    return {_path(name) for name in model.state_dict()}


def _is_below(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")


def _path_below(prefix: str, path: str) -> str:
    return path.removeprefix(prefix).removeprefix(".") if prefix else path


def _prefixes(path: str) -> list[str]:
    """Every module on the way to ``path``, itself included: ``["a", "a.b"]`` of ``"a.b"``."""
    return list(accumulate(path.split("."), "{}.{}".format)) if path else []


def _common_prefixes(paths: set[str]) -> list[str]:
    """The prefixes that all paths have, beginning with the empty one."""
    shortest = min(paths, key=len, default="")
    return ["", *(prefix for prefix in _prefixes(shortest) if all(_is_below(prefix, path) for path in paths))]
