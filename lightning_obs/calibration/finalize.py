"""From what observers gathered to qparams on modules: merge the ranks, observe the weights, compute, check, write.

The order matters: the ranks agree on what was observed, then each searches its share of the weights, then all get all
ranges. A rank that fails on the way goes on with the collectives, so that none is left waiting, and all raise alike.
Nothing is written before everything was checked.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.calibration.missing_data import borrow_ranges, check_coverage
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.weights import Weights
from lightning_obs.errors import CalibrationError
from lightning_obs.model.checksums import remember
from lightning_obs.model.qparams import as_stored, clear_qparams, read_qparams, write_qparams
from lightning_obs.model.sharding import reshard
from lightning_obs.numerics.qparams import QParamsDict
from lightning_obs.numerics.reshape import ATTENTION
from lightning_obs.observers import Key, Observer
from lightning_obs.ranks.failures import sendable
from lightning_obs.ranks.sync import Collectives, Synced, sync_statistics
from lightning_obs.schemes.attention import count_heads
from lightning_obs.schemes.target import Plan, Target


class Asked(NamedTuple):
    """Whose qparams are computed anew; the others stay what they are."""

    weights: bool = True
    activations: bool = True

    def has(self, key: Key) -> bool:
        """Whether an observer is among them."""
        return self.weights if key[1] == "weight" else self.activations


@dataclass
class Finalizer:
    """The end of one session's calibration. It can be run again, after the weights have changed.

    Attributes:
        model: without wrappers.
        plan: what is quantized.
        observers: of the session, by module name and base name.
        fed: those that data reach, and second observers of inputs.
        experts: which tokens they got.
        together: modules that are quantized together or not at all.
        options: of the session.
        collectives: how to talk to the other ranks.
        skipped: modules that are left in full precision, because no data reached them.
        borrowed: stand-ins for observers of experts that no data reached.
        synced: what the ranks agreed on about the activations, which are made one only once.
    """

    model: nn.Module
    plan: Plan
    observers: Mapping[Key, Observer]
    fed: Mapping[Key, Observer]
    experts: ExpertWatch
    together: list[list[str]]
    options: CalibrationOptions
    collectives: Collectives
    skipped: set[str] = field(default_factory=set)
    borrowed: dict[Key, Observer] = field(default_factory=dict)
    synced: Synced | None = None
    _activations: dict[Key, QParamsDict] = field(default_factory=dict)

    def run(self, asked: Asked, batches: int, measurements: int, started: float) -> CalibrationResult:
        """Merge the ranks, compute and check the qparams, write them to the modules. Every rank must call this.

        Args:
            asked: whose qparams.
            batches: how many this rank saw.
            measurements: how often an activation was reduced.
            started: ``time.perf_counter()`` at the beginning.

        Raises:
            CalibrationError: on every rank alike; nothing was written then.
        """
        with torch.inference_mode(False), torch.no_grad():
            synced, collectives = self._merge_ranks(asked, batches)
            qparams = self._qparams(asked)
            check_scales(qparams)
            check_heads(self.model, qparams)
            self._write(qparams, asked)
        chosen = [target for target in self.plan.targets if target.name in qparams]
        return CalibrationResult(
            scheme=self.options.label,
            modules=[target.name for target in chosen],
            observers=len(self.observers),
            batches=batches,
            measurements=measurements,
            ranks=synced.ranks,
            collectives=collectives if synced.ranks > 1 else 0,
            seconds=time.perf_counter() - started,
            qparams={
                f"{t.name}.{key}": v.to("cpu", copy=True) for t in chosen for key, v in read_qparams(t.module).items()
            },
            input_ranges=_observed_ranges(self.fed),
            chosen_input_ranges=_chosen_ranges(self.observers),
            skipped=sorted(self.skipped),
            expert_tokens=_add_up(synced.notes),
            fallback=sorted({name for name, _ in self.borrowed}),
            fused=self.together,
        )

    # ------------------------------------------------------------------ ranks and weights

    def _merge_ranks(self, asked: Asked, batches: int) -> tuple[Synced, int]:
        """What the ranks agreed on, and how many collectives it took to make activations and weights one."""
        reshard(self.model)
        held, failure = self._hold_weights(asked)
        synced = sync_statistics(
            self.fed if asked.activations and not self.synced else {},
            self.collectives,
            weights=held.sizes,
            failure=failure,
            note=self.experts.tokens,
        )
        self.borrowed = {}
        failure = (self._cover(synced, batches) or self._try_activations()) if asked.activations else None
        searched = [key for key in held.modules if key[0] not in self.skipped]

        def observe(key: Key, observer: Observer, rows: torch.Tensor) -> None:
            # Inputs may be lacking where the options allow it, and where data is not asked for.
            if key in self.borrowed or not asked.activations:
                observer.observe_without_inputs(rows)
            else:
                observer(rows)

        return synced, synced.collectives + held.observe(searched, synced.owners, failure, observe)

    def _hold_weights(self, asked: Asked) -> tuple[Weights, CalibrationError | None]:
        """The weights to observe, as this rank holds them; none of them, and why, where they cannot be observed."""
        weighted = {(t.name, "weight"): t.module for t in self.plan.targets if asked.weights}
        weighted = {key: module for key, module in weighted.items() if key in self.observers}
        try:
            missing = [name for (name, _), module in weighted.items() if module.weight.is_meta]
            if missing:
                what = "the weight is not materialized (meta device)"
                raise CalibrationError(what, where=missing, remedy="load it first.")
            held = Weights(weighted, self.observers, self.collectives)
        except CalibrationError as error:
            return Weights({}, {}, self.collectives), error
        for key in held.modules:
            self.observers[key].reset(keep=self.observers[key].input_statistics)
        return held, None

    def _cover(self, synced: Synced, batches: int) -> CalibrationError | None:
        """Find what no data reached on any rank, and what is done about it; an error is returned, not raised."""
        self.synced = self.synced or synced
        experts = {name: len(members) for name, members in self.experts.containers.items()}
        try:
            if self.options.on_missing == "siblings":
                self.borrowed = borrow_ranges(self.observers, experts, self.plan.fused, self.options.join_fused_scales)
            self.skipped = check_coverage(
                self.observers,
                set(self.synced.unreached) - set(self.borrowed),
                self.together,
                self.options,
                batches,
                experts=bool(experts),
            )
        except CalibrationError as error:
            return error
        return None

    def _try_activations(self) -> CalibrationError | None:
        """Compute them; an error of this rank alone is returned, to be raised on all before weights are searched."""
        self._activations = {}
        for key, observer in {**self.observers, **self.borrowed}.items():
            if key[1] != "weight" and key[0] not in self.skipped:
                try:
                    self._activations[key] = observer.get_qparams()
                except Exception as error:
                    failure = sendable(error, key)
                    failure.__cause__ = error
                    return failure
        return None

    # ------------------------------------------------------------------ qparams

    def _qparams(self, asked: Asked) -> dict[str, dict[str, torch.Tensor]]:
        """The qparams of every module that is quantized, as stored: ``{"fc1": {"weight_scale": ...}}``."""
        anew = {key: observer for key, observer in {**self.observers, **self.borrowed}.items() if asked.has(key)}
        chosen = [target for target in self.plan.targets if target.name not in self.skipped]
        return {
            target.name: as_stored(
                target.module, _kept_qparams(target, anew) | _new_qparams(target, anew, self._activations)
            )
            for target in chosen
        }

    def _write(self, qparams: Mapping[str, dict[str, torch.Tensor]], asked: Asked) -> None:
        for target in self.plan.targets:
            if target.name in qparams:
                write_qparams(target.module, target.scheme, qparams[target.name])
            else:  # an earlier calibration's would pass for this one's
                clear_qparams(target.module)
        if asked.weights:  # else they may have been trained on since their scale was chosen
            remember(self.model)


def _new_qparams(
    target: Target, asked: Mapping[Key, Observer], known: Mapping[Key, QParamsDict]
) -> dict[str, torch.Tensor]:
    """The qparams of what is asked: ``{"weight_scale": ...}``; those that are known are not computed again."""
    computed: dict[str, torch.Tensor] = {}
    for base_name in target.args:
        observer = asked.get((target.name, base_name))
        if observer is None:
            continue
        qparams = known.get((target.name, base_name)) or observer.get_qparams()
        global_scale = qparams.get("global_scale")
        if global_scale is not None:
            computed[f"{base_name}_global_scale"] = global_scale
        if observer.args.dynamic is False:
            computed[f"{base_name}_scale"] = qparams["scale"]
            if not observer.args.symmetric:
                computed[f"{base_name}_zero_point"] = qparams["zero_point"]
    return computed


def _kept_qparams(target: Target, asked: Collection[Key]) -> dict[str, torch.Tensor]:
    """The qparams of what is not asked anew, as they stand on the module."""
    kept = tuple(f"{base_name}_" for base_name in target.args if (target.name, base_name) not in asked)
    return {key: value for key, value in read_qparams(target.module).items() if kept and key.startswith(kept)}


# ---------------------------------------------------------------------- what has to hold before anything is written


def check_scales(qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise a CalibrationError that names every scale (by module and parameter) that is not finite and positive.

    Args:
        qparams: as they are stored: what is positive in float32 may be zero in float16.
    """
    scales = {f"{n}.{key}": x for n, values in qparams.items() for key, x in values.items() if key.endswith("scale")}
    # Nearly always all are: one question for all of them takes a tenth of the time.
    alike: dict[object, list[torch.Tensor]] = {}
    for scale in scales.values():
        alike.setdefault((scale.device, scale.dtype), []).append(scale.flatten())
    if all(_are_scales(torch.cat(some)) for some in alike.values()):
        return
    bad = [f"{key} ({str(x.dtype).removeprefix('torch.')})" for key, x in scales.items() if not _are_scales(x)]
    raise CalibrationError(
        "scales are not finite and positive",
        where=bad,
        remedy="look at the observer's range. Scales are stored in the weight's dtype; where it is too narrow, "
        "load the model in bfloat16 or float32, or list these modules in `ignore`.",
    )


def _are_scales(value: torch.Tensor) -> bool:
    return bool((torch.isfinite(value) & (value > 0)).all())


def check_heads(model: nn.Module, qparams: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise a CalibrationError where scales per head do not fit the config, by which a checkpoint is loaded."""
    per_head = [
        (name, key, value.shape[0])
        for name, values in qparams.items()
        for key, value in values.items()
        if key.partition("_")[0] in ATTENTION and value.ndim == 3
    ]
    expected = count_heads(model) if per_head else {}
    bad = [f"{name}.{key} ({heads})" for name, key, heads in per_head if heads != expected[key[0]]]
    if bad:
        raise CalibrationError(
            "attention has other heads than the config says, so the checkpoint would not load",
            where=bad,
            expected=", ".join(f"{base} {heads}" for base, heads in expected.items()),
            remedy="one scale per tensor (kv_cache='FP8').",
        )


# ---------------------------------------------------------------------- what a person reads


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
