"""Calibrate any module while its owner runs it.

A session attaches observers to the modules of a plan, feeds them through forward hooks, and turns what they saw into
quantization parameters. It runs nothing itself: whoever owns the data runs the model. Nothing is written before
everything was checked, and no hook outlives the session.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError, CalibrationWarning, name_list
from lightning_obs.modules import (
    clear_qparams,
    first_input,
    read_qparams,
    scheme_args,
    weight_matrix,
    write_qparams,
)
from lightning_obs.numerics.reshape import flatten_for_calibration
from lightning_obs.observers import Observer
from lightning_obs.plan import Plan, Reload, Target, build_plan
from lightning_obs.schemes import ObserversLike, SchemeLike, label, make_observer, resolve_config
from lightning_obs.shared_reads import LastRead

_STATE_FORMAT = 1


@dataclass
class CalibrationResult:
    """What a calibration did.

    Attributes:
        scheme: short name of the scheme.
        modules: names of the modules that were quantized.
        observers: how many observers took part.
        batches: how many batches (calls of the model) were seen.
        measurements: how often an activation was reduced; fewer than the observers' calls where modules share inputs.
        seconds: wall time from attaching to finishing, the user's forward passes included.
        qparams: ``{"layer.weight_scale": tensor, ...}`` on the CPU.
        input_ranges: observed (min, max) of the inputs of each module, in the units of the activation.
        skipped: modules left in full precision because no data reached them (``on_missing="warn"``).
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
        self.observers: dict[tuple[str, str], Observer] = {
            (target.name, base_name): make_observer(base_name, args)
            for target in self.plan.targets
            for base_name, args in scheme_args(target.scheme)
            if args.dynamic is not True
        }
        for target in self.plan.targets:
            weight = weight_matrix(target.module)
            for base_name in ("weight", "input", "output"):
                if weight is not None and (target.name, base_name) in self.observers:
                    self.observers[target.name, base_name].qparams_dtype = weight.dtype
        for group in self.plan.fused:
            for base_name in ("weight", "input"):
                Observer.fuse([self.observers[n, base_name] for n in group if (n, base_name) in self.observers])
        self.batches = 0
        self.result: CalibrationResult | None = None
        self._written: dict[str, torch.Tensor] = {}
        self._attached: ExitStack | None = None
        self._started = 0.0
        self._read = LastRead()

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
        self.batches, self.result, self._read = 0, None, LastRead()
        self._started = time.perf_counter()
        with ExitStack() as stack:
            # A hook added after a graph was compiled would never fire, in silence.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for target in self.plan.targets:
                for base_name, register in (
                    ("input", target.module.register_forward_pre_hook),
                    ("output", target.module.register_forward_hook),
                ):
                    key = (target.name, base_name)
                    if key in self.observers:
                        observer = self.observers[key]
                        stack.callback(register(self._hook(observer, base_name), with_kwargs=True).remove)
            if count_calls:
                stack.callback(self.model.register_forward_pre_hook(self._count).remove)
            self._attached = stack.pop_all()

    def detach(self) -> None:
        """Remove every hook. Can be called at any time, any number of times."""
        if self._attached is not None:
            self._attached.close()
            self._attached = None
        self._read = LastRead(self._read.count)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.batches += 1

    def _hook(self, observer: Observer, base_name: str) -> Any:
        def observe(value: Any) -> None:
            if isinstance(value, (tuple, list)):
                value = next((x for x in value if isinstance(x, torch.Tensor)), None)
            if isinstance(value, DTensor):
                value = value.to_local()
            if isinstance(value, torch.Tensor):
                observer.observe_shared(value.detach(), self._read.measurements(value))

        def observe_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            observe(first_input(args, kwargs))

        def observe_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            observe(output)

        return observe_input if base_name == "input" else observe_output

    # ------------------------------------------------------------------ finish

    def finalize(self) -> CalibrationResult:
        """Observe the weights as they are now, compute all qparams, check them, then write them to the modules.

        Raises:
            CalibrationError: no data for a static scheme, an observer that no data reached, NaN or infinity in data or
                weights. Nothing was written then.
        """
        self.detach()
        with torch.inference_mode(False), torch.no_grad():
            skipped = self._check_coverage()
            chosen = [target for target in self.plan.targets if target.name not in skipped]
            for target in chosen:
                weight_observer = self.observers.get((target.name, "weight"))
                if weight_observer is not None:
                    weight_observer.reset()
                    weight_observer(_materialized(target.name, target.module))
            self._check_finite({target.name for target in chosen})
            qparams = {target.name: self._qparams(target.name) for target in chosen}
            _check_scales(qparams)
            for target in self.plan.targets:
                if target.name in qparams:
                    write_qparams(target.module, target.scheme, qparams[target.name])
                else:  # an earlier calibration's would pass for this one's
                    clear_qparams(target.module)
        self.result = CalibrationResult(
            scheme=self.label,
            modules=[target.name for target in chosen],
            observers=len(self.observers),
            batches=self.batches,
            measurements=self._read.count,
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

    def _check_coverage(self) -> set[str]:
        activations = {key: obs for key, obs in self.observers.items() if key[1] != "weight"}
        missing = [f"{name} ({base})" for (name, base), obs in activations.items() if not obs.has_statistics]
        if not missing:
            return set()
        if len(missing) == len(activations):
            raise CalibrationError(
                f"{self.label} has static activations and saw no data",
                where=missing,
                got=f"{self.batches} batches",
                expected="calibration batches that run these modules",
                remedy="run the model inside the session (in Lightning: validation batches), "
                "or choose a scheme that needs no data (FP8_DYNAMIC, W8A8, W4A16).",
            )
        if self.on_missing == "error":
            raise CalibrationError(
                f"no data reached {len(missing)} of {len(activations)} observers",
                where=missing,
                remedy="add calibration batches, list them in `ignore`, or set on_missing='warn' "
                "to leave them in full precision.",
            )
        unreached = {name for (name, _), obs in activations.items() if not obs.has_statistics}
        # A fused group is quantized whole or not at all.
        mates = {name for group in self.plan.fused if unreached & set(group) for name in group} - unreached
        fused = f"; and, fused with them: {name_list(sorted(mates))}" if mates else ""
        warnings.warn(
            f"left in full precision, because no data reached them: {name_list(missing)}{fused}",
            CalibrationWarning,
            stacklevel=4,
        )
        return unreached | mates

    def _check_finite(self, chosen: set[str]) -> None:
        bad = {
            f"{name} ({base}: {found})"
            for (name, base), observer in self.observers.items()
            if name in chosen and (found := observer.nonfinite_statistics())
        }
        if bad:
            raise CalibrationError(
                "what was observed is not finite",
                where=sorted(bad),
                expected="finite weights and activations",
                remedy="find the NaN or infinity in these modules' weights or in the data; nothing was written.",
            )

    def _qparams(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for base_name in ("weight", "input", "output"):
            observer = self.observers.get((name, base_name))
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
            if base_name == "input" and hasattr(observer, "min_vals") and observer.has_statistics:
                low, high = observer.get_min_max()
                ranges[name] = (float(low.min()), float(high.max()))
        return ranges

    def _say_if_data_was_not_needed(self) -> None:
        if self.batches and not self.plan.needs_data:
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
        return {
            "format": _STATE_FORMAT,
            "config": self.config.model_dump_json(),
            "qparams": {name: value.clone() for name, value in self._written.items()},
            "checksums": {t.name: getattr(t.module, "calibrated_weight_checksum", None) for t in self.plan.targets},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the qparams of a :meth:`state_dict` to the modules.

        Raises:
            CalibrationError: the state was made with another scheme or for another model. Nothing was written then.
        """
        if state.get("format") != _STATE_FORMAT:
            raise CalibrationError(
                "the saved calibration has a format that this version does not know",
                got=state.get("format"),
                expected=_STATE_FORMAT,
                remedy="load it with the version of lightning_obs that wrote it, or calibrate again.",
            )
        if state.get("config") != self.config.model_dump_json():
            raise CalibrationError(
                "the saved calibration was made with another scheme, other observers or another ignore list",
                got=state.get("config"),
                expected=self.config.model_dump_json(),
                remedy="use the configuration that the checkpoint was calibrated with, or calibrate again.",
            )
        by_module: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state["qparams"].items():
            name, _, key = key.rpartition(".")
            by_module.setdefault(name, {})[key] = value
        unknown = sorted(set(by_module) - {target.name for target in self.plan.targets})
        if unknown:
            raise CalibrationError("the saved calibration has modules that this model has not", where=unknown)
        wrong = [t.name for t in self.plan.targets if not _scale_fits(t, by_module.get(t.name, {}))]
        if wrong:
            raise CalibrationError("the saved calibration is of weights with other shapes", where=wrong)
        with torch.inference_mode(False), torch.no_grad():
            for target in self.plan.targets:
                if target.name in by_module:
                    checksum = state["checksums"].get(target.name)
                    write_qparams(target.module, target.scheme, by_module[target.name], checksum)
        self._written = dict(state["qparams"])


def _scale_fits(target: Target, qparams: dict[str, torch.Tensor]) -> bool:
    args, scale, matrix = target.scheme.weights, qparams.get("weight_scale"), weight_matrix(target.module)
    if args is None or scale is None or matrix is None:
        return True
    return bool(scale.shape == flatten_for_calibration(matrix, "weight", args).shape[1:-1])


def _materialized(name: str, module: nn.Module) -> torch.Tensor:
    matrix = weight_matrix(module)
    if matrix is None or matrix.is_meta:
        raise CalibrationError("the weight is not materialized (meta device)", where=[name], remedy="load it first.")
    return matrix


def _check_scales(qparams: dict[str, dict[str, torch.Tensor]]) -> None:
    bad = [
        f"{name}.{key}"
        for name, values in qparams.items()
        for key, value in values.items()
        if key.endswith("scale") and not bool((torch.isfinite(value) & (value > 0)).all())
    ]
    if bad:
        raise CalibrationError(
            "scales are not finite and positive",
            where=bad,
            remedy="look at the observer's range; the values may not fit the scale's dtype.",
        )
