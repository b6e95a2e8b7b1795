"""The ranges of a model while it is trained: found, refreshed, learned, saved. No Lightning in it.

A :class:`~lightning_obs.CalibrationSession` calibrates a model that does not change. In training, weights and
activations are observed at different times, and an incomplete observation can be saved and resumed.

    NEW ------> OBSERVING ----> TRAINING ------> VALIDATED --> (OBSERVING | TRAINING)
     |                             ^    \\
     +-----------------------------+     +-----> GATHERED ---> TRAINING

The phase between two hooks is one value, which checkpoints hold. Lightning validates under inference mode: no tensor
that training needs may be made there.
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
from lightning_obs.forward.quantized_forward import fake_quantized_states, quantize_training_forward
from lightning_obs.forward.quantized_tensors import Switch, has_range
from lightning_obs.model.checksums import changed_since
from lightning_obs.model.module_qparams import get_scheme
from lightning_obs.observers import Key, Observer


class Phase(Enum):
    """The state in which the next training batch runs."""

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
    """The ranges of a session's model; ``train``: ``"weights"``, ``"scales"`` that can be ``learned``, or ``"all"``."""

    def __init__(self, session: CalibrationSession, train: str = "weights") -> None:
        refuse(
            session.weighed if train != "scales" else [],
            "weigh_tokens needs weights that stay as they are, and these are trained",
            remedy="leave it out, or set train='scales'.",
        )
        self.session = session
        self.switch = Switch()  # the tensors that are quantized now
        self.learned = None if train == "weights" else LearnedScales(session.plan, alone=train == "scales")
        self.phase = Phase.NEW
        self.validating = False  # a validation runs the model that an export would write at this moment
        self._forwards: ExitStack | None = None  # gives every module its own forward back; None while none is replaced
        # A resumed run may stand between two observations: weights are newer than their ranges, and stay so.
        self._resumed = False

    # ------------------------------------------------------------------ the forward

    @torch.inference_mode(False)
    def start(self, around: nn.Module | None = None) -> None:
        """Let the modules run quantized, with ranges for their weights; nothing happens if they do already.

        ``around``: the holder of the model, and perhaps of its torch.compile'd wrapper.
        """
        if self._forwards is not None:
            return
        model, targets = self.session.model, self.session.plan.targets
        with ExitStack() as stack:
            if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in (around or model).modules()):
                torch.compiler.reset()  # graphs compiled before do not see a new hook (of outputs), in silence
                stack.callback(torch.compiler.reset)
            states = {target.module: tuple(target.states) for target in targets if target.states}
            stack.enter_context(fake_quantized_states(model, states, self.switch))
            for target in targets:
                if not target.states:
                    output = "output" in target.args
                    stack.callback(quantize_training_forward(target.module, self.switch, output=output))
            self._forwards = stack.pop_all()
        if self._resumed and self.is_quantized:
            self._write_learned(refreshed=False)
        else:
            self.refresh_weights()
        self._resumed = False

    def stop(self) -> None:
        """Give every module its own forward back. Can be called at any time."""
        self.session.detach()
        self.validating = False
        if self._forwards is not None:
            self._forwards.close()
            self._forwards = None

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        """Run in full precision, unobserved, inside the ``with`` block."""
        switch = self.switch
        with patch_attr(switch, "weights", False), patch_attr(switch, "activations", False), self.session.paused():
            yield

    # ------------------------------------------------------------------ ranges

    @property
    def is_quantized(self) -> bool:
        """Whether anything was calibrated."""
        return any(get_scheme(target.module) is not None for target in self.session.plan.targets)

    @property
    def has_all_ranges(self) -> bool:
        """Whether every range that data have to give is known (except of modules that data never reached)."""
        return all(
            has_range(target.module, base_name, args)
            for target in self.session.plan.targets
            if target.name not in self.session.skipped
            for base_name, args in target.args.items()
        )

    @property
    def has_trained(self) -> bool:
        """Whether training batches have run since the last validation, so that weights or scales may have changed."""
        return self.phase in (Phase.TRAINING, Phase.OBSERVING)

    @property
    def has_observed(self) -> bool:
        """Whether training batches were observed whose ranges are not in force yet."""
        return self.phase is Phase.OBSERVING and self.session.batches > 0

    @property
    def _of_inputs(self) -> dict[Key, Observer]:
        """The observers of inputs that choose a weight's scale or rounding."""
        return {key: observer for key, observer in self.session.fed.items() if observer.needs_inputs}

    @property
    def _weights_stay(self) -> bool:
        """Whether weights were observed once and for all: they are frozen, and their scales are learned from there."""
        return self.learned is not None and self.learned.alone and self.is_quantized

    @property
    def can_refresh(self) -> bool:
        """Whether data would change the range of an activation that is known; with frozen weights, none should."""
        frozen = self.learned is not None and (self.learned.alone or self.learned.covers_activations)
        return self.session.needs_data and not frozen

    # ------------------------------------------------------------------ transitions

    def begin_training_batch(self) -> bool:
        """Put the ranges of the last validation in force.

        True if ranges of activations are due: nothing was observed yet, or a validation has ended.
        """
        self.validating = False
        phase, session = self.phase, self.session
        if phase is Phase.GATHERED:
            self.write(weights=True)
        elif phase is Phase.VALIDATED:  # weight averaging has swapped other weights in meanwhile
            self.refresh_weights()
        if phase is not Phase.OBSERVING:
            self.phase = Phase.TRAINING
        elif not session.is_attached:  # after stop() or load_state_dict(): go on
            session.attach(count_calls=False, forget=False)
        return phase in (Phase.NEW, Phase.VALIDATED)

    def observe_training(self) -> None:
        """Observe training batches from this one on."""
        self.session.attach(count_calls=False)
        self.phase = Phase.OBSERVING

    def end_training_batch(self, wanted: int) -> bool:
        """Count the batch if it was observed; after the last ``wanted`` one write the ranges, and return True."""
        if self.phase is not Phase.OBSERVING:
            return False
        self.session.batches += 1
        if self.session.batches < wanted:
            return False
        self.write()
        return True

    def begin_validation(self) -> bool:
        """Run the model that an export would write now; False if this validation does already.

        Weights are observed again. An observation of training batches ends with the ranges of the batches so far.
        """
        if self.validating:
            return False
        if self.has_observed:
            self.write()
        elif self.phase is Phase.OBSERVING:
            self.give_up()
        self.refresh_weights()
        self.switch.weights = self.switch.activations = self.validating = True
        return True

    def gather(self) -> None:
        """Stop observing a validation, and keep its statistics until the next training batch."""
        self.session.detach()
        self.phase = Phase.GATHERED

    def end_validation(self) -> None:
        """A validation between training batches has ended, or a resumed run has passed over it."""
        self.validating = False
        if self.phase is not Phase.GATHERED:
            self.phase = Phase.VALIDATED

    def give_up(self) -> None:
        """Stop observing, and forget the statistics."""
        self.session.detach()
        self.phase = Phase.NEW

    def write(self, weights: bool = False) -> None:
        """Write the ranges that data gave; of ``weights`` too, if asked or if their observers want inputs."""
        self.session.finalize(weights=(weights or bool(self._of_inputs)) and not self._weights_stay)
        self.phase = Phase.TRAINING
        self._write_learned()

    # ------------------------------------------------------------------ weights

    def refresh_weights(self) -> None:
        """Observe the weights as they are now, if they changed; write learned scales as they are now."""
        session = self.session
        excused = session.skipped | set(session.result.fallback if session.result is not None else ())
        wanting = {name: o.lacks_inputs for (name, _), o in self._of_inputs.items()}
        # Statistics differ from rank to rank until they are reduced.
        unfinished = self.phase in (Phase.OBSERVING, Phase.GATHERED) or not self.is_quantized
        lacking = bool(wanting) and (unfinished or any(wanting[name] for name in wanting.keys() - excused))
        unknown = any(get_scheme(target.module) is None for target in session.plan.targets)
        if not lacking and (unknown or changed_since(session.model)):
            session.finalize(activations=False)
        self._write_learned()

    @torch.inference_mode(False)
    def _write_learned(self, refreshed: bool = True) -> None:
        if self.learned is not None and self._forwards is not None:
            self.learned.start()
            # Refreshed are the zero points too, so scale and zero point are of the weights as they are now.
            self.session.write_scales(self.learned.values(), of_present_weights=refreshed)

    # ------------------------------------------------------------------ resume

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """The state beside the session's own: learned scales, and an incomplete observation.

        On several ranks every rank must call this, as Lightning does: they have seen different data.
        """
        session = self.session
        state: dict[str, Any] = {"phase": self.phase.value, "batches": session.batches}
        if self.phase in (Phase.OBSERVING, Phase.GATHERED):
            state["observed"] = dump_observation(session.fed, session.collectives)
        elif not self._weights_stay:  # for a weight's next observation, the same on all ranks
            state["statistics"] = dump_statistics(self._of_inputs)
        return state if self.learned is None else {**state, "learned": self.learned.state_dict()}

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a :meth:`state_dict`; learned scales keep the parameters that the optimizer has.

        An observation that began on another number of ranks is abandoned where its statistics depend on the ranks.
        """
        self.session.detach()
        self._resumed = True
        self.phase, self.session.batches = Phase(state["phase"]), state["batches"]
        load_statistics(self.session.fed, state.get("statistics", {}))
        if "observed" in state and not load_observation(self.session.fed, state["observed"], self.session.collectives):
            self.give_up()
        if self.learned is not None and "learned" in state:
            self.learned.load_state_dict(state["learned"])
