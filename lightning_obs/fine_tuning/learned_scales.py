"""The scales that an optimizer trains, kept by the callback and not by the model.

The model's ``state_dict`` must load without the callback, and the optimizer is made before any range is known. So each
scale is a calibrated constant times ``exp(log_factor)``: the factors are made, all zero, from the plan alone when fit
starts, join the first group of their module's optimizer (its learning rate and its schedule are theirs, and an
optimizer's state is restored by position), and travel in the callback's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.forward.quantized_forward import set_learned_scale
from lightning_obs.forward.quantized_tensors import LearnedScale
from lightning_obs.model.lora import adapters_of
from lightning_obs.model.sharding import in_shards
from lightning_obs.observers.base import Key
from lightning_obs.schemes.planned_modules import Plan, PlannedModule
from lightning_obs.schemes.stored_qparams import scale_shape


class LearnedScales:
    """A log factor for every scale of a plan that can be learned.

    Learned are static scales of weights, and of activations with one scale per tensor. The others (NVFP4 and MX, whose
    scales are stored rounded) are observed as ever.

    Args:
        plan: what is quantized.

    Raises:
        CalibrationError: no scale of the plan can be learned, or the weights are sharded.
    """

    def __init__(self, plan: Plan) -> None:
        sharded = [
            t.name
            for t in plan.targets
            if in_shards(t.module) or any(isinstance(p, DTensor) for p in t.module.parameters())
        ]
        if sharded:
            raise CalibrationError(
                "learn_scales is not supported with sharded weights (FSDP)", where=sharded, remedy="use DDP."
            )
        self._targets = {target.name: target for target in plan.targets}
        self._factors: dict[Key, nn.Parameter] = {}
        self._calibrated: dict[Key, torch.Tensor] = {}
        with torch.inference_mode(False):
            for target in plan.targets:
                for base_name, args in target.args.items():
                    shape = _learned_shape(target, base_name, args)
                    if shape is not None:
                        device = next(target.module.parameters()).device
                        self._factors[target.name, base_name] = nn.Parameter(torch.zeros(shape, device=device))
        if not self._factors:
            raise CalibrationError(
                "no scale of this scheme can be learned",
                expected="static scales that the checkpoint stores as they are (W4A16, INT8_STATIC, FP8)",
                remedy="set learn_scales=False; every validation observes the ranges anew.",
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The log factors, in the plan's order."""
        return list(self._factors.values())

    def covers(self, base_names: Iterable[str]) -> bool:
        """Whether every static scale of these base names is learned."""
        wanted = set(base_names)
        return all(
            (name, base) in self._factors
            for name, target in self._targets.items()
            for base, args in target.args.items()
            if base in wanted and args.dynamic is not True
        )

    def join(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Add each factor, once, to the first group of the optimizer that trains its module.

        Raises:
            CalibrationError: several optimizers, and none or more than one has parameters of a module.
        """
        held = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
        trained_by = {name: self._trained_by(target, held) for name, target in self._targets.items()}
        # A module that is frozen goes with the others, where all of these are in one optimizer.
        some = {at for found in trained_by.values() for at in found}
        places = {name: found or some for name, found in trained_by.items()}
        refuse(
            sorted({name for name, _ in self._factors if len(places[name]) != 1 and len(optimizers) > 1}),
            "no single optimizer trains these modules, so it is open which one trains their scales",
            got=f"{len(optimizers)} optimizers",
            expected="the parameters of each module in one of them",
            remedy="give them to one optimizer, list the modules in `ignore`, or set learn_scales=False.",
        )
        present = set().union(*held)
        for (name, _), factor in self._factors.items():
            if id(factor) not in present:
                optimizers[min(places[name], default=0)].param_groups[0]["params"].append(factor)

    @staticmethod
    def _trained_by(target: PlannedModule, held: Sequence[set[int]]) -> set[int]:
        """Which optimizers have parameters of a module, or of the adapters beside it."""
        adapters = adapters_of(target.module)
        own = {id(p) for p in (target.module if adapters is None else adapters.layer).parameters()}
        return {at for at, of_one in enumerate(held) if own & of_one}

    def start(self) -> None:
        """Take the scales that calibration has written to the modules, where none was taken yet."""
        for (name, base_name), log_factor in self._factors.items():
            module = self._targets[name].module
            if (name, base_name) not in self._calibrated and hasattr(module, f"{base_name}_scale"):
                self._calibrated[name, base_name] = getattr(module, f"{base_name}_scale").clone()
            if (name, base_name) in self._calibrated:
                calibrated = self._calibrated[name, base_name].to(log_factor.device)
                set_learned_scale(module, base_name, LearnedScale(calibrated, log_factor))

    @torch.no_grad()
    def values(self) -> dict[str, torch.Tensor]:
        """The scales now: ``{"layer.weight_scale": tensor}``."""
        return {
            f"{name}.{base}_scale": LearnedScale(calibrated, self._factors[name, base]).value()
            for (name, base), calibrated in self._calibrated.items()
        }

    def follow(self, plan: Plan) -> None:
        """The same modules were planned anew, perhaps on another device."""
        self._targets = {target.name: target for target in plan.targets}
        for (name, _), parameter in self._factors.items():
            parameter.data = parameter.data.to(next(self._targets[name].module.parameters()).device)

    def state_dict(self) -> dict[str, Any]:
        """Calibrated scales and factors, under the names of the scales."""
        return {
            "calibrated": {_join(key): value.clone() for key, value in self._calibrated.items()},
            "log_factors": {_join(key): value.detach().clone() for key, value in self._factors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the values of a :meth:`state_dict`; the parameters stay the ones that the optimizer has."""
        if set(state["log_factors"]) != {_join(key) for key in self._factors}:
            raise CalibrationError(
                "the checkpoint has learned scales of other modules",
                where=sorted(set(state["log_factors"]) ^ {_join(key) for key in self._factors}),
            )
        saved = [(_join(key), parameter.shape) for key, parameter in self._factors.items()]
        refuse(
            [
                name
                for values in (state["log_factors"], state["calibrated"])
                for name, shape in saved
                if name in values and (values[name].shape != shape or not torch.isfinite(values[name]).all())
            ],
            "learned scales of the checkpoint have other shapes, or are not finite",
        )
        with torch.inference_mode(False), torch.no_grad():
            for key, parameter in self._factors.items():
                parameter.copy_(state["log_factors"][_join(key)])
            self._calibrated = {
                key: state["calibrated"][_join(key)].clone()
                for key in self._factors
                if _join(key) in state["calibrated"]
            }


def _join(key: Key) -> str:
    return f"{key[0]}.{key[1]}"


def _learned_shape(target: PlannedModule, base_name: str, args: QuantizationArgs) -> tuple[int, ...] | None:
    """Shape of a scale that can be learned; None for the others."""
    stored_rounded = args.scale_dtype is not None or args.strategy == QuantizationStrategy.TENSOR_GROUP
    if args.dynamic or stored_rounded or not isinstance(getattr(target.module, "weight", None), torch.Tensor):
        return None
    if base_name != "weight" and args.strategy != QuantizationStrategy.TENSOR:
        return None
    return scale_shape(target, base_name, args)
