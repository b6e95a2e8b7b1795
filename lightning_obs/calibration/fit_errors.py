"""Judge whether weights that were fitted to the calibration data are better than weights chosen without data.

:class:`JudgedFits` judges the few modules that have a :class:`.HoldOut` while ``finalize`` observes their weights. The
functions below it summarize the estimates of all these modules, for results, reports and a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.calibration.hold_out import KEPT_OUT_OF, HoldOut
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.weight_rounding import make_roundings
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.model.module_qparams import as_stored
from lightning_obs.numerics.fake_quantize import dequantize, fake_quantize_without_graph
from lightning_obs.numerics.qparams import exact_products
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import input_statistics
from lightning_obs.ranks.collectives import Stretch
from lightning_obs.schemes.config import make_observer
from lightning_obs.schemes.planned_modules import PlannedModule
from lightning_obs.schemes.recipes import Recipe

#: sums of squared errors of a module's outputs, relative to the sum of squares of the outputs: with the fitted weight
#: and with a weight chosen without data, on batches that were fitted to; then both on batches that were kept out
FitErrors: TypeAlias = tuple[float, float, float, float]
#: a relative increase of errors up to this counts as no loss, because sketches only estimate errors
_TOLERANCE = 0.02
#: the end of the warnings of :func:`warn_of_fit`: how to choose weights without data
_WITHOUT_DATA = "choose weights without data: recipe='fast' or observers={'weight': 'memoryless_mse'}, and no rounding."


class JudgedFits:
    """The estimates of one finalization for the weights of an observation that were fitted to data.

    ``finalize`` makes one if the observation has hold-outs and activations are finalized, and calls its methods in the
    order in which they stand here.

    Args:
        observation: of this rank.

    Attributes:
        errors: by module name, the estimates; of the weights that this rank has observed, until :meth:`share`.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self.errors: dict[str, FitErrors] = {}

    @property
    def observers(self) -> dict[Key, Observer]:
        """The observers of all hold-outs, whose statistics must be reduced over ranks; empty if there is one rank."""
        observers: dict[Key, Observer] = {}
        if self._observation.collectives.size > 1:
            for hold_out in self._observation.hold_outs.values():
                observers |= hold_out.by_key
        return observers

    def judge(self, module_name: str, weight: torch.Tensor) -> None:
        """Estimate the errors of a fitted weight on batches that were kept out, if the module has a hold-out.

        Called on the rank that observes the weight, right after the weight's observer has searched the range. Nothing
        is estimated if the hold-out has no samples of inputs (``sketches``). The hold-out has the statistics of the
        batches that are kept out. ``subtract_from`` replaces them by the module's statistics of all batches minus
        these, and :func:`judge_fit` fits the weight once more to the difference.
        """
        hold_out = self._observation.hold_outs.get(module_name)
        if hold_out is None or hold_out.sketches is None:
            return
        hold_out.subtract_from(self._observers_of(module_name))
        errors = judge_fit(hold_out, weight)
        if errors is not None:
            self.errors[module_name] = errors

    def share(self, stretch: Stretch) -> int:
        """Give all ranks the estimates of all ranks, and reset the hold-outs, whose statistics are used only once.

        Every rank must call this.

        Args:
            stretch: keeps a failure of this rank.

        Returns:
            The number of collectives.
        """
        collectives = self._observation.collectives
        if collectives.size > 1:
            for errors in collectives.gather_object(self.errors):
                self.errors |= errors
        with stretch:
            for hold_out in self._observation.hold_outs.values():
                hold_out.reset()
        return 1 if collectives.size > 1 else 0

    def _observers_of(self, module_name: str) -> dict[str, Observer]:
        """The observers of a module, helpers included, by base name."""
        observers = self._observation.observers | self._observation.data_observers
        return {base: observer for (name, base), observer in observers.items() if name == module_name}


