"""Calibrate on quantized inputs while the owner of a model runs it: its calls are kept, and run again step by step.

A recipe asks for quantized inputs where the model can run step by step. What stands in the way may be known before any
data (:func:`.require_steps_possible`), while data run (parts of the model are called by themselves, arguments cannot be
copied), or at their end (a run in steps fails). A recipe then does without: the owner's run, and the calls that were
kept, are observed in full precision, and a warning says why. Where the user has named such a rounding, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_obs.calibration.finalize import finalize
from lightning_obs.calibration.hooks import ObserverHooks
from lightning_obs.calibration.kept_calls import KeptCalls
from lightning_obs.calibration.observation import CalibrationResult, Observation
from lightning_obs.calibration.quantized_inputs import calibrate_on_quantized_inputs, observe_kept_calls
from lightning_obs.calibration.stepwise import require_steps_possible
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.schemes.recipes import Recipe


class KeptRuns:
    """Keeps the calls of a model, and calibrates by them.

    A :class:`.CalibrationSession` whose plan rounds weights on quantized inputs makes one, and calls its methods in
    those of the same purpose: before data, at both ends of observing, and to finalize.

    Args:
        observation: of the model. Its options and observers change if a recipe does without quantized inputs.
        hooks: of the observation.

    Attributes:
        are_in_use: whether calls are kept; off for good once a recipe does without quantized inputs.
    """

    def __init__(self, observation: Observation, hooks: ObserverHooks) -> None:
        self.are_in_use = True
        self._observation = observation
        self._hooks = hooks
        self._calls = KeptCalls(observation)

    @property
    def observe_modules(self) -> bool:
        """Whether modules are observed while their owner runs them, outside of calls that are kept.

        ``CalibrationSession.attach`` asks it. Under a recipe they are: calls of parts of the model are never kept, and
        their inputs are needed if the recipe does without quantized inputs at the end.
        """
        return self.is_of_recipe or not self.are_in_use

    @property
    def is_of_recipe(self) -> bool:
        """Whether a recipe asks for quantized inputs, and may do without them; False: the user has named them.

        The callbacks ask it before data, this class before each error that a recipe answers by a warning.
        """
        return self._observation.options.rounding_is_of_recipe

    def require_possible(self) -> None:
        """Refuse a model that cannot run step by step; a recipe does without quantized inputs there.

        Called before data, by ``CalibrationSession.begin_run`` and ``CalibrationSession.attach``.

        Raises:
            CalibrationError: as :func:`.require_steps_possible`, if the user has named quantized inputs.
        """
        if not self.are_in_use:
            return
        try:
            require_steps_possible(self._observation)
        except CalibrationError as error:
            if not self.is_of_recipe:
                raise
            self.give_up(str(error))

    def give_up(self, reason: str) -> None:
        """Let a recipe do without quantized inputs from now on, with a warning. Every rank must call this.

        Called by :class:`.TrainerSession` for a model without ``forward``, by :meth:`require_possible`, and by
        :meth:`calibrate`. The plan stays as it is, so that earlier checkpoints can be loaded.

        Args:
            reason: why weights cannot be rounded on quantized inputs, for the warning.
        """
        assert self.is_of_recipe
        observation = self._observation
        warn(f"{observation.options.label}: the recipe rounds weights by inputs in full precision here: {reason}")
        self.are_in_use = False
        observation.options = observation.options.with_recipe(Recipe.without_quantized_inputs)
        observation.leave_out_input_errors()

    def attach(self, forget: bool) -> None:
        """Keep each call from now on; ``CalibrationSession.attach`` calls this after it has attached the hooks.

        Args:
            forget: release earlier calls. False: keep them beside the new ones.
        """
        if self.are_in_use:
            self._calls.attach(self._hooks.token_weights, forget)

    def detach(self) -> None:
        """Keep no further calls; those that are kept stay until :meth:`calibrate`.

        ``CalibrationSession.detach`` calls this, at any time and any number of times.
        """
        self._calls.detach()

    def calibrate(
        self, attempt: Callable[[], AbstractContextManager[None]], *, weights: bool, activations: bool
    ) -> CalibrationResult:
        """Compute all qparams by the kept calls, or by what was observed; then release the calls.

        ``CalibrationSession.finalize`` calls this when the data have run. Every rank must call it.

        Args:
            attempt: makes the context in which the kept calls run in steps: after an error in it, the modules have the
                qparams from before.
            weights: as of :func:`.finalize`. Runs in steps compute all qparams in any case.
            activations: as of :func:`.finalize`, likewise.

        Returns:
            The result; its ``seconds`` are for the caller to add.

        Raises:
            CalibrationError: as :func:`.finalize`; and as :func:`.calibrate_on_quantized_inputs`, if the user has named
                quantized inputs or data are missing.
        """
        observation = self._observation
        if not self.are_in_use:
            return finalize(observation, weights, activations)
        self._calls.warn_of_calls_left_out()
        try:
            if not self.is_of_recipe:
                return self._in_steps()
            obstacle = self._obstacle_on_any_rank()
            if obstacle is None:
                try:
                    with attempt():
                        return self._in_steps()
                except CalibrationError as error:
                    if observation.lacks_data:
                        raise
                    obstacle = str(error)
                    self._forget_statistics()
            self.give_up(obstacle)
            observe_kept_calls(observation, self._calls, self._hooks)
        finally:
            self._calls.release()
        return finalize(observation, weights, activations)

    def _in_steps(self) -> CalibrationResult:
        """Run the kept calls block by block, and compute all qparams on quantized inputs."""
        return calibrate_on_quantized_inputs(self._observation, self._calls, self._calls.token_weights)

    def _obstacle_on_any_rank(self) -> str | None:
        """Why the calls that ran cannot be run again in steps, by the first rank that has a reason; None: they can."""
        obstacle = self._calls.obstacle
        if obstacle is None and self._observation.calls.measurements:
            obstacle = (
                f"parts of {type(self._observation.model).__name__} were called by themselves. "
                "Where the steps call a part, name it: module=..."
            )
        return next(filter(None, self._observation.collectives.gather_object(obstacle)), None)

    def _forget_statistics(self) -> None:
        """Forget what a failed run in steps has observed, but not how many batches the owner has run."""
        batches = self._observation.calls.batches
        self._observation.forget()
        self._observation.calls.batches = batches
