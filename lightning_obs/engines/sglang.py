"""The compressed-tensors schemes that SGLang loads, and the hardware that runs them.

Read from SGLang 0.5.23 (``layers/quantization/compressed_tensors/``: ``compressed_tensors.py``, ``utils.py``,
``schemes/``; Marlin's list of groups in ``marlin_utils.py``) and held against its Linear layers by ``make engines``
(docs/evidence/engines.md); no kernel was run. Its loader began as vLLM's, and looks up fused sets, names
and the output embedding as vLLM does; so its engine is a subclass of vLLM's. It runs on CUDA only: the loader asks for
a compute capability.

What the table leaves out is refused. SGLang has a class for static int8 inputs, but it holds a single scale, and the
modules of a fused set bring several. It has no class for MX formats. It loads experts in MXFP4 by other code, which was
not read.
"""

from __future__ import annotations

from typing_extensions import override

from lightning_obs.engines import families as fit
from lightning_obs.engines.engine import Engine, Hardware, PlannedCheckpoint
from lightning_obs.engines.families import Family, either, fits, full
from lightning_obs.engines.vllm import VLLM
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.schemes.planned_modules import PlannedModule

_AMPERE = Hardware(80)
_ADA = Hardware(89)
#: the hardware that runs int8: sgl-kernel has kernels for these compute capabilities only
_INT8 = Hardware(80, last=90)
_WEIGHTS_ONLY = "below CUDA capability {} SGLang does not quantize the inputs, although the scheme does"
_FP8_DYNAMIC = fits("float8", "token", "tensor", "group", dynamic=True)
_BELOW_89 = _WEIGHTS_ONLY.format("8.9")
_BELOW_100 = _WEIGHTS_ONLY.format("10.0")


@Engine.register("sglang")
class SGLang(VLLM):
    """SGLang: it loads weights of 4 and 8 bits (by Marlin), FP8, int8 and NVFP4."""

    name = "SGLang"
    release = "SGLang 0.5.23"
    # Remarks are given only on checkpoints that are written for SGLang; on others, vLLM gives the same remarks.
    remarks_on_others = False
    states = _AMPERE  # runs a quantized kv cache
    # Each row: name, weights, inputs, the hardware of Linear modules, the hardware of experts, the remark.
    families = (
        Family("WNA16", fits("int4 int8", "group", group_size=(32, 64, 128)), full, _AMPERE, _AMPERE),
        Family("WNA16 per channel", fits("int4 int8", "channel"), full, _AMPERE, _AMPERE),
        Family("NVFP4A16", fit.NVFP4, full, _AMPERE, _AMPERE),
        Family("NVFP4", fit.NVFP4, fit.NVFP4, _AMPERE, _AMPERE, _BELOW_100),
        Family("FP8_BLOCK", fit.FP8_BLOCK, fit.FP8_GROUPS, _ADA, _ADA),
        Family("FP8_DYNAMIC", fit.FP8_CHANNEL, fit.FP8_TOKENS, _AMPERE, _ADA, _BELOW_89),
        Family("FP8", fit.FP8_TENSOR, either(fit.FP8_STATIC, fit.FP8_DYNAMIC), _AMPERE, _ADA, _BELOW_89),
        Family("FP8, otherwise paired", fit.FP8_EITHER, either(_FP8_DYNAMIC, fit.FP8_STATIC), _AMPERE, None, _BELOW_89),
        Family("FP8 weights", fit.FP8_EITHER, full, _AMPERE),
        Family("W8A8", fit.INT8_EITHER, fit.INT8_TOKENS, _INT8),
    )

    @override
    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        """The hardware that runs the whole checkpoint; ``ask_engines`` calls it before any data.

        Beside what vLLM's class refuses, refuses quantized queries.
        """
        refuse(
            [target.name for target in planned.targets if "q" in target.states],
            f"{self.release} cannot read a config that quantizes q",
            remedy='quantize the cache alone: kv_cache="FP8".',
        )
        return super().check(planned)

    @override
    def takes(self, target: PlannedModule, is_expert: bool) -> Hardware | None:
        """The hardware that runs one module in its scheme; the base's ``check`` calls it for each target.

        Beside what the base refuses, refuses a kv cache with a scale per head.
        """
        if any(args.strategy != "tensor" for args in target.states.values()):
            raise CalibrationError(
                f"{self.release} ignores a kv cache that has more than one scale for k and one for v",
                where=[target.name],
                remedy='kv_cache="FP8".',
            )
        return super().takes(target, is_expert)
