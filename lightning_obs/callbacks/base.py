"""The base of the package's callbacks: the options, a session for the Trainer's module, its state, its end.

Quantization parameters are in the callback's state, not in the model's ``state_dict``: checkpoints load strictly with
or without the callback. Lightning loads callbacks before the model is on its device, so a loaded state waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.token_mask import PADDING, find_mask
from lightning_obs.callbacks.lightning_package import RESTORES_IN_FIT_ONLY, TrainerFn
from lightning_obs.callbacks.results import Results
from lightning_obs.callbacks.strategies import (
    collectives_of,
    leave_in_place,
    repeated_in_batch,
    repeated_samples,
    require_exact,
)
from lightning_obs.callbacks.which_module import describe, find_module
from lightning_obs.errors import CalibrationError, refuse_unknown, require_bool, require_kind, warn
from lightning_obs.files.sealed import require_whole
from lightning_obs.model.checksums import refuse_unmerged
from lightning_obs.model.weight import in_shards, register_fsdp_units, reshard
from lightning_obs.schemes.config import SchemeLike

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class SessionKeywords(OptionKeywords, total=False):
    """The options of both callbacks, for type checkers and editors."""

    module: str | None
    export_folder: str | os.PathLike[str] | None
    export_overwrite: bool
    sanity_check: bool
    token_mask: str | Callable[[Any], torch.Tensor] | None
    log: bool | None


class SessionCallback(Results):
    """A callback that calibrates through a :class:`~lightning_obs.CalibrationSession` of its own.

    Args:
        module: attribute path of the module to calibrate and export; ``""`` is the LightningModule itself. Default: the
            one transformers model that it holds (of several, the one nearest to it); without one its only child with
            weights, if it has no ``forward`` itself; else the LightningModule. The choice is printed at the start.
        export_folder: write the checkpoint there when ``validate`` or ``fit`` has ended, as ``export(export_folder)``
            would; not in ``fast_dev_run``, nor after an error or Ctrl-C. A folder that is taken and a fit without
            validation are errors before the first batch.
        export_overwrite: replace the checkpoint that is in ``export_folder`` before the first run of this callback.
        sanity_check: also calibrate in fit's sanity check (its few batches). Off: nothing is observed there;
            :class:`CalibrationCallback` only warns of layers that its batches do not call.
        token_mask: where to find, in a batch, which tokens count: a key (``"attention_mask"``) or a function of the
            batch. A tensor ``(batch, tokens)``, nonzero for tokens that count; the others (padding) reach no observer.
        log: give the Trainer's loggers ``quant/sqnr_min``, ``quant/clipped_max`` and the other numbers of
            docs/reading_the_report.md, and the table of all layers, once per calibration; no data are run for them.
            Default: if there are loggers.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`: ``targets``, ``ignore``, ``observers``...
    """

    @takes_keywords_of(CalibrationOptions)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        module: str | None = None,
        export_folder: str | os.PathLike[str] | None = None,
        export_overwrite: bool = False,
        sanity_check: bool = False,
        token_mask: str | Callable[[Any], torch.Tensor] | None = None,
        log: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        super().__init__(export_folder, export_overwrite, log)
        refuse_unknown(options, CalibrationOptions.names(type(self)))
        self.options = CalibrationOptions.of(scheme, **options)
        self.label = self.options.label
        require_bool(sanity_check=sanity_check)
        require_kind("module", module, (str,), "the attribute path of a module, such as 'model'")
        require_kind("token_mask", token_mask, (str, Callable), "a key of the batch, or a function of it")
        self.module, self.sanity_check, self.token_mask = module, sanity_check, token_mask
        self._waiting_state: dict[str, Any] | None = None  # loaded, and not taken by a session yet

    @property
    @override
    def state_key(self) -> str:
        """Two calibrations in one Trainer keep their states apart."""
        return str(self._generate_state_key(scheme=self.label, module=self.module))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse setups that would fail in the end; keep an offloaded model where it is."""
        super().setup(trainer, pl_module, stage)
        leave_in_place(trainer, pl_module)
        if self.session is not None:
            self.session.begin_run(self.session.collectives, is_fitting=trainer.state.fn == TrainerFn.FITTING)

    # ------------------------------------------------------------------ the session

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> CalibrationSession:
        """Check the configuration against the model and return the session that the hooks use.

        A scheme that needs no data (``session.needs_data``) can be applied with it at once:
        ``with callback.prepare(trainer, module): pass``.
        """
        collectives = collectives_of(trainer)
        if isinstance(trainer.strategy.model, nn.Module):
            register_fsdp_units(trainer.strategy.model)  # it may hold parameters of the model that is calibrated
        path, model = find_module(pl_module, self.module)
        if self.session is None or self.session.model is not model:
            self.session = self.make_session(model)
            self._copies.register(self)
            rank_zero_info(f"{self.label}: {describe(pl_module, path, self.session)}")
        require_exact(trainer, self.session)
        if self.export_folder is not None and any(map(in_shards, model.modules())):
            refuse_unmerged(model, "export_folder, of sharded weights,")
        self.session.begin_run(collectives, is_fitting=trainer.state.fn == TrainerFn.FITTING)
        self._owner = pl_module
        state, self._waiting_state = self._waiting_state, None
        if state is not None:
            self.take_state(trainer, self.session, state)
        return self.session

    def make_session(self, model: nn.Module) -> CalibrationSession:
        """A session of the module that is calibrated, with this callback's options."""
        return CalibrationSession(model, self.options)

    def take_state(self, trainer: Trainer, session: CalibrationSession, state: dict[str, Any]) -> None:
        """Write a checkpoint's qparams to the modules of a new session."""
        session.load_state_dict(state)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs: tensors, strings and numbers, so that ``weights_only`` loading works.

        On several ranks every rank must call this, as Lightning does.
        """
        if self._waiting_state is not None or self.session is None:
            return self._waiting_state or {}
        return self.state_of(self.session)

    def state_of(self, session: CalibrationSession) -> dict[str, Any]:
        """The state of a session, and this callback's additions."""
        raise NotImplementedError

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved state, if it is whole, until the model is on its device (Lightning loads callbacks before)."""
        if state_dict:
            require_whole(state_dict)
        self._waiting_state = state_dict or None
        self.session = None

    def restore_outside_of_fit(self, trainer: Trainer) -> None:
        """Where Lightning does not, load this callback's state from the checkpoint of validate, test or predict.

        Called when one of them starts. The model has the weights of ``ckpt_path`` then, which need their own scales.
        """
        checkpoint_path = trainer.ckpt_path
        if not RESTORES_IN_FIT_ONLY or checkpoint_path is None or trainer.state.fn == TrainerFn.FITTING:
            return
        if os.path.isdir(checkpoint_path):  # a checkpoint of shards, which has callbacks in a file of their own
            checkpoint_path = os.path.join(checkpoint_path, "meta.pt")
        checkpoint = trainer.strategy.checkpoint_io.load_checkpoint(checkpoint_path)
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state:
            self.load_state_dict(state)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a checkpoint's state; in fit, of a strategy that loads it after ``on_fit_start``."""
        self.restore_outside_of_fit(trainer)
        if self._waiting_state is not None:
            self.prepare(trainer, pl_module)

    on_test_start = on_predict_start = on_train_start

    # ------------------------------------------------------------------ a validation that is observed

    def observe_validation(self, trainer: Trainer, session: CalibrationSession) -> None:
        """Attach the observers for all batches of a validation."""
        loaders = validation_loaders(trainer).values()
        repeated = sum(map(repeated_samples, loaders)) if trainer.world_size > 1 else 0
        if repeated:
            warn(
                f"rank {trainer.global_rank}: DistributedSampler repeats {repeated} sample(s), so that all ranks have "
                "as many. Calibration leaves them out; your own metrics count them twice."
            )
        session.attach(count_calls=False)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Find out which tokens of the batch count: padding does not, nor do samples that a sampler repeated."""
        if self.session is None or not self.session.is_attached:
            return
        mask = self.mask_of(batch)
        loader = list(validation_loaders(trainer).values())[dataloader_idx]
        samples = repeated_in_batch(loader, batch_idx) if trainer.world_size > 1 else None
        if samples is not None:
            mask = samples if mask is None else (mask.T * samples.to(mask.device, mask.dtype)).T
        self.session.mask_tokens(mask)
        self.session.warn_of_padding(batch.get(PADDING) if hasattr(batch, "get") else None)

    def mask_of(self, batch: Any) -> torch.Tensor | None:
        """Which tokens of a batch count; None: all."""
        return None if self.token_mask is None else find_mask(batch, self.token_mask)

    @override
    def on_validation_batch_end(self, *_: Any) -> None:
        """Count the batch, if it was observed."""
        if self.session is not None and self.session.is_attached and not self.session.observation.calls.is_paused:
            self.session.count_batches()

    def finish_calibration(self, session: CalibrationSession, pl_module: LightningModule) -> None:
        """Compute and write the quantization parameters, and print the result."""
        reshard(pl_module)
        result = session.finalize()
        rank_zero_info(f"{result.scheme}: calibrated {result.line(', ')}")

    # ------------------------------------------------------------------ the end, however it comes

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind; Lightning calls no teardown after an exception or Ctrl-C."""
        self.clean_up()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind; write the checkpoint to ``export_folder``."""
        self.clean_up()
        super().teardown(trainer, pl_module, stage)

    def clean_up(self) -> None:
        """Take every hook out. Can be called at any time, any number of times."""
        if self.session is not None:
            self.session.detach()


def require_at_least(least: int, **options: float | None) -> None:
    """Refuse options, by their names, that are below zero or one; None is not."""
    for name, number in options.items():
        if number is not None and not (isinstance(number, (int, float)) and number >= least):
            raise CalibrationError(name, got=number, expected="one or more" if least else "zero or more")


def validation_loaders(trainer: Trainer) -> dict[Any, Any]:
    """The loaders of a validation by number, or by key where they are a dict."""
    loaders = trainer.val_dataloaders
    if isinstance(loaders, Mapping):
        return dict(loaders)
    return dict(enumerate(loaders if isinstance(loaders, (list, tuple)) else [loaders]))
