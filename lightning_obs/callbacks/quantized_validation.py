"""Validate once more, through the quantized model, in the middle of a validation.

``ModelCheckpoint`` and ``EarlyStopping`` need the quantized metrics when the validation ends, so the second pass runs
inside ``on_validation_epoch_end``, before the metrics of the first are computed.

Lightning's own evaluation loop runs it (:mod:`.replayed_loop`): steps, devices, precision, strategies and ``self.log``
work as in the first pass. It has results of its own, calls no callback, and takes the batches as ``validation_step``
got them. The state of the LightningModule and its submodules, except weights, is copied before the first batch, and
the copy is put in place for the second pass. Modules stay the same objects, so wrappers (DDP, FSDP), compiled code and
hooks work on the copy. Each step starts from the random state that it had in the first pass.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.modeling import IMPL_ATTR, KV_CACHE_ATTR
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.copies import Copier, KeptBatches
from lightning_obs.callbacks.lightning_package import (
    TrainerFn,
    collect_rng_states,
    is_param_in_hook_signature,
    isolate_rng,
)
from lightning_obs.callbacks.replayed_loop import Metrics, ReplayedLoop, metrics_of
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.model.module_qparams import CALIBRATED, CHECKSUMS
from lightning_obs.model.wrappers import inside
from lightning_obs.report.predictions import KEPT_BYTES, Moved, Predictions

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: attributes of ``nn.Module`` itself, and of calibration: its modules in attention are there before the first batch
_LEFT_ALONE = {*vars(nn.Module()), *CALIBRATED, IMPL_ATTR, KV_CACHE_ATTR}


class QuantizedValidation:
    """A second pass over the first batches of a validation or a test, a ``share`` in (0, 1] of each loader's."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule, model: nn.Module, share: float) -> None:
        self._trainer, self._pl_module = trainer, pl_module
        loop = trainer._active_loop
        batches = loop.max_batches if loop._is_sequential else [loop._data_fetcher.length or math.inf]
        if share < 1 and any(map(math.isinf, batches)):
            raise CalibrationError(
                "a share of the batches to evaluate needs their number, and a loader does not know it",
                got=f"evaluate={share}",
                remedy="evaluate=True, or Trainer(limit_val_batches=<number>).",
            )
        #: by loader
        self._kept = [
            KeptBatches(KEPT_BYTES / len(batches), math.ceil(n * share) if n < math.inf else n) for n in batches
        ]
        self._start: _State | None = None
        self._metrics: dict[str, dict[str, Any]] = {}  # that the Trainer showed before the first batch
        self._random: tuple[bytes, dict[str, Any]] = b"", {}
        self.moved: Moved | None = None
        #: by name of a metric that was logged as an object of torchmetrics, its direction where it has one
        self.higher_is_better: dict[str, bool] = {}
        self._predictions = Predictions()
        first_pass = ExitStack()
        first_pass.enter_context(self._predictions.kept(model))
        self.close = first_pass.close  # stops keeping the first pass's predictions

    def see(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep a batch that the first pass is about to run; before the first one, copy the LightningModule's state."""
        if self._start is None:
            self._start = _State(self._pl_module)
            self._metrics = metrics_of(self._trainer)
        random = collect_rng_states()
        bits = pickle.dumps(apply_to_collection(random, torch.Tensor, torch.Tensor.numpy))
        if bits != self._random[0]:  # most validations draw none: their states are kept once
            self._random = bits, random
        self._predictions.batch = batch_idx, dataloader_idx
        self._kept[dataloader_idx].add(batch, (batch_idx, dataloader_idx, self._random[1]))

    def run(self, session: CalibrationSession) -> Metrics:
        """Run the calibrated model quantized; every rank must. The batches are gone afterwards.

        Returns:
            ``{"val_loss": (value, further arguments to log it with)}``, reduced over ranks where the user's own
            ``self.log`` is.
        """
        self.close()
        self._agree(session)
        if self._start is None or not any(map(len, self._kept)):
            return {}
        loop = ReplayedLoop(self._trainer, self._kept, self._predictions, self._metrics)
        with ExitStack() as stack:
            stack.enter_context(isolate_rng())
            stack.enter_context(session.in_force())
            stack.enter_context(self._start.in_place())
            # The first pass has moved and changed the batches.
            for hook in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
                vars(self._pl_module)[hook] = lambda batch, *_, **__: batch
            stack.enter_context(quantized(session.model))
            comparison = stack.enter_context(self._predictions.compared(session.model))
            loop.run()
        self._start = None
        self.moved = comparison.reduced(session.collectives)
        self.higher_is_better = loop.higher_is_better
        if not loop.logged:
            step = step_of(self._trainer)
            warn(f"evaluate: {step} logs no metric for the epoch, so there is none of the quantized model.")
        return loop.logged

    def _agree(self, session: CalibrationSession) -> None:
        """Ranks run as many batches as the one that has kept the fewest; print their share."""
        kept = torch.tensor([len(batches) for batches in self._kept], device=session.collectives.device)
        lengths = session.collectives.reduce(kept, "min").tolist()
        for batches, length in zip(self._kept, lengths, strict=True):
            batches.cut(length)
        seen = sum(batches.seen for batches in self._kept)
        if sum(lengths) < seen:
            warn(
                f"evaluate: the quantized model is measured on {sum(lengths)} of {seen} batches, the first of each "
                f"loader: more do not fit in {KEPT_BYTES / 2**30:.1f} GiB, where they are kept for it."
            )


def step_of(trainer: Trainer) -> str:
    """The name of the LightningModule's method that each batch of a validation or a test is given to."""
    return "test_step" if trainer.state.fn == TrainerFn.TESTING else "validation_step"


def require_batches(trainer: Trainer, pl_module: LightningModule, option: str) -> None:
    """Refuse a step that fetches its batches itself (``dataloader_iter``), which nobody else sees; called in setup.

    Only the step of the run that starts counts: none in ``predict``, nor in a fit that does not validate, of which
    ``module.validation_step = None`` is one.

    Raises:
        CalibrationError: naming ``option``, which needs the batches.
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
    """The quantized model's metric; Lightning's number of the loader stays at the end, ``scheme`` tells several apart.

    >>> quantized_name("val_loss/dataloader_idx_1"), quantized_name("val_loss", "FP8")
    ('val_loss_quantized/dataloader_idx_1', 'val_loss_quantized/FP8')
    """
    name, slash, loader = name.partition("/dataloader_idx_")
    return f"{name}_quantized{scheme and '/'}{scheme}{slash}{loader}"


# ---------------------------------------------------------------------- the state of the LightningModule


class _State:
    """Copies of the state, except weights, of a LightningModule, its submodules and the modules in its attributes."""

    def __init__(self, root: nn.Module) -> None:
        #: a dict that holds state, copies of its values, and the names in it that stay as they are
        self._places: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = []
        self._waiting = list(root.modules())
        self._copier = Copier(lambda t: t.detach().clone().requires_grad_(t.requires_grad), self._waiting.append)
        met: set[int] = set()
        with torch.inference_mode(False), torch.no_grad():
            while self._waiting:
                for module in self._waiting.pop().modules():
                    if id(module) not in met:
                        met.add(id(module))
                        self._take(module)

    def _take(self, module: nn.Module) -> None:
        if inside(module) is not None or isinstance(module, torch.jit.ScriptModule):
            return  # its state is torch's: FSDP1 has begun meanwhile
        # FSDP1 puts whole weights beside the parameters.
        left = {name for name in vars(module) if name.startswith("__")} | _LEFT_ALONE | {*module._parameters}
        for held in (vars(module), module._buffers, module._modules):
            copies = {name: self._copier(value) for name, value in held.items() if name not in left}
            self._places.append((held, copies, left))
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = vars(module)[name]
            copies = {key: copied for key, hook in hooks.items() if (copied := self._copier(hook)) is not hook}
            if copies:
                self._places.append((hooks, copies, {*hooks} - {*copies}))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules hold the copies inside the ``with`` block, and their own state afterwards."""
        before = [(held, dict(held)) for held, _, _ in self._places]
        try:
            for held, copies, left in self._places:
                if not all(isinstance(name, str) for name in copies):  # a hook that was removed since stays away
                    copies = {name: value for name, value in copies.items() if name in held}
                stays = {name: value for name, value in held.items() if name in left}
                held.clear()
                held.update(copies | stays)
                held.pop(CHECKSUMS, None)  # scales of an earlier epoch are measured knowingly
            yield
        finally:
            for held, values in before:
                held.clear()
                held.update(values)
