"""From observers' statistics to qparams on modules: reduce the ranks, observe the weights, compute, check, write.

The ranks agree on which observers saw data, then each searches its share of the weights, then all get all ranges, and
in the end they agree that all have written them. A rank that fails goes on with the collectives, so that none is left
waiting, and all raise alike (:class:`.Stretch`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_obs.calibration.expert_tokens import borrow_ranges
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.rounding import WeightRounding, make_roundings
from lightning_obs.calibration.unreached import left_in_float_without_data
from lightning_obs.calibration.weights import Observe, ShardedWeights
from lightning_obs.errors import CalibrationError, name_list, refuse, sendable, warn
from lightning_obs.files.tensors import Tally
from lightning_obs.model.checksums import remember
from lightning_obs.model.module_qparams import ROUNDED, as_stored, clear_qparams, read_qparams, write_qparams
from lightning_obs.model.offload import at_rest, is_offloaded
from lightning_obs.model.weight import onloaded, place_of, reshard, whole_matrix
from lightning_obs.numerics.many_tensors import all_finite, to_host
from lightning_obs.numerics.qparams import QParamsDict
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.by_inputs import observe_without_inputs, settle_zero_inputs
from lightning_obs.observers.statistic import input_statistics
from lightning_obs.ranks.collectives import Stretch
from lightning_obs.ranks.sync import share_weights, sync_statistics
from lightning_obs.schemes.left_in_float import shares_in_float
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, expected_shapes

if TYPE_CHECKING:
    from lightning_obs.calibration.session import CalibrationSession


@at_rest()
@torch.inference_mode(False)
@torch.no_grad()
def finalize(session: CalibrationSession, weights: bool, activations: bool) -> CalibrationResult:
    """As :meth:`.CalibrationSession.finalize`. Every rank must call this; an error is raised on all of them.

    It can be called again, after the weights have changed: activations are reduced only once.
    """
    collectives = session.collectives
    stretch = Stretch(collectives)
    shared = _Weights(session, {}, {})
    tokens: dict[str, list[int]] = {}
    with stretch:
        reshard(session.model)
        shared = _weights(session, weights)
        tokens = {name: [int(count) for count in counts] for name, counts in session.experts.tokens.items()}
        if activations and collectives.size == 1:
            _bring_to_host(session.fed)  # else the ranks reduce them where they are
    synced = sync_statistics(
        session.fed if activations and session.unreached is None else {},
        collectives,
        weights=shared.sizes,
        failure=stretch.failure,
        note=tokens,
    )
    taken = synced.collectives

    stretch = Stretch(collectives, synced.failure)
    borrowed: dict[Key, Observer] = {}
    computed: dict[Key, QParamsDict] = {}
    if activations:
        with stretch:
            _bring_to_host(session.fed)
            borrowed = _stand_ins(session, synced.unreached)
            computed = _compute(session, {**session.observers, **borrowed}, weights=False)

    def observe(key: Key, observer: Observer, weight: torch.Tensor) -> None:
        # Inputs may be missing where on_missing allows it, and where only weights are finalized.
        if key in borrowed or not activations:
            observe_without_inputs(observer, weight)
        else:
            observer(weight)

    searched = [key for key in shared.modules if key[0] not in session.skipped]
    with stretch:
        _settle_zero_inputs({key: session.observers[key] for key in searched})
    taken += shared.observe(searched, synced.owners, observe, stretch)

    qparams: dict[str, dict[str, torch.Tensor]] = {}
    with stretch:
        if weights:
            computed |= _compute(session, session.observers, weights=True)
        qparams = _checked_qparams(session, computed, weights, activations)
    if weights and any(observer.rounding is not None for observer in session.observers.values()):
        stretch.agree()  # weights are gathered to be rounded, by all ranks or none
        taken += 1 + _round(session, shared, searched, synced.owners, qparams, stretch)
    with stretch:
        write_all(session.plan, qparams)
    with stretch:
        if weights:  # else they may have been trained on since their scale was chosen
            remember(session.model)  # called by all ranks: they add up the checksums of sharded weights
    result: CalibrationResult | None = None
    with stretch:
        result = result_of(
            session,
            modules=list(qparams),
            batches=session.batches,
            measurements=session.measurements,
            collectives=taken + 1 if collectives.size > 1 else 0,
            seconds=time.perf_counter() - session.started,
            qparams=on_host({n: {k: x for k, x in own.items() if k != ROUNDED} for n, own in qparams.items()}),
            input_ranges=_observed_ranges(session.fed),
            chosen_input_ranges=_chosen_ranges(session.observers),
            skipped=sorted(session.skipped),
            expert_tokens=_add_up(synced.notes),
            fallback=sorted({name for name, _ in borrowed}),
        )
    stretch.agree()
    assert result is not None
    return result


def _checked_qparams(
    session: CalibrationSession, computed: Mapping[Key, QParamsDict], weights: bool, activations: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """The qparams of all modules that are not skipped, as they will be stored; an error names those that cannot be."""
    left = [target for target in session.plan.targets if target.name not in session.skipped]
    qparams = {t.name: as_stored(t.module, _qparams_of(t, computed, weights, activations)) for t in left}
    signed = {f"{name}.{base}_scale" for (name, base), observer in session.observers.items() if observer.signed}
    _check_scales(qparams, signed)
    _check_heads(left, qparams)
    return qparams


def _round(
    session: CalibrationSession,
    shared: _Weights,
    searched: Sequence[Key],
    owners: Mapping[Key, int],
    qparams: dict[str, dict[str, torch.Tensor]],
    stretch: Stretch,
) -> int:
    """Add the rounded weights to ``qparams``; returns how many collectives that took."""
    roundings: dict[Key, WeightRounding] = {}
    again = _Weights(session, {}, {})
    with stretch:
        roundings = make_roundings({key: session.observers[key] for key in searched}, session.fed, qparams)
        again = _Weights(session, {key: shared.modules[key] for key in roundings}, roundings)
    taken = again.observe(list(roundings), owners, lambda _, rounding, weight: rounding(weight), stretch)
    with stretch:
        for (name, _), rounding in roundings.items():
            qparams[name][ROUNDED] = rounding.rounded
    return taken


def _settle_zero_inputs(observers: Mapping[Key, Observer]) -> None:
    """Find weights whose columns count alike, because the inputs that should weigh them were all zero, and warn."""
    with_zeros = {id(observer) for observer in settle_zero_inputs(observers.values())}
    names = [name for (name, _), observer in observers.items() if id(observer) in with_zeros]
    if names:
        warn(
            "all inputs of these modules were zero (with weigh_tokens: no prediction depends on them), so the columns "
            f"of their weights count alike: {name_list(names)}"
        )


def result_of(session: CalibrationSession, **found: Any) -> CalibrationResult:
    """The result of a session: the facts of its plan, and the ``found`` ones."""
    planned = {
        "scheme": session.label,
        "modules": [target.name for target in session.plan.targets],
        "observers": len(session.observers),
        "fused": session.together,
        "left_out": session.plan.left_out,
        "in_float": shares_in_float(session.model, session.plan.targets, session.skipped),
        "engines": session.engines,
        "ranks": session.collectives.size,
    }
    return CalibrationResult(**{**planned, **found})


class _Weights:
    """The weights of ``modules``, shared out over ranks, and their observers; refused where they cannot be read."""

    def __init__(
        self, session: CalibrationSession, modules: Mapping[Key, nn.Module], observers: Mapping[Key, Observer]
    ) -> None:
        self.modules, self._observers = modules, observers
        self._collectives, self._progress = session.collectives, session.progress
        refuse(
            [name for (name, _), m in modules.items() if m.weight.is_meta and not is_offloaded(m)],
            "the weight is not materialized (meta device)",
            remedy="load it first.",
        )
        shapes, sharded = {key: place_of(module).shape for key, module in modules.items()}, None
        if any(place_of(module).groups for module in modules.values()):
            sharded = ShardedWeights(modules, observers, self._collectives)
        self._sharded = sharded
        #: the number of elements of each weight
        self.sizes = {key: shape.numel() for key, shape in shapes.items()}

    def observe(self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe, stretch: Stretch) -> int:
        """As :meth:`.ShardedWeights.observe`, whether weights are sharded or not; progress is told."""
        ranks, rank = self._collectives.size, self._collectives.rank
        if self._progress is not None:
            mine = {key: size for key, size in self.sizes.items() if owners.get(key) == rank}
            weights: dict[Key, Any] = {key: self.modules[key].weight for key in mine.keys() & set(keys)}
            tally = Tally(sum(mine[key] * weight.itemsize for key, weight in weights.items()), self._progress)
            observe = partial(_tell, observe, tally, ranks)
        if self._sharded is not None:
            return self._sharded.observe(keys, owners, observe, stretch)

        def search(key: Key) -> None:
            with onloaded(self.modules[key]):
                matrix = whole_matrix(self.modules[key])
                assert matrix is not None  # a plan has no weight without a matrix
                observe(key, self._observers[key], matrix)

        own = {key: self._observers[key] for key in keys}
        shared = share_weights(own, owners, search, self._collectives, stretch.failure)
        if shared.failure is not None:
            stretch.keep(shared.failure)
        return shared.collectives


def _tell(observe: Observe, tally: Tally, ranks: int, key: Key, observer: Observer, weight: torch.Tensor) -> None:
    observe(key, observer, weight)
    tally.add(key[0] if ranks == 1 else f"{key[0]} (this rank's share)", weight.nbytes)


def _weights(session: CalibrationSession, wanted: bool) -> _Weights:
    """The weights to observe, and their observers without statistics of an earlier weight."""
    observers = session.observers
    modules: dict[Key, nn.Module] = {}
    for target in session.plan.targets:
        key = (target.name, "weight")
        if wanted and key in observers:
            modules[key] = target.module
    shared = _Weights(session, modules, observers)
    for key in modules:
        observers[key].reset(keep=input_statistics(observers[key]))
    return shared


def write_all(plan: Plan, qparams: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """Write the qparams ``{"layer": {"weight_scale": tensor}}`` of a plan; modules without any are left without."""
    for target in plan.targets:
        if target.name in qparams:
            write_qparams(target.module, target.scheme, qparams[target.name])
        else:  # qparams of an earlier calibration would pass for this one's
            clear_qparams(target.module)


def on_host(qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Qparams ``{"layer": {"weight_scale": tensor}}`` as ``{"layer.weight_scale": tensor}``, on the CPU."""
    flat = {f"{name}.{key}": value for name, found in qparams.items() for key, value in found.items()}
    return dict(zip(flat, to_host(list(flat.values())), strict=True))


