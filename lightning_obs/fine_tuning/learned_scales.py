"""The scales that an optimizer trains, kept by the callback and not by the model.

The model's ``state_dict`` must load without the callback, and the optimizer is made before any range is known. So each
scale is a calibrated constant times ``exp(log_factor)``: the factors are made, all zero, from the plan alone when fit
starts, join the first group of their module's optimizer (its learning rate and its schedule are theirs, and an
optimizer's state is restored by position), and travel in the callback's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.forward.quantized_forward import set_learned_scale
from lightning_obs.model.weight import adapters_of, in_shards
from lightning_obs.numerics.fake_quantize import learned_scale
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, scale_shape


class LearnedScales:
    """A log factor for every scale of a plan that can be learned.

    Learned are static scales of weights, and of activations with one scale per tensor. The others (NVFP4 and MX, whose
    scales are stored rounded) are observed as ever.
    """

    def __init__(self, plan: Plan) -> None:
        refuse(
            [
                t.name
                for t in plan.targets
                if in_shards(t.module) or any(isinstance(p, DTensor) for p in t.module.parameters())
            ],
            "learn_scales is not supported with sharded weights (FSDP)",
            remedy="use DDP.",
        )
        #: by name, as ``layer.weight``
        self._scales = {
            f"{target.name}.{base_name}": _Scale(target, base_name, shape)
            for target in plan.targets
            for base_name, args in target.args.items()
            if (shape := _learned_shape(target, base_name, args)) is not None
        }
        if not self._scales:
            raise CalibrationError(
                "no scale of this scheme can be learned",
                expected="static scales that the checkpoint stores as they are (W4A16, INT8_STATIC, FP8)",
                remedy="set learn_scales=False; every validation observes the ranges anew.",
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
        """Add each factor, once, to the first group of the optimizer that trains its module."""
        for scale in self._scales.values():
            scale.follow()
        held = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
        trained_by = {name: _trained_by(scale.target, held) for name, scale in self._scales.items()}
        # A module that is frozen goes with the others, where all of these are in one optimizer.
        some = set().union(*trained_by.values())
        places = {name: found or some for name, found in trained_by.items()}
        refuse(
            sorted({self._scales[n].target.name for n in places if len(optimizers) > 1 and len(places[n]) != 1}),
            "no single optimizer trains these modules, so it is open which one trains their scales",
            got=f"{len(optimizers)} optimizers",
            expected="the parameters of each module in one of them",
            remedy="give them to one optimizer, list the modules in `ignore`, or set learn_scales=False.",
        )
        present = set().union(*held)
        for name, scale in self._scales.items():
            if id(scale.factor) not in present:
                optimizers[min(places[name], default=0)].param_groups[0]["params"].append(scale.factor)

    def start(self) -> None:
        """Take the scales that calibration has written to the modules, where none was taken yet."""
        for scale in self._scales.values():
            module, base_name = scale.target.module, scale.base_name
            if scale.calibrated is None and hasattr(module, f"{base_name}_scale"):
                scale.calibrated = getattr(module, f"{base_name}_scale").clone()
            scale.follow()
            if scale.calibrated is not None:
                set_learned_scale(module, base_name, scale.calibrated, scale.factor)

    @torch.no_grad()
    def values(self) -> dict[str, torch.Tensor]:
        """The scales now: ``{"layer.weight_scale": tensor}``."""
        return {
            f"{name}_scale": learned_scale(scale.calibrated, scale.factor)
            for name, scale in self._scales.items()
            if scale.calibrated is not None
        }

    def state_dict(self) -> dict[str, Any]:
        """Calibrated scales and factors, by name."""
        scales = self._scales.items()
        return {
            "calibrated": {name: s.calibrated.clone() for name, s in scales if s.calibrated is not None},
            "log_factors": {name: s.factor.detach().clone() for name, s in scales},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the values of a :meth:`state_dict`; the parameters stay the ones that the optimizer has."""
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
        with torch.inference_mode(False), torch.no_grad():
            for name, scale in self._scales.items():
                scale.factor.copy_(factors[name])
                scale.calibrated = calibrated[name].clone() if name in calibrated else None


class _Scale:
    """A scale that is learned; ``calibrated`` is what it starts from, once it is known."""

    def __init__(self, target: PlannedModule, base_name: str, shape: tuple[int, ...]) -> None:
        self.target, self.base_name = target, base_name
        self.calibrated: torch.Tensor | None = None
        with torch.inference_mode(False):
            self.factor = nn.Parameter(torch.zeros(shape))
            self.follow()

    def follow(self) -> None:
        """Go to the device where the module is now."""
        device = next(self.target.module.parameters()).device
        self.factor.data = self.factor.data.to(device)
        self.calibrated = None if self.calibrated is None else self.calibrated.to(device)


def _trained_by(target: PlannedModule, held: Sequence[set[int]]) -> set[int]:
    """Which optimizers have parameters of a module, or of the adapters beside it."""
    adapters = adapters_of(target.module)
    own = {id(p) for p in (target.module if adapters is None else adapters).parameters()}
    return {at for at, of_one in enumerate(held) if own & of_one}


def _learned_shape(target: PlannedModule, base_name: str, args: QuantizationArgs) -> tuple[int, ...] | None:
    """Shape of a scale that can be learned; None for the others."""
    stored_rounded = args.scale_dtype is not None or args.strategy == QuantizationStrategy.TENSOR_GROUP
    one_or_weight = base_name == "weight" or args.strategy == QuantizationStrategy.TENSOR
    has_weight = isinstance(getattr(target.module, "weight", None), torch.Tensor)
    learned = has_weight and one_or_weight and not args.dynamic and not stored_rounded
    return scale_shape(target, base_name, args) if learned else None
