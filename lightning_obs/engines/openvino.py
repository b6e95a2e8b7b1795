"""The part of compressed-tensors checkpoints that OpenVINO reads.

Read from OpenVINO 2026.4.1 (``frontend/pytorch/compressed_tensors.py``, there since 2026.3), which turns modules that
are still packed into int4 constants; held against its CPU plugin by ``make engines`` (docs/engines.md). Whoever loads
the model has to leave it packed: optimum-intel 2.2.0 does not yet (its pull request 1859 does). transformers loads no
packed Embedding, so none gets there. A model whose kv cache is quantized cannot be traced.
"""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import override

from lightning_obs.engines import families as fit
from lightning_obs.engines.engine import Engine, Hardware, PlannedCheckpoint
from lightning_obs.engines.families import Family, FamilyEngine, fits, full

_INTEL = Hardware(cpu="CPU, Intel GPU")
_INT4 = fits("int4", "group", symmetric=True)
_INPUTS = "OpenVINO leaves the inputs alone, which the scheme quantizes"
_ZERO_POINTS = "transformers 5.23 does not load the packed zero points that OpenVINO reads (docs/engines.md)"


@Engine.register("openvino")
class OpenVINO(FamilyEngine):
    """OpenVINO's PyTorch front end: W4A16 in groups."""

    name = "OpenVINO"
    release = "OpenVINO 2026.4"
    families = (
        Family("W4A16", _INT4, full, _INTEL),
        Family("W4A16_ASYM", fits("int4", "group"), full, _INTEL, None, _ZERO_POINTS),
        Family("W4A8", _INT4, fit.DYNAMIC, _INTEL, None, _INPUTS),
    )

    @override
    def remarks(self, planned: PlannedCheckpoint, chosen: bool) -> Iterator[str]:
        yield from super().remarks(planned, chosen)
        if chosen:
            yield "optimum-intel 2.2 unpacks the checkpoint as it loads; OpenVINO needs it packed (docs/engines.md)"
