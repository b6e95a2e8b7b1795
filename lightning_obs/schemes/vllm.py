"""What vLLM loads of a compressed-tensors checkpoint, and what hardware then runs it.

Read from vLLM 0.32.0 (``compressed_tensors.py``, ``compressed_tensors_moe.py``, the lists of kernels in
``kernels/linear``) and held against that release by ``make engines`` (docs/engines.md). vLLM decides by family, the
first that fits; what fits none, its loader refuses. Which of vLLM's models a checkpoint belongs to is not looked at
(but that it has no T5, BART or Marian): a model that it does not have, it does not load in full precision either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from torch import nn

from lightning_obs.errors import CalibrationError, name_list, refuse, warn
from lightning_obs.model.kinds import compressible_type
from lightning_obs.moe.experts import linear_experts
from lightning_obs.schemes.config import describe
from lightning_obs.schemes.preflight import gates, partly_fused, partly_planned
from lightning_obs.schemes.target import Target

VLLM = "vLLM 0.32"
_CHANNEL, _GROUP = QuantizationStrategy.CHANNEL, QuantizationStrategy.GROUP
_TENSOR, _TOKEN, _BLOCK = QuantizationStrategy.TENSOR, QuantizationStrategy.TOKEN, QuantizationStrategy.BLOCK
_REMEDY = 'choose another scheme (docs/engines.md lists them), list the modules in `ignore`, or set reload="unchecked".'


@dataclass(frozen=True)
class Hardware:
    """What runs a checkpoint.

    Attributes:
        cuda: least compute capability, times ten; None: no kernel for CUDA.
        exact: that capability only.
        cpu: ``"CPU"``, ``"CPU with AMX"``, or empty: no kernel for the CPU.
    """

    cuda: int | None
    exact: bool = False
    cpu: str = ""

    def __str__(self) -> str:
        cuda = "" if self.cuda is None else f"CUDA {self.cuda / 10:.1f}{'' if self.exact else ' or newer'}"
        return ", ".join(filter(None, (self.cpu, cuda))) or "no hardware"

    def and_(self, other: Hardware) -> Hardware:
        """What runs both."""
        both = None if self.cuda is None or other.cuda is None else max(self.cuda, other.cuda)
        if both is not None and any(each.exact and each.cuda != both for each in (self, other)):
            both = None
        cpu = max(self.cpu, other.cpu, key=len) if self.cpu and other.cpu else ""
        return Hardware(both, self.exact or other.exact, cpu)


@dataclass(frozen=True)
class _Family:
    """Schemes that vLLM runs alike.

    Attributes:
        fits: asked of weights and inputs.
        linear: what runs it in Linear modules.
        experts: the least capability for experts; None: refused. Quantized experts have no kernel for the CPU.
        differs: what vLLM computes in another way than the scheme says, if it does.
    """

    name: str
    fits: Callable[[QuantizationArgs, QuantizationArgs | None], bool]
    linear: Hardware
    experts: int | None = None
    differs: str = ""


def _integers(weights: QuantizationArgs, bits: range, *strategies: QuantizationStrategy) -> bool:
    return weights.type == "int" and weights.num_bits in bits and weights.strategy in strategies


def _dynamic(inputs: QuantizationArgs | None, kind: str, *strategies: QuantizationStrategy, bits: int = 8) -> bool:
    is_kind = inputs is not None and inputs.type == kind and inputs.num_bits == bits
    return is_kind and inputs is not None and inputs.dynamic is True and inputs.strategy in strategies


def _nvfp4(args: QuantizationArgs | None) -> bool:
    return _float4(args, QuantizationStrategy.TENSOR_GROUP, 16)


def _mxfp4(args: QuantizationArgs | None) -> bool:
    return _float4(args, _GROUP, 32)


def _float4(args: QuantizationArgs | None, strategy: QuantizationStrategy, size: int) -> bool:
    is_float4 = args is not None and args.type == "float" and args.num_bits == 4 and bool(args.symmetric)
    return is_float4 and args is not None and args.strategy == strategy and args.group_size == size


def _mxfp8(args: QuantizationArgs | None) -> bool:
    is_float8 = args is not None and args.type == "float" and args.num_bits == 8 and args.strategy == _GROUP
    return is_float8 and args is not None and args.group_size == 32 and args.scale_dtype == torch.uint8


def _fp8(weights: QuantizationArgs, *strategies: QuantizationStrategy) -> bool:
    is_float8 = weights.type == "float" and weights.num_bits == 8 and bool(weights.symmetric)
    return is_float8 and weights.strategy in strategies


def _static_fp8(inputs: QuantizationArgs | None) -> bool:
    return _static_tensor(inputs, "float") and inputs is not None and bool(inputs.symmetric)


def _static_tensor(inputs: QuantizationArgs | None, kind: str) -> bool:
    is_static = inputs is not None and inputs.dynamic is False and inputs.strategy == _TENSOR
    return is_static and inputs is not None and inputs.type == kind and inputs.num_bits == 8


def _is_128(weights: QuantizationArgs) -> bool:
    return weights.group_size == 128 and bool(weights.symmetric)


def _both_symmetric(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> bool:
    return bool(weights.symmetric) and inputs is not None and bool(inputs.symmetric)


def _symmetric_tokens(inputs: QuantizationArgs | None) -> bool:
    fits = any(_dynamic(inputs, "int", _TOKEN, _GROUP, bits=bits) for bits in (4, 8))
    return fits and inputs is not None and bool(inputs.symmetric)


_A16 = "vLLM quantizes the inputs too where the hardware can, though the scheme says that they stay"
_4, _8, _SUB8, _PACKED = range(4, 5), range(8, 9), range(2, 8), range(2, 9)

#: in vLLM's order
FAMILIES = (
    _Family("NVFP4A16", lambda w, i: _nvfp4(w) and i is None, Hardware(75), 75),
    _Family("NVFP4", lambda w, i: _nvfp4(w) and _nvfp4(i), Hardware(75), 75),
    _Family(
        "MXFP4 weights, FP8 inputs",
        lambda w, i: _mxfp4(w) and _dynamic(i, "float", _TOKEN, _GROUP) and bool(i and i.symmetric),
        Hardware(80),
        None,
        "where vLLM has no kernel for these inputs (below CUDA 10.0), it quantizes them to MXFP4",
    ),
    _Family("MXFP4", lambda w, i: _mxfp4(w) and _mxfp4(i), Hardware(80), 80),
    _Family("MXFP4A16", lambda w, i: _mxfp4(w) and i is None, Hardware(80), 80, _A16),
    _Family("MXFP8", lambda w, i: _mxfp8(w) and _mxfp8(i), Hardware(75), 75),
    _Family("MXFP8A16", lambda w, i: _mxfp8(w) and i is None, Hardware(75), 75, _A16),
    _Family(
        "W4AFP8",
        lambda w, i: _integers(w, _4, _GROUP) and _is_128(w) and _dynamic(i, "float", _TOKEN),
        Hardware(90, exact=True),
        90,
    ),
    _Family(
        "W4A8",  # on the CPU by the kernel for weights alone
        lambda w, i: _integers(w, _4, _CHANNEL, _GROUP) and _symmetric_tokens(i),
        Hardware(75, cpu="CPU"),
        differs="where vLLM has no kernel that quantizes the inputs too (CPUs without AMX), it leaves them alone",
    ),
    _Family("WNA8", lambda w, i: _integers(w, _SUB8, _CHANNEL, _GROUP) and _symmetric_tokens(i), Hardware(75)),
    _Family("W4A16", lambda w, i: _integers(w, _4, _GROUP) and i is None, Hardware(75, cpu="CPU"), 75),
    _Family("W4A16 per channel", lambda w, i: _integers(w, _4, _CHANNEL) and i is None, Hardware(75, cpu="CPU")),
    _Family("WNA16", lambda w, i: _integers(w, _PACKED, _GROUP) and i is None, Hardware(75), 75),
    _Family("WNA16 per channel", lambda w, i: _integers(w, _PACKED, _CHANNEL) and i is None, Hardware(75)),
    _Family(
        "FP8_DYNAMIC",
        lambda w, i: _fp8(w, _CHANNEL) and _dynamic(i, "float", _TOKEN),
        Hardware(75, cpu="CPU"),
        75,
    ),
    _Family(
        "FP8 in dynamic tensors",
        lambda w, i: _fp8(w, _TENSOR) and _dynamic(i, "float", _TENSOR),
        Hardware(75, cpu="CPU"),
        75,
    ),
    _Family(
        "FP8_DYNAMIC, otherwise paired",
        lambda w, i: _fp8(w, _TENSOR, _CHANNEL) and _dynamic(i, "float", _TOKEN, _TENSOR),
        Hardware(75, cpu="CPU"),
    ),
    _Family(
        "FP8_BLOCK", lambda w, i: _fp8(w, _BLOCK) and _dynamic(i, "float", _GROUP), Hardware(75, cpu="CPU with AMX"), 75
    ),
    _Family("FP8", lambda w, i: _fp8(w, _TENSOR) and _static_fp8(i), Hardware(75, cpu="CPU with AMX"), 75),
    _Family("FP8 per channel", lambda w, i: _fp8(w, _CHANNEL) and _static_fp8(i), Hardware(75, cpu="CPU with AMX")),
    _Family("FP8 weights", lambda w, i: _fp8(w, _TENSOR, _CHANNEL) and i is None, Hardware(75)),
    _Family(
        "INT8_STATIC",
        lambda w, i: _integers(w, _8, _TENSOR, _CHANNEL) and w.symmetric and _static_tensor(i, "int"),
        Hardware(75, cpu="CPU"),
    ),
    _Family(
        "W8A8",
        lambda w, i: _integers(w, _8, _CHANNEL) and _both_symmetric(w, i) and _dynamic(i, "int", _TOKEN),
        Hardware(75, cpu="CPU"),
        75,
    ),
    _Family(
        "W8A8 per tensor or asymmetric",
        lambda w, i: _integers(w, _8, _TENSOR, _CHANNEL) and w.symmetric and _dynamic(i, "int", _TOKEN),
        Hardware(75, cpu="CPU"),
    ),
)


def family_of(scheme: QuantizationScheme) -> _Family | None:
    """The first family that a scheme fits; None: vLLM's loader refuses it.

    >>> from compressed_tensors.quantization import preset_name_to_scheme
    >>> family_of(preset_name_to_scheme("FP8", ["Linear"])).name
    'FP8'
    """
    weights = scheme.weights
    if weights is None or scheme.output_activations is not None:
        return None
    return next((family for family in FAMILIES if family.fits(weights, scheme.input_activations)), None)


def check_vllm(model: nn.Module, targets: list[Target], fused_groups: Sequence[Sequence[str]]) -> Hardware:
    """What runs the checkpoint in vLLM; its CalibrationWarning says what vLLM will compute in another way.

    Raises:
        CalibrationError: vLLM's loader refuses it, and why.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and model.main_input_name == "input_ids":
        raise CalibrationError(
            f"{VLLM} has no models that read text with an encoder and write it with a decoder", got=type(model).__name__
        )
    linear = [target for target in targets if not target.states]
    refuse(
        [f"{t.name} ({type(t.module).__name__})" for t in linear if compressible_type(t.module) is not nn.Linear],
        f"{VLLM} loads quantized Linear modules, no others",
        remedy=_REMEDY,
    )
    _check_cache(targets)
    inside = tuple(f"{name}." for name in linear_experts(model))
    found = Hardware(75, cpu="CPU")
    for target in linear:
        family, is_expert = family_of(target.scheme), target.name.startswith(inside)
        if family is None or (is_expert and family.experts is None):
            raise CalibrationError(
                f"{VLLM} has nothing that loads {'experts' if is_expert else 'modules'} in this scheme",
                where=[target.name],
                got=_describe(target.scheme),
                remedy=_REMEDY,
            )
        found = found.and_(Hardware(family.experts) if is_expert else family.linear)
    _check_parts(model, targets, fused_groups)
    return found


