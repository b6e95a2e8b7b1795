"""The calibration session of the model that a Trainer runs, and the saved state that the session has still to take.

Quantization parameters are saved in the callback's state, not in the model's ``state_dict``: checkpoints load strictly
with and without the callback. Lightning loads the states of callbacks before it moves the model to its device, so a
loaded state is kept here until the session is prepared.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import RESTORES_IN_FIT_ONLY, TrainerFn
from lightning_obs.callbacks.strategies import collectives_of, require_exact
from lightning_obs.callbacks.which_module import find_module
from lightning_obs.errors import CalibrationError, require_kind
from lightning_obs.files.sealed import require_whole
from lightning_obs.model.weight import register_shards, reshard

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class TrainerSession:
    """Makes the session of a Trainer's module, and keeps it from run to run.

    Args:
        module_path: attribute path of the module to calibrate; None: :func:`find_module` chooses it.

    Raises:
        CalibrationError: the path is no text.
    """

    def __init__(self, module_path: str | None) -> None:
        require_kind("module", module_path, (str,), "the attribute path of a module, such as 'model'")
        self.module_path = module_path
        self.session: CalibrationSession | None = None
        #: a state that was loaded from a checkpoint, and that no session has taken yet
        self.saved_state: dict[str, Any] | None = None
        self._pl_module: LightningModule | None = None

    @property
    def pl_module(self) -> LightningModule:
        """The LightningModule that holds the session's model; there is one once the session was prepared."""
        assert self._pl_module is not None
        return self._pl_module

    @property
    def has_calibrated(self) -> bool:
        """Whether the session has quantization parameters, computed or loaded."""
        return self.session is not None and self.session.has_written

    def prepare(self, trainer: Trainer, pl_module: LightningModule, options: CalibrationOptions) -> CalibrationSession:
        """Return the session of the module to calibrate; a new one if the model is another than in the last run.

        Args:
            trainer: runs the model now, or will; its strategy tells how ranks communicate.
            pl_module: holds the module to calibrate.
            options: of a new session.

        Raises:
            CalibrationError: the module cannot be found, or the options do not fit the model or the strategy.
        """
        collectives = collectives_of(trainer)
        if isinstance(trainer.strategy.model, nn.Module):
            register_shards(trainer.strategy.model)  # it may hold parameters of the model that is calibrated
        _, model = find_module(pl_module, self.module_path)
        if self.session is None or self.session.model is not model:
            self.session = CalibrationSession(model, options)
        require_exact(trainer, self.session)
        self.session.begin_run(collectives, is_fitting=trainer.state.fn == TrainerFn.FITTING)
        self._pl_module = pl_module
        return self.session

    def require_calibrated(self) -> CalibrationSession:
        """Return the session.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        if self.session is None or not self.has_calibrated:
            raise CalibrationError(
                "nothing was calibrated yet", remedy="run trainer.validate or trainer.fit with this callback first."
            )
        return self.session

    def finalize(self) -> None:
        """Compute the quantization parameters of the observed data, write them to the modules, and print the result.

        Raises:
            CalibrationError: data are missing or not finite. Nothing was written then.
        """
        assert self.session is not None
        reshard(self.pl_module)
        result = self.session.finalize()
        rank_zero_info(f"{result.scheme}: calibrated {result.line(', ')}")

    def keep_state(self, state: dict[str, Any]) -> None:
        """Keep a checkpoint's state of the callback for the next session; an empty one holds nothing.

        Raises:
            CalibrationError: the state is damaged.
        """
        if state:
            require_whole(state)
        self.saved_state = state or None
        self.session = None

    def take_state(self) -> dict[str, Any] | None:
        """Hand the kept state over to the session that was prepared; None if there is none."""
        state = self.saved_state
        self.saved_state = None
        return state

    def stop(self) -> None:
        """Take the session's hooks off the model. Can be called at any time, any number of times."""
        if self.session is not None:
            self.session.detach()


def state_in_checkpoint(trainer: Trainer, state_key: str) -> dict[str, Any] | None:
    """Read a callback's state from the checkpoint of ``validate``, ``test`` or ``predict`` where Lightning does not.

    Called when one of these starts. The model has the weights of ``ckpt_path`` by then, which need their own scales.

    Args:
        trainer: runs one of the three, or fit, in which Lightning restores callbacks itself.
        state_key: names the callback's state in the checkpoint.

    Returns:
        The state; None if Lightning restores it, or if the checkpoint has none.
    """
    checkpoint_path = trainer.ckpt_path
    if not RESTORES_IN_FIT_ONLY or checkpoint_path is None or trainer.state.fn == TrainerFn.FITTING:
        return None
    if os.path.isdir(checkpoint_path):  # a checkpoint of shards has the callbacks in a file of their own
        checkpoint_path = os.path.join(checkpoint_path, "meta.pt")
    checkpoint = trainer.strategy.checkpoint_io.load_checkpoint(checkpoint_path)
    state: dict[str, Any] | None = checkpoint.get("callbacks", {}).get(state_key)
    return state
