"""The part of compressed-tensors checkpoints that MLX (mlx-lm) reads.

Read from mlx-lm 0.32.2 (``utils.py``: ``_compressed_tensors_quantization``, ``load_model``; each model's ``sanitize``)
and held against MLX's build for CPUs by ``make engines`` (docs/engines.md). The loader knows formats of packed 4-bit
numbers by name; but only the models of DeepSeek-V3 and Mistral 4 give packed tensors the names that MLX looks up, and
they take all packed numbers for symmetric int4: others load and mean something else. Any other model stops at tensors
that have no place.
"""

from __future__ import annotations

from typing_extensions import override

from lightning_obs.engines import families as fit
from lightning_obs.engines.engine import Engine, Hardware, PlannedCheckpoint
from lightning_obs.engines.families import Family, FamilyEngine, fits, full
from lightning_obs.errors import CalibrationError, refuse

_APPLE = Hardware(cpu="Apple silicon")
_MODELS = ("deepseek_v3", "kimi_k2", "mistral4")
_INT4 = fits("int4", "group", symmetric=True, group_size=(32, 64, 128))


@Engine.register("mlx")
class MLX(FamilyEngine):
    """mlx-lm: W4A16 in groups, of a few models."""

    name = "MLX"
    release = "mlx-lm 0.32.2"
    families = (
        Family("W4A16", _INT4, full, _APPLE, _APPLE),
        Family("W4A8", _INT4, fit.DYNAMIC, _APPLE, _APPLE, "MLX leaves the inputs alone, which the scheme quantizes"),
    )

    @override
    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        kind = getattr(getattr(planned.model, "config", None), "model_type", type(planned.model).__name__)
        if kind not in _MODELS:
            raise CalibrationError(
                f"{self.release} reads compressed-tensors of {', '.join(_MODELS)} only",
                got=kind,
                remedy="save the model in full precision and quantize it there: mlx_lm.convert -q.",
            )
        refuse(
            [target.name for target in planned.targets if target.name.endswith("kv_b_proj")],
            f"{self.release} cuts kv_b_proj by heads and quantizes the parts again, to other numbers",
            remedy='list it in `ignore` ("re:.*kv_b_proj").',
        )
        return super().check(planned)
