"""Validate once more, through the quantized model, in the middle of a validation.

``ModelCheckpoint`` and ``EarlyStopping`` need the quantized metrics when the validation ends, so the second pass runs
inside ``on_validation_epoch_end``, before the metrics of the first are computed.

Lightning's own evaluation loop runs it (:mod:`.replayed_loop`): steps, devices, precision, strategies and ``self.log``
work as in the first pass. It has results of its own, calls no callback, and takes the batches as ``validation_step``
got them. The LightningModule has the state that it had before the first batch (:mod:`.module_state`), and each step
starts from the random state that it had in the first pass.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import (
    TrainerFn,
    collect_rng_states,
    is_param_in_hook_signature,
    isolate_rng,
)
from lightning_obs.callbacks.module_state import ModuleState
from lightning_obs.callbacks.replayed_loop import BatchNote, Metrics, ReplayedLoop, metrics_of
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.eager import unfused
from lightning_obs.forward.kept_batches import KEPT_BYTES, KeptBatches
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.report.predictions import Moved, Predictions

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class QuantizedValidation:
    """A second pass over the first batches of a validation or a test, through the quantized model.

    `QuantizedMetrics` makes one when the validation or test starts, calls :meth:`keep_batch` before each of its
    batches, and :meth:`run` in ``on_validation_epoch_end`` or ``on_test_epoch_end``.

    Args:
        trainer: starts a validation or a test now.
        pl_module: its LightningModule.
        model: the calibrated module inside ``pl_module``.
        share: share of each loader's batches to run, in (0, 1].

    Attributes:
        moved: how far the predictions moved; None before :meth:`run`, and for outputs without logits.
        higher_is_better: by name, the direction of each metric that was logged as a torchmetrics object with a
            direction.

    Raises:
        CalibrationError: a share of a loader without a length.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, model: nn.Module, share: float) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._batches_of_loaders = _empty_batches(trainer, share)
        self._state_at_start: ModuleState | None = None  # until the first batch
        self._metrics_at_start: dict[str, dict[str, Any]] = {}
        self._random_states = _RandomStates()
        self._predictions = Predictions()
        self._first_pass = ExitStack()
        self._first_pass.enter_context(unfused(model))  # as the second pass: torch's fused encoder pads otherwise
        self._first_pass.enter_context(self._predictions.kept(model))
        self.moved: Moved | None = None
        self.higher_is_better: dict[str, bool] = {}

    def keep_batch(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep a batch that the first pass is about to run, with the random states; called before each batch.

        Before the first batch, the state of the module and the Trainer's metrics are recorded. The logits of the first
        pass are kept under the batch's numbers, by which the second pass finds them again.
        """
        if self._state_at_start is None:
            self._state_at_start = ModuleState(self._pl_module)
            self._metrics_at_start = metrics_of(self._trainer)
        self._predictions.batch = batch_idx, dataloader_idx
        note = BatchNote(batch_idx, dataloader_idx, self._random_states.now())
        self._batches_of_loaders[dataloader_idx].add(batch, note)

    def close(self) -> None:
        """Stop keeping predictions of the first pass; called before the second pass, and when the validation ends."""
        self._first_pass.close()

    def run(self, session: CalibrationSession) -> Metrics:
        """Run the kept batches through the quantized model. Every rank must call this.

        Called at the end of the epoch, after the calibration. ``moved`` and ``higher_is_better`` are set here. The loop
        takes each batch out of the kept batches when it runs it, so that none is left.

        Args:
            session: the session that has calibrated the model.

        Returns:
            ``{"val_loss": (value, further arguments to log it with)}``, reduced over ranks where the user's own
            ``self.log`` is. Empty if no batch was kept.
        """
        self.close()
        self._keep_equal_numbers(session)
        if self._state_at_start is None or not any(map(len, self._batches_of_loaders)):
            return {}
        loop = ReplayedLoop(self._trainer, self._batches_of_loaders, self._predictions, self._metrics_at_start)
        with ExitStack() as stack:
            stack.enter_context(isolate_rng())
            stack.enter_context(session.in_force())  # another callback may have written its qparams to the model
            stack.enter_context(self._state_at_start.restored())
            stack.enter_context(_batches_left_as_they_are(self._pl_module))
            stack.enter_context(quantized(session.model))
            comparison = stack.enter_context(self._predictions.compared(session.model))
            loop.run()
        self._state_at_start = None
        self.moved = comparison.reduced(session.collectives)
        self.higher_is_better = loop.higher_is_better
        if not loop.logged:
            step_name = step_of(self._trainer)
            warn(f"evaluate: {step_name} logs no metric for the epoch, so there is none of the quantized model.")
        return loop.logged

    def _keep_equal_numbers(self, session: CalibrationSession) -> None:
        """Make all ranks keep as many batches of each loader as the rank that has kept the fewest; warn of the rest.

        ``offered`` counts the batches that this rank was to keep, at most the share of ``evaluate``. So the
        warning can appear with a share below 1, too: if memory was full, or if another rank has had fewer batches.
        """
        lengths_here = [len(batches) for batches in self._batches_of_loaders]
        collectives = session.collectives
        lengths = collectives.reduce(torch.tensor(lengths_here, device=collectives.device), "min").tolist()
        offered = 0
        for batches, length in zip(self._batches_of_loaders, lengths, strict=True):
            batches.shorten(length)
            offered += batches.offered
        if sum(lengths) < offered:
            warn(
                f"evaluate: the quantized model is measured on {sum(lengths)} of {offered} batches, the first of each "
                f"loader, because the {KEPT_BYTES / 2**30:.1f} GiB for kept batches are full, or another rank has had "
                "fewer batches."
            )


def _empty_batches(trainer: Trainer, share: float) -> list[KeptBatches]:
    """For each loader of the validation that starts, the object that keeps the given share of its batches.

    Loaders that are combined into one batch (not run one after the other) count as one loader. All loaders together
    have ``KEPT_BYTES`` of memory, in equal parts.
    """
    loop = trainer._active_loop
    count_of_combined = loop._data_fetcher.length or math.inf
    counts = loop.max_batches if loop._is_sequential else [count_of_combined]
    if share < 1 and math.inf in counts:
        limit = "limit_test_batches" if step_of(trainer) == "test_step" else "limit_val_batches"
        raise CalibrationError(
            "a share of the batches to evaluate needs their number, and a loader does not know it",
            got=f"evaluate={share}",
            remedy=f"evaluate=True, or Trainer({limit}=<number>).",
        )
    batches_of_loaders = []
    for count in counts:
        batch_limit = count if count == math.inf else math.ceil(count * share)
        batches_of_loaders.append(KeptBatches(KEPT_BYTES / len(counts), batch_limit))
    return batches_of_loaders


@contextmanager
def _batches_left_as_they_are(pl_module: LightningModule) -> Iterator[None]:
    """A block in which Lightning does not move batches: the first pass has moved and changed the kept ones already."""
    attributes = vars(pl_module)
    hooks = ("_on_before_batch_transfer", "_apply_batch_transfer_handler")
    for hook in hooks:
        attributes[hook] = lambda batch, *_, **__: batch
    try:
        yield
    finally:
        for hook in hooks:
            del attributes[hook]


class _RandomStates:
    """States of Python's, NumPy's and torch's random generators at each batch.

    Most validations draw no random numbers. Their states are equal, and are kept once.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._pickled = b""

    def now(self) -> dict[str, Any]:
        """The present states, asked before each batch; the object of the last call if they are the same."""
        states = collect_rng_states()
        pickled = pickle.dumps(apply_to_collection(states, torch.Tensor, torch.Tensor.numpy))
        if pickled != self._pickled:
            self._states = states
            self._pickled = pickled
        return self._states


def step_of(trainer: Trainer) -> str:
    """The name of the LightningModule's step that runs now: ``validation_step`` or ``test_step``.

    Named in errors and warnings.
    """
    return "test_step" if trainer.state.fn == TrainerFn.TESTING else "validation_step"


def require_batches(trainer: Trainer, pl_module: LightningModule, option: str) -> None:
    """Refuse a step that fetches its batches itself (``dataloader_iter``); called in ``setup``.

    Nothing but such a step sees its batches. Only the step that this run calls is checked: none in ``predict``, and
    none in a fit that does not validate (``module.validation_step = None``, for example).

    Args:
        trainer: is about to start.
        pl_module: has the step.
        option: name of the option that needs the batches, for the error.

    Raises:
        CalibrationError: the step takes ``dataloader_iter``.
    """
    fits_only = trainer.state.fn == TrainerFn.FITTING and not trainer.enable_validation
    if fits_only or trainer.state.fn == TrainerFn.PREDICTING:
        return
    name = step_of(trainer)
    step = getattr(pl_module, name)
    if callable(step) and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise CalibrationError(
            f"{option} needs every batch, and a step that takes an iterator fetches its batches itself",
            got=f"{name}(dataloader_iter)",
            remedy=f"{name}(batch, batch_idx), or leave {option} out.",
        )


def quantized_name(name: str, scheme: str = "") -> str:
    """The name under which the quantized model's value of a metric is logged.

    `QuantizedMetrics` asks when it logs the second pass, and `Results` when it pairs the values of both passes.

    Lightning's number of the loader stays at the end. ``scheme`` tells several callbacks apart.

    >>> quantized_name("val_loss/dataloader_idx_1"), quantized_name("val_loss", "FP8")
    ('val_loss_quantized/dataloader_idx_1', 'val_loss_quantized/FP8')
    """
    name, slash, loader = name.partition("/dataloader_idx_")
    return f"{name}_quantized{scheme and '/'}{scheme}{slash}{loader}"
