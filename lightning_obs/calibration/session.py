"""Calibrate any module while its owner runs it.

A session attaches observers to the modules of a plan, feeds them through forward hooks, and turns their statistics into
quantization parameters. It runs nothing itself: the caller owns the data and runs the model. Nothing is written before
everything was checked, and no hook outlives the session.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.helpers import patch_attr
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.expert_tokens import ExpertWatch
from lightning_obs.calibration.finalize import finalize, on_host
from lightning_obs.calibration.hooks import GRADIENTS, HESSIAN, RANGE, ObserverHooks, Read
from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.saved_state import by_module, dump_state, load_state
from lightning_obs.calibration.token_mask import PADDING, require_mask
from lightning_obs.calibration.token_weights import MOST_OUTPUTS, TokenWeights
from lightning_obs.engines.engine import PlannedCheckpoint, ask_engines, engine_of
from lightning_obs.errors import CalibrationError, name_list, refuse_unknown, require_kind, warn
from lightning_obs.files.tensors import Progress
from lightning_obs.forward.quantized_forward import INSIDE
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.checksums import remember
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.module_qparams import (
    CHECKSUMS,
    Calibration,
    calibration_of,
    get_scheme,
    put_back,
    qparams_home,
    qparams_of,
    read_qparams,
    write_qparams,
)
from lightning_obs.model.offload import at_rest, register_offload
from lightning_obs.model.weight import matrix_shape, register_fsdp_units
from lightning_obs.model.wrappers import unwrapped, without_adapters, without_wrappers
from lightning_obs.moe.experts import LinearExperts
from lightning_obs.numerics.histogram import Support
from lightning_obs.observers import HessianObserver, Key, Observer, StaticMinMaxObserver
from lightning_obs.observers.counting import counted_values
from lightning_obs.observers.statistic import observes_data
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.build_plan import build_plan, check_inputs_fit
from lightning_obs.schemes.config import SchemeLike, make_observer
from lightning_obs.schemes.planned_modules import Plan


def _make_observers(plan: Plan) -> tuple[dict[Key, Observer], dict[Key, Observer]]:
    """A plan's observers, and second observers of statistics that they do not keep: an input's extremes, a Hessian."""
    observers, second = dict[Key, Observer](), dict[Key, Observer]()
    for target in plan.targets:
        home = qparams_home(target.module)
        for base_name, args in target.args.items():
            if args.dynamic is True:
                continue
            observers[target.name, base_name] = observer = make_observer(base_name, args)
            observer.qparams_dtype = None if home is None else home.dtype
            if base_name == "input" and not observer.keeps_extremes:
                second[target.name, RANGE] = StaticMinMaxObserver("input", QuantizationArgs())
            elif observer.rounding is not None:
                weighs = getattr(observer, "weigh_tokens", False)
                if not isinstance(observer, HessianObserver):
                    second[target.name, HESSIAN] = HessianObserver("weight", QuantizationArgs(), weigh_tokens=weighs)
                if weighs and (matrix_shape(target.module) or (0,))[0] <= MOST_OUTPUTS:
                    second[target.name, GRADIENTS] = HessianObserver("weight", QuantizationArgs())
    return observers, second


class CalibrationSession:
    """Calibrate the modules of ``model`` that ``scheme`` targets, in a ``with`` block that runs the data.

    A scheme without static activations (weight-only, dynamic) needs no data: leave the block empty. After the block the
    quantization parameters are on the modules (``module.weight_scale``...), the forward is unchanged, and
    ``session.result`` describes the calibration. Next: :func:`~lightning_obs.quantized`,
    :func:`~lightning_obs.export_checkpoint`.

    Args:
        model: any module; target and ignore names are names in its ``named_modules``. Where FSDP1 shards it, the
            outermost wrapper; names have no wrappers in them.
        scheme: preset name, dict, ``QuantizationConfig``, or :class:`~lightning_obs.CalibrationOptions`.
        token_mask: name of the model's argument that is nonzero for tokens that count, ``(batch, tokens)``, usually
            ``"attention_mask"``; the others reach no observer. Or set it for each batch with :meth:`mask_tokens`.
            Without it, padding that an ``attention_mask`` shows is observed, with a warning.
        collectives: how to talk to the other ranks, if there are any (``Collectives.of_group()``). Each rank runs its
            own data; all end with the same qparams.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`.

    Raises:
        CalibrationError: from the constructor, scheme, targets or shapes are wrong; at the end of the block, the data
            are. Nothing is written in either case.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with CalibrationSession(model, "INT8_STATIC", ignore=["2"]) as session:
        ...     _ = model(torch.ones(3, 4))
        >>> session.result.modules, model[0].input_scale.shape
        (['0'], torch.Size([1]))
    """

    batches = 0  # calls of the model
    measurements = 0  # of activations; modules that share an input share them
    started = 0.0  # when the calibration began that the next result reports
    is_paused = False  # whether calls of the model are ignored, though it is attached
    mask: torch.Tensor | None = None  # which tokens, ``(batch, tokens)``, or samples count; None: all
    progress: Progress | None = None  # told of the weights that this rank searches
    token_weights: Any = None  # a TokenWeights, where observers ask for weighed tokens
    is_fitting = False  # whether an error would end a training: modules that no data reached are then left in float
    lacked_data = False  # whether the last finalize failed because data were missing, on all ranks alike
    #: observers that no data reached on any rank; None: the ranks were not reduced yet
    unreached: list[Key] | None = None

    @takes_keywords_of(CalibrationOptions)
    def __init__(
        self,
        model: nn.Module,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        token_mask: str | None = None,
        collectives: Collectives | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        refuse_unknown(options, CalibrationOptions.names(CalibrationSession))
        require_kind("token_mask", token_mask, (str,), f"the name of an argument of the model, such as {PADDING!r}")
        self.options = CalibrationOptions.of(scheme, **options)
        self.label = self.options.label
        register_fsdp_units(model)
        self.model = unwrapped(model)
        register_offload(self.model)
        with without_wrappers(self.model), at_rest():
            fused_sets = [*self.options.engine.fused_sets, *self.options.fused_sets]
            self.plan = build_plan(self.model, self.options.config, fused_sets)
            chosen, also = self.options.engine, [engine_of(name) for name in self.options.engines]
            planned = PlannedCheckpoint(self.model, self.plan.targets, self.options.fused_sets)
            self.engines = ask_engines(planned, chosen, also)
            self.experts = ExpertWatch(self.model, self.options.calibrate_all_experts)
            #: names of modules that are quantized together or not at all
            self.together = [*self.plan.fused, *self._whole_layers()]
        self.observers, second = _make_observers(self.plan)
        #: the observers that data reach, second ones included
        self.fed = {key: observer for key, observer in self.observers.items() if observes_data(observer)} | second
        inputs_of = {(name, "weight"): observer for (name, base), observer in second.items() if base == HESSIAN}
        check_inputs_fit(self.plan.targets, self.observers | inputs_of)
        for group in self.plan.fused:
            for base_name in ("weight", "input"):
                fused = [self.observers[n, base_name] for n in group if (n, base_name) in self.observers]
                Observer.fuse(fused, self.options.join_fused_scales)
        self.collectives = collectives or Collectives()
        self.read = Read()  # sessions that observe the same calls may share it
        self.skipped: set[str] = set()  # modules left in full precision, because no data reached them
        self.result: CalibrationResult | None = None
        self._own: Calibration = {}  # its qparams on the modules; another session may have replaced them since
        self._token_mask, self._counts_calls, self._padding_is_said = token_mask, True, False
        self._attached: ExitStack | None = None
        self._is_timed = False  # whether ``started`` is when data began to be observed that no result has reported yet

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which is not attached."""
        return {**vars(self), "_attached": None, "read": Read(), "progress": None, "token_weights": None}

    @property
    def weighed(self) -> list[str]:
        """Names of the modules whose weight is chosen by tokens that count by their gradients."""
        return [name for (name, _), observer in self.fed.items() if getattr(observer, "weigh_tokens", False)]

    @property
    def needs_data(self) -> bool:
        """Whether the model has to be run: for static activations, or for weights that want inputs."""
        return bool(self.fed)

    # ------------------------------------------------------------------ attach and detach

    def __enter__(self) -> CalibrationSession:
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.detach()
        if kind is None:
            self.finalize()

    @property
    def is_attached(self) -> bool:
        """Whether hooks are on the model."""
        return self._attached is not None

    def attach(self, count_calls: bool = True, forget: bool = True) -> None:
        """Start to observe.

        Args:
            count_calls: count calls of ``model`` as batches. Leave it to the caller (``session.batches += 1``) if the
                model is not called as a whole.
            forget: forget earlier statistics; off: go on with them.
        """
        self.detach()
        if forget:
            self.batches = self.measurements = 0
            for observer in (self.observers | self.fed).values():
                observer.reset()
        self.result = self.unreached = None
        self.is_paused, self._counts_calls = False, count_calls
        self.started = time.perf_counter()
        self._is_timed = True
        with ExitStack() as stack:
            ObserverHooks(self).attach(stack)
            handle = self.model.register_forward_pre_hook(self._on_call, with_kwargs=True)
            stack.callback(keep_hook_out(self.model, handle))
            self.token_weights = TokenWeights(self) if self.weighed else None
            if self.token_weights is not None:
                self.token_weights.attach(stack)
            self._attached = stack.pop_all()

    def detach(self) -> None:
        """Remove every hook. Can be called at any time, any number of times."""
        attached, self._attached, self.mask, self.token_weights = self._attached, None, None, None
        if attached is not None:
            self.read.forget()
            attached.close()

    def paused(self) -> AbstractContextManager[None]:
        """Run the model inside the ``with`` block without observing."""
        return patch_attr(self, "is_paused", True)

    def mask_tokens(self, mask: torch.Tensor | None) -> None:
        """Keep padding out of every observer from the next call of the model on.

        ``mask`` is ``(batch, tokens)``, nonzero for a token that counts; None for all. Another shape is an error. Give
        one that lies on the CPU where you have it: for one on an accelerator the host waits.
        """
        self.mask = None if mask is None else require_mask(mask, "mask_tokens").cpu()
        self.read.forget()

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if INSIDE in vars(module):
            return
        self.batches += self._counts_calls
        given = kwargs
        with suppress(TypeError, ValueError):  # a call that fails, or a forward that is compiled
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
            given = {**bound.arguments, **bound.kwargs}
        if self._token_mask is None:
            self.say_padding(given.get(PADDING))
        elif (mask := given.get(self._token_mask)) is not None:
            self.mask_tokens(mask)
        else:
            raise CalibrationError(
                f"token_mask={self._token_mask!r} was not given to the model",
                where=[type(module).__name__],
                got=f"a call with {', '.join(given)}",
                remedy="pass it in every batch, or leave token_mask out if there is no padding.",
            )
        if self.token_weights is not None and not self.is_paused:
            self.token_weights.measure(module, args, kwargs)

    def say_padding(self, mask: Any) -> None:
        """Warn, once, if tokens that the mask marks as padding are about to be observed."""
        is_masked = self.mask is not None and self.mask.ndim > 1
        if self._padding_is_said or is_masked or self.is_paused or not self.is_attached or not self.needs_data:
            return
        masked = int((mask == 0).sum()) if isinstance(mask, torch.Tensor) and mask.ndim == 2 else 0
        if masked:
            self._padding_is_said = True
            warn(
                f"padding is observed: {PADDING} masks {masked} of {mask.numel()} tokens, and no token_mask is set. "
                f"token_mask={PADDING!r} keeps them out."
            )

    # ------------------------------------------------------------------ finish

    def finalize(self, *, weights: bool = True, activations: bool = True) -> CalibrationResult:
        """Observe the weights as they are now, compute all qparams, check them, then write them to the modules.

        Args:
            weights: off: the weights are not observed, their qparams do not change.
            activations: off: no data are required, the qparams of activations do not change.

        Raises:
            CalibrationError: no data for a static scheme, an observer that no data reached, NaN or infinity in data or
                weights. Nothing was written then.
        """
        self.detach()
        self.lacked_data = False
        if not (activations and self._is_timed):
            self.started = time.perf_counter()
        with self._writing():
            self.result = finalize(self, weights, activations)
        if activations:
            self._is_timed = False
        if self.batches and not self.needs_data:
            warn(
                f"{self.label} needs no data (its activations are dynamic or in full precision): "
                f"{self.batches} batches were run and not used. Data are used by schemes with static activations "
                f"(INT8_STATIC, FP8, NVFP4), by observers of weights that read inputs "
                f"(observers={{'weight': 'imatrix_mse'}}), and by rounding='gptq'."
            )
        if self.result.fallback:
            warn(
                f"no token reached these modules; their activations have the range of the layer's other experts: "
                f"{name_list(self.result.fallback)}"
            )
        return self.result

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Qparams on the modules after the ``with`` block are this session's; an error restores the earlier ones."""
        on_modules, before = calibration_of(self.model), (self._own, self.skipped, self.result)
        try:
            yield
            self._own = calibration_of(self.model, only={target.module for target in self.plan.targets})
        except BaseException:
            put_back(on_modules)
            self._own, self.skipped, self.result = before
            raise

    @property
    def qparams(self) -> dict[str, torch.Tensor]:
        """The qparams that this session has written, ``{"layer.weight_scale": tensor}`` on the CPU."""
        return on_host({t.name: qparams_of(self._own, t.module) for t in self.plan.targets})

    @property
    def input_counts(self) -> dict[str, Support]:
        """How often each value was read, by module name, where the input's observer counts (``histogram``...)."""
        counts = {}
        for (name, base_name), observer in self.observers.items():
            counted = counted_values(observer) if base_name == "input" else None
            if counted is not None:
                counts[name] = counted
        return counts

    def _whole_layers(self) -> list[list[str]]:
        """The modules of each layer's experts: vLLM runs all of them quantized or none, transformers loads them so."""
        ours = is_transformers_model(self.model)
        layers = [n for n in self.experts.containers if ours or isinstance(self.model.get_submodule(n), LinearExperts)]
        return [[t.name for t in self.plan.targets if t.name.startswith(f"{layer}.")] for layer in layers]

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to have the same qparams: tensors, strings and numbers only."""
        with without_wrappers(self.model), without_adapters(self.model):
            own = {name: self._own.get(module, {}) for name, module in self.model.named_modules()}
        checksums = {name: dict(plain[CHECKSUMS]) for name, plain in own.items() if plain.get(CHECKSUMS)}
        return dump_state(self.plan, self.qparams, checksums, self.skipped)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the qparams of a :meth:`state_dict` to the modules.

        Raises:
            CalibrationError: the state was made with another scheme or for another model. Nothing was written then.
        """
        with self._writing():
            load_state(self.model, self.plan, state)
            self.skipped = {*state["skipped"]}

    @torch.no_grad()
    def write_scales(self, scales: Mapping[str, torch.Tensor], *, of_present_weights: bool) -> None:
        """Replace scales ``{"layer.weight_scale": tensor}``, by trained ones for example.

        They belong to the weights that were calibrated, or with ``of_present_weights`` to the present weights.
        """
        own = by_module(scales)
        with torch.inference_mode(False), self._writing():
            for target in self.plan.targets:
                if get_scheme(target.module) is not None and target.name in own:
                    write_qparams(target.module, target.scheme, read_qparams(target.module) | own[target.name])
            if of_present_weights:
                remember(self.model)

    # ------------------------------------------------------------------ several sessions of one model

    @property
    def has_written(self) -> bool:
        """Whether this session has written qparams."""
        return bool(self._own)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put this session's qparams on the modules inside the ``with`` block, if another has written since."""
        now = calibration_of(self.model)
        put_back(self._own)
        try:
            yield
        finally:
            put_back(now)