def _bring_to_host(observers: Mapping[Key, Observer]) -> None:
    """Move statistics of activations to the host in one transfer: they are small, and each is read many times now."""
    own = [o for o in observers.values() if o.base_name != "weight" and o._declares_all]
    all_found = [(o, name, x) for o in own for name, x in o.get_statistics().items() if isinstance(x, torch.Tensor)]
    found = [one for one in all_found if one[2].device.type != "cpu"]
    for (observer, name, _), value in zip(found, to_host([x for *_, x in found]), strict=True):
        setattr(observer, name, value)


# ---------------------------------------------------------------------- modules that no data reached


def _stand_ins(session: CalibrationSession, unreached: list[Key]) -> dict[Key, Observer]:
    """Observers in the place of those that no data reached; modules without one are skipped from now on."""
    if session.unreached is None:
        session.unreached = unreached
    borrowed: dict[Key, Observer] = {}
    if session.unreached and session.options.on_missing == "siblings":
        join = session.options.join_fused_scales
        borrowed = borrow_ranges(session.observers, session.experts.containers, session.plan.fused, join)
    session.skipped = left_in_float_without_data(session, set(session.unreached) - borrowed.keys())
    return borrowed


# ---------------------------------------------------------------------- qparams


def _compute(session: CalibrationSession, observers: Mapping[Key, Observer], weights: bool) -> dict[Key, QParamsDict]:
    """The qparams of weights, or of activations, whose module is not skipped. An error names the module."""
    computed: dict[Key, QParamsDict] = {}
    for key, observer in observers.items():
        if key[0] not in session.skipped and (key[1] == "weight") == weights:
            try:
                computed[key] = observer.get_qparams()
            except Exception as error:
                raise sendable(error, key) from error
    return computed


