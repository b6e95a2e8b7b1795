"""``observers="auto"``: in the first validation, choose the observer of each tensor by measurement.

The model's inputs are kept while it runs. At its end :func:`~lightning_obs.choose_observers` scores the candidates on
some of them, and a session with the chosen observers, which later validations use too, runs all of them again.
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
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.kept_batches import KeptBatches
from lightning_obs.callbacks.which_module import require_forward
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
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.report.predictions import KEPT_BYTES

#: batches that candidates observe and are scored on, half of them each
SCORED = 32
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class AutoObservers:
    """The choice of one callback, from its options, the ``asked`` ones, and the ``candidates`` by base name."""

    def __init__(self, asked: CalibrationOptions, masked: bool, candidates: Candidates) -> None:
        self.asked, self._masked = asked, masked
        self.candidates = candidates or None  # None: the default candidates that fit
        self.options: CalibrationOptions | None = None  # the asked ones with the chosen observers; None before
        self.choice: ObserverChoice | None = None  # the scores; None before the choice, and after a resume
        self._kept = KeptBatches()
        self._remove_hook: Callable[[], None] | None = None

    def require_possible(self, session: CalibrationSession) -> None:
        """Refuse, before training, a module without ``forward``, several devices, a token mask, wrong candidates."""
        require_forward(session.model, 'observers="auto"')
        if session.collectives.size > 1 or self._masked:
            raise CalibrationError(
                'observers="auto" chooses on one device, and without a token mask',
                got=f"{session.collectives.size} devices{', a token mask' if self._masked else ''}",
                remedy="choose there (callback.choice.config), then calibrate here with that scheme.",
            )
        fitting_candidates(session.model, self.asked, self.candidates)

    def start(self, session: CalibrationSession) -> None:
        """Keep the model's arguments, until :meth:`choose` or :meth:`stop`; nothing after the choice."""
        if self.options is not None:
            return
        self.require_possible(session)
        self.stop()

        def keep(model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not session.is_paused:
                if not self._kept.offered:
                    logits_of(output)  # a model without logits is an error now, not at the end
                self._kept.add(_by_name(model, args, kwargs))

        model = session.model
        self._remove_hook = keep_hook_out(model, model.register_forward_hook(keep, with_kwargs=True))

    def stop(self) -> None:
        """Keep nothing any more."""
        if self._remove_hook is not None:
            self._remove_hook()
        self._remove_hook, self._kept = None, KeptBatches()

    def choose(self, session: CalibrationSession) -> CalibrationSession:
        """Choose, and return an attached session with the chosen observers that has seen the same batches.

        Where nothing is kept there is nothing to choose: the session itself.
        """
        if self._remove_hook is None:
            return session
        model = session.model
        if not self._kept:
            raise CalibrationError(
                f'observers="auto": no validation batch called {type(model).__name__}, so there is nothing to score on',
                remedy='name the module that validation_step calls: CalibrationCallback(module="...").',
            )
        if len(self._kept) < self._kept.offered:
            warn(
                f'observers="auto": inputs are kept to be run again, {len(self._kept)} of {self._kept.offered} fit in '
                f"{KEPT_BYTES / 2**30:.1f} GiB. The others are not observed."
            )
        kept = [inputs for inputs, _ in self._kept.pop_all()]
        self.stop()
        session.detach()
        self.choice = choose_observers(model, kept[:SCORED], self.asked, self.candidates)
        self.options = self.asked.with_config(self.choice.config)
        for base, counts in self.choice.counts.items():
            rank_zero_info(f'observers="auto", {base}: ' + ", ".join(f"{name} {n}" for name, n in counts.most_common()))
        chosen = CalibrationSession(model, self.options, collectives=session.collectives)
        chosen.attach()
        with left_as_it_was(model), torch.no_grad():
            for inputs in kept:
                call_on(model, inputs)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """The chosen config, and the one that it was chosen for, as strings."""
        if self.options is None:
            return {}
        return {"chosen_config": self.options.config.model_dump_json(), "asked_config": self._question}

    @property
    def _question(self) -> str:
        return f"{self.asked.config.model_dump_json()} {self.candidates or ''}".rstrip()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`; the next validation chooses where it has no choice, or one of other options."""
        text = state.get("chosen_config")
        same = text is not None and state.get("asked_config") == self._question
        self.options = self.asked.with_config(QuantizationConfig.model_validate_json(text)) if same else None
        self.choice = None


def given_candidates(observers: Any) -> tuple[Any, Candidates | None]:
    """A callback's ``observers``, and the lists to choose from: empty for ``"auto"``; None: nothing is chosen.

    >>> given_candidates({"input": "minmax", "weight": ["memoryless_mse", "imatrix_mse"]})
    ({'input': 'minmax'}, {'weight': ['memoryless_mse', 'imatrix_mse']})
    """
    if not isinstance(observers, Mapping):
        return (None, {}) if observers == "auto" else (observers, None)
    lists = {base: each for base, each in observers.items() if isinstance(each, Sequence) and not isinstance(each, str)}
    require_candidates(lists)
    return {base: each for base, each in observers.items() if base not in lists}, lists or None


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    names = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind in _NAMED]
    if len(args) > len(names):
        raise CalibrationError(
            f'observers="auto" calls {type(model).__name__} again, with arguments by their names',
            got=f"{len(args)} positional arguments, {len(names)} names",
            remedy="call it with keyword arguments.",
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}
