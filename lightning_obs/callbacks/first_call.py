"""Keep the arguments of one call of the calibrated module, so that it can be traced later without an example.

``export_onnx`` and ``export_program`` trace a model. A callback has seen it run; what it needs for them is two samples
of one call, which are copied in the first validation batch, on the device where they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.errors import CalibrationError
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.mark import keep_hook_out

#: torch.export fixes a size of 1, so that a batch whose size may vary is traced with two samples
_SAMPLES = 2


class FirstCall:
    """The arguments of the first observed call of a session's model: positional ones, and those by name."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None  # whose call it is
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._stop_watching: Callable[[], None] | None = None  # None: no call is waited for

    def watch(self, session: CalibrationSession | None) -> None:
        """Keep the next call of the session's model, unless there is one; called before each validation batch."""
        if session is None or session.observation.calls.is_paused:
            return
        if self._model is session.model and (self._call is not None or self._stop_watching is not None):
            return
        self.stop()
        self._call = None
        self._model = session.model
        handle = session.model.register_forward_pre_hook(self._keep, with_kwargs=True)
        self._stop_watching = keep_hook_out(session.model, handle)

    def stop(self) -> None:
        """Wait for no call any more. Can be called at any time, any number of times."""
        if self._stop_watching is not None:
            self._stop_watching()
        self._stop_watching = None

    def require(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call that was kept.

        Args:
            model: of the session.

        Raises:
            CalibrationError: no call was seen.
        """
        if self._call is None or self._model is not model:
            raise CalibrationError(
                f"no validation batch has called {type(model).__name__}, so there is no example to trace it with",
                remedy="give one: export_onnx(file, example), export_program(file, example), or "
                'export_to={"model.onnx": {"example": example}}.',
            )
        return self._call

    def example(self, model: nn.Module, *, is_dynamic: bool) -> tuple[Any, ...] | dict[str, Any]:
        """The example for a writer: positional arguments alone, or else all arguments by name.

        Arguments of a transformers model that are labels are left out.

        Args:
            model: of the session; the example is put on its device.
            is_dynamic: whether sizes may vary in the file. Then there are two samples, else one.

        Raises:
            CalibrationError: no call was seen.
        """
        args, kwargs = call = self.require(model)
        if not is_dynamic:
            args, kwargs = _first_samples(call, 1)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        if not kwargs:
            return tuple(args)
        by_name = inspect.signature(model.forward).bind(*args, **kwargs)
        labels = label_names(model)
        example = {}
        for name, value in _flat(by_name).items():
            if name not in labels:
                example[name] = value
        return example

    @torch.no_grad()
    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook of the model: keep copies of the first samples of a call."""
        self.stop()
        with torch.inference_mode(False):
            samples = _first_samples((args, kwargs), _SAMPLES)
            self._call = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), samples)


def _first_samples(call: Any, count: int) -> Any:
    """The first samples of a call's tensors; the tensors whole, unless all have the same size in their first dimension.

    Args:
        call: tensors in tuples, lists and dicts, beside other values.
        count: of samples.
    """
    sizes = set()
    for value in pytree.tree_leaves(call):
        if isinstance(value, torch.Tensor):
            sizes.add(value.shape[0] if value.ndim else None)
    if len(sizes) != 1 or None in sizes:
        return call
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:count], call)


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments by name, those that the signature gathers in ``**kwargs`` too."""
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        else:
            arguments[name] = value
    return arguments


def label_names(model: nn.Module) -> list[str]:
    """The arguments of a transformers model's forward from which it computes a loss."""
    if not is_transformers_model(model):
        return []
    from transformers.utils import find_labels

    return list(find_labels(type(model)))
