"""A run of made-up numbers that lost too much."""

from lightning_obs import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult, PlanSummary
from lightning_obs.report.facts import LayerFacts, Report
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.metrics import TensorError


def layer(name, sqnr, weight=40.0, read=40.0, high=1.0):
    """The error of a layer: SQNR of its output, its weight and its input, and the largest input."""
    read = TensorError(read, clipped=0.0, low=-1.0, high=high, bits=1.3)
    return LayerError(name, TensorError(weight), read, TensorError(sqnr))


def run(scheme="INT8_STATIC", errors=None, **parts):
    """A run that two of twenty layers have spoilt, by single inputs of up to 2,571; every step can run after it."""
    spoilt = [layer(f"layers.{i}.down_proj", 2.0, 40.0, 2.0, 2571.0) for i in (1, 11)]
    errors = [*spoilt, *(layer(f"layers.{i}.up_proj", 40.0) for i in range(18))] if errors is None else errors
    names = [error.name for error in errors]
    facts = LayerFacts("int8", 8, 8, "", "", 4 << 20, 1 << 20, 0, [], None)
    known = {
        "result": CalibrationResult(scheme, names, 2, 2, 1.0, plan=PlanSummary(observers=2)),
        "options": CalibrationOptions(scheme, ignore=["lm_head"]),
        "layers": dict.fromkeys(names, facts),
        "metrics": {"perplexity": (14.80, 33.01)},
        "can_run": lambda step: True,
    }
    return Report.of("a run", errors=errors, **{**known, **parts})
