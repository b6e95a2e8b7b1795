"""Turn observers' statistics into qparams on modules: reduce over ranks, observe the weights, compute, check, write.

A session calls :func:`finalize` after the data; the calibrations part by part call it for each part of a model. The
ranks agree on which observers saw data. Then each rank searches the ranges of its share of the weights, and all ranks
get all ranges. Finally the ranks agree that all have written their qparams. A rank that fails keeps taking part in the
collectives, so that no rank waits forever, and all ranks raise the same error (:class:`.Stretch`).

:class:`_Finalization` has the steps. Its :class:`WeightSearch` makes the rank that owns a weight observe it, wherever
the weight is.

The scales of a large model take gigabytes. So each module's qparams take the dtype in which they are stored as soon as
they are computed, they are checked without a copy, and the written tensors replace the computed ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.expert_tokens import add_counts, borrow_ranges
from lightning_obs.calibration.fit_errors import JudgedFits
from lightning_obs.calibration.hold_out import of_hold_out
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.quantized_outputs import qparams_from_zero, ranges_of_sources, settle_outputs
from lightning_obs.calibration.result import (
    CalibrationResult,
    chosen_ranges,
    grids_of_weights,
    observed_ranges,
    on_host,
    qparams_for_result,
    result_of,
)
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
from lightning_obs.observers.statistic import input_statistics
from lightning_obs.ranks.collectives import Collectives, Stretch
from lightning_obs.ranks.sync import Synced, share_weights, sync_statistics
from lightning_obs.schemes.planned_modules import Plan, PlannedModule, expected_shapes


@at_rest()
@torch.inference_mode(False)
@torch.no_grad()
def finalize(observation: Observation, weights: bool = True, activations: bool = True) -> CalibrationResult:
    """Turn the statistics of an observation into qparams on its modules. Every rank must call this.

    Called by ``CalibrationSession.finalize`` for a whole model, and for each step or part of a model by
    :mod:`.stepwise` and ``streaming/parts.py``. It can be called again after the weights have changed; the statistics
    of activations are reduced over ranks only once.

    Offloaded weights stay where they are (``at_rest``), except each one while it is observed. Lightning validates in
    inference mode; it is left here, because tensors that are made in it could not take part in a training later.

    Args:
        observation: of this rank.
        weights: False: do not observe the weights; their qparams do not change.
        activations: False: require no data; the qparams of activations do not change.

    Returns:
        The result, without ``seconds``, which the caller sets.

    Raises:
        CalibrationError: the same on every rank: no data for a static scheme, an observer that no data reached, NaN or
            infinity in data or weights, or a failure of some rank. Qparams may have been written by then; the caller
            restores the earlier ones.
    """
    return _Finalization(observation, weights, activations).run()


class _Finalization:
    """The steps of one call of :func:`finalize`, and what one step leaves for the next.

    The work of a rank between two collectives is in a ``with self.stretch:`` block, which keeps an error for the next
    collective (:class:`.Stretch`).
    """

    def __init__(self, observation: Observation, weights: bool, activations: bool) -> None:
        self.observation = observation
        self.weights = weights
        self.activations = activations
        self.stretch = Stretch(observation.collectives)
        #: how many collectives the steps so far have used
        self.collectives = 0
        #: observers to use in place of those of experts that no data reached
        self.stand_ins: dict[Key, Observer] = {}
        #: names of modules left in full precision: those of the last finalization, until activations are computed
        self.skipped = observation.coverage.skipped
        #: ``{"layer": {"weight_scale": tensor}}``, as they will be stored
        self.qparams: dict[str, dict[str, torch.Tensor]] = {}
        #: judges the fits of weights; None: no fit is judged, or only weights are finalized
        self.fits = JudgedFits(observation) if observation.hold_outs and activations else None

    def run(self) -> CalibrationResult:
        """Run all steps; :func:`finalize` calls this once."""
        observation = self.observation
        observation.coverage.lacks_data = False
        search = self._prepare_weights()
        synced = self._reduce_ranks(search)
        activation_qparams = self._compute_activations(synced)
        searched = self._observe_weights(search, synced)
        self._compute_and_check(activation_qparams)
        self._round_weights(search, searched, synced)
        if self.fits is not None and self.weights:
            self.collectives += self.fits.share(self.stretch)
        self._write()
        return self._agree_on_result(synced)

    # ------------------------------------------------------------------ the steps

    def _prepare_weights(self) -> WeightSearch:
        """Collect the weights to observe, and let their observers forget an earlier weight.

        The observers keep their statistics of inputs. Weights that FSDP has gathered are sharded again first.
        """
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
        """A search of these modules' weights, with this rank's collectives and progress."""
        return WeightSearch(modules, observers, self.observation.collectives, self.observation.progress)

    def _reduce_ranks(self, search: WeightSearch) -> Synced:
        """Reduce the statistics of activations over ranks, and decide which rank observes which weight.

        Args:
            search: has the sizes of the weights.

        Returns:
            The outcome. Its ``notes`` hold, for each rank, the token counts of experts and the state of the readers of
            quantized outputs (None: no outputs are quantized).
        """
        observation = self.observation
        readers = observation.calls.readers
        expert_tokens: dict[str, list[int]] = {}
        with self.stretch:
            for name, counts in observation.calls.expert_tokens.items():
                expert_tokens[name] = [int(count) for count in counts]
            if self.activations and observation.collectives.size == 1:
                _bring_to_host(observation.data_observers)  # several ranks reduce them on the accelerator
        observers: dict[Key, Observer] = {}
        if self.activations and observation.coverage.unreached is None:  # not reduced yet
            observers |= observation.data_observers
            if self.fits is not None:
                observers |= self.fits.observers
        synced = sync_statistics(
            observers,
            observation.collectives,
            weights=search.sizes,
            failure=self.stretch.failure,
            note=(expert_tokens, None if readers is None else readers.state_dict()),
        )
        self.collectives += synced.collectives
        self.stretch = Stretch(observation.collectives, synced.failure)
        return synced

    def _compute_activations(self, synced: Synced) -> dict[Key, QParamsDict]:
        """Compute the qparams of all activations, and decide what happens to modules that no data reached.

        :meth:`run` calls this after the ranks were reduced. If outputs are quantized, the record of which module reads
        which output decides three things: which outputs leave the plan, because an engine quantizes them behind the
        next module; which outputs have a range from zero, because only a ReLU reads them; and which inputs take the
        qparams of the output that they read (their source) in place of their own. The records of all ranks are merged
        for this; to merge them once more in a later finalization changes nothing.

        Args:
            synced: the outcome of :meth:`_reduce_ranks`.

        Returns:
            The qparams by module name and base name; empty if activations are not finalized.
        """
        observation = self.observation
        computed: dict[Key, QParamsDict] = {}
        if not self.activations:
            return computed
        with self.stretch:
            readers = observation.calls.readers
            begin_at_zero: set[str] = set()
            coverage = observation.coverage
            if coverage.unreached is None:
                coverage.unreached = [key for key in synced.unreached if not of_hold_out(key)]
            if readers is not None:
                readers.add(readers_of_rank for _, readers_of_rank in synced.notes)
                begin_at_zero = settle_outputs(observation, readers)
            _bring_to_host(observation.data_observers)
            self.stand_ins = _stand_ins(observation)
            without_ranges = set(coverage.unreached) - self.stand_ins.keys()
            self.skipped = left_in_float_without_data(observation, without_ranges) if without_ranges else set()
            for key, observer in {**observation.observers, **self.stand_ins}.items():
                name, base = key
                if base == "output" and name in begin_at_zero and name not in self.skipped:
                    _qparams_from(observer, key)  # raises for values that are not finite
                    computed[key] = qparams_from_zero(observer)
                elif base != "weight" and name not in self.skipped:
                    computed[key] = _qparams_from(observer, key)
            if readers is not None:
                computed |= ranges_of_sources(observation, readers, computed)
        return computed

    def _observe_weights(self, search: WeightSearch, synced: Synced) -> list[Key]:
        """Let every rank observe its share of the weights; return the keys of the weights of all ranks."""
        observers = self.observation.observers
        searched = [key for key in search.modules if key[0] not in self.skipped]
        with self.stretch:
            with_inputs = {key: observers[key] for key in searched if observers[key].needs_inputs}
            if with_inputs:
                without_signal = settle_zero_inputs(with_inputs)
                if without_signal:
                    warn(
                        "all inputs of these modules were zero (with weigh_tokens: no prediction depends on them), so "
                        f"the columns of their weights count alike: {name_list(without_signal)}"
                    )

        def observe(key: Key, observer: Observer, weight: torch.Tensor) -> None:
            # The statistics of inputs may be missing: for experts without tokens, or if only weights are finalized.
            if key in self.stand_ins or not self.activations:
                observe_without_inputs(observer, weight)
            else:
                observer(weight)
            if self.fits is not None:
                self.fits.judge(key[0], weight)

        self.collectives += search.observe(searched, synced.owners, observe, self.stretch)
        return searched

    def _compute_and_check(self, activation_qparams: Mapping[Key, QParamsDict]) -> None:
        """Compute the qparams of all modules in the dtypes in which they are stored, and check them.

        Args:
            activation_qparams: the result of :meth:`_compute_activations`; those of weights come from their observers.

        Raises:
            CalibrationError: scales are not finite and positive, or have the wrong number of attention heads.
        """
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
        """The qparams of one module, ``{"weight_scale": tensor}``.

        Those of weights or activations that are not finalized now are read from the module.

        Args:
            target: the module.
            activation_qparams: the new qparams of activations, by module name and base name.
        """
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
            if computed is None:  # quantized dynamically, so it has no qparams
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
        """Round the weights whose observers ask for it (``rounding="gptq"``), and add the integers to the qparams.

        Args:
            search: of the weights that were observed.
            searched: their keys.
            synced: has the rank that observes, and rounds, each weight.
        """
        observation = self.observation
        is_asked_for = any(observer.rounding is not None for observer in observation.observers.values())
        if not (self.weights and is_asked_for):
            return
        self.stretch.agree()  # if a rank has failed, none rounds: gathering sharded weights takes all ranks
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
        """Write the qparams to the modules, and with them the checksums of the weights to which they belong."""
        with self.stretch:
            write_all(self.observation.plan, self.qparams)
        with self.stretch:
            if self.weights:  # otherwise the weights may have been trained since their scales were chosen
                remember(self.observation.model)  # on all ranks, which add up the checksums of sharded weights

    def _agree_on_result(self, synced: Synced) -> CalibrationResult:
        """Agree with the other ranks that all have written their qparams, and return the result.

        Without activations no fit was judged, so the result does not speak of a fit (``plan.is_fitted``).
        """
        observation = self.observation
        result: CalibrationResult | None = None
        with self.stretch:
            result = result_of(observation, self.skipped)
            result.modules = list(self.qparams)
            result.batches = observation.calls.batches
            result.measurements = observation.calls.measurements
            result.collectives = self.collectives + 1 if observation.collectives.size > 1 else 0
            result.qparams = on_host(qparams_for_result(self.qparams))
            result.input_ranges = observed_ranges(observation.data_observers)
            result.chosen_input_ranges = chosen_ranges(observation.observers)
            result.grids = grids_of_weights(observation.observers)
            result.plan.is_fitted = result.plan.is_fitted and self.activations
            result.fit_errors = {} if self.fits is None else self.fits.errors
            result.skipped = sorted(self.skipped)
            expert_tokens = [counts for counts, _ in synced.notes]
            if any(expert_tokens):
                result.expert_tokens = add_counts(expert_tokens)
            result.fallback = sorted({name for name, _ in self.stand_ins})
        self.stretch.agree()
        assert result is not None
        observation.coverage.skipped = self.skipped
        return result


def write_all(plan: Plan, qparams: dict[str, dict[str, torch.Tensor]]) -> None:
    """Write the qparams of a plan to its modules; modules without an entry lose the qparams that they had.

    Called near the end of ``finalize``, and by ``load_state`` (:mod:`.saved_state`) for a saved calibration.

    Args:
        plan: its modules are written to.
        qparams: ``{"layer": {"weight_scale": tensor}}``. Its tensors are replaced by those that the modules hold now
            (copies), so that memory does not hold all scales of a model twice.
    """
    for target in plan.targets:
        if target.name in qparams:
            write_qparams(target.module, target.scheme, qparams[target.name])
            written = read_qparams(target.module)
            qparams[target.name] = {key: written[key] for key in qparams[target.name]}
        else:  # otherwise qparams of an earlier calibration would count as this one's
            clear_qparams(target.module)


# ---------------------------------------------------------------------- statistics of activations


def _bring_to_host(observers: Mapping[Key, Observer]) -> None:
    """Move the statistics of activations to the host in one transfer.

    They are small, and computing qparams reads each of them many times. Observers that do not declare their statistics
    keep them where they are, since these may be of any kind.
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
    """Observers to use in place of those of experts that no data reached; empty unless ``on_missing="siblings"``."""
    experts = observation.experts
    if not observation.coverage.unreached or experts is None or observation.options.on_missing != "siblings":
        return {}
    join_ranges = observation.options.join_fused_scales
    return borrow_ranges(observation.observers, experts.containers, observation.plan.fused, join_ranges)


