"""The most that each path through the package may ask of a device; ``docs/evidence/gpu.md`` says what is counted.

A test that finds more fails and prints its numbers; a change that asks for less lowers them here. The tests are in
``test_observers.py``, ``test_calibration.py`` and ``test_uses.py`` beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tests.accelerator.common import Budget, llama, mixture
from tests.support.moe_models import W4A16_32

# ---------------------------------------------------------------------- observers, one tensor each

TENSOR = {"num_bits": 8, "strategy": "tensor"}
HEADS = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 128}
CHANNEL = {"num_bits": 8, "strategy": "channel"}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
#: observer, what it observes, its args; launches, bytes a value (2 is one read of bfloat16), reads by the host
OBSERVERS = [
    ("static_minmax", "input", TENSOR, Budget(3, 2.01, 0)),
    ("minmax", "input", TENSOR, Budget(3, 2.01, 0)),
    ("histogram", "input", TENSOR, Budget(9, 8.13, 0)),
    ("percentile", "input", TENSOR, Budget(9, 8.13, 0)),
    ("mse", "input", TENSOR, Budget(41, 8.25, 0)),
    ("normal_observer", "input", TENSOR, Budget(6, 2.01, 0)),
    ("static_minmax", "k", HEADS, Budget(5, 8.01, 0)),
    ("histogram", "k", HEADS, Budget(11, 22.0, 0)),
    ("memoryless_minmax", "weight", GROUPS, Budget(4, 4.1, 0)),
    ("memoryless_minmax", "weight", CHANNEL, Budget(4, 4.02, 0)),
    ("memoryless_mse", "weight", GROUPS, Budget(28, 8.02, 0)),
    ("memoryless_mse", "weight", CHANNEL, Budget(28, 6.13, 0)),
    ("memoryless_mse", "weight", BLOCKS, Budget(34, 6.26, 0)),
    ("nvfp4_expanded_mse", "weight", NVFP4, Budget(19, 41.64, 0)),
]
#: what an observer may ask for that has no row here: a few sums in float64, and no read by the host
FEW_SUMS = Budget(24, 64.0, 0)

# ---------------------------------------------------------------------- whole calibrations

INT4 = {"weights": {"num_bits": 4, "group_size": 32}}
SMALL_BLOCKS = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]}}
NOTHING = Budget(0, 0, 0)


class Calibration(NamedTuple):
    """A calibration, and the most that a batch, the end, and a quantized forward ask for (moved: megabytes)."""

    scheme: Any
    batch: Budget
    finalize: Budget
    quantized: Budget
    options: Mapping[str, Any] = MappingProxyType({})
    model: Callable[[], torch.nn.Module] = llama


def inputs(observer):
    return {"observers": {"input": observer}}


def weights(observer, **more):
    return {"observers": {"weight": observer}, **more}


#: 14 modules (mixture: 24), two sequences of 32 tokens a batch
CALIBRATIONS = {
    "FP8": Calibration("FP8", Budget(36, 0.17, 0), Budget(459, 11.77, 5), Budget(239, 19.96, 1)),
    "FP8, kv cache": Calibration(
        "FP8", Budget(48, 0.21, 0), Budget(471, 11.77, 5), Budget(259, 20.25, 1), {"kv_cache": "FP8"}
    ),
    "FP8, kv cache per head": Calibration(
        "FP8", Budget(52, 0.24, 0), Budget(471, 11.77, 5), Budget(259, 20.25, 1), {"kv_cache": "FP8_HEAD"}
    ),
    "INT8_STATIC": Calibration("INT8_STATIC", Budget(36, 0.17, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1)),
    "minmax": Calibration(
        "INT8_STATIC", Budget(156, 0.34, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1), inputs("minmax")
    ),
    "mse": Calibration(
        "INT8_STATIC", Budget(404, 0.55, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1), inputs("mse")
    ),
    "histogram": Calibration(
        "INT8_STATIC", Budget(66, 34.94, 0), Budget(487, 27.29, 5), Budget(211, 19.11, 1), inputs("histogram")
    ),
    "entropy": Calibration(
        "INT8_STATIC",
        Budget(66, 34.94, 0),
        Budget(487, 27.29, 5),
        Budget(211, 19.11, 1),
        inputs({"name": "histogram", "criterion": "entropy"}),
    ),
    "percentile": Calibration(
        "INT8_STATIC", Budget(66, 34.94, 0), Budget(487, 27.29, 5), Budget(211, 19.11, 1), inputs("percentile")
    ),
    "normal_observer": Calibration(
        "INT8_STATIC", Budget(94, 0.34, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1), inputs("normal_observer")
    ),
    "token mask": Calibration(
        "INT8_STATIC", Budget(48, 0.45, 1), Budget(487, 12.61, 5), Budget(211, 19.11, 1), {"masked": True}
    ),
    "token mask, histogram": Calibration(
        "INT8_STATIC",
        Budget(74, 35.18, 1),
        Budget(487, 27.29, 5),
        Budget(211, 19.11, 1),
        {"masked": True, **inputs("histogram")},
    ),
    "W8A8": Calibration("W8A8", NOTHING, Budget(444, 12.61, 4), Budget(547, 20.76, 1)),
    "FP8_DYNAMIC": Calibration("FP8_DYNAMIC", NOTHING, Budget(430, 12.6, 4), Budget(561, 21.6, 1)),
    "FP8_BLOCK": Calibration("FP8_BLOCK", NOTHING, Budget(428, 12.68, 4), Budget(565, 22.39, 1)),
    "FP8 in small blocks, mse": Calibration(
        SMALL_BLOCKS, NOTHING, Budget(754, 13.39, 4), Budget(169, 17.6, 1), weights("memoryless_mse")
    ),
    "W4A16": Calibration(INT4, NOTHING, Budget(444, 13.51, 4), Budget(155, 17.04, 1)),
    "W4A16 mse": Calibration(INT4, NOTHING, Budget(768, 16.31, 4), Budget(155, 17.04, 1), weights("memoryless_mse")),
    "W4A16 imatrix_mse": Calibration(
        INT4, Budget(64, 1.57, 0), Budget(853, 16.61, 6), Budget(155, 17.04, 1), weights("imatrix_mse")
    ),
    "W4A16 local_hessian": Calibration(
        INT4, Budget(48, 2.47, 0), Budget(1483, 489.38, 6), Budget(155, 17.04, 1), weights("local_hessian")
    ),
    "W4A16 hessian": Calibration(
        INT4, Budget(48, 5.48, 0), Budget(13023, 2221.66, 6), Budget(155, 17.04, 1), weights("hessian")
    ),
    "W4A16 gptq": Calibration(
        INT4,
        Budget(48, 5.48, 0),
        Budget(13463, 2276.76, 20),
        Budget(169, 20.34, 1),
        weights("hessian", rounding="gptq"),
    ),
    "NVFP4": Calibration("NVFP4", Budget(44, 0.34, 0), Budget(906, 15.32, 5), Budget(799, 56, 1)),
    "NVFP4 expanded": Calibration(
        "NVFP4", Budget(44, 0.34, 0), Budget(1082, 26.07, 5), Budget(799, 56, 1), weights("nvfp4_expanded_mse")
    ),
    "MXFP4": Calibration("MXFP4", NOTHING, Budget(640, 14.33, 4), Budget(953, 52.4, 1)),
    "experts, siblings": Calibration(
        W4A16_32,
        Budget(230, 1.19, 2),
        Budget(2025, 5.25, 6),
        Budget(407, 4.89, 3),
        weights("imatrix_mse", on_missing="siblings"),
        mixture,
    ),
    "experts, all tokens": Calibration(
        W4A16_32,
        Budget(270, 2.2, 2),
        Budget(2025, 5.25, 6),
        Budget(407, 4.89, 3),
        weights("imatrix_mse", calibrate_all_experts=True),
        mixture,
    ),
    "experts, FP8": Calibration(
        "FP8",
        Budget(110, 1.09, 2),
        Budget(991, 2.97, 5),
        Budget(585, 6.35, 3),
        {"on_missing": "siblings", "engines": "vllm"},
        mixture,
    ),
    "experts, FP8, all tokens": Calibration(
        "FP8",
        Budget(150, 2.12, 2),
        Budget(991, 2.97, 5),
        Budget(585, 6.35, 3),
        {"calibrate_all_experts": True, "engines": "vllm"},
        mixture,
    ),
    "experts, FP8, minmax, token mask": Calibration(
        "FP8",
        Budget(200, 1.62, 3),
        Budget(991, 2.97, 5),
        Budget(585, 6.35, 3),
        {"on_missing": "siblings", "engines": "vllm", "masked": True, **inputs("minmax")},
        mixture,
    ),
    "experts, token mask": Calibration(
        W4A16_32,
        Budget(260, 1.34, 3),
        Budget(2025, 5.25, 6),
        Budget(407, 4.89, 3),
        weights("imatrix_mse", on_missing="siblings", masked=True),
        mixture,
    ),
}

# ---------------------------------------------------------------------- what follows a calibration

#: what is done, and the most that the package asks for meanwhile: launches, megabytes moved, reads
USES = {
    "layer errors of one batch": Budget(1934, 77.66, 4),
    "layer errors without data": Budget(1150, 47.3, 2),
    "export": Budget(143, 16.34, 3),
    "restoring a state": Budget(28, 0.01, 0),
}
