"""What vLLM loads of a compressed-tensors checkpoint, and the hardware that then runs it.

Read from vLLM 0.32.0 (``compressed_tensors.py``, ``compressed_tensors_moe.py``, the lists of kernels in
``kernels/linear``) and held against that release by ``make engines`` (docs/engines.md). vLLM takes the first family
that a scheme fits; its loader refuses a scheme that fits none. Whether vLLM has a model of this architecture is not
checked, except that it has no T5, BART or Marian: an architecture that it lacks does not load unquantized either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import nn
from typing_extensions import override

from lightning_obs.engines.engine import Engine, FusedSets, Hardware
from lightning_obs.errors import CalibrationError, name_list, refuse
from lightning_obs.model.kinds import is_transformers_model, kind_of
from lightning_obs.moe.experts import expert_containers, modules_beside, split_experts
from lightning_obs.schemes.config import describe, describe_scheme, number_format
from lightning_obs.schemes.planned_modules import PlannedModule, find_fused

_VLLM = "vLLM 0.32"
#: families of which a kernel reads negative scales wrongly (Marlin with int8 inputs, vLLM #48926), or was not tried
_POSITIVE_SCALES = ("W4AFP8", "W4A8", "WNA8")
_REMEDY = 'choose another scheme (docs/engines.md lists them), list the modules in `ignore`, or set reload="unchecked".'

_Fits: TypeAlias = "Callable[[QuantizationArgs | None], bool]"


def _is(numbers: str, *strategies: str, **fields: Any) -> _Fits:
    """Whether quantization arguments have one of the number formats, one of the strategies, and these fields."""

    def fits(args: QuantizationArgs | None) -> bool:
        known = args is not None and number_format(args) in numbers.split() and args.strategy in strategies
        return known and all(getattr(args, name) == value for name, value in fields.items())

    return fits


def _full(args: QuantizationArgs | None) -> bool:
    """Whether a tensor stays in full precision."""
    return args is None


@dataclass(frozen=True)
class _Family:
    """Schemes that vLLM runs with the same kernels.

    Attributes:
        weights: whether weights fit.
        inputs: whether inputs fit.
        linear: the hardware that runs Linear modules.
        experts: the least compute capability for experts, times ten; None: refused. No family has a kernel for experts
            on the CPU.
        differs: where vLLM does not compute as the scheme says.
    """

    name: str
    weights: _Fits
    inputs: _Fits
    linear: Hardware
    experts: int | None = None
    differs: str = ""


_CUDA, _CUDA80, _CPU, _AMX = Hardware(75), Hardware(80), Hardware(75, cpu="CPU"), Hardware(75, cpu="CPU with AMX")
_INTS = "int2 int3 int4 int5 int6 int7"
_NVFP4 = _is("float4", "tensor_group", group_size=16, symmetric=True)
_MXFP4 = _is("float4", "group", group_size=32, symmetric=True)
_MXFP8 = _is("float8", "group", group_size=32, scale_dtype=torch.uint8)
_W4AFP8 = _is("int4", "group", group_size=128, symmetric=True)
_FP8_CHANNEL, _FP8_TENSOR = _is("float8", "channel", symmetric=True), _is("float8", "tensor", symmetric=True)
_FP8_EITHER = _is("float8", "tensor", "channel", symmetric=True)
_FP8_TOKENS = _is("float8", "token", dynamic=True)
_FP8_STATIC = _is("float8", "tensor", dynamic=False, symmetric=True)
_MX_FP8_INPUTS = _is("float8", "token", "group", dynamic=True, symmetric=True)
_INT8_CHANNEL, _INT8_EITHER = _is("int8", "channel", symmetric=True), _is("int8", "tensor", "channel", symmetric=True)
_INT8_TOKENS = _is("int8", "token", dynamic=True)
_INT_TOKENS = _is("int4 int8", "token", "group", dynamic=True, symmetric=True)
_A16 = "vLLM quantizes the inputs too where the hardware can, though the scheme leaves them in full precision"
_MX_INPUTS = "where vLLM has no kernel for these inputs (below CUDA 10.0), it quantizes them to MXFP4"
_NO_AMX = "where vLLM has no kernel that quantizes the inputs too (CPUs without AMX), it leaves them alone"

#: in vLLM's order
FAMILIES = (
    _Family("NVFP4A16", _NVFP4, _full, _CUDA, 75),
    _Family("NVFP4", _NVFP4, _NVFP4, _CUDA, 75),
    _Family("MXFP4 weights, FP8 inputs", _MXFP4, _MX_FP8_INPUTS, _CUDA80, None, _MX_INPUTS),
    _Family("MXFP4", _MXFP4, _MXFP4, _CUDA80, 80),
    _Family("MXFP4A16", _MXFP4, _full, _CUDA80, 80, _A16),
    _Family("MXFP8", _MXFP8, _MXFP8, _CUDA, 75),
    _Family("MXFP8A16", _MXFP8, _full, _CUDA, 75, _A16),
    _Family("W4AFP8", _W4AFP8, _FP8_TOKENS, Hardware(90, exact=True), 90),
    _Family("W4A8", _is("int4", "channel", "group"), _INT_TOKENS, _CPU, None, _NO_AMX),  # on CPUs as weight-only
    _Family("WNA8", _is(_INTS, "channel", "group"), _INT_TOKENS, _CUDA),
    _Family("W4A16", _is("int4", "group"), _full, _CPU, 75),
    _Family("W4A16 per channel", _is("int4", "channel"), _full, _CPU),
    _Family("WNA16", _is(f"{_INTS} int8", "group"), _full, _CUDA, 75),
    _Family("WNA16 per channel", _is(f"{_INTS} int8", "channel"), _full, _CUDA),
    _Family("FP8_DYNAMIC", _FP8_CHANNEL, _FP8_TOKENS, _CPU, 75),
    _Family("FP8 in dynamic tensors", _FP8_TENSOR, _is("float8", "tensor", dynamic=True), _CPU, 75),
    _Family("FP8_DYNAMIC, otherwise paired", _FP8_EITHER, _is("float8", "token", "tensor", dynamic=True), _CPU),
    _Family("FP8_BLOCK", _is("float8", "block", symmetric=True), _is("float8", "group", dynamic=True), _AMX, 75),
    _Family("FP8", _FP8_TENSOR, _FP8_STATIC, _AMX, 75),
    _Family("FP8 per channel", _FP8_CHANNEL, _FP8_STATIC, _AMX),
    _Family("FP8 weights", _FP8_EITHER, _full, _CUDA),
    _Family("INT8_STATIC", _INT8_EITHER, _is("int8", "tensor", dynamic=False), _CPU),
    _Family("W8A8", _INT8_CHANNEL, _is("int8", "token", dynamic=True, symmetric=True), _CPU, 75),
    _Family("W8A8 per tensor or asymmetric", _INT8_EITHER, _INT8_TOKENS, _CPU),
)


def family_of(scheme: QuantizationScheme) -> _Family | None:
    """The first family that a scheme fits; None: vLLM's loader refuses it.

    >>> from compressed_tensors.quantization import preset_name_to_scheme
    >>> family_of(preset_name_to_scheme("FP8", ["Linear"])).name
    'FP8'
    """
    if scheme.output_activations is not None:
        return None
    return next((f for f in FAMILIES if f.weights(scheme.weights) and f.inputs(scheme.input_activations)), None)


@Engine.register("vllm")
class VLLM(Engine):
    """vLLM: schemes by family, fused sets and the experts of a layer as a whole, names of the stored tensors."""

    name = "vLLM"

    @override
    def check(self, model: nn.Module, targets: list[PlannedModule], own_sets: FusedSets) -> Hardware | None:
        if not is_transformers_model(model):
            raise CalibrationError(f"vLLM does not load a {type(model).__name__}", expected="a model of transformers")
        if getattr(model.config, "is_encoder_decoder", False) and model.main_input_name == "input_ids":
            raise CalibrationError(
                f"{_VLLM} has no models that read text with an encoder and write it with a decoder",
                got=type(model).__name__,
            )
        refuse(
            [str(t) for t in targets if not t.states and kind_of(t.module).stored_as is not nn.Linear],
            f"{_VLLM} loads quantized Linear modules, no others",
            remedy=_REMEDY,
        )
        found = super().check(model, targets, own_sets)
        for fault in self._wrong_choices(model, targets, own_sets):
            raise fault
        return found

    @override
    def takes(self, target: PlannedModule, is_expert: bool) -> Hardware | None:
        if target.states:
            return _CPU
        family = family_of(target.scheme)
        if family is None or (is_expert and family.experts is None):
            raise CalibrationError(
                f"{_VLLM} has nothing that loads {'experts' if is_expert else 'modules'} in this scheme",
                where=[target.name],
                got=describe_scheme(target.scheme),
                remedy=_REMEDY,
            )
        weights = target.scheme.weights
        if family.name in _POSITIVE_SCALES and weights is not None and (weights.observer_kwargs or {}).get("signed"):
            raise CalibrationError(
                f"{_VLLM} does not read the negative scales of a weight whose inputs are quantized, too",
                where=[target.name],
                got=f"an observer with signed=True, {describe_scheme(target.scheme)}",
                remedy="leave out signed=True, or leave the inputs in full precision (W4A16).",
            )
        return Hardware(family.experts) if is_expert else family.linear

    @override
    def remarks(
        self, model: nn.Module, targets: list[PlannedModule], own_sets: FusedSets, chosen: bool
    ) -> Iterator[str]:
        if not chosen:
            yield from map(str, self._wrong_choices(model, targets, own_sets))
        of_q = [target for target in targets if "q" in target.states]
        named = {name for target in of_q for name in target.scheme.targets}
        if len(named) > 1 or any(not name.endswith("Attention") for name in named):
            kinds = sorted({type(target.module).__name__ for target in of_q})
            yield (
                f"vLLM wants one target that ends in Attention ({', '.join(kinds)}), not {', '.join(sorted(named))}; "
                f"transformers loads it."
            )
        if not chosen:
            return
        differs: dict[str, list[str]] = {}
        for target in targets:
            if not target.states and (family := family_of(target.scheme)) is not None and family.differs:
                differs.setdefault(family.differs, []).append(target.name)
        for text, names in differs.items():
            yield f"{text}: {name_list(names)}"
        if of_q:
            yield f"{_VLLM} does not quantize q, only the kv cache: attention will give other numbers there"

    @override
    def config_names(self, model: nn.Module, names: list[str]) -> dict[str, str]:
        """The names of the stored tensors: ``save_pretrained`` renames modules that transformers renamed on loading."""
        # The function with which save_pretrained itself renames; transformers is not imported here.
        home = sys.modules.get(getattr(type(model), "save_pretrained", family_of).__module__)
        rename = getattr(home, "revert_weight_conversion", None)
        if rename is None:
            return super().config_names(model, names)
        # The value of a stand-in weight says which name its key came from.
        renamed = rename(model, {f"{name}.weight": torch.tensor(index) for index, name in enumerate(names)})
        found = {int(value): key.removesuffix(".weight") for key, value in renamed.items()}
        return {name: found.get(index, name) for index, name in enumerate(names)}

    @override
    def matches_class(self, model: nn.Module, module: nn.Module) -> bool:
        """vLLM's output embedding is no Linear."""
        return module is not getattr(model, "get_output_embeddings", lambda: None)()

    def _wrong_choices(
        self, model: nn.Module, targets: list[PlannedModule], own_sets: FusedSets
    ) -> Iterator[CalibrationError]:
        """What vLLM refuses for the way modules were chosen, and kv caches for their format; not for their scheme."""
        planned = {target.name for target in targets}
        caches = {
            target.name: describe(args)
            for target in targets
            for args in target.states.values()
            if number_format(args) != "float8" or not args.symmetric
        }
        together = "target or ignore them together."
        for where, what, remedy in (
            (
                [*caches],
                f"loads a kv cache in symmetric 8-bit float only, not {next(iter(caches.values()), '')}",
                'kv_cache="FP8" or "FP8_HEAD".',
            ),
            (
                _split_sets(model, targets, [*self.fused_sets, *own_sets]),
                "fuses these modules and wants all of a set quantized or none, but only a part is targeted",
                together,
            ),
            (
                split_experts(model, planned),
                "runs the experts of a layer in one scheme, but only some of their modules are targeted",
                together,
            ),
            (
                _quantized_gates(model, planned),
                "runs most routers or gates of experts in full precision and would not load these quantized",
                "list them in `ignore`.",
            ),
        ):
            if where:
                yield CalibrationError(f"{_VLLM} {what}", where=where, remedy=remedy)


def _split_sets(model: nn.Module, targets: list[PlannedModule], fused_sets: FusedSets) -> list[str]:
    """Fused sets of which only some modules will be quantized: ``"q_proj/k_proj/v_proj in layers.0.self_attn"``."""
    planned, kinds = {t.name for t in targets}, {type(t.module) for t in targets}
    return [
        f"{'/'.join(n.rpartition('.')[2] for n in fused)} in {fused[0].rpartition('.')[0]}"
        for fused in find_fused((n for n, m in model.named_modules() if type(m) in kinds), fused_sets)
        if 0 < sum(name in planned for name in fused) < len(fused)
    ]


def _quantized_gates(model: nn.Module, planned: Container[str]) -> list[str]:
    """Modules that will be quantized and look like routers or gates of experts."""
    return [
        other
        for name, experts in expert_containers(model).items()
        for other, module in modules_beside(model, name)
        if isinstance(module, nn.Linear) and other in planned and module.out_features in (1, len(experts))
    ]
