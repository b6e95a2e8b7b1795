"""The ranges of a model while it is trained: observed, refreshed, learned, saved. No Lightning in it.

A :class:`~lightning_obs.CalibrationSession` calibrates a model that does not change. In training, weights and
activations are observed at different times, and an incomplete observation can be saved and resumed.

    NEW, VALIDATED -> OBSERVING  a training batch begins, and training batches are to be observed
    NEW, VALIDATED -> TRAINING   a training batch begins, and none is to be observed
    OBSERVING -> TRAINING        enough batches are observed, or a validation begins
    OBSERVING, GATHERED -> NEW   the observation is given up
    any -> GATHERED -> TRAINING  a validation was observed; the next training batch begins. If the model had no ranges
                                 before, they are in force at the end of the validation already.
    any but GATHERED -> VALIDATED  a validation has ended that was not observed, or gave the first ranges

Between two hooks the phase is one value, which is saved in checkpoints. Lightning validates under inference mode: no
tensor that training needs may be made there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from compressed_tensors.utils.helpers import patch_attr
from torch import nn

from lightning_obs.calibration.saved_state import dump_observation, dump_statistics, load_observation, load_statistics
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.errors import refuse
from lightning_obs.fine_tuning.learned_scales import LearnedScales
from lightning_obs.forward.eager import unfused
from lightning_obs.forward.quantized_forward import fake_quantized_states, quantize_training_forward
from lightning_obs.forward.quantized_module import Switch, has_range
from lightning_obs.model.module_qparams import changed_since, get_scheme
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.statistic import lacks_inputs


class Phase(Enum):
    """The state of a training between two hooks; it says what the next training batch does.

    The methods of :class:`QuantizedTraining` change it, and checkpoints hold it. The module's docstring lists the
    transitions.
    """

    #: nothing was observed yet, or an observation was abandoned
    NEW = "new"
    #: training batches are being observed
    OBSERVING = "observing"
    #: the ranges in force stay
    TRAINING = "training"
    #: a validation has ended: weights are observed again before the next batch, which may be observed itself
    VALIDATED = "validated"
    #: a validation was observed: its ranges are in force from the next batch on
    GATHERED = "gathered"


class QuantizedTraining:
    """The ranges of a session's model in training.

    ``QuantizedFit`` (``callbacks/quantized_fit.py``), a part of ``QuantizationAwareTraining``, makes one when the
    callback has prepared a session. The hooks of that callback call the methods, most of them through ``QuantizedFit``.

    Args:
        session: observes the model.
        train: what an optimizer trains: ``"weights"``, ``"scales"`` (those that can be learned), or ``"all"``.
        refreshes_weights: whether ranges of weights follow the weights: at each validation and at the end of a fit. If
            not, weights are trained in the ranges with which the fit started.

    Attributes:
        session, refreshes_weights: as given.
        switch: which tensors are quantized now.
        learned: the scales that an optimizer trains; None with ``train="weights"``.
        phase: the state in which the next training batch runs.
        forwards: gives the modules their own forwards back when it is closed; None: nothing runs quantized.
        validating: whether a validation runs now, through the model that an export would write at this moment.

    Raises:
        CalibrationError: the session weighs tokens and weights are trained; no scale can be learned.
    """

    def __init__(self, session: CalibrationSession, train: str = "weights", refreshes_weights: bool = False) -> None:
        if train != "scales":
            refuse_weighed_tokens(session)
        # How well fitted weights hold on other data is not measured, because training changes the weights.
        session.observation.judge_no_fit()
        self.session = session
        self.refreshes_weights = refreshes_weights
        self.switch = Switch()
        self.learned = None if train == "weights" else LearnedScales(session.plan, alone=train == "scales")
        self.phase = Phase.NEW
        self.validating = False
        self.forwards: ExitStack | None = None
        # A resumed run may be between two observations: its weights are newer than their ranges, and stay so.
        self._is_resumed = False

    # ------------------------------------------------------------------ the forward

    @torch.inference_mode(False)
    def start(self, around: nn.Module | None = None) -> None:
        """Let the modules run quantized, with ranges of their present weights.

        If the modules' own forwards were in place, ranges of weights that changed are searched, and learned scales are
        written; in a resumed run, only learned scales are written. Called before each training batch, validation and
        test; nothing happens if the modules run quantized already.

        Args:
            around: holds the model, and perhaps its torch.compile'd wrapper; default: the model.
        """
        if self.forwards is not None:
            return
        with ExitStack() as stack:
            if _is_compiled(around or self.session.model):
                torch.compiler.reset()  # graphs that were compiled before do not see a new hook of outputs
                stack.callback(torch.compiler.reset)
            stack.enter_context(unfused(self.session.model))
            _quantize_forwards(self.session, self.switch, stack)
            self.forwards = stack.pop_all()
        if self._is_resumed and self.is_quantized:
            self._write_learned(weights_refreshed=False)
        else:
            self._observe_weights()
        self._is_resumed = False

    def stop(self) -> None:
        """Give every module its own forward back, and detach the session.

        ``QuantizedFit.stop`` calls this at the end of a run, however it ends.
        """
        self.session.detach()
        self.validating = False
        if self.forwards is not None:
            self.forwards.close()
            self.forwards = None

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        """Let the model run in full precision, unobserved, inside a ``with`` block.

        Distillation enters it in each training step while the teacher runs, which may be the model itself.
        """
        switch = self.switch
        with patch_attr(switch, "weights", False), patch_attr(switch, "activations", False), self.session.paused():
            yield

    # ------------------------------------------------------------------ ranges

    @property
    def is_quantized(self) -> bool:
        """Whether any module was calibrated, so that the model runs quantized.

        Asked when forwards are replaced, before exports and tests, and by distillation for its loss.
        """
        return any(get_scheme(target.module) is not None for target in self.session.plan.targets)

    @property
    def has_all_ranges(self) -> bool:
        """Whether every range is known; modules that data never reached do not count.

        Asked before batches are observed, before an export and at the end of a fit: a missing range needs data
        first.
        """
        for target in self.session.plan.targets:
            if target.name not in self.session.skipped:
                for base_name, args in target.args.items():
                    if not has_range(target.module, base_name, args):
                        return False
        return True

    @property
    def has_trained(self) -> bool:
        """Whether training batches have run since the last validation: weights or scales may have changed.

        Asked at the end of a fit, which then refreshes the ranges of the weights.
        """
        return self.phase in (Phase.TRAINING, Phase.OBSERVING)

    @property
    def has_observed(self) -> bool:
        """Whether training batches were observed whose ranges are not in force yet.

        Asked when a validation starts, which puts them in force.
        """
        return self.phase is Phase.OBSERVING and self.session.batches > 0

    @property
    def _input_observers(self) -> dict[Key, Observer]:
        """The observers that choose a weight's scale or rounding by the inputs of its module."""
        return {key: observer for key, observer in self.session.data_observers.items() if observer.needs_inputs}

    @property
    def _weights_stay(self) -> bool:
        """Whether a fit never observes its weights again: their ranges stay, or they are frozen."""
        are_frozen = self.learned is not None and self.learned.alone
        return self.is_quantized and (are_frozen or not self.refreshes_weights)

    @property
    def can_refresh(self) -> bool:
        """Whether data may change ranges of activations that are known already.

        Asked before training or validation batches are observed. False if nothing but scales is trained, or if
        all ranges of activations are learned.
        """
        if self.learned is not None and (self.learned.alone or self.learned.covers_activations):
            return False
        return self.session.needs_data

    # ------------------------------------------------------------------ transitions

    def begin_training_batch(self) -> bool:
        """Put the ranges of the last validation in force; called before each training batch.

        If training batches are being observed in a run that was stopped or resumed, the session is attached again.
        After a validation, ranges of weights are searched again if the weights differ from those that were validated:
        Lightning's ``WeightAveraging`` puts averaged weights into the model for a validation, and takes them out after.

        Returns:
            Whether ranges of activations are due: nothing was observed yet, or a validation has ended.
        """
        self.validating = False
        phase = self.phase
        if phase is Phase.GATHERED:
            self.write(weights=True)
        elif phase is Phase.VALIDATED:  # the weights may differ from those of the validation
            self.refresh_weights()
        if phase is not Phase.OBSERVING:
            self.phase = Phase.TRAINING
        elif not self.session.is_attached:  # after stop() or load_state_dict(): continue, as observe_training began
            self.session.attach(count_calls=False, forget=False)
        return phase in (Phase.NEW, Phase.VALIDATED)

    def observe_training(self) -> None:
        """Observe training batches from this one on.

        ``QuantizedFit.begin_training_batch`` calls this before a batch if ranges of activations are due. A step may
        call the model any number of times, so calls are not counted as batches: :meth:`end_training_batch` counts.
        """
        self.session.attach(count_calls=False)
        self.phase = Phase.OBSERVING

    def end_training_batch(self, wanted: int) -> bool:
        """Count the batch if it was observed, and write the ranges after the last one; called after every batch.

        Args:
            wanted: number of batches to observe.

        Returns:
            Whether the ranges were written.
        """
        if self.phase is not Phase.OBSERVING:
            return False
        self.session.count_batches()
        if self.session.batches < wanted:
            return False
        self.write()
        return True

    def begin_validation(self) -> bool:
        """Let the validation that starts run the model that an export would write now.

        An observation of training batches ends with the ranges of the batches so far; without any batch it is given up.
        Weights are observed again, unless their ranges stay. Weights and activations are all quantized;
        ``QuantizedFit.begin_training_batch`` sets the switches for training again.

        ``QuantizedFit.begin_validation`` calls this before the first batch of a validation. In a run that resumes right
        after a validation of the process before it, ``QuantizedFit.begin_training_batch`` calls this before the first
        training batch.

        Returns:
            False if this was called for the running validation already; then nothing happens.
        """
        if self.validating:
            return False
        if self.has_observed:
            self.write()
        elif self.phase is Phase.OBSERVING:
            self.give_up()
        self.refresh_weights()
        self.switch.weights = True
        self.switch.activations = True
        self.validating = True
        return True

    def gather(self) -> None:
        """Stop observing a validation, and keep its statistics until the next training batch.

        ``QuantizedFit`` calls this at the end of an observed validation's epoch.
        """
        self.session.detach()
        self.phase = Phase.GATHERED

    def end_validation(self) -> None:
        """Note that a validation between training batches has ended; called at its end.

        A resumed run calls it too, for a validation that ran in the process before it.
        """
        self.validating = False
        if self.phase is not Phase.GATHERED:
            self.phase = Phase.VALIDATED

    def give_up(self) -> None:
        """Stop observing; the statistics so far are not used, and the next ``attach`` forgets them.

        ``QuantizedFit`` calls this after an exception in a run on several ranks, each of which may have stopped at
        another batch; on a single rank the observation is kept. :meth:`load_state_dict` calls it for an
        observation that cannot be resumed, and :meth:`begin_validation` for an observation without batches.
        """
        self.session.detach()
        self.phase = Phase.NEW

    def write(self, weights: bool = False) -> None:
        """End an observation: write its ranges to the modules.

        Ranges of activations are written, and those of all weights if ``weights`` says so or if any observer chooses a
        weight by inputs; none of weights that keep their ranges for the whole fit. Called after the last observed
        training batch, when a validation cuts an observation short, before the batch that follows an observed
        validation, and when a validation gives a fit its first ranges.

        Args:
            weights: whether the ranges of all weights are searched, too, as after an observed validation.
        """
        writes_weights = weights or bool(self._input_observers)
        self.session.finalize(weights=writes_weights and not self._weights_stay)
        self.phase = Phase.TRAINING
        self._write_learned()

    # ------------------------------------------------------------------ weights

    def refresh_weights(self) -> None:
        """Let the ranges be those of the present weights, and write the present learned scales.

        The ranges are searched again if they follow the weights; else they stay, and the present weights are noted as
        theirs. Called before a validation or test, at the end of a fit, and before the first batch after a validation.
        """
        if not self._weights_stay or _has_uncalibrated(self.session):
            self._observe_weights()
            return
        if changed_since(self.session.model):
            self.session.write_scales({}, of_present_weights=True)
        self._write_learned()

    def _observe_weights(self) -> None:
        """Search the ranges of the present weights if needed, and write the present learned scales.

        The search is needed if a weight has changed, or a module is not calibrated yet. It is left out while inputs
        that observers of weights need are incomplete.
        """
        model = self.session.model
        if not self._lacks_inputs() and (_has_uncalibrated(self.session) or changed_since(model)):
            self.session.finalize(activations=False)
        self._write_learned()

    def _lacks_inputs(self) -> bool:
        """Whether weights cannot be searched now, because the inputs that their observers need are not complete."""
        if not self._input_observers:
            return False
        # Statistics differ from rank to rank until they are reduced.
        if self.phase in (Phase.OBSERVING, Phase.GATHERED) or not self.is_quantized:
            return True
        # No data reached these modules in the last calibration: they were left in full precision, or took their ranges
        # from other experts. So their observers have no inputs to wait for.
        excused = set(self.session.skipped)
        result = self.session.result
        if result is not None:
            excused.update(result.fallback)
        for (module_name, _), observer in self._input_observers.items():
            if lacks_inputs(observer) and module_name not in excused:
                return True
        return False

    @torch.inference_mode(False)
    def _write_learned(self, weights_refreshed: bool = True) -> None:
        """Let the modules compute their learned scales, and write the present values to them.

        Called whenever ranges were written or kept. Nothing happens if no scale is learned, or if the modules have
        their own forwards.

        Args:
            weights_refreshed: whether the scales belong to the present weights, so that the session writes new
                checksums; False where the modules keep scales of earlier weights.
        """
        if self.learned is not None and self.forwards is not None:
            self.learned.start()
            self.session.write_scales(self.learned.values(), of_present_weights=weights_refreshed)

    # ------------------------------------------------------------------ resume

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """The state beside the session's own: phase, number of batches, learned scales, statistics still needed.

        The statistics are those of an incomplete observation, with the record of which modules read quantized outputs
        (:class:`~lightning_obs.calibration.output_readers.OutputReaders`); otherwise those of inputs by which weights
        will be observed again. ``QuantizedFit.state_dict`` calls this when Lightning writes a checkpoint and at the end
        of a fit, on every rank, because the ranks have seen different data.
        """
        session = self.session
        readers = session.observation.calls.readers
        state: dict[str, Any] = {"phase": self.phase.value, "batches": session.batches}
        if self.phase in (Phase.OBSERVING, Phase.GATHERED):
            state["observed"] = dump_observation(session.data_observers, session.collectives)
            if readers is not None:
                state["readers"] = readers.state_dict()
        elif not self._weights_stay:  # for a weight's next observation, the same on all ranks
            state["statistics"] = dump_statistics(self._input_observers)
        if self.learned is not None:
            state["learned"] = self.learned.state_dict()
        return state

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; ``QuantizedFit.load_state_dict`` calls this when Lightning resumes a fit.

        Learned scales are loaded into the parameters that the optimizer has. An observation that began on another
        number of ranks is given up if its statistics depend on the ranks. ``QuantizedFit`` has compared the options
        before, so the state was saved with the same plan, and turns an error of this method into a CalibrationError.
        """
        session = self.session
        session.detach()
        self._is_resumed = True
        self.phase = Phase(state["phase"])
        session.count_batches(0, after=state["batches"])  # sets the count, adds nothing
        load_statistics(session.data_observers, state.get("statistics", {}))
        if "observed" in state:
            readers = session.observation.calls.readers
            if readers is not None:  # the plan quantizes outputs
                readers.add([state["readers"]])
            is_loaded = load_observation(session.data_observers, state["observed"], session.collectives)
            if not is_loaded:
                self.give_up()
        if self.learned is not None and "learned" in state:
            self.learned.load_state_dict(state["learned"])


def refuse_weighed_tokens(session: CalibrationSession) -> None:
    """Raise a CalibrationError if tokens are weighed for the weights of the session, which are to be trained.

    Called when a :class:`QuantizedTraining` of weights is made, and by ``can_train`` (``callbacks/trainable.py``).
    """
    refuse(
        session.observation.weighed_modules,
        "weigh_tokens needs weights that stay as they are, and these are trained",
        remedy="leave it out, or set train='scales'.",
    )


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled or wrapped the module or a part of it."""
    return any(hasattr(child, "_orig_mod") or child._compiled_call_impl is not None for child in module.modules())


def _quantize_forwards(session: CalibrationSession, switch: Switch, stack: ExitStack) -> None:
    """Replace the forward of every planned module by the quantized one, until ``stack`` is closed.

    Args:
        session: has the plan.
        switch: turns weights and activations on and off.
        stack: undoes it when it is closed.
    """
    states = {}
    for target in session.plan.targets:
        if target.states:
            states[target.module] = tuple(target.states)
    stack.enter_context(fake_quantized_states(session.model, states, switch))
    for target in session.plan.targets:
        if not target.states:
            has_output = "output" in target.args
            stack.callback(quantize_training_forward(target.module, switch, output=has_output))


def _has_uncalibrated(session: CalibrationSession) -> bool:
    """Whether a planned module was never calibrated."""
    return any(get_scheme(target.module) is None for target in session.plan.targets)
