"""Calibrate on quantized inputs while the owner of a model runs it: its calls are kept, and run again step by step.

A recipe asks for quantized inputs if the model can run step by step. Obstacles may be known before any data
(:func:`.require_steps_possible`), while data run (the owner calls parts of the model, or an argument cannot be copied),
or at their end (a run in steps fails). A recipe then goes over to inputs in full precision, with a warning that says
why: what the owner runs is observed as it runs, and calls that were kept run once more. A rounding that the user has
named is not changed; there an obstacle is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_obs.calibration.finalize import finalize
from lightning_obs.calibration.hooks import ObserverHooks
from lightning_obs.calibration.kept_calls import KeptCalls
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.quantized_inputs import calibrate_on_quantized_inputs, observe_kept_calls
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.stepwise import require_steps_possible
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.schemes.planned_modules import round_by_full_precision
from lightning_obs.schemes.recipes import Recipe


class KeptRuns:
    """Keeps the calls of a model, and calibrates by them.

    A :class:`.CalibrationSession` makes one in its constructor if its plan rounds weights on quantized inputs. It calls
    the methods before data, when it attaches and detaches its hooks, and when it finalizes.

    Args:
        observation: of the session. Its options and observers change when a recipe goes over to inputs in full
            precision.
        hooks: of the session; they measure the token weights of a call before it is kept.

    Attributes:
        are_in_use: whether calls are kept. False for good once a recipe has gone over to inputs in full precision.
    """

    def __init__(self, observation: Observation, hooks: ObserverHooks) -> None:
        self.are_in_use = True
        self._observation = observation
        self._hooks = hooks
        self._calls = KeptCalls(observation)

    @property
    def observe_modules(self) -> bool:
        """Whether modules get hooks that observe what their owner runs outside of kept calls.

        ``CalibrationSession.attach`` asks this before it attaches the hooks. Under a recipe they do: calls of parts of
        the model cannot be kept, and their inputs are needed if the recipe goes over to inputs in full precision.
        """
        return self.is_of_recipe or not self.are_in_use

    @property
    def is_of_recipe(self) -> bool:
        """Whether a recipe asks for quantized inputs, and can go over to full precision; False: the user named them.

        Asked where an obstacle is an error or a warning: by :class:`.TrainerSession` before data, and by this class.
        """
        return self._observation.options.rounding_is_of_recipe

    def require_possible(self) -> None:
        """Refuse a model that cannot run step by step; under a recipe go over to inputs in full precision instead.

        Called before data, by ``CalibrationSession.begin_run`` and ``CalibrationSession.attach``: a strategy may have
        sharded or offloaded the weights since the session was made.

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
        """Let the recipe go over to inputs in full precision for good, with a warning. Every rank must call this.

        Called by :class:`.TrainerSession` before data for a model without ``forward``, by :meth:`require_possible`, and
        by :meth:`calibrate`.

        Args:
            reason: why weights cannot be rounded on quantized inputs, for the warning.
        """
        assert self.is_of_recipe
        label = self._observation.options.label
        warn(f"{label}: the recipe rounds weights by inputs in full precision here: {reason}")
        self.round_by_full_precision()

    def round_by_full_precision(self) -> None:
        """Round by inputs in full precision from now on; labels, and schemes in checkpoints, say so.

        Called by :meth:`give_up`, and by ``CalibrationSession.load_state_dict`` for a calibration whose recipe had gone
        over to such inputs. The plan's config stays, so that the callback's states in earlier checkpoints can be
        loaded. The observers of input errors are removed: they pair inputs of the quantized run with those in full
        precision, and there is no quantized run any more.
        """
        observation = self._observation
        self.are_in_use = False
        round_by_full_precision(observation.plan)
        observation.options = observation.options.with_recipe(Recipe.without_quantized_inputs)
        observation.leave_out_input_errors()

    def attach(self, forget: bool) -> None:
        """Keep each call of the model from now on, unless a recipe has gone over to inputs in full precision.

        ``CalibrationSession.attach`` calls this after it has attached the hooks.

        Args:
            forget: release the calls that were kept before. False: keep them beside the new ones.
        """
        if self.are_in_use:
            self._calls.attach(self._hooks.token_weights, forget)

    def detach(self) -> None:
        """Keep no further calls; the kept ones stay until :meth:`calibrate`. ``CalibrationSession.detach`` calls this.

        Nothing happens if no calls are being kept.
        """
        self._calls.detach()

    def calibrate(
        self, attempt: Callable[[], AbstractContextManager[None]], *, weights: bool, activations: bool
    ) -> CalibrationResult:
        """Compute and write qparams from the kept calls, run in steps, or from what was observed; release the calls.

        ``CalibrationSession.finalize`` calls this when the data have run. Every rank must call it. Under a recipe, if a
        call could not be kept or the run in steps fails on some rank, the kept calls are observed in full precision.
        All ranks do so together: a failure of one rank raises on every rank (:func:`.calibrate_on_quantized_inputs`).
        If the user has named quantized inputs, a failure ends the calibration, so that no attempt need be undone here.

        Args:
            attempt: makes the ``with`` block in which a recipe's kept calls run in steps. If the block raises, it must
                give the modules the qparams from before.
            weights: False: do not observe the weights, as in :func:`.finalize`. A run in steps always observes them.
            activations: False: require no data, as in :func:`.finalize`. A run in steps always requires data.

        Returns:
            The result; its ``seconds`` are for the caller to add.

        Raises:
            CalibrationError: as :func:`.finalize`; as :func:`.calibrate_on_quantized_inputs` if data are missing, or if
                the user has named quantized inputs.
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
                    if observation.coverage.lacks_data:
                        raise
                    obstacle = str(error)
                    self._forget_statistics()
            self.give_up(obstacle)
            observe_kept_calls(observation, self._calls, self._hooks)
        finally:
            self._calls.release()
        return finalize(observation, weights, activations)

    def _in_steps(self) -> CalibrationResult:
        """Run the kept calls block by block, and compute all qparams on quantized inputs; :meth:`calibrate` does so."""
        return calibrate_on_quantized_inputs(self._observation, self._calls, self._calls.token_weights)

    def _obstacle_on_any_rank(self) -> str | None:
        """Why what ran cannot be run again in steps, as the first rank with a reason says; None: it can on all ranks.

        Under a recipe, :meth:`calibrate` asks this before the kept calls run in steps. Hooks do not observe modules
        during a call that is kept. So if they have computed statistics (``calls.measurements``) although every call
        could be kept, the owner has called parts of the model outside of the model's own call.
        """
        obstacle = self._calls.obstacle
        if obstacle is None and self._observation.calls.measurements:
            obstacle = (
                f"parts of {type(self._observation.model).__name__} were called by themselves. "
                "Where the steps call a part, name it: module=..."
            )
        return next(filter(None, self._observation.collectives.gather_object(obstacle)), None)

    def _forget_statistics(self) -> None:
        """Forget what a failed run in steps has observed, but not how many batches the owner has run.

        :meth:`calibrate` calls this before the kept calls are observed in full precision.
        """
        batches = self._observation.calls.batches
        self._observation.forget()
        self._observation.calls.batches = batches
