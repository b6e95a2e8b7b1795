"""The compressed-tensors checkpoints that llama.cpp's converter reads.

Read from commit 0c1e57098, which llama-cpp-python 0.3.36 ships (``conversion/base.py``: ``dequant_model``,
``_generate_nvfp4_tensors``); checkpoints were converted with it (docs/evidence/engines.md). It keeps NVFP4
as it is and dequantizes all else: the GGUF file then has the checkpoint's values in the type of ``--outtype``, and
inputs are no longer quantized. Tensors that it has no name for (scales of inputs or of a kv cache) are an error, and so
are several config groups, unless all are NVFP4. Integers of 3, 5, 6 and 7 bits are packed in a layout that it does not
read.
"""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from lightning_obs.engines import families as fit
from lightning_obs.engines.engine import Engine, Hardware, PlannedCheckpoint
from lightning_obs.engines.families import Family, FamilyEngine, either, fits, full
from lightning_obs.errors import CalibrationError, refuse

_ANY = Hardware(cpu="any hardware")
_INPUTS = "llama.cpp does not quantize the inputs, although the scheme does"
_FP8 = either(fit.FP8_CHANNEL, fit.FP8_BLOCK)


@Engine.register("llama.cpp")
class LlamaCpp(FamilyEngine):
    """llama.cpp's ``convert_hf_to_gguf.py``: one scheme for all modules, dequantized; or NVFP4, kept."""

    name = "llama.cpp"
    release = "llama.cpp's converter (0c1e57098)"
    stored = (nn.Linear, nn.Embedding)  # the kinds of modules that it loads quantized
    states = _ANY  # the hardware of a quantized kv cache; `check` refuses the cache unless all weights are NVFP4
    # Each row: name, weights, inputs, the hardware of Linear modules, the hardware of experts, the remark.
    # The converter stops at packed integers that are not in groups, and at other numbers without a scale per row or
    # block, so no row has them. FP8 per tensor is therefore refused. Integers of 8 bits are packed if the inputs are in
    # full precision: then groups are taken and rows refused. If inputs are quantized, they are not packed: then rows
    # are taken and groups refused.
    families = (
        Family("NVFP4A16", fit.NVFP4, full, _ANY, _ANY),
        Family("NVFP4", fit.NVFP4, fit.NVFP4, _ANY, _ANY),
        Family("packed integers", fits("int2 int4 int8", "group"), full, _ANY, _ANY),
        Family("packed integers, inputs", fits("int2 int4", "group"), fit.DYNAMIC, _ANY, _ANY, _INPUTS),
        Family("FP8", _FP8, full, _ANY, _ANY),
        Family("FP8 or INT8, inputs", either(_FP8, fit.INT8_CHANNEL), fit.DYNAMIC, _ANY, _ANY, _INPUTS),
    )

    @override
    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        """The hardware that runs the whole checkpoint; ``ask_engines`` calls it before any data.

        Beside what the base class refuses, refuses several schemes and a quantized kv cache, unless all weights are
        NVFP4.
        """
        hardware = super().check(planned)
        modules = planned.modules
        if modules and all(fit.NVFP4(target.scheme.weights) for target in modules):
            return hardware
        refuse(
            planned.attention_names,
            f"{self.release} has no names for the scales of a kv cache",
            remedy="leave the cache in full precision; llama.cpp quantizes its own (--cache-type-k).",
        )
        if planned.has_several_schemes:
            raise CalibrationError(
                f"{self.release} reads one scheme, not several", remedy="use one scheme for all modules, or only NVFP4."
            )
        return hardware
