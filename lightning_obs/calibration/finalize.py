"""From observers' statistics to qparams on modules: reduce the ranks, observe the weights, compute, check, write.

The ranks agree on which observers saw data, then each searches its share of the weights, then all get all ranges, and
in the end they agree that all have written them. A rank that fails goes on with the collectives, so that none is left
waiting, and all raise alike (:class:`.Stretch`).

Scales of a large model take gigabytes in all. So each module's qparams are stored as soon as they are computed, written
in place of the stored ones, and checked without a copy.
A weight may be whole on each rank, sharded, or offloaded: :class:`WeightSearch` lets the rank that owns it observe it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.expert_tokens import borrow_ranges
from lightning_obs.calibration.observation import CalibrationResult, Observation, PlanSummary
from lightning_obs.calibration.quantized_outputs import qparams_from_zero, ranges_of_sources, settle_outputs
from lightning_obs.calibration.sharded_weights import Observe, ShardedWeights
from lightning_obs.calibration.unreached import left_in_float_without_data
from lightning_obs.calibration.weight_rounding import make_roundings
from lightning_obs.errors import CalibrationError, name_list, refuse, sendable, warn
from lightning_obs.files.tensors import Progress, Tally
from lightning_obs.model.module_qparams import ROUNDED, as_stored, clear_qparams, read_qparams, remember, write_qparams
from lightning_obs.model.offload import at_rest, is_offloaded
from lightning_obs.model.weight import onloaded, place_of, reshard, whole_matrix
from lightning_obs.numerics.many_tensors import all_positive, to_host
from lightning_obs.numerics.qparams import QParamsDict
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.by_inputs import observe_without_inputs, settle_zero_inputs
from lightning_obs.observers.lattice import GridShares, LatticeObserver
from lightning_obs.observers.statistic import input_statistics
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.sync import Synced, share_weights, sync_statistics
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, expected_shapes, shares_in_float


@at_rest()
@torch.inference_mode(False)
@torch.no_grad()
def finalize(observation: Observation, weights: bool = True, activations: bool = True) -> CalibrationResult:
    """Turn the statistics of an observation into qparams on its modules. Every rank must call this.

    It can be called again, after the weights have changed: activations are reduced only once.

    Args:
        observation: of this rank.
        weights: off: the weights are not observed, their qparams do not change.
        activations: off: no data are required, the qparams of activations do not change.

    Returns:
        The result; its ``seconds`` are for the caller to add.

    Raises:
        CalibrationError: on every rank alike: no data for a static scheme, an observer that no data reached, NaN or
            infinity in data or weights, a rank's failure. Qparams may have been written then; the caller restores the
            earlier ones.
    """
    return _Finalization(observation, weights, activations).run()


class _Finalization:
    """The steps of :func:`finalize`, and what they hand on.

    Between two collectives each rank works by itself, in a :class:`.Stretch`, which keeps a failure for the next
    collective.
    """

    def __init__(self, observation: Observation, weights: bool, activations: bool) -> None:
        self.observation = observation
        self.weights = weights
        self.activations = activations
        self.stretch = Stretch(observation.collectives)
        #: how many collectives the steps so far took
        self.collectives = 0
        #: observers in place of those that no data reached
        self.stand_ins: dict[Key, Observer] = {}
        self.skipped = observation.skipped
        #: ``{"layer": {"weight_scale": tensor}}``, as they will be stored
        self.qparams: dict[str, dict[str, torch.Tensor]] = {}

    def run(self) -> CalibrationResult:
        observation = self.observation
        observation.lacks_data = False
        search = self._prepare_weights()
        synced = self._reduce_ranks(search)
        activation_qparams = self._compute_activations(synced)
        searched = self._observe_weights(search, synced)
        self._compute_and_check(activation_qparams)
        self._round_weights(search, searched, synced)
        self._write()
        return self._agree_on_result(synced)

    # ------------------------------------------------------------------ the steps

    def _prepare_weights(self) -> WeightSearch:
        """The weights to observe; their observers forget an earlier weight."""
        observation = self.observation
        search = self._weight_search({}, {})
        with self.stretch:
            reshard(observation.model)
            modules: dict[Key, nn.Module] = {}
            for target in observation.plan.targets:
                key = (target.name, "weight")
                if self.weights and key in observation.observers:
                    modules[key] = target.module
            search = self._weight_search(modules, observation.observers)
            for key in modules:
                observer = observation.observers[key]
                observer.reset(keep=input_statistics(observer))
        return search

    def _weight_search(self, modules: Mapping[Key, nn.Module], observers: Mapping[Key, Observer]) -> WeightSearch:
        return WeightSearch(modules, observers, self.observation.collectives, self.observation.progress)

    def _reduce_ranks(self, search: WeightSearch) -> Synced:
        """Reduce the statistics of activations over ranks, and share out the weights.

        The notes of the ranks are what their calls have counted and seen: tokens of experts, readers of outputs.
        """
        observation = self.observation
        readers = observation.calls.readers
        expert_tokens: dict[str, list[int]] = {}
        with self.stretch:
            for name, counts in observation.calls.expert_tokens.items():
                expert_tokens[name] = [int(count) for count in counts]
            if self.activations and observation.collectives.size == 1:
                _bring_to_host(observation.data_observers)  # else the ranks reduce them where they are
        is_due = self.activations and observation.unreached is None
        synced = sync_statistics(
            observation.data_observers if is_due else {},
            observation.collectives,
            weights=search.sizes,
            failure=self.stretch.failure,
            note=(expert_tokens, None if readers is None else readers.state_dict()),
        )
        self.collectives += synced.collectives
        self.stretch = Stretch(observation.collectives, synced.failure)
        return synced

    def _compute_activations(self, synced: Synced) -> dict[Key, QParamsDict]:
        """Find the modules that no data reached, and compute the qparams of the others' activations."""
        observation = self.observation
        computed: dict[Key, QParamsDict] = {}
        if not self.activations:
            return computed
        with self.stretch:
            readers = observation.calls.readers
            begin_at_zero: set[str] = set()
            if observation.unreached is None:
                observation.unreached = synced.unreached
            if readers is not None:
                readers.add(readers_of_rank for _, readers_of_rank in synced.notes)
                begin_at_zero = settle_outputs(observation, readers)
            _bring_to_host(observation.data_observers)
            self.stand_ins = _stand_ins(observation)
            without_ranges = set(observation.unreached) - self.stand_ins.keys()
            self.skipped = left_in_float_without_data(observation, without_ranges) if without_ranges else set()
            for key, observer in {**observation.observers, **self.stand_ins}.items():
                name, base = key
                if base == "output" and name in begin_at_zero and name not in self.skipped:
                    _qparams_from(observer, key)  # refuses values that are not finite
                    computed[key] = qparams_from_zero(observer)
                elif base != "weight" and name not in self.skipped:
                    computed[key] = _qparams_from(observer, key)
            if readers is not None:
                computed |= ranges_of_sources(observation, readers, computed)
        return computed

    def _observe_weights(self, search: WeightSearch, synced: Synced) -> list[Key]:
        """Let every rank observe its share of the weights; returns the keys of all weights that are observed."""
        observers = self.observation.observers
        searched = [key for key in search.modules if key[0] not in self.skipped]
        with self.stretch:
            with_inputs = {key: observers[key] for key in searched if observers[key].needs_inputs}
            if with_inputs:
                _settle_zero_inputs(with_inputs)

        def observe(key: Key, observer: Observer, weight: torch.Tensor) -> None:
            # Inputs may be missing where on_missing allows it, and where only weights are finalized.
            if key in self.stand_ins or not self.activations:
                observe_without_inputs(observer, weight)
            else:
                observer(weight)

        self.collectives += search.observe(searched, synced.owners, observe, self.stretch)
        return searched

    def _compute_and_check(self, activation_qparams: Mapping[Key, QParamsDict]) -> None:
        """Compute the qparams of all modules as they will be stored; an error names those that cannot be stored."""
        with self.stretch:
            for target in self.observation.plan.targets:
                if target.name not in self.skipped and target.args:
                    qparams = self._qparams_of(target, activation_qparams)
                    self.qparams[target.name] = as_stored(target.module, qparams)
            _check_scales(self.qparams, self.observation.observers)
            _check_heads(self.observation.plan.targets, self.qparams)

    def _qparams_of(
        self, target: PlannedModule, activation_qparams: Mapping[Key, QParamsDict]
    ) -> dict[str, torch.Tensor]:
        """``{"weight_scale": ...}`` of one module: new ones, and those on the module where they do not change."""
        qparams: dict[str, torch.Tensor] = {}
        for base_name, args in target.args.items():
            key = (target.name, base_name)
            is_new = self.weights if base_name == "weight" else self.activations
            if not is_new:
                for name, value in read_qparams(target.module).items():
                    if name.startswith(f"{base_name}_"):
                        qparams[name] = value
                continue
            computed = activation_qparams.get(key)
            if base_name == "weight" and key in self.observation.observers:
                computed = _qparams_from(self.observation.observers[key], key)
            if computed is None:  # quantized dynamically
                continue
            global_scale = computed.get("global_scale")
            if global_scale is not None:
                qparams[f"{base_name}_global_scale"] = global_scale
            if args.dynamic is False:
                qparams[f"{base_name}_scale"] = computed["scale"]
                if not args.symmetric:
                    qparams[f"{base_name}_zero_point"] = computed["zero_point"]
        return qparams

    def _round_weights(self, search: WeightSearch, searched: Sequence[Key], synced: Synced) -> None:
        """Add the rounded weights to the qparams, where rounding is asked for."""
        observation = self.observation
        is_asked_for = any(observer.rounding is not None for observer in observation.observers.values())
        if not (self.weights and is_asked_for):
            return
        self.stretch.agree()  # weights are gathered to be rounded, by all ranks or none
        self.collectives += 1
        rounded_search = self._weight_search({}, {})
        roundings: dict[Key, Any] = {}
        with self.stretch:
            weight_observers = {key: observation.observers[key] for key in searched}
            roundings = dict(make_roundings(weight_observers, observation.data_observers, self.qparams))
            modules = {key: search.modules[key] for key in roundings}
            rounded_search = self._weight_search(modules, roundings)

        def observe(_: Key, rounding: Observer, weight: torch.Tensor) -> None:
            rounding(weight)

        self.collectives += rounded_search.observe(list(roundings), synced.owners, observe, self.stretch)
        with self.stretch:
            for (name, _), rounding in roundings.items():
                self.qparams[name][ROUNDED] = rounding.rounded

    def _write(self) -> None:
        """Write the qparams to the modules, and remember the weights that they belong to."""
        with self.stretch:
            write_all(self.observation.plan, self.qparams)
        with self.stretch:
            if self.weights:  # else they may have been trained on since their scale was chosen
                remember(self.observation.model)  # called by all ranks: they add up the checksums of sharded weights

    def _agree_on_result(self, synced: Synced) -> CalibrationResult:
        """The result, once all ranks have written their qparams."""
        observation = self.observation
        result: CalibrationResult | None = None
        with self.stretch:
            result = result_of(observation, self.skipped)
            result.modules = list(self.qparams)
            result.batches = observation.calls.batches
            result.measurements = observation.calls.measurements
            result.collectives = self.collectives + 1 if observation.collectives.size > 1 else 0
            result.qparams = on_host(qparams_for_result(self.qparams))
            result.input_ranges = _observed_ranges(observation.data_observers)
            result.chosen_input_ranges = _chosen_ranges(observation.observers)
            result.grids = _grids(observation.observers)
            result.skipped = sorted(self.skipped)
            result.expert_tokens = _add_counts([expert_tokens for expert_tokens, _ in synced.notes])
            result.fallback = sorted({name for name, _ in self.stand_ins})
        self.stretch.agree()
        assert result is not None
        observation.skipped = self.skipped
        return result


