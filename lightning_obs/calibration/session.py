"""Calibrate any module while its owner runs it.

A session attaches observers to the modules of a plan, feeds them through forward hooks, and turns their statistics into
quantization parameters. It runs nothing itself: the caller owns the data and runs the model. Nothing is written before
everything was checked, and no hook outlives the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.finalize import finalize, on_host, warn_of_borrowed_ranges
from lightning_obs.calibration.hooks import ObserverHooks
from lightning_obs.calibration.kept_calls import KeptCalls
from lightning_obs.calibration.observation import CalibrationResult, Observation
from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.quantized_inputs import calibrate_on_quantized_inputs
from lightning_obs.calibration.quantized_outputs import attach_readers
from lightning_obs.calibration.saved_state import by_module, dump_state, load_state
from lightning_obs.calibration.stepwise import require_steps_possible
from lightning_obs.calibration.token_mask import PADDING
from lightning_obs.errors import name_list, refuse_unknown, require_kind, warn
from lightning_obs.files.tensors import Progress
from lightning_obs.model.kinds import unwrapped, without_adapters, without_wrappers
from lightning_obs.model.module_qparams import (
    CHECKSUMS,
    Calibration,
    calibrated_modules,
    calibration_of,
    get_scheme,
    put_back,
    qparams_of,
    read_qparams,
    remember,
    write_qparams,
)
from lightning_obs.model.weight import register_surroundings
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.config import SchemeLike
from lightning_obs.schemes.planned_modules import Plan, scheme_identity


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

    Attributes:
        model: the calibrated model, without wrappers.
        options: of the calibration, without what its recipe has that the model cannot run.
        label: short name of scheme and rounding.
        plan: the modules that will be quantized.
        engines: each engine's verdict on the checkpoint.
        observers: by module name and base name (``("layer", "weight")``), the observers of the plan.
        data_observers: the observers that data reach.
        observation: the record of what was observed. It is read, and only the session's methods change it.
        result: of the last calibration; None before its end.

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
        requested_options = CalibrationOptions.of(scheme, **options)
        register_surroundings(model)
        self.model = unwrapped(model)
        self.observation = Observation.of_model(self.model, requested_options, collectives)
        self.options = self.observation.options
        self.label = self.options.label
        self.plan = self.observation.plan
        self.engines = self.observation.engines
        self.observers = self.observation.observers
        self.data_observers = self.observation.data_observers
        self.result: CalibrationResult | None = None
        self._hooks = ObserverHooks(self.observation, token_mask)
        #: the model's calls, to be run again step by step; None: the owner's run is observed
        self._kept_calls: KeptCalls | None = None
        if self.observation.rounds_on_quantized_inputs:
            self._kept_calls = KeptCalls(self.observation)
        self._written = _WrittenQParams(self.model, self.plan)
        #: when the data that no result has reported yet began to be observed; None: there are none
        self._observing_since: float | None = None

    @property
    def needs_data(self) -> bool:
        """Whether the model has to be run: for static activations, or for weights that need inputs."""
        return self.observation.needs_data

    @property
    def collectives(self) -> Collectives:
        """How to talk to the other ranks."""
        return self.observation.collectives

    @property
    def batches(self) -> int:
        """How many batches were observed."""
        return self.observation.calls.batches

    @property
    def skipped(self) -> set[str]:
        """Names of modules that were left in full precision, because no data reached them."""
        return self.observation.skipped

    # ------------------------------------------------------------------ before data

    def begin_run(self, collectives: Collectives, is_fitting: bool) -> None:
        """Take over the facts of a run that will call the model.

        Args:
            collectives: how to talk to the other ranks of the run.
            is_fitting: whether an error at its end would end a training. Modules that no data reached are then left in
                full precision, with a warning.
        """
        self.observation.collectives = collectives
        self.observation.is_fitting = is_fitting
        if self._kept_calls is not None:
            require_steps_possible(self.observation)

    def show_progress(self, progress: Progress | None) -> None:
        """Call ``progress`` with each weight that this rank has searched; None: with none."""
        self.observation.progress = progress

    # ------------------------------------------------------------------ attach and detach

    def __enter__(self) -> CalibrationSession:
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.detach()
        if kind is None:
            self.finalize()
            self._warn_of_other_schemes()

    def _warn_of_other_schemes(self) -> None:
        """Warn of modules that an earlier session has calibrated otherwise, and that this one has not targeted."""
        planned_modules = {target.module for target in self.plan.targets}
        identities = {_identity_without_format(target.scheme) for target in self.plan.targets}
        others = []
        for name, module in calibrated_modules(self.model):
            scheme = get_scheme(module)
            assert scheme is not None
            if module not in planned_modules and _identity_without_format(scheme) not in identities:
                others.append(name)
        if others:
            warn(
                f"{name_list(others)}: calibrated before with another scheme, and not targeted by {self.label}, so "
                f"both are in the model now. For one scheme alone, calibrate a model that was not calibrated before."
            )

    @property
    def is_attached(self) -> bool:
        """Whether hooks are on the model."""
        return self._hooks.is_attached

    def attach(
        self, count_calls: bool = True, forget: bool = True, shares_calls_with: CalibrationSession | None = None
    ) -> None:
        """Start to observe.

        Args:
            count_calls: count calls of ``model`` as batches. Leave it to the caller (:meth:`count_batches`) if the
                model is not called as a whole.
            forget: forget earlier statistics; off: go on with them.
            shares_calls_with: another session that observes the same calls. What one has measured in a tensor the
                other does not measure again.
        """
        self.detach()
        if self._kept_calls is not None:
            require_steps_possible(self.observation)
        if forget:
            self.observation.forget()
        if shares_calls_with is not None:
            self.observation.calls.cache = shares_calls_with.observation.calls.cache
        self.result = None
        self.observation.unreached = None
        self.observation.calls.is_paused = False
        self._observing_since = time.perf_counter()
        has_outputs = self.observation.calls.readers is not None
        observes_modules = self._kept_calls is None
        self._hooks.attach(count_calls, attach_readers if has_outputs else None, observes_modules)
        if self._kept_calls is not None:
            self._kept_calls.attach(self._hooks.token_weights, forget)

    def detach(self) -> None:
        """Remove every hook. Can be called at any time, any number of times."""
        self._hooks.detach()
        if self._kept_calls is not None:
            self._kept_calls.detach()

    # ------------------------------------------------------------------ while data run

    def paused(self) -> AbstractContextManager[None]:
        """Run the model inside the ``with`` block without observing."""
        return self.observation.calls.paused()

    def ignore_calls(self, ignore: bool) -> None:
        """Ignore the next calls of the model, or observe them; what was measured in the last tensor is forgotten."""
        self.observation.calls.is_paused = ignore
        self.observation.calls.cache.forget()  # it may hold a copy of the last Hessian

    def mask_tokens(self, mask: torch.Tensor | None) -> None:
        """Keep padding out of every observer from the next call of the model on.

        ``mask`` is ``(batch, tokens)``, nonzero for a token that counts; None for all. Another shape is an error. Give
        one that is on the CPU where you have it: for one on an accelerator the host waits.
        """
        self._hooks.calls.mask_tokens(mask)

    def warn_of_padding(self, mask: Any) -> None:
        """Warn, once, if tokens that the mask of a batch marks as padding are about to be observed."""
        if self.is_attached:
            self._hooks.calls.warn_of_padding(mask)

    def count_batches(self, number: int = 1, after: int | None = None) -> None:
        """Count batches that were observed.

        Args:
            number: how many.
            after: how many were observed before them, in an earlier run; None: as many as were counted.
        """
        if after is not None:
            self.observation.calls.batches = after
        self.observation.calls.batches += number

    # ------------------------------------------------------------------ finish

    def finalize(self, *, weights: bool = True, activations: bool = True) -> CalibrationResult:
        """Observe the weights as they are now, compute all qparams, check them, then write them to the modules.

        A rounding on quantized inputs runs the kept calls of the model now, and computes all qparams in any case.

        Args:
            weights: off: the weights are not observed, their qparams do not change.
            activations: off: no data are required, the qparams of activations do not change.

        Raises:
            CalibrationError: no data for a static scheme, an observer that no data reached, NaN or infinity in data or
                weights. Nothing was written then.
        """
        self.detach()
        started = time.perf_counter()
        if activations and self._observing_since is not None:
            started = self._observing_since
        with self._written.replacing():
            if self._kept_calls is None:
                result = finalize(self.observation, weights, activations)
            else:
                result = _run_kept_calls(self.observation, self._kept_calls)
        result.seconds = time.perf_counter() - started
        self.result = result
        if activations:
            self._observing_since = None
        warn_of_borrowed_ranges(result)
        if self.batches and not self.needs_data:
            warn(
                f"{self.label} needs no data (its activations are dynamic or in full precision): "
                f"{self.batches} batches were run and not used. Data are used by schemes with static activations "
                f"(INT8_STATIC, FP8, NVFP4), by observers of weights that read inputs "
                f"(observers={{'weight': 'imatrix_mse'}}), and by rounding='gptq'."
            )
        return result

    @property
    def qparams(self) -> dict[str, torch.Tensor]:
        """The qparams that this session has written, ``{"layer.weight_scale": tensor}`` on the CPU."""
        return self._written.on_host()

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to have the same qparams: tensors, strings and numbers only."""
        readers = self.observation.calls.readers
        followed = set() if readers is None else readers.followed
        return dump_state(self.plan, self.qparams, self._written.checksums(), self.skipped, followed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the qparams of a :meth:`state_dict` to the modules.

        Raises:
            CalibrationError: the state was made with another scheme or for another model. Nothing was written then.
        """
        with self._written.replacing():
            load_state(self.model, self.plan, state)
            self.observation.skipped = set(state["skipped"])
            readers = self.observation.calls.readers
            if readers is not None:
                readers.followed.update(state["followed"])
                self.observation.drop_outputs(readers.followed)

    @torch.no_grad()
    def write_scales(self, scales: Mapping[str, torch.Tensor], *, of_present_weights: bool) -> None:
        """Replace scales ``{"layer.weight_scale": tensor}``, by trained ones for example.

        They belong to the weights that were calibrated, or with ``of_present_weights`` to the present weights.
        """
        scales_of_modules = by_module(scales)
        with torch.inference_mode(False), self._written.replacing():
            for target in self.plan.targets:
                if get_scheme(target.module) is not None and target.name in scales_of_modules:
                    qparams = read_qparams(target.module) | scales_of_modules[target.name]
                    write_qparams(target.module, target.scheme, qparams)
            if of_present_weights:
                remember(self.model)

    # ------------------------------------------------------------------ several sessions of one model

    @property
    def has_written(self) -> bool:
        """Whether this session has written qparams."""
        return bool(self._written)

    def in_force(self) -> AbstractContextManager[None]:
        """A block in which this session's qparams are on the modules, if another session has written since."""
        return self._written.in_force()


def _identity_without_format(scheme: QuantizationScheme) -> str:
    """What a scheme says of numbers; its format is set once it is written to a module."""
    return scheme_identity(scheme.model_copy(update={"format": None}))


def _run_kept_calls(observation: Observation, kept_calls: KeptCalls) -> CalibrationResult:
    """Calibrate on quantized inputs, and release the kept calls."""
    kept_calls.warn_of_calls_left_out()
    try:
        return calibrate_on_quantized_inputs(observation, kept_calls, kept_calls.token_weights)
    finally:
        kept_calls.release()


class _WrittenQParams:
    """The qparams that one session has written to the modules of its plan. Another session may have replaced them.

    Args:
        model: the calibrated model.
        plan: of the session.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._calibration: Calibration = {}

    def __bool__(self) -> bool:
        """Whether the session has written any."""
        return bool(self._calibration)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Qparams that are on the modules after the ``with`` block are the session's; an error restores the earlier."""
        earlier = calibration_of(self._model)
        try:
            yield
            planned_modules = {target.module for target in self._plan.targets}
            self._calibration = calibration_of(self._model, only=planned_modules)
        except BaseException:
            put_back(earlier)
            raise

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put the session's qparams on the modules inside the ``with`` block, if another has written since."""
        present = calibration_of(self._model)
        put_back(self._calibration)
        try:
            yield
        finally:
            put_back(present)

    def on_host(self) -> dict[str, torch.Tensor]:
        """``{"layer.weight_scale": tensor}``, copies on the CPU."""
        qparams = {target.name: qparams_of(self._calibration, target.module) for target in self._plan.targets}
        return on_host(qparams)

    def checksums(self) -> dict[str, Mapping[str, int]]:
        """The checksums of the weights that the qparams belong to: ``{"layer": {"weight": checksum}}``."""
        checksums: dict[str, Mapping[str, int]] = {}
        with without_wrappers(self._model), without_adapters(self._model):
            for name, module in self._model.named_modules():
                of_module = self._calibration.get(module, {}).get(CHECKSUMS)
                if of_module:
                    checksums[name] = dict(of_module)
        return checksums
