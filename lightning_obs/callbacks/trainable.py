"""Whether a model can be trained through its quantization, and by this Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.fine_tuning.quantized_training import refuse_weighed_tokens
from lightning_obs.model.kinds import drops_inputs
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.weight import adapters_of
from lightning_obs.schemes.config import has_rounding

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: the Trainer's precisions in which weights keep the dtype in which they were loaded
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def require_precision(trainer: Trainer) -> None:
    """Refuse a Trainer whose precision converts the weights for training.

    Called when a fit of `QuantizationAwareTraining` starts, by the command line before it fine-tunes, and by
    :func:`can_train`.

    Raises:
        CalibrationError: the precision does not keep weights in the dtype in which they were loaded.
    """
    if trainer.precision not in _PRECISIONS:
        raise CalibrationError(
            "training needs weights in the precision that they were loaded in",
            got=f"Trainer(precision={str(trainer.precision)!r})",
            expected=", ".join(_PRECISIONS),
            remedy="use bf16-mixed; for weights in bfloat16 load the model with dtype=torch.bfloat16 and leave "
            "precision at 32-true.",
        )


def require_trainable(session: CalibrationSession) -> None:
    """Refuse a model with weights that cannot be trained; called when a fit of `QuantizationAwareTraining` starts.

    Raises:
        CalibrationError: offloaded parameters that require gradients, or adapters with dropout.
    """
    refuse(
        [name for name, module in session.model.named_modules() if _trains_offloaded(module)],
        "offloaded weights cannot be trained",
        remedy="load the model whole, or freeze them (parameter.requires_grad_(False)) and train the others.",
    )
    refuse(
        [target.name for target in session.plan.targets if drops_inputs(adapters_of(target.module))],
        "adapters with dropout cannot be trained as a part of the quantized weight",
        remedy="set lora_dropout=0 in peft's LoraConfig.",
    )


def can_train(session: CalibrationSession, pl_module: LightningModule) -> bool:
    """Whether a calibrated model can be trained with the options of its calibration.

    False if the LightningModule has no ``training_step`` of its own, if some parameter is offloaded or all are frozen,
    if weights were rounded or tokens weighed, or if a fit of `QuantizationAwareTraining` would be refused at its start.

    ``Results.can_run`` and the command line ask it, to decide whether a report proposes fine-tuning as the next step.

    Args:
        session: the session of the calibration; nothing changes in it or on its model.
        pl_module: holds the model. If it is attached to a Trainer, the Trainer's precision must allow training, too.
    """
    model = session.model
    package = getattr(pl_module.training_step, "__module__", "").partition(".")[0]
    if package in ("", "lightning", "pytorch_lightning"):  # Lightning's own step, which trains nothing
        return False
    if any(is_offloaded(module) for module in model.modules()):
        return False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    if has_rounding(session.options.config):
        return False
    try:
        if pl_module._trainer is not None:
            require_precision(pl_module.trainer)
        require_trainable(session)
        refuse_weighed_tokens(session)
    except CalibrationError:
        return False
    return True


def _trains_offloaded(module: nn.Module) -> bool:
    """Whether a module is offloaded and has parameters of its own that require gradients."""
    if not is_offloaded(module):
        return False
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))