# ---------------------------------------------------------------------- qparams


def _qparams_from(observer: Observer, key: Key) -> QParamsDict:
    """The qparams of an observer; if computing them fails, the error names the module."""
    try:
        return observer.get_qparams()
    except Exception as error:
        raise sendable(error, key) from error


def _check_scales(qparams: Mapping[str, Mapping[str, torch.Tensor]], observers: Mapping[Key, Observer]) -> None:
    """Raise a CalibrationError that names every scale that is not finite and positive in the dtype of its storage.

    A positive float32 may become zero in float16. Scales of signed observers may be negative.

    Args:
        qparams: ``{"layer": {"weight_scale": tensor}}``, as stored.
        observers: of the plan.
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
    # One check of all scales together, as nearly always all are valid.
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
    """Raise a CalibrationError if scales per attention head have another shape than the model's config implies.

    Loaders allocate the scales of a checkpoint by its config.
    """
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
        "attention has another number of heads than the config says, so the checkpoint would not load",
        remedy="use one scale per tensor (kv_cache='FP8').",
    )


# ---------------------------------------------------------------------- weights


class WeightSearch:
    """Lets the ranks observe a set of weights, each weight on one rank.

    A finalization makes one for the observers of weights, and one for the roundings, and calls :meth:`observe` of each.
    A weight may be whole on each rank, sharded over ranks (:mod:`.sharded_weights`), or offloaded; then it is loaded
    while it is observed.

    Args:
        modules: by key (module name, base name), the module of each weight.
        observers: by key, the observer of each weight.
        collectives: of this rank.
        progress: called after each weight that this rank has searched; None: no progress is shown.

    Attributes:
        modules: as given.
        sizes: by key, the number of elements of the weight, by which weights are shared out.

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

        Args:
            keys: the weights to observe; the same on every rank on which nothing failed.
            owners: by key, the rank that observes the weight.
            observe: called with the key, observer and whole weight (a matrix) of each weight that this rank owns.
            stretch: this rank's work. If it holds a failure, this rank observes nothing, and the failure is raised on
                all ranks; a failure in here is kept in it.

        Returns:
            The number of collectives, without the gathering of sharded weights.
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
        """A function that calls ``observe``, and then ``progress`` with the bytes that this rank has observed so far.

        The total is the bytes of the weights in ``keys`` that this rank owns.
        """
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
    """Whether a module's weight has no data: it is on the meta device, and no offloading will load it."""
    weight: Any = module.weight
    return bool(weight.is_meta) and not is_offloaded(module)
