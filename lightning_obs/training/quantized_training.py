"""The ranges of a model while it is trained: found, refreshed, learned, saved. No Lightning in it.

A :class:`~lightning_obs.CalibrationSession` calibrates a model that stands still. Here the model changes
between two observations, so weights and activations are observed at different times, and what is half observed can be
saved and taken up again.

Lightning validates and tests under inference mode. Nothing that training needs may be born in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.saved_state import dump_observation, dump_statistics, load_observation, load_statistics
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.model.qparams import get_scheme, trained_since
from lightning_obs.model.quantized_forward import Switch, fake_quantized_states, has_range, quantize_training_forward
from lightning_obs.model.weights import weight_checksum
from lightning_obs.numerics.reshape import ATTENTION
from lightning_obs.training.learned_scales import LearnedScales


class QuantizedTraining:
    """Ranges of one session's model.

    Args:
        session: observes and writes.
        learn_scales: let an optimizer train the scales, see :attr:`learned`.

    Raises:
        CalibrationError: scales are to be learned, and none can be.
    """

    def __init__(self, session: CalibrationSession, learn_scales: bool = False) -> None:
        self.session = session
        #: what is quantized now
        self.switch = Switch()
        self.learned = LearnedScales(session.plan) if learn_scales else None
        #: batches still to be observed
        self.left = 0
        #: all was observed, and waits to be written
        self.gathered = False
        self._resumed = False  # perhaps between two observations: weights are newer than their ranges, and stay so
        self._running: ExitStack | None = None
        self._observing = False

    def take(self, session: CalibrationSession) -> None:
        """Go on with another session of the same model and scheme."""
        if session is not self.session:
            self._detach()
        self.session = session
        if self.learned is not None:
            self.learned.follow(session.plan)

    # ------------------------------------------------------------------ the forward

    @torch.inference_mode(False)
    def start(self, around: nn.Module | None = None) -> None:
        """Let the modules run quantized, and know the ranges of their weights. Again: nothing happens.

        Args:
            around: what holds the model, and perhaps its torch.compile'd wrapper.
        """
        if self._running is not None:
            return
        with ExitStack() as stack:
            if any(
                hasattr(m, "_orig_mod") or m._compiled_call_impl is not None
                for m in (around or self.session.model).modules()
            ):
                torch.compiler.reset()  # graphs compiled before do not see a new hook (of outputs), in silence
                stack.callback(torch.compiler.reset)
            targets = self.session.plan.targets
            states = {target.module: tuple(target.states) for target in targets if target.states}
            stack.enter_context(fake_quantized_states(self.session.model, states, self.switch))
            for target in targets:
                if not target.states:
                    stack.callback(
                        quantize_training_forward(target.module, self.switch, output="output" in target.args)
                    )
            self._running = stack.pop_all()
        if self._resumed and self.is_quantized:
            self._write_learned(refreshed=False)
        else:
            self.refresh_weights()
        self._resumed = False

    def stop(self) -> None:
        """Give every module its own forward back. Can be called at any time."""
        self._detach()
        if self._running is not None:
            self._running.close()
            self._running = None

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        """Run in full precision, unobserved, inside the ``with`` block."""
        before = replace(self.switch)
        self.switch.weights = self.switch.activations = False
        try:
            with self.session.paused():
                yield
        finally:
            self.switch.weights, self.switch.activations = before.weights, before.activations

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
    def can_refresh(self) -> bool:
        """Whether data would change the range of an activation that is known."""
        learned = self.learned is not None and self.learned.covers(("input", "output", *ATTENTION))
        return self.session.needs_data and not learned

    def observe(self, batches: int) -> None:
        """Start to observe; call :meth:`count_batch` after each, or :meth:`gather` at the end."""
        self.session.attach(count_calls=False)
        self._observing = True
        self.left, self.gathered = batches, False

    @torch.inference_mode(False)
    def go_on_observing(self) -> None:
        """After :meth:`stop` or :meth:`load_state_dict`: observe what is left to be observed."""
        if self.left and not self._observing:
            left, batches, seen = self.left, self.session.batches, dump_statistics(self.session.observers)
            self.observe(left)
            load_statistics(self.session.observers, seen)
            self.session.batches = batches

    def count_batch(self) -> None:
        """Write the ranges after the last of the batches that :meth:`observe` has announced."""
        if self.left:
            self.session.batches += 1
            self.left -= 1
            if not self.left:
                self.write()

    def gather(self) -> None:
        """End to observe, and keep what was seen until :meth:`write`."""
        self._detach()
        self.left, self.gathered = 0, True

    def give_up(self) -> None:
        """End to observe, and forget what was seen."""
        self._detach()
        self.left, self.gathered = 0, False

    def write(self, weights: bool = False) -> None:
        """Write the ranges that data gave.

        Args:
            weights: observe the weights too (they are, if their observers want inputs).
        """
        wants_inputs = any(observer.needs_inputs for observer in self.session.observers.values())
        self._detach()
        self.session.finalize(weights=weights or wants_inputs)
        self.left, self.gathered = 0, False
        self._write_learned()

    def refresh_weights(self) -> None:
        """Observe the weights as they are now, if they changed; write learned scales as they are now."""
        session = self.session
        excused = session.skipped | set(session.result.fallback if session.result is not None else ())
        wanting = {name: o.lacks_inputs for (name, _), o in session.observers.items() if o.needs_inputs}
        unfinished = (
            bool(self.left or self.gathered) or not self.is_quantized
        )  # what was seen differs from rank to rank
        lacking = bool(wanting) and (unfinished or any(wanting[name] for name in wanting.keys() - excused))
        unknown = any(get_scheme(target.module) is None for target in session.plan.targets)
        if not lacking and (unknown or trained_since(session.model)):
            session.finalize(activations=False)
        self._write_learned()

    def _detach(self) -> None:
        self._observing = False
        self.session.detach()

    @torch.inference_mode(False)
    def _write_learned(self, refreshed: bool = True) -> None:
        if self.learned is None or self._running is None:
            return
        self.learned.start()
        state = self.session.state_dict()
        state["qparams"] |= {name: value.to("cpu", copy=True) for name, value in self.learned.values().items()}
        if refreshed:  # the zero points too
            state["checksums"] = {target.name: weight_checksum(target.module) for target in self.session.plan.targets}
        self.session.load_state_dict(state)

    # ------------------------------------------------------------------ resume

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """What the session's own state does not hold: learned scales, and an observation that is not complete.

        On several ranks every rank must call this, as Lightning does: they have seen different data.
        """
        state: dict[str, Any] = {"left": self.left, "batches": self.session.batches, "gathered": self.gathered}
        observers = self.session.observers
        if self.left or self.gathered:
            fed = {key: o for key, o in observers.items() if o.observes_data}
            state["observed"] = dump_observation(fed, self.session.collectives)
        else:  # what a weight's next observation needs, the same on all ranks
            state["statistics"] = dump_statistics({key: o for key, o in observers.items() if o.needs_inputs})
        if self.learned is not None:
            state["learned"] = self.learned.state_dict()
        return state

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a :meth:`state_dict`; learned scales keep the parameters that the optimizer has.

        An observation that another number of ranks began is given up, where its statistics depend on the ranks.

        Raises:
            CalibrationError: its learned scales are of other modules.
        """
        self._detach()
        self._resumed = True
        self.left, self.gathered = state.get("left", 0), state.get("gathered", False)
        self.session.batches = state.get("batches", 0)
        load_statistics(self.session.observers, state.get("statistics", {}))
        if "observed" in state:
            fed = {key: o for key, o in self.session.observers.items() if o.observes_data}
            if not load_observation(fed, state["observed"], self.session.collectives):
                self.give_up()
        if self.learned is not None and "learned" in state:
            self.learned.load_state_dict(state["learned"])
