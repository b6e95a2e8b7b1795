"""Plans of a model, as the tests of ``schemes`` ask for them."""

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.engines import ask_engines
from lightning_obs.engines.engine import PlannedCheckpoint
from lightning_obs.schemes.build_plan import build_plan

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}


def plan(model, scheme=None, engines="transformers", **options):
    return asked(model, scheme, engines, **options)[0]


def asked(model, scheme=None, engines="transformers", **options):
    """The plan, and each engine's verdict."""
    options = CalibrationOptions(scheme, engines=engines, **options)
    planned = build_plan(model, options.config, [*options.engine.fused_sets, *options.fused_sets])
    return planned, ask_engines(PlannedCheckpoint(model, planned.targets, options.fused_sets), options.engine)


def names(*args, **kwargs):
    return [target.name for target in plan(*args, **kwargs).targets]
