"""A report of made-up numbers, of as many layers as are asked for."""

from dataclasses import replace

import torch

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult, PlanSummary
from lightning_obs.numerics.histogram import support_of
from lightning_obs.report.facts import Report
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.metrics import ScaleDrift, TensorError

KINDS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]


def made_up(count, **changes):
    numbers = torch.rand(count, 12, generator=torch.Generator().manual_seed(0)).tolist()
    names = [f"model.layers.{i // 6}.{KINDS[i % 6]}" for i in range(count)]
    tensor = [
        TensorError(10 + 30 * n[0], n[1] / 1e3, 1 - n[2] / 99, n[3], -9 * n[4], 9 * n[5], 7 * n[6]) for n in numbers
    ]
    errors = [
        LayerError(name, part, part, replace(part, sqnr=8 + 32 * n[7]), tuple(names[at + 1 : at + 3]))
        for at, (name, n, part) in enumerate(zip(names, numbers, tensor, strict=True))
    ]
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    seen, drift = support_of(torch.cat([values, values[:3] * 9])), ScaleDrift()
    for step in range(4):
        drift.add(100 * step, {f"{name}.weight_scale": torch.tensor([2.0**step]) for name in names[:20]})
    options = {
        "title": "INT8_STATIC \N{MIDDLE DOT} a <model>",
        "result": CalibrationResult(
            "INT8_STATIC",
            names,
            16,
            4 * count,
            15.9,
            {},
            chosen_input_ranges=dict.fromkeys(names, (-3.5, 3.4)),
            plan=PlanSummary(observers=2 * count),
        ),
        "errors": sorted(errors, key=lambda error: error.sqnr),
        "metrics": {"perplexity": (14.80, 33.01)},
        "sizes": (538 * 2**20, 213 * 2**20),
        "counts": dict.fromkeys(names, seen),
        "drift": drift,
        "sensitivity": {name: n[9] for name, n in zip(names, numbers, strict=True)},
        "sensitivity_unit": "nats",
        "choices": {name: ("NVFP4", "FP8", "none")[i % 3] for i, name in enumerate(names)},
        "frontier": [
            {"name": name, "bits_per_weight": bits, "bytes": int(bits * 1.3e7), "loss": loss}
            for name, bits, loss in [("W4A16", 4.25, 3.07), ("plan 4.75", 4.75, 2.83), ("by weight", 4.75, 2.93)]
        ],
        "lines": ["wrote outputs/checkpoint"],
        "options": CalibrationOptions("INT8_STATIC"),
        "can_run": lambda step: True,
    }
    return Report.of(**{**options, **changes})
