"""Plans of a model, as the tests of ``schemes`` ask for them."""

from lightning_obs.schemes.options import CalibrationOptions
from lightning_obs.schemes.plan import build_plan

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}


def plan(model, scheme=None, reload="default", **options):
    return build_plan(model, CalibrationOptions(scheme, reload=reload, **options))


def names(*args, **kwargs):
    return [target.name for target in plan(*args, **kwargs).targets]