@torch.no_grad()
def judge_fit(hold_out: HoldOut, weight: torch.Tensor) -> FitErrors | None:
    """Fit a weight to the batches that are not kept out, and estimate the errors of its module's outputs.

    :meth:`JudgedFits.judge` calls this while the whole weight is in memory.

    Args:
        hold_out: of the module, with the statistics of the batches that are not kept out.
        weight: ``(R, C)``; not changed.

    Returns:
        The four estimates of :data:`FitErrors`; None if nothing was kept out, the outputs are zero, or too few tokens
        are left to fit the weight.
    """
    sketches = hold_out.sketches
    if sketches is None:
        return None
    errors = []
    with torch.inference_mode(False), torch.autocast(weight.device.type, enabled=False), exact_products():
        try:
            fitted = _fitted(hold_out, weight)
            without_data = _without_data(hold_out.target, weight)
        except CalibrationError:  # too few tokens are left
            return None
        for sketch in sketches:
            for quantized in (fitted, without_data):
                errors.append(_output_error(sketch.to(weight.device), weight.float(), quantized))
        estimate = torch.stack(errors)
    if not estimate.isfinite().all():
        return None
    first, second, third, fourth = estimate.tolist()
    return first, second, third, fourth


def _fitted(hold_out: HoldOut, weight: torch.Tensor) -> torch.Tensor:
    """The quantized and dequantized weight ``(R, C)``, fitted without the batches that are kept out.

    The scales come from the hold-out's observer of the weight; the integers from the rounding, if the scheme rounds and
    a Hessian was gathered, else they are the nearest. :func:`judge_fit` calls this.
    """
    target = hold_out.target
    observer = hold_out.observers["weight"]
    qparams = _observed(target, observer, weight)
    # make_roundings takes what it needs by base name: Hessians, and errors of inputs. It leaves the sketches alone.
    observers_of_module = {(target.name, base): other for base, other in hold_out.observers.items()}
    qparams_of_module = {f"weight_{name}": value for name, value in qparams.items()}
    key = (target.name, "weight")
    roundings = make_roundings({key: observer}, observers_of_module, {target.name: qparams_of_module})
    if not roundings:
        return _nearest(weight, qparams, observer.args)
    rounding = roundings[key]
    rounding(weight)
    zero_point = qparams.get("zero_point")
    global_scale = qparams.get("global_scale")
    return dequantize(rounding.rounded, qparams["scale"], zero_point, observer.args, global_scale=global_scale)


def _without_data(target: PlannedModule, weight: torch.Tensor) -> torch.Tensor:
    """The quantized and dequantized weight as ``recipe="fast"`` chooses it, without data."""
    args = _args_without_data(target)
    observer = make_observer("weight", args)
    return _nearest(weight, _observed(target, observer, weight), args)


def _args_without_data(target: PlannedModule) -> QuantizationArgs:
    """The quantization arguments of a module's weight, with the observer by which ``recipe="fast"`` chooses its range.

    If the recipe has no choice for the format (eight bits), the observer is ``memoryless_mse``: the least squared error
    of the weight's values. :func:`_without_data` calls this for the weight that the fitted weight is compared with.
    """
    choice = Recipe.of("fast").for_weights(target.scheme)
    hyperparameters = {"name": "memoryless_mse"} if choice is None else dict(choice.observer)
    name = hyperparameters.pop("name")
    changes = {"observer": name, "observer_kwargs": hyperparameters}
    return target.args["weight"].model_copy(update=changes)


