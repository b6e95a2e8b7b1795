"""Validate once more, through the quantized model, in the middle of a validation.

What the user's ``validation_step`` logs of the quantized model belongs beside what it logs of the plain one, in time
for ``ModelCheckpoint`` and ``EarlyStopping``. So the second pass runs inside ``on_validation_epoch_end``, while the
first is not over: its metrics are not computed yet, and the user's lists of outputs are full.

Method: Lightning's own evaluation loop runs it, so that steps, hooks, devices, precision, strategies and ``self.log``
(reductions, ranks, torchmetrics, several loaders) are what they are in the first pass. It gets results and a connector
of its own, and no callbacks. The LightningModule starts it in the state in which it started the first pass: what its
metrics, buffers and plain attributes held then is copied before the first batch, put in place for the second pass, and
replaced by the originals again. Random numbers are those of the first pass too, and do not move on.

The loop and its connector are private to Lightning; the versions that were tried are in pyproject.toml. The trade-off:
the alternative would be to write reductions, loaders and steps of all strategies a second time.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.model.checksums import CHECKSUMS

#: appended to the names of what the second pass logs
SUFFIX = "_quantized"
#: what ``nn.Module`` itself keeps, and this package
_OWN = {*vars(nn.Module()), CHECKSUMS}
_CONTAINERS = (list, set, deque, dict, defaultdict, OrderedDict, Counter)


class QuantizedValidation:
    """A second pass over the validation batches. Make it before the first batch of the first pass.

    Args:
        trainer: in ``on_validation_start``.
        pl_module: the LightningModule.
        model: the module inside of it that will be calibrated.
        share: of each loader's batches, the first ones, in (0, 1].

    Raises:
        CalibrationError: a share of a loader that does not know its length.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, model: nn.Module, share: float = 1.0) -> None:
        self._trainer, self._pl_module, self._model = trainer, pl_module, model
        self._loop = _Loop(trainer, share)
        self._start = _state_of(pl_module, model)

    def run(self) -> dict[str, tuple[torch.Tensor, bool]]:
        """Run the calibrated model quantized.

        Every rank must call this.

        Returns:
            ``{"val_loss_quantized": (value, whether it is shown in the progress bar)}``, reduced over ranks where the
            user's own ``self.log`` is.
        """
        trainer, loop = self._trainer, self._loop
        connector = _Connector(trainer)
        with ExitStack() as stack:
            stack.enter_context(_own_random_numbers(loop.loaders))
            stack.enter_context(_in_state(self._start))
            stack.enter_context(quantized(self._model))
            stack.enter_context(_replaced(trainer, "callbacks", []))
            stack.enter_context(_replaced(trainer, "_logger_connector", connector))
            stack.enter_context(_replaced(*loop.place, loop))
            loop.run()
        if not connector.found:
            warn(
                "evaluate: validation_step logs nothing for a whole epoch, so nothing of the quantized model is known."
            )
        return {_quantized_name(name): (value, name in connector.in_bar) for name, value in connector.found.items()}


class _Loop(_EvaluationLoop):
    """Lightning's evaluation loop over loaders that are there already."""

    def __init__(self, trainer: Trainer, share: float) -> None:
        outer = trainer._active_loop
        super().__init__(trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING, False, outer.inference_mode)
        self._combined_loader = outer._combined_loader
        if share < 1 and any(map(math.isinf, outer.max_batches)):
            raise CalibrationError(
                "a share of the batches of a loader that does not know how many it has",
                got=f"evaluate={share}",
                remedy="evaluate=True, or Trainer(limit_val_batches=<number>).",
            )
        self._max_batches = [n if math.isinf(n) else math.ceil(n * share) for n in outer.max_batches]
        self._random = _collect_rng_states()
        fits = trainer.state.fn == TrainerFn.FITTING
        #: the attribute of which object Lightning finds its loop in
        self.place = (trainer.fit_loop.epoch_loop, "val_loop") if fits else (trainer, "validate_loop")

    @property
    def loaders(self) -> list[Any]:
        """The DataLoaders."""
        return list(self._combined_loader.flattened)

    @override
    def setup_data(self) -> None:
        """They are there: the user's ``val_dataloader`` is not asked again."""

    @override
    def on_run_start(self) -> None:
        """Begin with the random numbers of the first pass: noise in a step is the same noise."""
        _set_rng_states(self._random)
        super().on_run_start()

    @override
    def _on_evaluation_model_eval(self) -> None:
        """It is in evaluation mode already..."""

    @override
    def _on_evaluation_model_train(self) -> None:
        """...and the first pass is not over."""

    @override
    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        """The user's ``on_validation_end`` logs nothing, and may write files: it is called once."""


