"""Calibrate in Lightning's validation loop.

Lightning already runs the user's data through the user's model; this callback only watches. It is a thin user of
:class:`~lightning_obs.CalibrationSession`: attach when validation starts, finish when its epoch ends, leave nothing
behind however it ends. The quantization parameters travel in the callback's own state, not in the model's
``state_dict``, so checkpoints load strictly with or without the callback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.token_mask import require_mask
from lightning_obs.callbacks.strategies import collectives_of, repeated_in_batch, repeated_samples, require_exact
from lightning_obs.checkpoint.export import export_checkpoint
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.sharding import in_shards, register_fsdp_units, reshard, unwrapped
from lightning_obs.schemes.config import SchemeLike
from lightning_obs.schemes.options import CalibrationOptions


class CalibrationCallback(Callback):
    """Observe weights and activations during validation and write quantization parameters at the epoch's end.

    Works in ``trainer.validate`` and in the validation of ``trainer.fit`` (each validation calibrates anew; the last
    one stands). Outputs, metrics, ``state_dict`` and the forward of the model stay what they are. Afterwards:
    ``callback.result``, ``callback.export(folder)``, ``quantized(model)``.

    Args:
        scheme: preset name (``"FP8"``, ``"INT8_STATIC"``, ``"W4A16"``...), dict, ``QuantizationConfig``, or
            :class:`~lightning_obs.CalibrationOptions`.
        module: attribute path of the module to calibrate and export. Default: the one transformers model that the
            LightningModule holds, else the LightningModule itself.
        sanity_check: also calibrate in fit's sanity check (its few batches). Off: nothing happens there.
        token_mask: where to find, in a batch, which tokens count: a key (``"attention_mask"``) or a function of the
            batch. A tensor ``(batch, tokens)``, nonzero for tokens that count; the others (padding) reach no observer.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`: ``targets``, ``ignore``, ``observers``,
            ``kv_cache``, ``on_missing``, ``reload``, ``calibrate_all_experts``, ``fused_groups``.

    Raises:
        CalibrationError: by the constructor for a wrong scheme; before the first batch for targets, shapes or devices;
            at a batch without its token mask; at the epoch's end for missing data or values that are not finite.
    """

    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        module: str | None = None,
        sanity_check: bool = False,
        token_mask: str | Callable[[Any], torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.options = CalibrationOptions.of(scheme, **options)
        self.module = module
        self.sanity_check = sanity_check
        self.token_mask = token_mask
        self.session: CalibrationSession | None = None
        self._active = False
        self._loaded: dict[str, Any] | None = None
        self._tokenizer: Any = None
        self._owner: LightningModule | None = None

    @property
    def label(self) -> str:
        """Short name of the scheme, for reports."""
        return self.options.label

    @property
    def ignore(self) -> list[str]:
        """Patterns of modules that are left alone."""
        return list(self.options.config.ignore or [])

    @property
    def result(self) -> CalibrationResult | None:
        """What the last calibration did; None before it."""
        return self.session.result if self.session is not None else None

    @property
    @override
    def state_key(self) -> str:
        """Two calibrations in one Trainer keep their states apart."""
        return str(self._generate_state_key(scheme=self.label, module=self.module))

    def export(self, folder: str | os.PathLike[str], *, tokenizer: Any = None, overwrite: bool = False) -> Path:
        """Write the calibrated module as a compressed-tensors checkpoint (:func:`~lightning_obs.export_checkpoint`).

        On several ranks, rank 0 writes. Under DDP the others return at once; where weights are sharded (FSDP) every
        rank must call this, to gather them. To read the folder on another rank, let ``trainer.strategy.barrier()``
        come first.

        Args:
            folder: written whole or not at all.
            tokenizer: saved beside it; default: the LightningModule's ``tokenizer`` attribute, if it has one.
            overwrite: replace ``folder`` if it is there.

        Raises:
            CalibrationError: no validation has calibrated the model yet, or ``folder`` is there.
        """
        if self.session is None:
            raise CalibrationError(
                "nothing was calibrated yet", remedy="run trainer.validate or trainer.fit with this callback first."
            )
        if self._owner is not None:
            reshard(self._owner)
        sharded = any(map(in_shards, self.session.model.modules()))
        if self.session.collectives.rank != 0 and not sharded:
            return Path(folder)
        return export_checkpoint(
            self.session.model, folder, tokenizer=tokenizer or self._tokenizer, overwrite=overwrite
        )

    # ------------------------------------------------------------------ Lightning's hooks

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a wrong configuration before hours of training; restore the qparams of a resumed run."""
        self.prepare(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the qparams of a resumed run under strategies that load checkpoints after ``on_fit_start``."""
        self._restore(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the observers."""
        if trainer.sanity_checking and not self.sanity_check:
            return
        session = self.prepare(trainer, pl_module)
        repeated = sum(repeated_samples(loader) for loader in _loaders(trainer)) if trainer.world_size > 1 else 0
        if repeated:
            warn(
                f"rank {trainer.global_rank}: DistributedSampler repeats {repeated} sample(s), so that all ranks have "
                "as many. Calibration leaves them out; your own metrics count them twice."
            )
        session.attach(count_calls=False)
        self._active = True

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Find out which tokens of the batch count: padding does not, nor do samples that a sampler repeated."""
        if not self._active or self.session is None:
            return
        mask = None if self.token_mask is None else find_mask(batch, self.token_mask)
        samples = repeated_in_batch(_loaders(trainer)[dataloader_idx], batch_idx) if trainer.world_size > 1 else None
        if samples is not None:
            mask = samples if mask is None else mask * samples.unsqueeze(-1).to(mask.device, mask.dtype)
        self.session.mask_tokens(mask)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count."""
        if self._active and self.session is not None:
            self.session.batches += 1

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute and write the quantization parameters; ModelCheckpoint, which runs later, saves them."""
        if not self._active or self.session is None:
            return
        self._active = False
        reshard(pl_module)
        result = self.session.finalize()
        rank_zero_info(
            f"{result.scheme}: calibrated {len(result.modules)} modules, {result.observers} observers, "
            f"{result.batches} batches{f' x {result.ranks} ranks' if result.ranks > 1 else ''}, {result.seconds:.1f} s"
        )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing behind."""
        self._clean_up()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind; Lightning calls no teardown after an exception or Ctrl-C."""
        self._clean_up()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._clean_up()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the qparams of ``test(ckpt_path=...)``."""
        self._restore(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the qparams of ``predict(ckpt_path=...)``."""
        self._restore(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The quantization parameters: tensors and strings, so that ``weights_only`` loading works."""
        if self._loaded is not None:
            return self._loaded
        state = self.session.state_dict() if self.session is not None else {}
        return state if state.get("qparams") else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved qparams until the model is on its device (Lightning loads callbacks before that)."""
        self._loaded = state_dict or None
        self.session = None

    # ------------------------------------------------------------------ the session behind them

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> CalibrationSession:
        """Check the configuration against the model and return the session that the hooks use.

        A scheme that needs no data (``session.needs_data``) can be applied with it at once:
        ``with callback.prepare(trainer, module): pass``.
        """
        collectives = collectives_of(trainer)
        if isinstance(trainer.strategy.model, nn.Module):
            register_fsdp_units(trainer.strategy.model)  # it may hold parameters of the model that is calibrated
        model = find_module(pl_module, self.module)
        if self.session is None or self.session.model is not model:
            self.session = CalibrationSession(model, self.options)
        require_exact(trainer, self.session)
        self.session.collectives = collectives
        self._owner = pl_module
        candidates = (getattr(pl_module, name, None) for name in ("tokenizer", "processor"))
        self._tokenizer = next((found for found in candidates if hasattr(found, "save_pretrained")), None)
        self._restore_into(self.session)
        return self.session

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded is not None:
            self.prepare(trainer, pl_module)

    def _restore_into(self, session: CalibrationSession) -> None:
        if self._loaded is not None:
            session.load_state_dict(self._loaded)
            self._loaded = None

    def _clean_up(self) -> None:
        self._active = False
        if self.session is not None:
            self.session.detach()


def find_module(pl_module: nn.Module, path: str | None = None) -> nn.Module:
    """The module to calibrate inside a LightningModule.

    Args:
        pl_module: the LightningModule.
        path: attribute path; None looks for the one child that is a transformers model.

    Raises:
        CalibrationError: no such attribute, or several transformers models to choose from.
    """
    if path is not None:
        try:
            found = pl_module.get_submodule(path)
        except AttributeError as error:
            children = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise CalibrationError(
                f"{type(pl_module).__name__} has no module {path!r}", expected=f"one of its modules: {children}"
            ) from error
        return _unwrapped(found)
    models = {n: c for n, c in ((n, _unwrapped(c)) for n, c in pl_module.named_children()) if is_transformers_model(c)}
    if len(models) > 1:
        raise CalibrationError(
            f"{type(pl_module).__name__} holds several transformers models",
            where=list(models),
            remedy='say which one: CalibrationCallback(module="...").',
        )
    return next(iter(models.values()), pl_module)


def find_mask(batch: Any, token_mask: str | Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """The token mask of a batch.

    Args:
        batch: what the DataLoader gives.
        token_mask: a key of the batch, or a function that returns the mask.

    Raises:
        CalibrationError: the batch has no such key.
    """
    if not isinstance(token_mask, str):
        return token_mask(batch)
    try:
        mask = batch[token_mask] if hasattr(batch, "keys") else getattr(batch, token_mask)
    except (KeyError, AttributeError) as error:
        keys = ", ".join(map(str, batch.keys())) if hasattr(batch, "keys") else f"a {type(batch).__name__}"
        raise CalibrationError(
            f"the batch has no {token_mask!r}, which token_mask names",
            got=keys,
            remedy="give the key that holds the mask, a function of the batch, or leave token_mask out.",
        ) from error
    return require_mask(mask, f"{token_mask} of the batch")


def _loaders(trainer: Trainer) -> list[Any]:
    loaders = trainer.val_dataloaders
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside FSDP1's wrapper, torch.compile's and peft's."""
    module = unwrapped(module)
    original = getattr(module, "_orig_mod", module)
    assert isinstance(original, nn.Module)
    original = unwrapped(original)
    if hasattr(original, "peft_config") and hasattr(original, "get_base_model"):
        original = original.get_base_model()  # type: ignore[operator]
    return original
