"""Calibrate in Lightning's validation loop.

Lightning already runs the user's data through the user's model; this callback only watches. It is a thin user of
:class:`~lightning_obs.CalibrationSession`: attach when validation starts, finish when its epoch ends, leave nothing
behind however it ends.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_obs.callbacks.base import SessionCallback


class CalibrationCallback(SessionCallback):
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
            ``kv_cache``, ``on_missing``, ``reload``, ``calibrate_all_experts``, ``fused_groups``,
            ``join_fused_scales``.

    Raises:
        CalibrationError: by the constructor for a wrong option; before the first batch for targets, shapes or devices;
            at a batch without its token mask; at the epoch's end for missing data or values that are not finite.
    """

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
        if not trainer.sanity_checking or self.sanity_check:
            self.observe_validation(trainer, self.prepare(trainer, pl_module))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute and write the quantization parameters; ModelCheckpoint, which runs later, saves them."""
        if self.session is not None and self.session.is_attached:
            self.finish_calibration(self.session, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing behind."""
        self.clean_up()

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
        if self._waiting_state is not None:
            return self._waiting_state
        state = self.session.state_dict() if self.session is not None else {}
        return state if state.get("qparams") else {}

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._waiting_state is not None:
            self.prepare(trainer, pl_module)
