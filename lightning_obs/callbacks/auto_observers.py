"""``observers="auto"``: in the first validation, choose the observer of each tensor by measurement.

The model's inputs are kept while it runs. At its end :func:`~lightning_obs.choose_observers` measures the candidates on
some of them, and a session with the chosen observers, which later validations use too, observes all kept inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.saved_state import ASKED_CONFIG
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.trainer_session import require_forward
from lightning_obs.choice.observer_choice import (
    Candidates,
    ObserverChoice,
    choose_observers,
    fitting_candidates,
    require_candidates,
)
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.calls import call_on, logits_of
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.kept_batches import KEPT_BYTES, KeptBatches
from lightning_obs.model.mark import keep_hook_out

#: the batches of a choice: a half is observed, a quarter scores the candidates, on a quarter assignments are measured
SCORED = 32
#: kinds of a forward's parameters whose arguments can be passed by name
_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class AutoObservers:
    """Chooses the observers of a callback once.

    `CalibrationCallback` holds an object of this class if its ``observers`` leave a choice. Later validations and
    resumed runs use the chosen observers.

    Args:
        requested: the callback's options, without observers for the tensors to choose for.
        candidates: by base name, the observers to choose from; empty: the default candidates that fit the model.
        is_masked: whether batches have a token mask, with which nothing can be chosen.

    Raises:
        CalibrationError: a recipe, which names the observers that would be chosen.
    """

    def __init__(self, requested: CalibrationOptions, candidates: Candidates, is_masked: bool) -> None:
        if requested.recipe is not None:
            raise CalibrationError(
                "a recipe names the observers, and here they are chosen by measurement",
                got=f"recipe={requested.recipe!r}",
                remedy="leave out the recipe, or the observers to choose from.",
            )
        self._requested = requested
        self._candidates = candidates
        self._is_masked = is_masked
        #: the requested options with the chosen observers; None before the choice
        self._chosen_options: CalibrationOptions | None = None
        self.choice: ObserverChoice | None = None  # the scores; None before the choice, and after a resume
        self._inputs = KeptBatches()
        self._remove_hook: Callable[[], None] | None = None

    @property
    def is_keeping(self) -> bool:
        """Whether the model's inputs are being kept.

        Asked at the end of a validation's epoch, where the callback then calls :meth:`choose`.
        """
        return self._remove_hook is not None

    @property
    def options(self) -> CalibrationOptions:
        """The options to calibrate with: the requested ones, with the chosen observers once they are chosen.

        Read by `CalibrationCallback` after a choice and after a checkpoint was loaded.
        """
        return self._requested if self._chosen_options is None else self._chosen_options

    def require_possible(self, session: CalibrationSession) -> None:
        """Refuse, before training, a model or setup whose choice would fail at the first validation's end.

        Called when a fit starts, and by :meth:`start`.

        Raises:
            CalibrationError: a module without ``forward``, several devices, a token mask, candidates that do not fit.
        """
        require_forward(session.model, 'observers="auto"')
        if session.collectives.size > 1 or self._is_masked:
            mask = ", a token mask" if self._is_masked else ""
            raise CalibrationError(
                'observers="auto" chooses on one device, and without a token mask',
                got=f"{session.collectives.size} devices{mask}",
                remedy="choose there (callback.choice.config), then calibrate here with that scheme.",
            )
        fitting_candidates(session.model, self._requested, self._candidates or None)

    def start(self, session: CalibrationSession) -> None:
        """Keep the model's inputs until :meth:`choose` or :meth:`stop`; after the choice, do nothing.

        Called by the callback when a validation that calibrates starts.
        """
        if self._chosen_options is not None:
            return
        self.require_possible(session)
        self.stop()

        def keep(model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            """The model's forward hook: keep the inputs of an observed call."""
            if session.observation.calls.is_paused:
                return
            if not self._inputs.offered:
                logits_of(output)  # a model without logits is an error at the first batch, not at the end
            self._inputs.add(_by_name(model, args, kwargs))

        model = session.model
        self._remove_hook = keep_hook_out(model, model.register_forward_hook(keep, with_kwargs=True))

    def stop(self) -> None:
        """Stop keeping inputs, and release the kept ones; nothing happens if none are kept.

        Called before inputs are kept anew, when the choice has them, and by the callback when a validation or a run
        ends.
        """
        if self._remove_hook is not None:
            self._remove_hook()
        self._remove_hook = None
        self._inputs = KeptBatches()

    def choose(self, session: CalibrationSession) -> CalibrationSession:
        """Choose the observers, and observe the kept inputs with them.

        Called by the callback at the end of the validation's epoch.

        Args:
            session: observed the validation; it is detached.

        Returns:
            An attached session with the chosen observers that has seen the same batches.

        Raises:
            CalibrationError: no batch has called the model.
        """
        model = session.model
        self._require_inputs(model)
        kept_inputs = [inputs for inputs, _note in self._inputs.pop_all()]  # inputs are kept here without a note
        self.stop()
        session.detach()
        self.choice = choose_observers(model, kept_inputs[:SCORED], self._requested, self._candidates or None)
        self._chosen_options = self._requested.with_config(self.choice.config)
        for base_name, counts in self.choice.counts.items():
            tally = ", ".join(f"{observer} {count}" for observer, count in counts.most_common())
            rank_zero_info(f'observers="auto", {base_name}: {tally}')
        for line in self.choice.lines:
            rank_zero_info(line)
        chosen_session = CalibrationSession(model, self._chosen_options, collectives=session.collectives)
        chosen_session.attach()
        with left_as_it_was(model), torch.no_grad():
            for inputs in kept_inputs:
                call_on(model, inputs)
        return chosen_session

    def _require_inputs(self, model: nn.Module) -> None:
        """Raise if no inputs were kept; warn if some did not fit in memory."""
        if not self._inputs:
            raise CalibrationError(
                f'observers="auto": no validation batch called {type(model).__name__}, so there is nothing to score on',
                remedy='name the module that validation_step calls: CalibrationCallback(module="...").',
            )
        kept = len(self._inputs)
        if kept < self._inputs.offered:
            warn(
                f'observers="auto": inputs are kept to be run again, {kept} of {self._inputs.offered} fit in '
                f"{KEPT_BYTES / 2**30:.1f} GiB. The others are not observed."
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the chosen config and the request that it answers, as strings; nothing before the choice.

        Called by the callback's ``state_dict``, when Lightning saves a checkpoint.
        """
        if self._chosen_options is None:
            return {}
        return {"chosen_config": self._chosen_options.config.model_dump_json(), ASKED_CONFIG: self._request}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`, when Lightning restores the callback from a checkpoint.

        A state without a choice, or with the choice for another request, is ignored: the next
        validation chooses.
        """
        self.choice = None
        self._chosen_options = None
        chosen_config = state.get("chosen_config")
        if chosen_config is not None and state.get(ASKED_CONFIG) == self._request:
            config = QuantizationConfig.model_validate_json(chosen_config)
            self._chosen_options = self._requested.with_config(config)

    @property
    def _request(self) -> str:
        """The requested config and the candidates as one string; a saved choice counts for an equal string only."""
        return f"{self._requested.config.model_dump_json()} {self._candidates or ''}".rstrip()


def split_candidates(observers: Any) -> tuple[Any, Candidates | None]:
    """Split a callback's ``observers`` into those to use as they are and lists to choose from.

    Called by the constructor of `CalibrationCallback`.

    Args:
        observers: ``"auto"``; or a dict by base name, with an observer or a list of observers. A dict's ``"auto"`` is
            the name of an observer, and from an empty list nothing is chosen. Anything else is returned as it is, for
            the options to check.

    Returns:
        The observers by base name that are no list; the lists by base name, empty for ``"auto"`` (default candidates),
        None if there is nothing to choose.

    Raises:
        CalibrationError: an entry of a list is neither a name nor a dict with a ``name``. Whether there is an observer
            of this name is checked before the choice (:meth:`AutoObservers.require_possible`).

    >>> split_candidates({"input": "minmax", "weight": ["memoryless_mse", "imatrix_mse"]})
    ({'input': 'minmax'}, {'weight': ['memoryless_mse', 'imatrix_mse']})
    """
    if not isinstance(observers, Mapping):
        return (None, {}) if observers == "auto" else (observers, None)
    named: dict[str, Any] = {}
    candidates: dict[str, Any] = {}
    for base_name, value in observers.items():
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        (candidates if is_list else named)[base_name] = value
    require_candidates(candidates)
    return named, candidates or None


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the positional ``args`` and the keyword ``kwargs`` of a call of the model as one dict by name.

    The hook of :meth:`AutoObservers.start` calls it for each observed call.

    Raises:
        CalibrationError: a positional argument has no name in the model's ``forward``.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in _NAMED_KINDS]
    if len(args) > len(names):
        raise CalibrationError(
            f'observers="auto" calls {type(model).__name__} again, with arguments by their names',
            got=f"{len(args)} positional arguments, {len(names)} names",
            remedy="call it with keyword arguments.",
        )
    positional = dict(zip(names, args, strict=False))
    return {**positional, **kwargs}
