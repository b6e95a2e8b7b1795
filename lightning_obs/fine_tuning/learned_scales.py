"""The scales that an optimizer trains, kept by the callback and not by the model.

The model's ``state_dict`` must load without the callback, and the optimizer is made before any range is known. So each
scale is a calibrated constant times ``exp(log_factor)``: the factors are made, all zero, from the plan alone when fit
starts, join the first group of their module's optimizer (with its learning rate and schedule; an optimizer's state is
restored by position), and travel in the callback's state.

Where scales are trained alone, weights in NVFP4 keep the numbers that calibration gave them, the nearest or a
rounding's (``weight_rounded``), and the scale has an exact gradient: a float8 scale moves by 6 to 12 % at a time, too
far for the straight-through gradient of a weight that is rounded again. Weights of the other formats are rounded again.
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
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, scale_shape


class LearnedScales:
    """A log factor for every scale of a plan that can be learned; ``alone``: nothing but scales is trained.

    Learned are static scales of weights, and of activations with one scale per tensor; the others are observed. Scales
    of NVFP4 are learned only alone, because trained weights need another global scale; scales of MX never, because the
    smallest step of a power of two doubles a block.
    """

    def __init__(self, plan: Plan, alone: bool = False) -> None:
        self.alone = alone
        refuse(
            [target.name for target in plan.targets if in_shards(target.module)],
            "scales of sharded weights (FSDP) cannot be learned",
            remedy="use DDP.",
        )
        #: by name, as ``layer.weight``
        self._scales = {
            f"{target.name}.{base_name}": _Scale(target, base_name, shape)
            for target in plan.targets
            for base_name in target.args
            if (shape := _learned_shape(target, base_name, alone)) is not None
        }
        if not self._scales:
            raise CalibrationError(
                "no scale of this scheme can be learned",
                expected="static scales, not powers of two (MX); those of NVFP4 are learned with train='scales'",
                remedy="set train='weights'; every validation observes the ranges again.",
            )
        #: whether no range of an activation is left to data
        self.covers_activations = all(
            f"{target.name}.{base_name}" in self._scales
            for target in plan.targets
            for base_name, args in target.args.items()
            if base_name != "weight" and args.dynamic is not True
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The log factors, in the plan's order."""
        return [scale.factor for scale in self._scales.values()]

    def join(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Add each factor, once, to the first group of the optimizer that trains its module.

        Where scales are trained alone, all other parameters are removed. Empty groups stay: schedulers count them.
        """
        for scale in self._scales.values():
            scale.follow()
        held = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
        places = {}
        for name, scale in self._scales.items():
            module = scale.target.module
            own = {id(p) for p in (adapters_of(module) or module).parameters()}
            places[name] = {at for at, of_one in enumerate(held) if own & of_one}
        # A module that is frozen goes with the others, where all of these are in one optimizer.
        some = set().union(*places.values())
        places = {name: found or some for name, found in places.items()}
        refuse(
            sorted({self._scales[n].target.name for n in places if len(optimizers) > 1 and len(places[n]) != 1}),
            "no single optimizer trains these modules, so it is undecided which one trains their scales",
            got=f"{len(optimizers)} optimizers",
            expected="the parameters of each module in one of them",
            remedy="give them to one optimizer, list the modules in `ignore`, or set train='weights'.",
        )
        present = set().union(*held)
        for name, scale in self._scales.items():
            if id(scale.factor) not in present:
                optimizers[min(places[name], default=0)].param_groups[0]["params"].append(scale.factor)
        if self.alone:
            factors = {id(factor) for factor in self.parameters}
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["params"] = [p for p in group["params"] if id(p) in factors]

    def start(self) -> None:
        """Take the scales that calibration has written to the modules, where none was taken yet."""
        for scale in self._scales.values():
            module, base_name = scale.target.module, scale.base_name
            if scale.calibrated is None and hasattr(module, f"{base_name}_scale"):
                scale.calibrated = getattr(module, f"{base_name}_scale").clone()
            scale.follow()
            if scale.calibrated is not None:
                set_learned_scale(module, base_name, scale.calibrated, scale.factor, scale.stored)
                if scale.stored is not None and not hasattr(module, ROUNDED):
                    setattr(module, ROUNDED, _nearest(module, scale.target.args[base_name]))

    @torch.no_grad()
    def values(self) -> dict[str, torch.Tensor]:
        """The scales now: ``{"layer.weight_scale": tensor}``."""
        return {f"{name}_scale": scale.now() for name, scale in self._scales.items() if scale.calibrated is not None}

    @property
    def has_changed(self) -> bool:
        """Whether a scale differs, as it is stored, from the calibrated one."""
        return any(
            scale.calibrated is not None and not torch.equal(scale.now(), scale.calibrated)
            for scale in self._scales.values()
        )

    def state_dict(self) -> dict[str, Any]:
        """Calibrated scales and factors, by name."""
        scales = self._scales.items()
        return {
            "calibrated": {name: s.calibrated.clone() for name, s in scales if s.calibrated is not None},
            "log_factors": {name: s.factor.detach().clone() for name, s in scales},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a :meth:`state_dict`; the parameters stay the ones that the optimizer has."""
        factors, calibrated = state["log_factors"], state["calibrated"]
        refuse(sorted({*factors} ^ {*self._scales}), "the checkpoint has learned scales of other modules")
        refuse(
            [
                name
                for values in (factors, calibrated)
                for name, scale in self._scales.items()
                if name in values and (values[name].shape != scale.factor.shape or not values[name].isfinite().all())
            ],
            "learned scales of the checkpoint have other shapes, or are not finite",
        )
        for name, scale in self._scales.items():
            scale.factor.copy_(factors[name])
            scale.calibrated = calibrated[name].clone() if name in calibrated else None


class _Scale:
    """A learned scale; ``calibrated`` is its start, once it is known."""

    def __init__(self, target: PlannedModule, base_name: str, shape: tuple[int, ...]) -> None:
        self.target, self.base_name = target, base_name
        self.stored = _stored_dtype(target.args[base_name])
        self.calibrated: torch.Tensor | None = None
        with torch.inference_mode(False):
            device = next(target.module.parameters()).device
            self.factor = nn.Parameter(torch.zeros(shape, device=device))

    def now(self) -> torch.Tensor:
        """The scale, with a gradient to the factor; only once it is calibrated."""
        assert self.calibrated is not None
        return learned_scale(self.calibrated, self.factor, self.stored)

    def follow(self) -> None:
        """Move to the module's device."""
        device = device_of(self.target.module)
        self.factor.data = self.factor.data.to(device)
        self.calibrated = None if self.calibrated is None else self.calibrated.to(device)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter takes a gradient inside the ``with`` block; dropout and batch norms are in evaluation mode."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = (_BatchNorm, _DropoutNd)
    with patch_attrs(trained, "requires_grad", [False] * len(trained)), in_evaluation_mode(model, kinds):
        yield


def _learned_shape(target: PlannedModule, base_name: str, alone: bool) -> tuple[int, ...] | None:
    """Shape of a scale that can be learned; None for the others."""
    args, is_weight = target.args[base_name], base_name == "weight"
    is_static = not args.dynamic and isinstance(getattr(target.module, "weight", None), torch.Tensor)
    if not is_static or not (is_weight or args.strategy == QuantizationStrategy.TENSOR):
        return None
    if _stored_dtype(args) is not None and (not is_weight or not alone or args.scale_dtype == torch.uint8):
        return None
    return scale_shape(target, base_name, args)


@torch.no_grad()
def _nearest(module: nn.Module, args: QuantizationArgs) -> torch.Tensor:
    """The weight ``(R, C)`` in numbers of its format, each the nearest under the module's scale."""
    with held(module) as matrix:
        assert matrix is not None  # it has a scale
        scale, zero_point = module.weight_scale, getattr(module, "weight_zero_point", None)
        number = NumberGrid.of(args).number
        codes = torch.int8 if number is None else number.codes
        global_scale = getattr(module, "weight_global_scale", None)
        return quantize(matrix, scale, zero_point, args, global_scale=global_scale).to(codes)


def _stored_dtype(args: QuantizationArgs) -> torch.dtype | None:
    """The dtype to which a scale is rounded; None: the weight's."""
    return torch.float8_e4m3fn if args.strategy == QuantizationStrategy.TENSOR_GROUP else args.scale_dtype
