"""Calibrate any module while the user's code runs it.

A session attaches observers to the modules of a plan, feeds them through forward hooks, and turns their statistics into
quantization parameters. The caller has the data and runs the model; only for a rounding on quantized inputs does the
session run the model's calls again. If the calibration fails, the modules have the qparams that they had before. No
hook outlives the session.

Users make a session themselves. The callbacks, the functions that choose schemes, and the calibration from files to
files make one, too.
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

from lightning_obs.calibration.finalize import finalize
from lightning_obs.calibration.fit_errors import warn_of_fit
from lightning_obs.calibration.hooks import ObserverHooks
from lightning_obs.calibration.kept_runs import KeptRuns
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.quantized_outputs import attach_readers
from lightning_obs.calibration.result import CalibrationResult, on_host, warn_of_borrowed_ranges
from lightning_obs.calibration.saved_state import by_module, dump_state, load_state
from lightning_obs.calibration.token_mask import PADDING
from lightning_obs.calibration.token_weights import count_tokens_alike, names_calibrated_alike
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
        scheme: preset name, dict, ``QuantizationConfig``, or :class:`~lightning_obs.CalibrationOptions`. None,
            with the option ``kv_cache``: only the keys and values of attention are quantized.
        token_mask: name of the model's argument that is nonzero for tokens that count, ``(batch, tokens)``, usually
            ``"attention_mask"``. Other tokens reach no observer. Or set the mask of each batch with
            :meth:`mask_tokens`. Without a mask, padding that an ``attention_mask`` shows is observed, with a warning.
        collectives: how this rank communicates with the others, if there are several (``Collectives.of_group()``).
            Each rank runs its own data; all ranks get the same qparams.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`.

    Attributes:
        model: the calibrated model, without wrappers.
        options: of the calibration; parts of a recipe that the model cannot run are left out. If that shows only while
            the data run, the part is left out here when the session finalizes.
        label: short name of scheme and rounding, by ``options``.
        plan: the modules that will be quantized.
        engines: by name of an engine (``"vLLM"``, ``"transformers"``...), whether it will load the checkpoint, and on
            which hardware; or why not.
        observers: by module name and base name (``("layer", "weight")``), the observers of the plan.
        data_observers: the observers that observe data: those of the plan that need data, and those that gather what
            a report or a rounding needs beside them.
        observation: the record of what was observed. Others may read it; only the session's methods change it.
        kept_runs: keeps the model's calls and runs them again step by step, for a rounding on quantized inputs. None:
            the plan has no such rounding.
        result: of the last calibration; None before its end.

    Raises:
        CalibrationError: in the constructor if scheme, targets or shapes are wrong; at the end of the block if the data
            are. The modules' qparams do not change in either case.

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
        # The decorator shows the options in this signature. Names that are neither options nor arguments are refused.
        refuse_unknown(options, CalibrationOptions.names(CalibrationSession))
        require_kind("token_mask", token_mask, (str,), f"the name of an argument of the model, such as {PADDING!r}")
        require_kind("model", model, (nn.Module,), "a module: `MyNet()`, not its class or its name")
        requested_options = CalibrationOptions.of(scheme, **options)
        register_surroundings(model)  # notes wrappers, offloading hooks and LoRA layers on the modules
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
        self.kept_runs: KeptRuns | None = None
        if self.observation.rounds_on_quantized_inputs:
            self.kept_runs = KeptRuns(self.observation, self._hooks)
        self._written = _WrittenQParams(self.model, self.plan)
        #: the time at which observing began, for the ``seconds`` of the next result; None: nothing new is observed
        self._observing_since: float | None = None

    @property
    def needs_data(self) -> bool:
        """Whether the model has to be run: for static activations, or for weights that need inputs.

        Callbacks, command line and file calibrations ask this before they run data.
        """
        return self.observation.needs_data

    @property
    def collectives(self) -> Collectives:
        """How this rank communicates with the other ranks of the run.

        The callbacks ask for it when they export or report, and the calibration layer by layer in each step.
        """
        return self.observation.collectives

    @property
    def batches(self) -> int:
        """How many batches this rank has observed.

        Quantized training asks this after each batch that it observes, to know when it has observed enough.
        """
        return self.observation.calls.batches

    @property
    def skipped(self) -> set[str]:
        """Names of modules that were left in full precision, because no data reached them; empty before the data.

        Read after a calibration: by :meth:`state_dict`, quantized training and ``sensitivity``.
        """
        return self.observation.coverage.skipped

    # ------------------------------------------------------------------ before data

    def begin_run(self, collectives: Collectives, is_fitting: bool) -> None:
        """Prepare for a Trainer's run, in which the model will be called; the callbacks call this when a run starts.

        Args:
            collectives: how this rank communicates with the other ranks of the run.
            is_fitting: whether the run is a fit, which an error would end. Modules that no data reached are then left
                in full precision, with a warning.

        Raises:
            CalibrationError: the user has named a rounding on quantized inputs, and the model cannot run block by
                block. Under a recipe that is a warning.
        """
        self.observation.collectives = collectives
        self.observation.is_fitting = is_fitting
        if self.kept_runs is not None:
            self.kept_runs.require_possible()

    def show_progress(self, progress: Progress | None) -> None:
        """Call ``progress`` with each weight that this rank has searched; None: show no progress.

        The command line calls this around a calibration that it runs.
        """
        self.observation.progress = progress

    # ------------------------------------------------------------------ attach and detach

    def __enter__(self) -> CalibrationSession:
        """Attach the hooks; the model's calls are observed from now on."""
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Detach the hooks, and finalize unless the block has raised."""
        self.detach()
        if kind is None:
            self.finalize()
            self._warn_of_other_schemes()

    def _warn_of_other_schemes(self) -> None:
        """Warn of modules that keep another scheme from an earlier session, because this one does not target them."""
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
                "the model has both schemes now. For one scheme alone, calibrate a model that has not been calibrated."
            )

    @property
    def is_attached(self) -> bool:
        """Whether hooks are on the model.

        The callbacks ask this before each batch, and at the end of a validation to know whether it was observed.
        """
        return self._hooks.is_attached

    def attach(
        self, count_calls: bool = True, forget: bool = True, shares_calls_with: CalibrationSession | None = None
    ) -> None:
        """Attach the hooks: the model's calls are observed from now on.

        If weights are rounded on quantized inputs (``kept_runs``), the calls are kept, and the modules are observed
        when :meth:`finalize` runs the calls again. Under a recipe, calls of the model's parts, which cannot be kept,
        are observed at once. If the plan quantizes outputs, hooks also record which module reads which output.

        Earlier hooks are removed, a pause (:meth:`ignore_calls`) ends, and the last result is forgotten; the qparams on
        the modules stay.

        Called by ``with session:``, by the callbacks when a validation or an observation of training batches starts,
        by the functions that choose schemes, and by ``calibrate_layerwise`` before its first block.

        Args:
            count_calls: count each call of ``model`` as a batch. False: the caller counts (:meth:`count_batches`), for
                example because steps call parts of the model.
            forget: forget earlier statistics. False: continue with them.
            shares_calls_with: another session that observes the same calls. Statistics that one session has computed
                of a tensor are not computed again by the other.

        Raises:
            CalibrationError: the options need a model that can be run backward, or block by block, and this one cannot.
                Under a recipe that is a warning.
        """
        self.detach()
        if self.kept_runs is not None:
            self.kept_runs.require_possible()
        if forget:
            self.observation.forget()
        if shares_calls_with is not None:
            self.observation.calls.cache = shares_calls_with.observation.calls.cache
        self.result = None
        # Statistics change, so finalize must reduce them over the ranks again.
        self.observation.coverage.unreached = None
        self.observation.calls.is_paused = False
        self._observing_since = time.perf_counter()
        has_outputs = self.observation.calls.readers is not None  # whether the plan quantizes outputs
        observes_modules = self.kept_runs is None or self.kept_runs.observe_modules
        self._hooks.attach(count_calls, attach_readers if has_outputs else None, observes_modules)
        if self.kept_runs is not None:
            self.kept_runs.attach(forget)

    def detach(self) -> None:
        """Remove all hooks; statistics and kept calls stay. Nothing happens if no hooks are attached.

        Called at the end of ``with session:``, by :meth:`attach` and :meth:`finalize`, and by the callbacks when a run
        ends, however it ends.
        """
        self._hooks.detach()
        if self.kept_runs is not None:
            self.kept_runs.detach()

    # ------------------------------------------------------------------ while data run

    def paused(self) -> AbstractContextManager[None]:
        """A context manager in which the model can run without being observed.

        ``QuantizedTraining.unquantized`` enters it, so that distillation can run the unquantized model as its teacher.
        """
        return self.observation.calls.paused()

    def ignore_calls(self, ignore: bool) -> None:
        """Ignore the next calls of the model, or observe them again; the callbacks say this before each batch.

        Args:
            ignore: True: ignore them, for batches beyond ``max_batches`` or of other dataloaders.
        """
        self.observation.calls.is_paused = ignore
        self.observation.calls.cache.forget()  # frees the last tensor's statistics, perhaps a Hessian

    def mask_tokens(self, mask: torch.Tensor | None) -> None:
        """Keep padding out of every observer from the next call of the model on.

        The callbacks call this before each batch that is observed.

        Args:
            mask: ``(batch, tokens)`` or ``(batch,)``, nonzero for tokens or samples that count; None: all count. A mask
                on the CPU is best, since the host waits for one on an accelerator.

        Raises:
            CalibrationError: ``mask`` has another shape.
        """
        self._hooks.calls.mask_tokens(mask)

    def warn_of_padding(self, mask: Any) -> None:
        """Warn, once, if the next batch has padding that would be observed; the callbacks call this before each batch.

        Args:
            mask: the ``attention_mask`` of the batch; anything but a tensor ``(batch, tokens)`` is ignored.
        """
        if self.is_attached:
            self._hooks.calls.warn_of_padding(mask)

    def count_batches(self, number: int = 1, after: int | None = None) -> None:
        """Count observed batches, if the calls of the model are not counted (``attach(count_calls=False)``).

        A loop that calls parts of the model, but never the model, calls this before each batch: a fit of weights is
        then judged on every fourth batch. The callbacks call this before each observed validation batch, quantized
        training after each observed training batch, and ``calibrate_layerwise`` once for all batches.

        Args:
            number: how many batches to add.
            after: set the count to this number first, when a run resumes; None: add to the present count.
        """
        if after is not None:
            self.observation.calls.batches = after
        self.observation.calls.batches += number

    # ------------------------------------------------------------------ finish

    def finalize(self, *, weights: bool = True, activations: bool = True) -> CalibrationResult:
        """Observe the weights as they are now, compute and check all qparams, and write them to the modules.

        Called at the end of ``with session:``, by the callbacks at the end of a validation, by quantized training when
        an observation ends or weights have changed, and by ``sensitivity`` for each candidate. If weights are rounded
        on quantized inputs, this runs the kept calls of the model, and computes all qparams whatever the arguments say
        (:meth:`.KeptRuns.calibrate`).
        Every rank must call it.

        Args:
            weights: False: do not observe the weights; their qparams do not change.
            activations: False: require no data; the qparams of activations do not change.

        Raises:
            CalibrationError: no data for a static scheme, an observer that no data reached, NaN or infinity in data or
                weights. The modules then have the qparams that they had before.
        """
        self.detach()
        started = time.perf_counter()
        if activations and self._observing_since is not None:
            started = self._observing_since
        with self._written.replacing():
            if self.kept_runs is None:
                result = finalize(self.observation, weights, activations)
            else:
                result = self.kept_runs.calibrate(self._written.replacing, weights=weights, activations=activations)
        token_weights = self._hooks.token_weights
        if token_weights is not None:
            count_tokens_alike(self.plan, token_weights.names_that_count_alike)
        result.seconds = time.perf_counter() - started
        self.result = result
        self.options = self.observation.options  # a recipe may have gone over to inputs in full precision
        self.label = self.options.label
        if activations:
            self._observing_since = None
        warn_of_borrowed_ranges(result)
        if result.fit_errors:
            warn_of_fit(result.fit_errors)
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
        """The qparams that this session has written, ``{"layer.weight_scale": tensor}``, as new copies on the CPU.

        Read by :meth:`state_dict`, and by the callbacks' results to follow how scales drift in a fit.
        """
        return self._written.on_host()

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """The finished calibration as tensors, strings and numbers; the callbacks save it in Trainer checkpoints."""
        readers = self.observation.calls.readers
        followed = set() if readers is None else readers.followed
        in_full_precision = self.kept_runs is not None and not self.kept_runs.are_in_use
        checksums = self._written.checksums()
        tokens_alike = names_calibrated_alike(self.plan)
        return dump_state(self.plan, self.qparams, checksums, self.skipped, followed, tokens_alike, in_full_precision)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the qparams of a :meth:`state_dict` to the modules; the callbacks call this when a run resumes.

        Outputs that the saved calibration did not quantize leave the plan, and their observers are removed. If its
        recipe had gone over to inputs in full precision, so does this session's.

        Raises:
            CalibrationError: the state was made with another scheme or for another model. Plan and qparams do not
                change then.
        """
        with self._written.replacing():
            load_state(self.model, self.plan, state)
            self.observation.coverage.skipped = set(state["skipped"])
            readers = self.observation.calls.readers
            if readers is not None:  # the plan quantizes outputs
                readers.followed.update(state["followed"])
                self.observation.drop_outputs(readers.followed)  # their observers; load_state has changed the plan
            if state["in_full_precision"] and self.kept_runs is not None and self.kept_runs.is_of_recipe:
                self.kept_runs.round_by_full_precision()
                self.options = self.observation.options
                self.label = self.options.label

    @torch.no_grad()
    def write_scales(self, scales: Mapping[str, torch.Tensor], *, of_present_weights: bool) -> None:
        """Replace scales of calibrated modules, and note whether they belong to the present weights.

        Quantized training calls this with its learned scales whenever they may have changed; and with no scales, to
        note that the qparams are from now on those of weights that were trained.

        Args:
            scales: ``{"layer.weight_scale": tensor}``; qparams without an entry stay.
            of_present_weights: whether the qparams are now those of the present weights. False: they belong to the
                weights that were calibrated, and an export refuses weights that have changed since.
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
        """Whether this session has written qparams, calibrated or loaded.

        The callbacks ask this at the start of fits, validations and tests, which differ for a calibrated model.
        """
        return bool(self._written)

    def in_force(self) -> AbstractContextManager[None]:
        """A context manager in which the modules have this session's qparams, whatever another session wrote since.

        Exports and reports of the callbacks enter it (``callbacks/results.py``), and a validation that runs quantized.
        """
        return self._written.in_force()


def _identity_without_format(scheme: QuantizationScheme) -> str:
    """A text that is equal for schemes of the same number formats; the ``format`` field is set only at writing."""
    return scheme_identity(scheme.model_copy(update={"format": None}))


class _WrittenQParams:
    """The qparams that one session has written, kept because another session of the same model may overwrite them.

    The session makes it in its constructor, empty, and calls its methods.

    Args:
        model: the calibrated model.
        plan: of the session.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._calibration: Calibration = {}

    def __bool__(self) -> bool:
        """Whether the session has written any qparams."""
        return bool(self._calibration)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """A ``with`` block that writes qparams to the modules: they become the session's, or are undone by an error.

        The session's ``finalize``, ``load_state_dict`` and ``write_scales`` enter it.
        """
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
        """Put the session's qparams on the modules inside the ``with`` block, and the present qparams back after it.

        In the block, modules that the session does not target have no qparams, even if another session has calibrated
        them. The session's ``in_force`` enters the block.
        """
        present = calibration_of(self._model)
        put_back(self._calibration)
        try:
            yield
        finally:
            put_back(present)

    def on_host(self) -> dict[str, torch.Tensor]:
        """The session's qparams, ``{"layer.weight_scale": tensor}``, as copies on the CPU.

        Called whenever the session's ``qparams`` is read.
        """
        qparams = {target.name: qparams_of(self._calibration, target.module) for target in self._plan.targets}
        return on_host(qparams)

    def checksums(self) -> dict[str, Mapping[str, int]]:
        """The checksums of the weights to which the qparams belong, ``{"layer": {"weight": checksum}}``.

        The session's ``state_dict`` saves them, so that weights that have changed since are noticed.
        """
        checksums: dict[str, Mapping[str, int]] = {}
        with without_wrappers(self._model), without_adapters(self._model):
            for name, module in self._model.named_modules():
                of_module = self._calibration.get(module, {}).get(CHECKSUMS)
                if of_module:
                    checksums[name] = dict(of_module)
        return checksums
