"""Fine-tune through fake quantization, so that the checkpoint gives the numbers that validation saw.

:mod:`.quantized_fit` decides which ranges are in force meanwhile; here are the trained parameters and the loss.

No callback hook can replace the loss: ``on_before_backward`` only reads it, and a second ``backward`` there would
miss gradient accumulation and the loss scale. So ``training_step`` is wrapped while fit runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import move_data_to_device
from lightning_obs.callbacks.quantized_fit import FitKeywords, QuantizedFit
from lightning_obs.errors import CalibrationError, refuse, require_choice, warn
from lightning_obs.fine_tuning.learned_scales import frozen
from lightning_obs.fine_tuning.quantized_training import QuantizedTraining
from lightning_obs.forward.calls import in_evaluation_mode, logits_of
from lightning_obs.model.additions import keep_hook_out, set_attributes
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.weight import adapters_of
from lightning_obs.model.wrappers import drops_inputs
from lightning_obs.schemes.config import SchemeLike, has_rounding

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class QuantizationAwareTraining(QuantizedFit):
    """Train through fake quantization in ``trainer.fit``; validate, test and predict through it too.

    Weights are quantized from the first step on, and their ranges are observed again at every validation. Activations
    pass unquantized until their ranges are known: from an earlier ``trainer.validate`` with this callback, from a
    checkpoint, from the sanity check (``sanity_check=True``), or from the first ``calibration_batches`` training
    batches. Afterwards ``callback.export(folder)`` writes the model of the last validation.

    A ``trainer.validate`` before any of that calibrates as :class:`CalibrationCallback` does; later it measures the
    quantized model, and its data change no activation range.

    Args:
        scheme: as for :class:`CalibrationCallback`.
        train: ``"weights"``; ``"scales"`` alone, from where calibration put them; or ``"all"``, both. Learned scales
            (not those of q, k and v) join the first parameter group of the optimizer that trains their module, and are
            no longer observed. With ``"scales"`` every parameter of the LightningModule is frozen while fit runs.
            NVFP4's block scales are learned with ``"scales"`` only; global scales, zero points and scales of MX never.
        distill: weight of the divergence of the quantized model's logits from the teacher's, added to the loss that
            ``training_step`` returns; ``"only"``: it is the loss; 0: none. Default: ``"only"`` for scales alone,
            else 0. It costs one more forward per step. Logged as ``quant/distillation``.
        teacher: takes the calls that the quantized model takes. None: the model itself, unquantized.
        **options: of :class:`~lightning_obs.callbacks.quantized_fit.QuantizedFit` and
            :class:`~lightning_obs.callbacks.base.SessionCallback`, and the fields of
            :class:`~lightning_obs.CalibrationOptions`.

    Raises:
        CalibrationError: by the constructor for wrong arguments; when fit starts, for a precision whose weights are
            not in float32, or where :class:`CalibrationCallback` raises; at the first step, if nothing will ever
            calibrate the activations.

    Reference:
        Jacob et al., Quantization and Training of Neural Networks, 2018, arXiv:1712.05877, section 3; for
        ``train`` Esser et al., Learned Step Size Quantization, 2020, arXiv:1902.08153.
    """

    @takes_keywords_of(QuantizedFit)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        train: Literal["weights", "scales", "all"] = "weights",
        distill: float | Literal["only"] | None = None,
        teacher: nn.Module | None = None,
        **options: Unpack[FitKeywords],
    ) -> None:
        super().__init__(scheme, **options)
        require_choice("train", train, ("weights", "scales", "all"))
        if distill is None:
            distill = "only" if train == "scales" else 0.0
        if distill != "only" and not (isinstance(distill, (int, float)) and distill >= 0):
            raise CalibrationError("distill", got=repr(distill), expected="zero or more, or 'only'")
        if has_rounding(self.options.config) and train != "scales":
            raise CalibrationError(
                "training the weights undoes their rounding",
                got="QuantizationAwareTraining(rounding=...)",
                remedy="train='scales'; or train without it, then calibrate the trained model with "
                "CalibrationCallback(rounding='gptq').",
            )
        if train == "scales" and not distill:
            raise CalibrationError(
                "train='scales' learns from the unquantized model",
                got="distill=0",
                expected="distill='only', or the weight of its term beside your loss",
            )
        if teacher is not None and not distill:
            raise CalibrationError("a teacher without distill", remedy="set distill, the weight of its term.")
        self.train, self.distill, self.teacher = train, distill, teacher
        self._on_fit = ExitStack()  # closed when fit ends: the LightningModule is as it was

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a model that the user froze: no optimizer could be made of it, nor DDP."""
        super().setup(trainer, pl_module, stage)
        trained = [parameter.requires_grad for parameter in pl_module.parameters()]
        if stage == "fit" and self.train == "scales" and trained and not any(trained):
            raise CalibrationError(
                "every parameter is frozen, so configure_optimizers has nothing to make an optimizer of",
                remedy="leave requires_grad on: fit freezes the parameters, and puts the scales in their place.",
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse setups that cannot train; hand learned scales to the optimizer, wrap the loss."""
        self.require_precision(trainer)
        session = self.prepare(trainer, pl_module)
        refuse(
            [
                name
                for name, module in session.model.named_modules()
                if is_offloaded(module) and any(p.requires_grad for p in module.parameters(recurse=False))
            ],
            "offloaded weights cannot be trained",
            remedy="load the model whole, or freeze them (parameter.requires_grad_(False)) and train the others.",
        )
        refuse(
            [target.name for target in session.plan.targets if drops_inputs(adapters_of(target.module))],
            "adapters with dropout cannot be trained as a part of the quantized weight",
            remedy="set lora_dropout=0 in peft's LoraConfig.",
        )
        assert self._training is not None
        if self._training.learned is not None and trainer.optimizers:
            self._training.learned.join(trainer.optimizers)
        if self.distill:
            if self.teacher is not None and next(self.teacher.parameters()).device.type == "cpu":
                self.teacher.to(pl_module.device)
            step = self._distilling_step(pl_module, session.model, self.logs(trainer))
            self._on_fit.callback(set_attributes(pl_module, training_step=step))

    @staticmethod
    def require_precision(trainer: Trainer) -> None:
        """Refuse a Trainer that trains weights in another precision than they were loaded in."""
        if trainer.precision not in _PRECISIONS:
            raise CalibrationError(
                "training needs weights in the precision that they were loaded in",
                got=f"Trainer(precision={str(trainer.precision)!r})",
                expected=", ".join(_PRECISIONS),
                remedy="use bf16-mixed; for weights in bfloat16 load the model with dtype=torch.bfloat16 and leave "
                "precision at 32-true.",
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze the weights where scales are trained alone."""
        super().on_train_start(trainer, pl_module)
        if self.train == "scales":
            self._on_fit.enter_context(frozen(pl_module))
            if isinstance(trainer.strategy.model, DistributedDataParallel):
                self._on_fit.enter_context(trainer.strategy.model.no_sync())  # it would wait for frozen weights

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe the trained weights; warn if training scales alone has changed none.

        A float8 scale takes a change of 3 to 6 % to become its neighbour.
        """
        super().on_train_end(trainer, pl_module)
        learned = None if self._training is None or self.train != "scales" else self._training.learned
        if learned is not None and trainer.is_global_zero and trainer.global_step and not learned.has_changed:
            warn(f"{self.label}: no scale has changed in {trainer.global_step} steps; raise the learning rate (0.01)")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the gradients of learned scales over ranks; DDP knows only the module's own parameters.

        Not later: a gradient that a loss scale made infinite on one rank must be seen on all before they step.
        """
        if self._training is None or self._training.learned is None or trainer.world_size == 1:
            return
        parameters = self._training.learned.parameters
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        mean = trainer.strategy.reduce(torch.cat([grad.reshape(-1) for grad in grads]), reduce_op="mean")
        for parameter, grad in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.reshape(parameter.shape).clone()

    def _distilling_step(self, pl_module: LightningModule, student: nn.Module, log: bool) -> Callable[..., Any]:
        """The ``training_step``, with the divergence of each call of ``student`` from the teacher's in its loss."""
        if not pl_module.automatic_optimization:
            raise CalibrationError(
                "distill needs automatic optimization",
                remedy="add the divergence in your training_step (callbacks.quantization_aware_training.divergence), "
                "and leave distill=0.",
            )
        assert self._training is not None
        training_step, training = pl_module.training_step, self._training

        @functools.wraps(training_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            calls: list[tuple[Any, Any, Any]] = []
            remember = student.register_forward_hook(lambda m, a, k, out: calls.append((a, k, out)), with_kwargs=True)
            forget = keep_hook_out(student, remember)
            try:
                result = training_step(*args, **kwargs)
            finally:
                forget()
            if result is None:  # the user skips this batch
                return None
            if not calls:
                raise CalibrationError(
                    f"training_step did not call {type(student).__name__}, so there are no logits to distill",
                    remedy="name the module that it calls: QuantizationAwareTraining(module='...').",
                )
            counts = self.mask_of(args[0] if args else kwargs["batch"])
            terms = [divergence(_logits_of(out), _logits_of(self._teach(*a, **k)), counts) for a, k, out in calls]
            mean = torch.stack(terms).mean()
            if log:
                pl_module.log("quant/distillation", mean.detach())
            loss = result["loss"] if isinstance(result, dict) else result
            loss = mean if self.distill == "only" else loss + self.distill * mean
            if not loss.requires_grad and not training.is_quantized and training.learned is not None:
                loss = loss + sum(0 * factor.sum() for factor in training.learned.parameters)
            return {**result, "loss": loss} if isinstance(result, dict) else loss

        return step

    def _teach(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training is not None
        model = self.teacher if self.teacher is not None else self._training.session.model
        if self.teacher is not None:
            args, kwargs = move_data_to_device((args, kwargs), next(self.teacher.parameters()).device)
        with self._training.unquantized(), in_evaluation_mode(model), torch.no_grad():
            return model(*args, **kwargs)

    @override
    def clean_up(self) -> None:
        """Give the model its own forward back, and the LightningModule its ``training_step`` and trained weights."""
        super().clean_up()
        self._on_fit.close()


def can_train(session: CalibrationSession, pl_module: LightningModule) -> bool:
    """Whether :class:`QuantizationAwareTraining` can train a model that was calibrated, with the same options.

    Args:
        session: of the calibration.
        pl_module: holds the model; it may be attached to a Trainer, whose precision is then asked.
    """
    model = session.model
    package = getattr(pl_module.training_step, "__module__", "").partition(".")[0]
    if package in ("", "lightning", "pytorch_lightning"):  # Lightning's own, which trains nothing
        return False
    if any(map(is_offloaded, model.modules())):
        return False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    try:
        if pl_module._trainer is not None:
            QuantizationAwareTraining.require_precision(pl_module.trainer)
        QuantizationAwareTraining(session.options)
        QuantizedTraining(session)
    except CalibrationError:
        return False
    return True


def divergence(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Kullback-Leibler divergence of the student's distribution from the teacher's, in nats, mean over tokens.

    Logits are ``(..., classes)``; ``mask`` is ``(...)``, nonzero for tokens that count. The teacher gets no gradient.
    Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, at temperature 1.

    >>> round(divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[100.0, 0.0]])).item(), 4)
    0.6931
    """
    teacher = teacher.to(student.device)
    if mask is not None and mask.shape == student.shape[:-1]:
        chosen = mask.to(student.device).bool()
        student, teacher = student[chosen], teacher[chosen]
    log_p, log_q = (F.log_softmax(x.float(), dim=-1).flatten(0, -2) for x in (teacher.detach(), student))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def _logits_of(output: Any) -> torch.Tensor:
    """As :func:`logits_of`; of a tuple, its first tensor."""
    is_tuple = isinstance(output, (tuple, list))
    logits = logits_of(next((x for x in output if isinstance(x, torch.Tensor)), None) if is_tuple else output)
    if logits.ndim > 3:
        raise CalibrationError(
            "distill reads logits whose last dimension holds the classes",
            got=f"logits of shape {tuple(logits.shape)}",
            expected="(batch, classes) or (batch, tokens, classes)",
            remedy="wrap the model in a module that returns (batch, positions, classes), or leave distill=0.",
        )
    return logits
