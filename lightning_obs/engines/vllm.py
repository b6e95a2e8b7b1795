"""The compressed-tensors schemes that vLLM loads, and the hardware that runs them.

Read from vLLM 0.32.0 (``compressed_tensors.py``, ``compressed_tensors_moe.py``, the lists of kernels in
``kernels/linear``) and held against that release by ``make engines`` (docs/evidence/engines.md). vLLM takes the first
family that a scheme fits; its loader refuses a scheme that fits none. Whether vLLM has the model's architecture is not
checked, since a model that vLLM lacks does not load unquantized either. Only encoder-decoders that read text (T5, BART,
Marian) are refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import ClassVar

from torch import nn
from typing_extensions import override

from lightning_obs.engines import families as fit
from lightning_obs.engines.engine import Engine, FusedSets, Hardware, PlannedCheckpoint
from lightning_obs.engines.families import Family, FamilyEngine, fits, full
from lightning_obs.errors import CalibrationError
from lightning_obs.model.conversions import names_in_files
from lightning_obs.moe.experts import expert_containers, modules_beside, split_experts
from lightning_obs.schemes.config import describe, number_format
from lightning_obs.schemes.planned_modules import find_fused

# 75 is CUDA capability 7.5: kernels run on it and on every newer one, or up to the capability ``last``. With ``cpu``
# they run on CPUs, too.
_CUDA = Hardware(75)
_CUDA80 = Hardware(80)
_CPU = Hardware(75, cpu="CPU")
_AMX = Hardware(75, cpu="CPU with AMX")
_INTS = "int2 int3 int4 int5 int6 int7"
_W4AFP8 = fits("int4", "group", group_size=128, symmetric=True)
_MX_FP8_INPUTS = fits("float8", "token", "group", dynamic=True, symmetric=True)
_INT_TOKENS = fits("int4 int8", "token", "group", dynamic=True, symmetric=True)
_A16 = "vLLM quantizes the inputs too where the hardware can, although the scheme leaves them in full precision"
_MX_INPUTS = "where vLLM has no kernel for these inputs (below CUDA capability 10.0), it quantizes them to MXFP4"
_NO_AMX = "where vLLM has no kernel that quantizes the inputs too (CPUs without AMX), it does not quantize them"

#: in vLLM's order; each row: name, weights, inputs, the hardware of Linear modules, that of experts, the remark.
#: Marlin with int8 inputs reads negative scales wrongly (vLLM #48926); other kernels of quantized inputs below 8 bits
#: were not tried
FAMILIES = (
    Family("NVFP4A16", fit.NVFP4, full, _CUDA, _CUDA),
    Family("NVFP4", fit.NVFP4, fit.NVFP4, _CUDA, _CUDA),
    Family("MXFP4 weights, FP8 inputs", fit.MXFP4, _MX_FP8_INPUTS, _CUDA80, None, _MX_INPUTS),
    Family("MXFP4", fit.MXFP4, fit.MXFP4, _CUDA80, _CUDA80),
    Family("MXFP4A16", fit.MXFP4, full, _CUDA80, _CUDA80, _A16),
    Family("MXFP8", fit.MXFP8, fit.MXFP8, _CUDA, _CUDA),
    Family("MXFP8A16", fit.MXFP8, full, _CUDA, _CUDA, _A16),
    Family("W4AFP8", _W4AFP8, fit.FP8_TOKENS, Hardware(90, last=90), Hardware(90), signed=False),
    # on CPUs as weight-only
    Family("W4A8", fits("int4", "channel", "group"), _INT_TOKENS, _CPU, None, _NO_AMX, signed=False),
    Family("WNA8", fits(_INTS, "channel", "group"), _INT_TOKENS, _CUDA, signed=False),
    Family("W4A16", fits("int4", "group"), full, _CPU, _CUDA),
    Family("W4A16 per channel", fits("int4", "channel"), full, _CPU),
    Family("WNA16", fits(f"{_INTS} int8", "group"), full, _CUDA, _CUDA),
    Family("WNA16 per channel", fits(f"{_INTS} int8", "channel"), full, _CUDA),
    Family("FP8_DYNAMIC", fit.FP8_CHANNEL, fit.FP8_TOKENS, _CPU, _CUDA),
    Family("FP8 in dynamic tensors", fit.FP8_TENSOR, fit.FP8_DYNAMIC, _CPU, _CUDA),
    Family("FP8_DYNAMIC, otherwise paired", fit.FP8_EITHER, fits("float8", "token", "tensor", dynamic=True), _CPU),
    Family("FP8_BLOCK", fit.FP8_BLOCK, fit.FP8_GROUPS, _AMX, _CUDA),
    Family("FP8", fit.FP8_TENSOR, fit.FP8_STATIC, _AMX, _CUDA),
    Family("FP8 per channel", fit.FP8_CHANNEL, fit.FP8_STATIC, _AMX),
    Family("FP8 weights", fit.FP8_EITHER, full, _CUDA),
    Family("INT8_STATIC", fit.INT8_EITHER, fit.INT8_STATIC, _CPU),
    Family("W8A8", fit.INT8_CHANNEL, fits("int8", "token", dynamic=True, symmetric=True), _CPU, _CUDA),
    Family("W8A8 per tensor or asymmetric", fit.INT8_EITHER, fit.INT8_TOKENS, _CPU),
)


@Engine.register("vllm")
class VLLM(FamilyEngine):
    """vLLM: it loads the schemes of :data:`FAMILIES`, and looks modules up by the names of the stored tensors.

    It loads a fused set, and the experts of a layer, only if all members are quantized or none. ``ask_engines`` calls
    ``check`` and ``remarks`` before any data.
    """

    name = "vLLM"
    release = "vLLM 0.32"
    families: ClassVar[Sequence[Family]] = FAMILIES
    # remarks are also shown for checkpoints that are written for another engine: vLLM loads most of them in the end
    remarks_on_others = True
    states = _CPU  # the hardware that runs a quantized kv cache: CUDA from 7.5 on, and CPUs

    @override
    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        """The hardware that runs the whole checkpoint; ``ask_engines`` calls it before any data.

        Beside what the base class refuses, refuses encoder-decoders of text and whatever :meth:`_refusals` yields.
        """
        config = getattr(planned.model, "config", None)
        reads_text = getattr(planned.model, "main_input_name", "") == "input_ids"
        if getattr(config, "is_encoder_decoder", False) and reads_text:
            raise CalibrationError(
                f"{self.release} has no models that read text with an encoder and write it with a decoder",
                got=type(planned.model).__name__,
            )
        hardware = super().check(planned)
        for refusal in self._refusals(planned):
            raise refusal
        return hardware

    @override
    def remarks(self, planned: PlannedCheckpoint, is_target: bool) -> Iterator[str]:
        """Yield texts about a checkpoint that ``ask_engines`` shows as warnings, before any data.

        For a checkpoint that is written for another engine: why vLLM would refuse it. For a checkpoint that is written
        for vLLM: how its arithmetic differs from the scheme. For both: targets by which vLLM does not find quantized
        queries.
        """
        if not is_target:
            for refusal in self._refusals(planned):
                yield str(refusal)
        targets_of_q = [target for target in planned.targets if "q" in target.states]
        patterns: set[str] = set()
        for target in targets_of_q:
            patterns.update(target.scheme.targets)
        if len(patterns) > 1 or any(not pattern.endswith("Attention") for pattern in patterns):
            kinds = sorted({type(target.module).__name__ for target in targets_of_q})
            yield (
                f"vLLM wants one target that ends in Attention ({', '.join(kinds)}), not "
                f"{', '.join(sorted(patterns))}; transformers loads it."
            )
        if not is_target:
            return
        yield from super().remarks(planned, is_target)
        if targets_of_q:
            yield f"{self.release} does not quantize q, only the kv cache: attention will give other numbers there"

    @override
    def config_names(self, model: nn.Module, names: list[str]) -> dict[str, str]:
        """By module name, the name under which vLLM looks the module up in a config: its name in the files.

        An export calls it while it writes the config. transformers may have renamed modules while it loaded the model;
        ``save_pretrained`` takes that back.
        """
        return names_in_files(model, names)

    @override
    def matches_class(self, model: nn.Module, module: nn.Module) -> bool:
        """Whether the config may target a module by its class; asked while an export writes the config.

        Not the output embedding, which is no Linear in vLLM.
        """
        return module is not getattr(model, "get_output_embeddings", lambda: None)()

    def _refusals(self, planned: PlannedCheckpoint) -> Iterator[CalibrationError]:
        """Yield the errors of modules that vLLM loads only together, and of the kv cache's format.

        These are the rules that no row of :data:`FAMILIES` has. ``check`` raises the first error; ``remarks`` shows all
        of them as warnings.
        """
        together = "target or ignore them together."
        cache_formats = _refused_cache_formats(planned)
        if cache_formats:
            cache_format = next(iter(cache_formats.values()))
            yield CalibrationError(
                f"{self.release} loads a kv cache in symmetric 8-bit float only, not {cache_format}",
                where=list(cache_formats),
                remedy='kv_cache="FP8" or "FP8_HEAD".',
            )
        split_sets = _split_sets(planned, [*self.fused_sets, *planned.own_sets])
        if split_sets:
            yield CalibrationError(
                f"{self.release} fuses these modules and wants all of a set quantized or none, but only a part is "
                "targeted",
                where=split_sets,
                remedy=together,
            )
        target_names = planned.target_names
        experts = split_experts(planned.model, target_names)
        if experts:
            yield CalibrationError(
                f"{self.release} runs the experts of a layer in one scheme, but only some of their modules are "
                "targeted",
                where=experts,
                remedy=together,
            )
        gates = _quantized_gates(planned.model, target_names)
        if gates:
            yield CalibrationError(
                f"{self.release} runs most routers or gates of experts in full precision and would not load these "
                "quantized",
                where=gates,
                remedy="list them in `ignore`.",
            )


def _refused_cache_formats(planned: PlannedCheckpoint) -> dict[str, str]:
    """By name of an attention module, the format of its quantized states, where vLLM does not load this format.

    All states of a module have one format, that of its scheme's ``input_activations``, so q is judged with k and v.
    """
    formats: dict[str, str] = {}
    for target in planned.targets:
        for args in target.states.values():
            if number_format(args) != "float8" or not args.symmetric:
                formats[target.name] = describe(args)
    return formats


def _split_sets(planned: PlannedCheckpoint, fused_sets: FusedSets) -> list[str]:
    """Fused sets that would be quantized in part: ``"q_proj/k_proj/v_proj in layers.0.self_attn"``."""
    target_names = planned.target_names
    classes = {type(target.module) for target in planned.targets}
    names = [name for name, module in planned.model.named_modules() if type(module) in classes]
    split: list[str] = []
    for members in find_fused(names, fused_sets):
        quantized = target_names.intersection(members)
        if quantized and len(quantized) < len(members):
            parent, _, _ = members[0].rpartition(".")
            attributes = [name.removeprefix(f"{parent}.") for name in members]
            split.append(f"{'/'.join(attributes)} in {parent}")
    return split


def _quantized_gates(model: nn.Module, planned: Container[str]) -> list[str]:
    """The names of Linears that will be quantized and look like routers or gates of experts.

    Such a Linear is beside experts, and has one output (a gate) or one for each expert (a router).
    """
    gates: list[str] = []
    for name, experts in expert_containers(model).items():
        for gate_name, module in modules_beside(model, name):
            if not isinstance(module, nn.Linear) or gate_name not in planned:
                continue
            if module.out_features in (1, len(experts)):
                gates.append(gate_name)
    return gates