class _Connector(_LoggerConnector):
    """Collects what is logged for a whole epoch; nothing reaches loggers, the progress bar or callbacks."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.found: dict[str, torch.Tensor] = {}
        self.in_bar: set[str] = set()

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Not to the loggers: the names are those of the first pass."""

    @override
    def update_eval_epoch_metrics(self) -> Any:
        """Keep the values; asked after each loader and at the end."""
        metrics = self.metrics
        self.found.update(metrics["callback"])
        self.in_bar.update(metrics["pbar"])
        return super().update_eval_epoch_metrics()


def _quantized_name(name: str) -> str:
    """Lightning's number of the loader stays at the end.

    >>> _quantized_name("val_loss/dataloader_idx_1")
    'val_loss_quantized/dataloader_idx_1'
    """
    name, slash, loader = name.partition("/dataloader_idx_")
    return f"{name}{SUFFIX}{slash}{loader}"


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _own_random_numbers(loaders: list[Any]) -> Iterator[None]:
    """Draw random numbers inside the ``with`` block; afterwards every generator is where it was."""
    sources = [s for loader in loaders for s in (loader, getattr(loader, "sampler", None))]
    generators = [g for s in sources if isinstance(g := getattr(s, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with isolate_rng():
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


# ---------------------------------------------------------------------- the state of the LightningModule


def _state_of(pl_module: nn.Module, model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Copies of what a validation may change: ``(the dict that holds it, {name: copy})``.

    These are all buffers, and the plain attributes (numbers, tensors, containers of them) of metrics, of the
    LightningModule, and of modules beside the model, except those of torch's own classes. Objects of other classes are
    not copied.
    """
    seen: dict[int, Any] = {}  # metrics of a collection share their states
    inside = set(model.modules()) - {pl_module}
    state = []
    for module in pl_module.modules():
        state.append((module._buffers, {name: _copy(value, seen) for name, value in module._buffers.items()}))
        mine = module not in inside and not type(module).__module__.startswith("torch.")
        if mine or isinstance(module, (Metric, MetricCollection)):
            plain = {name: _copy(value, seen) for name, value in vars(module).items() if name not in _OWN}
            state.append((vars(module), plain))
    return state


@contextmanager
def _in_state(state: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Let the dicts have the copies inside the ``with`` block, and what they had afterwards."""
    originals = [(held, dict(held)) for held, _ in state]
    for held, copies in state:
        held.update(copies)
    try:
        yield
    finally:
        for held, before in originals:
            held.clear()
            held.update(before)


def _copy(value: Any, seen: dict[int, Any]) -> Any:
    """A copy of tensors, arrays and containers, with equal parts where the original has equal parts."""
    if id(value) in seen:
        return seen[id(value)]
    copied = value
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()
    elif isinstance(value, np.ndarray):
        copied = value.copy()
    elif type(value) is tuple:
        copied = tuple(_copy(item, seen) for item in value)
    elif type(value) in _CONTAINERS:
        copied = seen[id(value)] = copy(value)
        copied.clear()
        if isinstance(copied, dict):
            copied.update((key, _copy(item, seen)) for key, item in value.items())
        elif isinstance(copied, set):
            copied.update(value)
        else:
            copied.extend(_copy(item, seen) for item in value)
    seen[id(value)] = copied
    return copied