def _qparams_of(
    target: PlannedModule, computed: Mapping[Key, QParamsDict], weights: bool, activations: bool
) -> dict[str, torch.Tensor]:
    """``{"weight_scale": ...}`` of one module: the computed ones, and the rest as it is on the module."""
    found: dict[str, torch.Tensor] = {}
    for base_name, args in target.args.items():
        if not (weights if base_name == "weight" else activations):
            found |= {k: x for k, x in read_qparams(target.module).items() if k.startswith(f"{base_name}_")}
        elif qparams := computed.get((target.name, base_name)):
            global_scale = qparams.get("global_scale")
            if global_scale is not None:
                found[f"{base_name}_global_scale"] = global_scale
            if args.dynamic is False:
                found[f"{base_name}_scale"] = qparams["scale"]
                if not args.symmetric:
                    found[f"{base_name}_zero_point"] = qparams["zero_point"]
    return found


def _check_scales(qparams: Mapping[str, Mapping[str, torch.Tensor]], signed: Collection[str]) -> None:
    """Raise a CalibrationError that names every scale, as stored, that is not finite and positive.

    A positive float32 may be zero in float16. Scales named in ``signed`` may be negative.
    """
    scales = {f"{n}.{key}": x for n, values in qparams.items() for key, x in values.items() if key.endswith("scale")}
    scales |= {key: scales[key].abs() for key in signed if key in scales}
    logs = {f"{key} ({str(x.dtype).removeprefix('torch.')})": x.log() for key, x in scales.items()}
    if not all_finite(logs.values()):  # one question for all of them: nearly always all are
        raise CalibrationError(
            "scales are not finite and positive",
            where=[key for key, log in logs.items() if not all_finite([log])],
            remedy="look at the observer's range. Scales are stored in the weight's dtype; where it is too narrow, "
            "load the model in bfloat16 or float32, or list these modules in `ignore`.",
        )


