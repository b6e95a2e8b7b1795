"""Calibrate any module while its owner runs it.

A session attaches observers to the modules of a plan, feeds them through forward hooks, and turns what they saw into
quantization parameters. It runs nothing itself: whoever owns the data runs the model. Nothing is written before
everything was checked, and no hook outlives the session.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_obs.checks import check_coverage, check_scales
from lightning_obs.errors import CalibrationError, CalibrationWarning
from lightning_obs.hooks import ObserverHooks
from lightning_obs.modules import (
    clear_qparams,
    read_qparams,
    reshard,
    weight_checksums,
    weight_matrix,
    write_qparams,
)
from lightning_obs.observers import Observer
from lightning_obs.plan import Plan, Reload, Target, build_plan
from lightning_obs.saved_state import dump_state, load_state
from lightning_obs.schemes import ObserversLike, SchemeLike, label, make_observer, resolve_config
from lightning_obs.shards import Weights
from lightning_obs.sync import Collectives, sync_statistics
from lightning_obs.token_mask import require_mask


@dataclass
class CalibrationResult:
    """What a calibration did.

    Attributes:
        scheme: short name of the scheme.
        modules: names of the modules that were quantized.
        observers: how many observers took part.
        batches: how many batches (calls of the model) this rank saw.
        measurements: how often an activation was reduced; fewer than the observers' calls where modules share inputs.
        seconds: wall time from attaching to finishing, the user's forward passes included.
        qparams: ``{"layer.weight_scale": tensor, ...}`` on the CPU.
        input_ranges: observed (min, max) of the inputs of each module, in the units of the activation.
        skipped: modules left in full precision because no data reached them (``on_missing="warn"``).
        ranks: how many ranks took part.
        collectives: how many collectives made their statistics one.
    """

    scheme: str
    modules: list[str]
    observers: int
    batches: int
    measurements: int
    seconds: float
    qparams: dict[str, torch.Tensor]
    input_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    ranks: int = 1
    collectives: int = 0


class CalibrationSession:
    """Calibrate the modules of ``model`` that ``scheme`` targets, in a ``with`` block that runs the data.

    A scheme without static activations (weight-only, dynamic) needs no data: leave the block empty. After the block the
    quantization parameters are on the modules (``module.weight_scale``...), the forward is what it was,
    ``session.result`` says what was done; see :func:`~lightning_obs.quantized` and
    :func:`~lightning_obs.export_checkpoint` for what comes next.

    Args:
        model: any module; target and ignore names are those of its ``named_modules``.
        scheme: preset name, dict, or ``QuantizationConfig`` (:func:`~lightning_obs.schemes.resolve_config`).
        targets: what to quantize where the scheme does not say (default: every Linear).
        ignore: modules to leave alone: names, class names, ``re:`` patterns.
        observers: ``{"input": "minmax", "weight": {"name": ..., <hyperparameter>: ...}}``.
        on_missing: what to do when no data reached a module: ``"error"``, or ``"warn"`` and leave it in full precision.
        reload: how the checkpoint will be loaded, see :func:`~lightning_obs.plan.build_plan`.
        token_mask: name of the model's argument that is nonzero for tokens that count, ``(batch, tokens)``, usually
            ``"attention_mask"``; the others reach no observer. Or say it batch by batch with :meth:`mask_tokens`.
        collectives: how to talk to the other ranks, if there are (``Collectives.of_group()``). Each rank runs its own
            data; all end with the same qparams.

    Raises:
        CalibrationError: by the constructor, whatever is wrong with scheme, targets or shapes; at the end of the block,
            whatever is wrong with the data. Nothing is written in either case.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with CalibrationSession(model, "INT8_STATIC", ignore=["2"]) as session:
    ...     _ = model(torch.ones(3, 4))
    >>> session.result.modules, model[0].input_scale.shape
    (['0'], torch.Size([1]))
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: SchemeLike,
        *,
        targets: str | Sequence[str] | None = None,
        ignore: str | Sequence[str] = (),
        observers: ObserversLike = None,
        on_missing: Literal["error", "warn"] = "error",
        reload: Reload = "default",
        token_mask: str | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        if on_missing not in ("error", "warn"):
            raise CalibrationError("on_missing", got=repr(on_missing), expected="'error' or 'warn'")
        if reload not in ("default", "dequantize", "unchecked"):
            raise CalibrationError("reload", got=repr(reload), expected="'default', 'dequantize' or 'unchecked'")
        self.model = model
        self.config: QuantizationConfig = resolve_config(scheme, targets=targets, ignore=ignore, observers=observers)
        self.label = label(scheme, self.config)
        self.plan: Plan = build_plan(model, self.config, reload)
        self.on_missing = on_missing
        self.collectives = collectives or Collectives()
        self.observers: dict[tuple[str, str], Observer] = {
            (target.name, base_name): make_observer(base_name, args)
            for target in self.plan.targets
            for base_name, args in target.args.items()
            if args.dynamic is not True
        }
        for target in self.plan.targets:
            weight = weight_matrix(target.module)
            for base_name in target.args:
                if weight is not None and (target.name, base_name) in self.observers:
                    self.observers[target.name, base_name].qparams_dtype = weight.dtype
        _check_inputs_fit(self.plan, self.observers)
        for group in self.plan.fused:
            for base_name in ("weight", "input"):
                Observer.fuse([self.observers[n, base_name] for n in group if (n, base_name) in self.observers])
        self.batches = 0
        self.result: CalibrationResult | None = None
        self._written: dict[str, torch.Tensor] = {}
        self._started = 0.0
        self._hooks = ObserverHooks(self.plan.targets, self.observers)
        self._token_mask = token_mask
        self._on_model: list[RemovableHandle] = []

    @property
    def needs_data(self) -> bool:
        """Whether the model has to be run: for static activations, or for a weight's observer that wants inputs."""
        return self.plan.needs_data or any(
            observer.needs_inputs for (_, base_name), observer in self.observers.items() if base_name == "weight"
        )

    # ------------------------------------------------------------------ attach and detach

    def __enter__(self) -> CalibrationSession:
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.detach()
        if kind is None:
            self.finalize()

    def attach(self, count_calls: bool = True) -> None:
        """Forget earlier statistics and start to observe.

        Args:
            count_calls: count calls of ``model`` as batches. Leave it to the caller (``session.batches += 1``) if the
                model is not called as a whole.
        """
        self.detach()
        for observer in self.observers.values():
            observer.reset()
        self.batches, self.result = 0, None
        self._started = time.perf_counter()
        self._hooks.attach()
        if count_calls:
            self._on_model.append(self.model.register_forward_pre_hook(self._count))
        if self._token_mask is not None:
            self._on_model.append(self.model.register_forward_pre_hook(self._find_mask, with_kwargs=True))

    def detach(self) -> None:
        """Remove every hook. Can be called at any time, any number of times."""
        self._hooks.detach()
        for handle in self._on_model:
            handle.remove()
        self._on_model = []

    def mask_tokens(self, mask: torch.Tensor | None) -> None:
        """Keep padding out of every observer from the next call of the model on.

        Args:
            mask: ``(batch, tokens)``, nonzero for a token that counts; None for all.

        Raises:
            CalibrationError: ``mask`` has another shape.
        """
        self._hooks.mask_tokens(None if mask is None else require_mask(mask, "mask_tokens"))

    def _count(self, module: nn.Module, args: Any) -> None:
        self.batches += 1

    def _find_mask(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        mask = {**given.arguments, **given.kwargs}.get(str(self._token_mask))
        if mask is None:
            raise CalibrationError(
                f"token_mask={self._token_mask!r} was not given to the model",
                where=[type(module).__name__],
                got=f"a call with {', '.join(given.arguments)}",
                remedy="pass it in every batch, or leave token_mask out if there is no padding.",
            )
        self.mask_tokens(mask)

    # ------------------------------------------------------------------ finish

    def finalize(self) -> CalibrationResult:
        """Observe the weights as they are now, compute all qparams, check them, then write them to the modules.

        Raises:
            CalibrationError: no data for a static scheme, an observer that no data reached, NaN or infinity in data or
                weights. Nothing was written then.
        """
        self.detach()
        with torch.inference_mode(False), torch.no_grad():
            skipped, collectives, ranks = self._merge_ranks()
            chosen = [target for target in self.plan.targets if target.name not in skipped]
            qparams = {target.name: self._qparams(target) for target in chosen}
            check_scales(qparams)
            checksums = weight_checksums([target.module for target in self.plan.targets])
            for target, checksum in zip(self.plan.targets, checksums, strict=True):
                if target.name in qparams:
                    write_qparams(target.module, target.scheme, qparams[target.name], checksum)
                else:  # an earlier calibration's would pass for this one's
                    clear_qparams(target.module)
        self.result = CalibrationResult(
            scheme=self.label,
            modules=[target.name for target in chosen],
            observers=len(self.observers),
            batches=self.batches,
            measurements=self._hooks.measurements,
            ranks=ranks,
            collectives=collectives if ranks > 1 else 0,
            seconds=time.perf_counter() - self._started,
            qparams={
                f"{t.name}.{key}": v.to("cpu", copy=True) for t in chosen for key, v in read_qparams(t.module).items()
            },
            input_ranges=self._input_ranges(),
            skipped=sorted(skipped),
        )
        self._written = self.result.qparams
        self._say_if_data_was_not_needed()
        return self.result

    def _merge_ranks(self) -> tuple[set[str], int, int]:
        """Give every rank all activations' statistics and all weights' ranges.

        Returns:
            names of modules that no data reached, number of collectives, number of ranks.
        """
        weights = Weights({}, {}, self.collectives)
        failure: CalibrationError | None = None
        reshard(self.model)
        try:
            weighted = [target for target in self.plan.targets if (target.name, "weight") in self.observers]
            _require_materialized(weighted)
            weights = Weights({(t.name, "weight"): t.module for t in weighted}, self.observers, self.collectives)
        except CalibrationError as error:
            failure = error
        for (_, base_name), observer in self.observers.items():
            if base_name == "weight":
                observer.reset(keep=observer.input_statistics)
        synced = sync_statistics(self.observers, self.collectives, weights=weights.sizes, failure=failure)
        skipped: set[str] = set()
        try:
            skipped = check_coverage(
                self.observers, synced.unreached, self.plan.fused, self.label, self.batches, self.on_missing
            )
        except CalibrationError as error:
            failure = error
        keys = [key for key in weights.modules if key[0] not in skipped]
        collectives = weights.observe(keys, synced.owners, failure)
        return skipped, synced.collectives + collectives, synced.ranks

    def _qparams(self, target: Target) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for base_name in target.args:
            observer = self.observers.get((target.name, base_name))
            if observer is None:
                continue
            qparams = observer.get_qparams()
            global_scale = qparams.get("global_scale")
            if global_scale is not None:
                found[f"{base_name}_global_scale"] = global_scale
            if observer.args.dynamic is False:
                found[f"{base_name}_scale"] = qparams["scale"]
                if not observer.args.symmetric:
                    found[f"{base_name}_zero_point"] = qparams["zero_point"]
        return found

    def _input_ranges(self) -> dict[str, tuple[float, float]]:
        ranges = {}
        for (name, base_name), observer in self.observers.items():
            if base_name == "input" and observer.has_statistics:
                low, high = observer.get_min_max()
                ranges[name] = (float(low.min()), float(high.max()))
        return ranges

    def _say_if_data_was_not_needed(self) -> None:
        if self.batches and not self.needs_data:
            static = (
                " For calibrated INT8 activations use scheme='INT8_STATIC'." if self.label in ("W8A8", "INT8") else ""
            )
            warnings.warn(
                f"{self.label} needs no data (its activations are dynamic or in full precision): "
                f"{self.batches} batches were run and not used.{static}",
                CalibrationWarning,
                stacklevel=4,
            )

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to have the same qparams: tensors, strings and numbers only."""
        return dump_state(self.plan, self._written)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the qparams of a :meth:`state_dict` to the modules.

        Raises:
            CalibrationError: the state was made with another scheme or for another model. Nothing was written then.
        """
        self._written = load_state(self.plan, state)


def _check_inputs_fit(plan: Plan, observers: dict[tuple[str, str], Observer]) -> None:
    """An observer that weighs a weight's columns by inputs needs one column per input channel."""
    wrong = [
        f"{target.name} ({type(target.module).__name__})"
        for target in plan.targets
        if (target.name, "weight") in observers
        and observers[target.name, "weight"].needs_inputs
        and (isinstance(target.module, nn.Embedding) or target.module.weight.ndim != 2)
    ]
    if wrong:
        raise CalibrationError(
            "the observer of the weight needs inputs with one channel per column of the weight",
            where=wrong,
            expected="Linear modules",
            remedy="give these modules a group of their own with another observer (memoryless_mse), or ignore them.",
        )


def _require_materialized(targets: Sequence[Target]) -> None:
    missing = [t.name for t in targets if (matrix := weight_matrix(t.module)) is None or matrix.is_meta]
    if missing:
        raise CalibrationError("the weight is not materialized (meta device)", where=missing, remedy="load it first.")
