"""The scales that an optimizer trains (``train="scales"`` or ``"all"``). The callback keeps them, not the model.

The model's ``state_dict`` must load without the callback, and the optimizer is made before any range is known. So each
scale is a calibrated constant times ``exp(log_factor)``. The factors are made from the plan alone when fit starts, all
zero. They join the first group of their module's optimizer, with its learning rate and schedule (an optimizer's state
is restored by position), and are saved in the callback's state.

If only scales are trained, weights in NVFP4 keep the numbers that calibration gave them, the nearest or a rounding's
(``weight_rounded``), and the scale has an exact gradient: a float8 scale moves by 6 to 12 % at a time, too far for the
straight-through gradient of a weight that is rounded again. Weights of the other formats are rounded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.utils.helpers import patch_attrs
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.forward.calls import in_evaluation_mode
from lightning_obs.forward.quantized_forward import set_learned_scale
from lightning_obs.model.module_qparams import ROUNDED
from lightning_obs.model.offload import device_of
from lightning_obs.model.weight import adapters_of, held, in_shards
from lightning_obs.numerics.fake_quantize import learned_scale
from lightning_obs.numerics.formats import format_of
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, scale_shape


class LearnedScales:
    """A log factor for every scale of a plan that can be learned.

    :class:`.QuantizedTraining` makes one in its constructor, with ``train="scales"`` or ``"all"``.

    Static scales of weights are learned, and static scales of activations with one scale per tensor, if their module
    has a weight; all others are observed. Scales of NVFP4 are learned only if nothing else is trained, because trained
    weights need another global scale. Scales of MX are never learned: the smallest step of a power of two doubles a
    block.

    Args:
        plan: the modules to quantize.
        alone: whether nothing but scales is trained.

    Attributes:
        alone: as given.
        covers_activations: whether all static scales of activations are learned, so that data need not give new ranges.

    Raises:
        CalibrationError: no scale can be learned, or weights are sharded (FSDP).
    """

    def __init__(self, plan: Plan, alone: bool = False) -> None:
        self.alone = alone
        refuse(
            [target.name for target in plan.targets if in_shards(target.module)],
            "scales of sharded weights (FSDP) cannot be learned",
            remedy="use DDP.",
        )
        self._scales: dict[str, _LearnedScale] = {}  # by names such as ``layer.weight``
        self.covers_activations = True
        for target in plan.targets:
            for base_name, args in target.args.items():
                shape = _learned_shape(target, base_name, alone)
                if shape is not None:
                    self._scales[f"{target.name}.{base_name}"] = _LearnedScale(target, base_name, shape)
                elif base_name != "weight" and args.dynamic is not True:
                    self.covers_activations = False
        if not self._scales:
            raise CalibrationError(
                "no scale of this scheme can be learned",
                expected="static scales, not powers of two (MX); those of NVFP4 are learned with train='scales'",
                remedy="set train='weights'; every validation observes the ranges again.",
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The log factors, in the plan's order.

        ``QuantizationAwareTraining`` averages their gradients over ranks after each backward. Distillation reads them
        to give them a gradient of zeros before the first calibration.
        """
        return [scale.log_factor for scale in self._scales.values()]

    def join(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Add each factor to the first group of the optimizer that trains its module, unless it is there already.

        If only scales are trained, all other parameters are removed. Empty groups stay: schedulers count them. The
        callback calls this when a fit starts, after Lightning has made the optimizers.

        Raises:
            CalibrationError: there are several optimizers, and it is undecided which one trains a module's scale.
        """
        for scale in self._scales.values():
            scale.move_to_module()
        optimizer_of = self._optimizers_of_scales(optimizers)
        present: set[int] = set()
        for optimizer in optimizers:
            present |= _parameter_ids(optimizer)
        for name, scale in self._scales.items():
            if id(scale.log_factor) not in present:
                optimizer_of[name].param_groups[0]["params"].append(scale.log_factor)
        if self.alone:
            factor_ids = {id(factor) for factor in self.parameters}
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) in factor_ids]

    def _optimizers_of_scales(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
        """By name of a scale, the optimizer that is to train it; :meth:`join` calls this.

        A single optimizer trains all scales. Of several, it is the optimizer that trains the scale's module. A module
        that is frozen is in no optimizer: its scales go to the optimizer of the other modules, if a single one trains
        all of these.

        Raises:
            CalibrationError: there are several optimizers, and more than one trains a module; or a module is in none,
                and the other modules are not all in one.
        """
        ids_of_optimizers = [_parameter_ids(optimizer) for optimizer in optimizers]
        indices_of_scales: dict[str, set[int]] = {}
        indices_of_all: set[int] = set()
        for name, scale in self._scales.items():
            module = scale.target.module
            module_ids = {id(parameter) for parameter in (adapters_of(module) or module).parameters()}
            indices = {index for index, ids in enumerate(ids_of_optimizers) if ids & module_ids}
            indices_of_scales[name] = indices
            indices_of_all |= indices
        optimizer_of = {}
        undecided = set()
        for name, indices in indices_of_scales.items():
            candidates = indices or indices_of_all
            if len(optimizers) > 1 and len(candidates) != 1:
                undecided.add(self._scales[name].target.name)
            else:
                optimizer_of[name] = optimizers[min(candidates, default=0)]  # 0: a single one, and all modules frozen
        refuse(
            sorted(undecided),
            "no single optimizer trains these modules, so it is undecided which one trains their scales",
            got=f"{len(optimizers)} optimizers",
            expected="the parameters of each module in one of them",
            remedy="give them to one optimizer, list the modules in `ignore`, or set train='weights'.",
        )
        return optimizer_of

    def start(self) -> None:
        """Let each module compute its scale from its factor, beginning at the first scale that calibration wrote.

        ``QuantizedTraining`` calls this whenever calibration may have written scales to the modules. Modules without a
        scale are left out. A factor that was trained already stays.
        """
        for scale in self._scales.values():
            scale.take_calibrated()
            scale.move_to_module()
            if scale.calibrated is not None:
                scale.set_on_module()

    @torch.no_grad()
    def values(self) -> dict[str, torch.Tensor]:
        """The present scales by name, ``{"layer.weight_scale": tensor}``, without those that are not calibrated yet.

        ``QuantizedTraining`` calls this after :meth:`start`, and lets the session write them to the modules.
        """
        scales = {}
        for name, scale in self._scales.items():
            if scale.calibrated is not None:
                scales[f"{name}_scale"] = scale.present_value()
        return scales

    @property
    def has_changed(self) -> bool:
        """Whether training has changed a scale, in the dtype in which it is stored.

        ``QuantizationAwareTraining`` asks this at the end of a fit, to warn if nothing has changed.
        """
        for scale in self._scales.values():
            if scale.calibrated is not None and not torch.equal(scale.present_value(), scale.calibrated):
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Calibrated scales and log factors, by name, as copies.

        ``QuantizedTraining.state_dict`` calls this for the callback's state in a checkpoint.
        """
        calibrated = {}
        log_factors = {}
        for name, scale in self._scales.items():
            log_factors[name] = scale.log_factor.detach().clone()
            if scale.calibrated is not None:
                calibrated[name] = scale.calibrated.clone()
        return {"calibrated": calibrated, "log_factors": log_factors}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values of a :meth:`state_dict` in place; ``QuantizedTraining.load_state_dict`` calls this.

        The parameters stay the same objects, because an optimizer may hold them already.

        Raises:
            CalibrationError: the state is of other modules, of other shapes, or has values that are not finite.
        """
        log_factors = state["log_factors"]
        calibrated = state["calibrated"]
        refuse(sorted(log_factors.keys() ^ self._scales.keys()), "the checkpoint has learned scales of other modules")
        refuse(
            [*self._names_of_unusable(log_factors), *self._names_of_unusable(calibrated)],
            "learned scales of the checkpoint have other shapes, or are not finite",
        )
        for name, scale in self._scales.items():
            scale.log_factor.copy_(log_factors[name])
            scale.calibrated = calibrated[name].clone() if name in calibrated else None

    def _names_of_unusable(self, values: Mapping[str, torch.Tensor]) -> list[str]:
        """The names among ``values`` whose tensor has another shape than the scale, or is not finite."""
        names = []
        for name, scale in self._scales.items():
            if name in values:
                value = values[name]
                if value.shape != scale.log_factor.shape or not value.isfinite().all():
                    names.append(name)
        return names


class _LearnedScale:
    """One learned scale: ``calibrated * exp(log_factor)``; :class:`LearnedScales` makes it and calls its methods.

    Args:
        target: the planned module that has the scale.
        base_name: the tensor that is scaled, such as ``weight``.
        shape: of the scale.

    Attributes:
        target, base_name: as given.
        stored_dtype: the dtype to which the scale is rounded; None: the weight's.
        calibrated: the value at which training starts; None until calibration has written it.
        log_factor: the parameter that an optimizer trains, zero at first.
    """

    def __init__(self, target: PlannedModule, base_name: str, shape: tuple[int, ...]) -> None:
        self.target = target
        self.base_name = base_name
        self.stored_dtype = _stored_dtype(target.args[base_name])
        self.calibrated: torch.Tensor | None = None
        with torch.inference_mode(False):
            device = next(target.module.parameters()).device
            self.log_factor = nn.Parameter(torch.zeros(shape, device=device))

    def present_value(self) -> torch.Tensor:
        """Compute the scale, with a gradient to the factor. The scale must be calibrated.

        Called when scales are written to the modules, and to see whether training has changed them.
        """
        assert self.calibrated is not None
        return learned_scale(self.calibrated, self.log_factor, self.stored_dtype)

    def take_calibrated(self) -> None:
        """Keep the scale that calibration wrote to the module as ``calibrated``, unless a scale is kept already.

        Called by :meth:`LearnedScales.start`, before :meth:`set_on_module`.
        """
        name = f"{self.base_name}_scale"
        if self.calibrated is None and hasattr(self.target.module, name):
            self.calibrated = getattr(self.target.module, name).clone()

    def set_on_module(self) -> None:
        """Make the module's quantized forward compute this scale from the factor.

        A weight whose scale has a ``stored_dtype`` keeps its rounded numbers while the scale is trained. These numbers
        (``weight_rounded``) are computed here, unless a rounding has chosen them.
        """
        module = self.target.module
        assert self.calibrated is not None
        set_learned_scale(module, self.base_name, self.calibrated, self.log_factor, self.stored_dtype)
        if self.stored_dtype is not None and not hasattr(module, ROUNDED):
            setattr(module, ROUNDED, _nearest_numbers(module, self.target.args[self.base_name]))

    def move_to_module(self) -> None:
        """Move factor and calibrated scale to the device that the module is on now.

        The Trainer moves a model to its device before a run, and back to the CPU after it.
        """
        device = device_of(self.target.module)
        self.log_factor.data = self.log_factor.data.to(device)
        if self.calibrated is not None:
            self.calibrated = self.calibrated.to(device)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let no parameter of the model take a gradient inside a ``with`` block.

    Dropout and batch norms are in evaluation mode there. `QuantizationAwareTraining` enters it in ``on_train_start``
    with ``train="scales"``, for the length of the fit.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = (_BatchNorm, _DropoutNd)
    with patch_attrs(trained, "requires_grad", [False] * len(trained)), in_evaluation_mode(model, kinds):
        yield


def _learned_shape(target: PlannedModule, base_name: str, alone: bool) -> tuple[int, ...] | None:
    """The shape of a scale; None if it cannot be learned (:class:`LearnedScales` says which can).

    A module without a weight (a ReLU, attention with quantized states) has no learned scales: a learned scale is moved
    with its module's parameters, which a ReLU does not have, and states are left to the observers.

    Args:
        target: the module that has it.
        base_name: the tensor that is scaled.
        alone: whether nothing but scales is trained.
    """
    args = target.args[base_name]
    is_weight = base_name == "weight"
    has_weight = isinstance(getattr(target.module, "weight", None), torch.Tensor)
    if args.dynamic or not has_weight:
        return None
    if not is_weight and args.strategy != QuantizationStrategy.TENSOR:
        return None
    if _stored_dtype(args) is not None:
        is_mx = args.scale_dtype == torch.uint8
        if is_mx or not is_weight or not alone:
            return None
    return scale_shape(target, base_name, args)


@torch.no_grad()
def _nearest_numbers(module: nn.Module, args: QuantizationArgs) -> torch.Tensor:
    """The weight ``(R, C)`` in numbers of its format, each the nearest under the module's scale, one byte for each."""
    with held(module) as matrix:
        assert matrix is not None  # it has a scale
        numbers = quantize(
            matrix,
            module.weight_scale,
            getattr(module, "weight_zero_point", None),
            args,
            global_scale=getattr(module, "weight_global_scale", None),
        )
    float_format = format_of(args)  # None for integers
    dtype_of_byte = torch.int8 if float_format is None else float_format.codes
    return numbers.to(dtype_of_byte)


def _stored_dtype(args: QuantizationArgs) -> torch.dtype | None:
    """The dtype to which a scale is rounded: float8 for NVFP4, ``uint8`` for MX; None: the weight's."""
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        return torch.float8_e4m3fn
    return args.scale_dtype


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer trains."""
    ids: set[int] = set()
    for group in optimizer.param_groups:
        ids.update(map(id, group["params"]))
    return ids