def qparams_for_result(qparams: Mapping[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """The qparams of modules, by name, without rounded weights, which are as large as the weights."""
    without_weights = {}
    for name, of_module in qparams.items():
        without_weights[name] = {key: value for key, value in of_module.items() if key != ROUNDED}
    return without_weights


def result_of(observation: Observation, skipped: Collection[str] = ()) -> CalibrationResult:
    """The result of a calibration as far as it follows from the plan.

    Args:
        observation: has the plan.
        skipped: names of modules that are left in full precision.
    """
    plan = PlanSummary(
        fused=observation.inseparable,
        left_out=observation.plan.left_out,
        in_float=shares_in_float(observation.model, observation.plan.targets, skipped),
        engines=observation.engines,
    )
    return CalibrationResult(
        scheme=observation.options.label,
        modules=[target.name for target in observation.plan.targets],
        observers=len(observation.observers),
        ranks=observation.collectives.size,
        plan=plan,
    )


def warn_of_borrowed_ranges(result: CalibrationResult) -> None:
    """Warn of experts that no token reached, and that were quantized all the same."""
    if result.fallback:
        warn(
            f"no token reached these modules; their activations have the range of the layer's other experts: "
            f"{name_list(result.fallback)}"
        )


def write_all(plan: Plan, qparams: dict[str, dict[str, torch.Tensor]]) -> None:
    """Write the qparams of a plan; modules without any are left without.

    Args:
        plan: its modules are written to.
        qparams: ``{"layer": {"weight_scale": tensor}}``. Afterwards it holds the tensors of the modules, which are
            copies, and no others: all scales of a model take gigabytes.
    """
    for target in plan.targets:
        if target.name in qparams:
            write_qparams(target.module, target.scheme, qparams[target.name])
            written = read_qparams(target.module)
            qparams[target.name] = {key: written[key] for key in qparams[target.name]}
        else:  # qparams of an earlier calibration would pass for this one's
            clear_qparams(target.module)


def on_host(qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Qparams ``{"layer": {"weight_scale": tensor}}`` as ``{"layer.weight_scale": tensor}``, copies on the CPU."""
    by_full_name: dict[str, torch.Tensor] = {}
    for name, of_module in qparams.items():
        for key, value in of_module.items():
            by_full_name[f"{name}.{key}"] = value
    return dict(zip(by_full_name, to_host(list(by_full_name.values())), strict=True))


# ---------------------------------------------------------------------- statistics of activations


def _bring_to_host(observers: Mapping[Key, Observer]) -> None:
    """Move statistics of activations to the host in one transfer: they are small, and each is read many times now.

    Observers that do not declare their statistics keep them where they are: they may hold anything.
    """
    places: list[tuple[Observer, str]] = []
    tensors: list[torch.Tensor] = []
    for observer in observers.values():
        if observer.base_name == "weight" or not observer._declares_all:
            continue
        for name, value in observer.get_statistics().items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                places.append((observer, name))
                tensors.append(value)
    for (observer, name), value in zip(places, to_host(tensors), strict=True):
        setattr(observer, name, value)


def _stand_ins(observation: Observation) -> dict[Key, Observer]:
    """Observers in place of those of experts that no data reached, if ``on_missing`` allows it."""
    experts = observation.experts
    if not observation.unreached or experts is None or observation.options.on_missing != "siblings":
        return {}
    join_ranges = observation.options.join_fused_scales
    return borrow_ranges(observation.observers, experts.containers, observation.plan.fused, join_ranges)


def _settle_zero_inputs(observers: Mapping[Key, Observer]) -> None:
    """Find weights whose columns count alike, because the inputs that should weigh them were all zero, and warn."""
    with_zeros = {id(observer) for observer in settle_zero_inputs(observers.values())}
    names = []
    for (name, _), observer in observers.items():
        if id(observer) in with_zeros:
            names.append(name)
    if names:
        warn(
            "all inputs of these modules were zero (with weigh_tokens: no prediction depends on them), so the columns "
            f"of their weights count alike: {name_list(names)}"
        )


# ---------------------------------------------------------------------- qparams


def _qparams_from(observer: Observer, key: Key) -> QParamsDict:
    """An observer's qparams; an error names its module."""
    try:
        return observer.get_qparams()
    except Exception as error:
        raise sendable(error, key) from error


def _check_scales(qparams: Mapping[str, Mapping[str, torch.Tensor]], observers: Mapping[Key, Observer]) -> None:
    """Raise a CalibrationError that names every scale, as stored, that is not finite and positive.

    A positive float32 may be zero in float16. Scales of signed observers may be negative.
    """
    unsigned: dict[str, torch.Tensor] = {}
    signed: dict[str, torch.Tensor] = {}
    for name, of_module in qparams.items():
        for key, scale in of_module.items():
            if key.endswith("scale"):
                observer = observers.get((name, key.removesuffix("_scale")))
                may_be_negative = observer is not None and observer.signed
                scales = signed if may_be_negative else unsigned
                scales[f"{name}.{key}"] = scale
    # One question for all of them: nearly always all are positive.
    if all_positive(unsigned.values()) and all_positive(signed.values(), absolute=True):
        return
    names = []
    for name, scale in (unsigned | signed).items():
        if not all_positive([scale], absolute=name in signed):
            names.append(f"{name} ({str(scale.dtype).removeprefix('torch.')})")
    raise CalibrationError(
        "scales are not finite and positive",
        where=names,
        remedy="look at the observer's range. Scales are stored in the weight's dtype; where it is too narrow, "
        "load the model in bfloat16 or float32, or list these modules in `ignore`.",
    )


def _check_heads(targets: Collection[PlannedModule], qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise a CalibrationError where scales per head do not fit the config, from which a checkpoint is loaded."""
    misfits = []
    for target in targets:
        of_module = qparams.get(target.name, {})
        for base in target.states:
            for key, shape in expected_shapes(target, base).items():
                value = of_module.get(key)
                if value is not None and value.shape != shape:
                    misfits.append(f"{target.name}.{key} {tuple(value.shape)} instead of {shape}")
    refuse(
        misfits,
        "attention has other heads than the config says, so the checkpoint would not load",
        remedy="one scale per tensor (kv_cache='FP8').",
    )


# ---------------------------------------------------------------------- for the result


def _observed_ranges(observers: Mapping[Key, Observer]) -> dict[str, tuple[float, float]]:
    """The smallest and largest input of each module whose observer, or helper observer, keeps them."""
    ranges = {}
    for (name, _), observer in observers.items():
        if observer.base_name == "input" and observer.keeps_extremes and observer.has_statistics:
            ranges[name] = (float(observer.min_vals.min()), float(observer.max_vals.max()))
    return ranges


def _chosen_ranges(observers: Mapping[Key, Observer]) -> dict[str, tuple[float, float]]:
    """The range that each module's input scale was computed from."""
    ranges = {}
    for (name, base), observer in observers.items():
        if base == "input" and observer.has_statistics:
            low, high = observer.get_min_max()
            ranges[name] = (float(low.min()), float(high.max()))
    return ranges


def _grids(observers: Mapping[Key, Observer]) -> dict[str, GridShares]:
    """How much of each weight lies on a grid, where its observer looked for one."""
    grids = {}
    for (name, _), observer in observers.items():
        if isinstance(observer, LatticeObserver) and observer.has_statistics:
            grids[name] = observer.grid_shares
    return grids


def _add_counts(counts_of_ranks: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Tokens of each expert, over all ranks."""
    totals: dict[str, list[int]] = {}
    for counts_by_name in counts_of_ranks:
        for name, counts in counts_by_name.items():
            earlier = totals.get(name, [0] * len(counts))
            totals[name] = [total + count for total, count in zip(earlier, counts, strict=True)]
    return totals


# ---------------------------------------------------------------------- the search of weights


class WeightSearch:
    """Weights to search, shared out over ranks.

    Args:
        modules: the module of each weight.
        observers: the observer of each weight.
        collectives: of this rank.
        progress: called after each weight that this rank has searched.

    Attributes:
        modules: as given.
        sizes: the number of elements of each weight.

    Raises:
        CalibrationError: a weight is on the meta device, or sharded over ranks that ``collectives`` does not reach.
    """

    def __init__(
        self,
        modules: Mapping[Key, nn.Module],
        observers: Mapping[Key, Observer],
        collectives: Collectives,
        progress: Progress | None = None,
    ) -> None:
        self.modules = modules
        self.sizes: dict[Key, int] = {}
        self._observers = observers
        self._collectives = collectives
        self._progress = progress
        self._sharded: ShardedWeights | None = None
        refuse(
            [name for (name, _), module in modules.items() if _is_on_meta(module)],
            "the weight is not materialized (meta device)",
            remedy="load it first.",
        )
        is_sharded = False
        for key, module in modules.items():
            place = place_of(module)
            self.sizes[key] = place.shape.numel()
            is_sharded = is_sharded or bool(place.groups)
        if is_sharded:
            self._sharded = ShardedWeights(modules, observers, collectives)

    def observe(self, keys: Collection[Key], owners: Mapping[Key, int], observe: Observe, stretch: Stretch) -> int:
        """Let each rank observe the weights that it owns, and give all ranks all ranges. Every rank must call this.

        Arguments and result are those of :meth:`.ShardedWeights.observe`, whether weights are sharded or not.
        """
        if self._progress is not None:
            observe = self._reporting(observe, keys, owners, self._progress)
        if self._sharded is not None:
            return self._sharded.observe(keys, owners, observe, stretch)

        def search(key: Key) -> None:
            module = self.modules[key]
            with onloaded(module):
                matrix = whole_matrix(module)
                assert matrix is not None  # a plan has no weight without a matrix
                observe(key, self._observers[key], matrix)

        observers = {key: self._observers[key] for key in keys}
        shared = share_weights(observers, owners, search, self._collectives, stretch.failure)
        if shared.failure is not None:
            stretch.keep(shared.failure)
        return shared.collectives

    def _reporting(
        self, observe: Observe, keys: Collection[Key], owners: Mapping[Key, int], progress: Progress
    ) -> Observe:
        """``observe``, followed by a call of ``progress`` with the bytes that this rank has observed so far."""
        total = 0
        for key in keys:
            if owners.get(key) == self._collectives.rank:
                weight: Any = self.modules[key].weight
                total += self.sizes[key] * weight.itemsize
        tally = Tally(total, progress)

        def observe_and_report(key: Key, observer: Observer, weight: torch.Tensor) -> None:
            observe(key, observer, weight)
            name, _ = key
            tally.add(name if self._collectives.size == 1 else f"{name} (this rank's share)", weight.nbytes)

        return observe_and_report


def _is_on_meta(module: nn.Module) -> bool:
    weight: Any = module.weight
    return bool(weight.is_meta) and not is_offloaded(module)