def warn_of_vllm(targets: Sequence[Target], hardware: Hardware) -> None:
    """Warn of what vLLM loads but computes in another way, and of what no hardware runs."""
    families = {t.name: family_of(t.scheme) for t in targets if not t.states}
    for text in dict.fromkeys(family.differs for family in families.values() if family is not None):
        names = [name for name, family in families.items() if family is not None and family.differs == text]
        if text:
            warn(f"{text}: {name_list(names)}")
    if hardware.cuda is None and not hardware.cpu:
        warn(f"{VLLM} loads the checkpoint, but no hardware has kernels for all of its schemes")
    if any("q" in target.states for target in targets):
        warn(f"{VLLM} does not quantize q, only the kv cache: attention will give other numbers there")


def _check_cache(targets: list[Target]) -> None:
    """Refuse other kv caches than FP8 with one scale per tensor or head."""
    refuse(
        [
            t.name
            for t in targets
            if any(
                args.type != "float"
                or args.num_bits != 8
                or not args.symmetric
                or args.strategy not in (_TENSOR, QuantizationStrategy.ATTN_HEAD)
                for args in t.states.values()
            )
        ],
        f"{VLLM} has a kv cache in 8-bit floats only, symmetric, with a scale per tensor or head",
        remedy='kv_cache="FP8" or "FP8_HEAD".',
    )


def _check_parts(model: nn.Module, targets: list[Target], fused_groups: Sequence[Sequence[str]]) -> None:
    """Refuse a part of what vLLM runs as a whole, and routers."""
    planned = {target.name for target in targets}
    refuse(
        partly_fused(model, targets, fused_groups),
        f"{VLLM} fuses these modules and wants all of a group quantized or none",
        remedy="target or ignore them together.",
    )
    refuse(
        partly_planned(model, planned),
        f"{VLLM} runs the experts of a layer in one scheme, but only some of their modules are targeted",
        remedy="target or ignore them together.",
    )
    refuse(gates(model, planned), f"{VLLM} keeps routers and gates of experts in full precision", remedy=_REMEDY)


def _describe(scheme: QuantizationScheme) -> str:
    parts = {"weights": scheme.weights, "inputs": scheme.input_activations, "outputs": scheme.output_activations}
    return ", ".join(f"{describe(args)} {name}" for name, args in parts.items() if args is not None)