def _check_heads(targets: Sequence[PlannedModule], qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise a CalibrationError where scales per head do not fit the config, from which a checkpoint is loaded."""
    shapes = {(t.name, key): x for t in targets for base in t.states for key, x in expected_shapes(t, base).items()}
    refuse(
        [
            f"{name}.{key} {tuple(found.shape)} instead of {shape}"
            for (name, key), shape in shapes.items()
            if (found := qparams[name].get(key)) is not None and found.shape != shape
        ],
        "attention has other heads than the config says, so the checkpoint would not load",
        remedy="one scale per tensor (kv_cache='FP8').",
    )


# ---------------------------------------------------------------------- for the result


def _observed_ranges(observers: Mapping[Key, Observer]) -> dict[str, tuple[float, float]]:
    inputs = {name: o for (name, _), o in observers.items() if o.base_name == "input" and o.keeps_extremes}
    return {name: (float(o.min_vals.min()), float(o.max_vals.max())) for name, o in inputs.items() if o.has_statistics}


def _chosen_ranges(observers: Mapping[Key, Observer]) -> dict[str, tuple[float, float]]:
    inputs = {name: o for (name, base), o in observers.items() if base == "input" and o.has_statistics}
    ranges = {name: observer.get_min_max() for name, observer in inputs.items()}
    return {name: (float(low.min()), float(high.max())) for name, (low, high) in ranges.items()}


def _add_up(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Tokens of each expert, over all ranks."""
    names = dict.fromkeys(name for of_rank in counts for name in of_rank)
    return {name: [sum(each) for each in zip(*(c[name] for c in counts if name in c), strict=True)] for name in names}