def _observed(target: PlannedModule, observer: Observer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Let an observer observe a weight, and return its qparams as the module would hold them.

    The observer forgets an earlier weight, and keeps its statistics of inputs. Keys have no base name:
    ``{"scale": tensor}``.
    """
    observer.reset(keep=input_statistics(observer))
    observer(weight)
    qparams: dict[str, Any] = {}
    for name, value in observer.get_qparams().items():
        is_needed = name != "zero_point" or not observer.args.symmetric
        if isinstance(value, torch.Tensor) and is_needed:
            qparams[f"weight_{name}"] = value
    stored = as_stored(target.module, qparams)
    return {name.removeprefix("weight_"): value for name, value in stored.items()}


def _nearest(weight: torch.Tensor, qparams: Mapping[str, torch.Tensor], args: QuantizationArgs) -> torch.Tensor:
    """The weight rounded to nearest with these qparams, dequantized."""
    zero_point = qparams.get("zero_point")
    global_scale = qparams.get("global_scale")
    return fake_quantize_without_graph(weight, qparams["scale"], zero_point, args, global_scale=global_scale)


def _output_error(sketch: torch.Tensor, weight: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """Estimate the sum of squared errors of a module's outputs, relative to the sum of squares of the outputs.

    Args:
        sketch: of inputs, ``(1, S, C)``; or ``(2, S, C)``, of inputs in full precision and of those of the quantized
            model, with which the quantized weight is multiplied.
        weight: ``(R, C)`` in full precision.
        quantized: the weight quantized and dequantized.
    """
    outputs = sketch[0] @ weight.T
    if len(sketch) == 1:
        error = sketch[0] @ (quantized.float() - weight).T
    else:
        error = sketch[1] @ quantized.float().T - outputs
    return error.double().square().sum() / outputs.double().square().sum()


# ---------------------------------------------------------------------- of all modules


def fit_changes(errors: Mapping[str, FitErrors]) -> tuple[float, float]:
    """Two relative changes of squared output errors by fitting: on batches fitted to, and on batches kept out.

    -0.5 says that fitted weights make half of the errors of weights without data. Called by :func:`fit_text`,
    :func:`loses` and :func:`warn_of_fit`, and by ``report/next_steps.py``, which shows the second number.

    Args:
        errors: by module name; relative errors of the modules are added up.

    >>> fit_changes({"a": (0.01, 0.04, 0.02, 0.04)})
    (-0.75, -0.5)
    """
    sums = []
    for place in range(4):
        sums.append(math.fsum(of_module[place] for of_module in errors.values()))
    fitted, without_data, kept_out, kept_out_without_data = sums
    return _change(fitted, without_data), _change(kept_out, kept_out_without_data)


def _change(fitted: float, without_data: float) -> float:
    """The relative change from one error to another; from zero to zero it is 0, from zero to any other infinite.

    Weights that lie on the grid of their format already have no error without data.
    """
    if fitted == without_data:
        return 0.0
    return fitted / without_data - 1 if without_data else math.inf


def loses(errors: Mapping[str, FitErrors]) -> bool:
    """Whether fitted weights have larger errors than weights without data, on batches that were kept out.

    Asked by :func:`warn_of_fit`, and by ``report/next_steps.py`` when a report proposes next steps.
    """
    return bool(errors) and fit_changes(errors)[1] > _TOLERANCE


def fit_text(errors: Mapping[str, FitErrors], batches: int) -> str:
    """The text about fitted weights in the summary of a result; ``CalibrationResult.facts`` calls this.

    Args:
        errors: by module name; empty: the fit was not judged.
        batches: the number of batches of all ranks.

    >>> fit_text({"a": (0.01, 0.04, 0.02, 0.04)}, batches=8)
    'errors of outputs -75.0 % on batches fitted to, -50.0 % on others, beside weights without data (1 layer)'
    """
    if not errors:
        reason = "none of them was observed for it"
        if batches < KEPT_OUT_OF:
            reason = f"it takes {KEPT_OUT_OF} batches"
        if not batches:
            reason = (
                "the model itself was not called, only parts of it, and batches are its calls "
                "(call session.count_batches() before each batch)"
            )
        return f"not judged on batches kept out: {reason}"
    fitted, kept_out = fit_changes(errors)
    layers = f"{len(errors)} layer{'' if len(errors) == 1 else 's'}"
    return (
        f"errors of outputs {_signed_percent(fitted)} on batches fitted to, {_signed_percent(kept_out)} on others, "
        f"beside weights without data ({layers})"
    )


def _signed_percent(share: float) -> str:
    """A share as a percentage with its sign: ``-50.0 %``."""
    return f"{100 * share:+.1f} %"


def warn_of_fit(errors: Mapping[str, FitErrors]) -> None:
    """Warn if fitting to the calibration data increases errors on batches that were kept out.

    ``CalibrationSession.finalize`` calls this with each new result, and ``calibrate_layerwise`` at its end.
    """
    if not loses(errors):
        return
    fitted, kept_out = fit_changes(errors)
    changes = (
        f"beside weights without data, errors of outputs are {_signed_percent(fitted)} on batches that were fitted to, "
        f"and {_signed_percent(kept_out)} on every fourth batch, which was kept out"
    )
    if fitted > 0:
        warn(f"fitted weights have larger errors even on the calibration data: {changes}. Instead, {_WITHOUT_DATA}")
    else:
        warn(
            f"fitted weights have larger errors on other data than the calibration's: {changes}. Calibrate with more "
            f"tokens, raise the damping where there is one, or {_WITHOUT_DATA}"
        )
