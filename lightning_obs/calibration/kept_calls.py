"""Keep the arguments of a model's calls while the user's code runs it, to run the calls again block by block.

A session whose weights are rounded on quantized inputs cannot observe the user's run: the modules read the inputs of
the unquantized model there. So the session keeps the arguments of each call on the CPU, and
:meth:`.KeptRuns.calibrate` runs the calls again when the session finalizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.random_tokens import RandomTokens
from lightning_obs.calibration.token_weights import TokenWeights, WeightsOfCall
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.calls import Autocast
from lightning_obs.forward.kept_batches import KEPT_BYTES, KeptBatches
from lightning_obs.model.mark import is_inside_quantized, keep_hook_out


@dataclass(frozen=True)
class _Call:
    """The state in which the model was called, kept beside the arguments of the call.

    :meth:`KeptCalls._keep` makes one for each call; :meth:`KeptCalls.run` and :meth:`KeptCalls.mask` read it.
    """

    mask: torch.Tensor | None  # of the tokens that count; None: all tokens count
    autocast: Autocast  # of the model's device
    token_weights: WeightsOfCall | None  # how much each token counts; None: all tokens count alike
    random_token_weights: WeightsOfCall | None  # the same with random tokens; None also without random tokens


class KeptCalls:
    """Keeps the observed calls of a model, and runs them again; a :class:`.Batches` for a calibration step by step.

    :class:`.KeptRuns` makes one, and calls its methods; a session whose weights are rounded on quantized inputs has it.

    Args:
        observation: of the model. A call is not kept while ``observation.calls`` is paused, nor in a
            :func:`~lightning_obs.quantized` block.

    Attributes:
        obstacle: why a call could not be kept, if a recipe asks for quantized inputs (otherwise that is an error). The
            modules of that call and of later ones are observed while the call runs. None: all calls could be kept so
            far. :meth:`.KeptRuns.calibrate` reads it.
        random_tokens: with which each call runs a second time; None: no call does.

    Raises:
        CalibrationError: as :meth:`.RandomTokens.of`, by the constructor.
    """

    def __init__(self, observation: Observation) -> None:
        self.obstacle: str | None = None
        self.random_tokens = RandomTokens.of(observation)
        self._observation = observation
        self._batches = KeptBatches(KEPT_BYTES)
        self._remove_hook: Callable[[], None] | None = None
        #: the arguments of the present call, before hooks of the user's may replace them: they run again with the call
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        #: measures how much each token counts, in the user's run; None: all tokens count alike
        self.token_weights: TokenWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the calls and the hook out of a copy or pickle: a copy is not attached."""
        changes: dict[str, Any] = {
            "_batches": KeptBatches(KEPT_BYTES),
            "_remove_hook": None,
            "_arguments": ((), {}),
            "token_weights": None,
        }
        return {**vars(self), **changes}

    def __len__(self) -> int:
        """How many calls are kept; a calibration step by step runs as many batches."""
        return len(self._batches)

    def attach(self, token_weights: TokenWeights | None, forget: bool = True) -> None:
        """Keep each call of the model from now on, by hooks on the model.

        :meth:`.KeptRuns.attach` calls this, as the last step of ``CalibrationSession.attach``: the hook that sets the
        mask and measures the token weights of a call must run before the call is kept.

        Args:
            token_weights: measures the weights of each call; None: all tokens count alike.
            forget: release the calls that were kept before.
        """
        self.token_weights = token_weights
        self.detach()
        if forget:
            self.release()
        model = self._observation.model
        first = model.register_forward_pre_hook(self._note_arguments, with_kwargs=True, prepend=True)
        before = model.register_forward_pre_hook(self._keep, with_kwargs=True)
        after = model.register_forward_hook(self._end_call, always_call=True)
        removals = [keep_hook_out(model, hook) for hook in (first, before, after)]
        self._remove_hook = partial(_call_all, removals)

    def detach(self) -> None:
        """Remove the hooks: no further calls are kept. :meth:`.KeptRuns.detach` and :meth:`attach` call this.

        Nothing happens if there are no hooks.
        """
        if self._remove_hook is not None:
            self._remove_hook()
        self._remove_hook = None
        self._observation.calls.is_kept = False

    def release(self) -> None:
        """Release the kept calls.

        Called by :meth:`.KeptRuns.calibrate` once they were run again, and by :meth:`attach` unless earlier calls stay.
        """
        self._batches = KeptBatches(KEPT_BYTES)

    def run(self, index: int, has_random_tokens: bool = False) -> Any:
        """Repeat a kept call with copies of its arguments, its token weights and its autocast; return the output.

        ``StepwiseCalibration`` calls this for each kept call, many times. It sets the mask itself (:meth:`mask`).

        Args:
            index: of the call.
            has_random_tokens: whether :attr:`random_tokens` replace some of its tokens.
        """
        args, kwargs = self._batches.copy(index)
        call: _Call = self._batches.note(index)
        weights = call.random_token_weights if has_random_tokens else call.token_weights
        if self.token_weights is not None and weights is not None:
            self.token_weights.use(weights)
        with ExitStack() as stack:
            if has_random_tokens:
                assert self.random_tokens is not None
                self.random_tokens.attach(index, stack)
            stack.enter_context(call.autocast.entered())
            return self._observation.model(*args, **kwargs)

    def mask(self, index: int) -> torch.Tensor | None:
        """The mask of a kept call, ``(batch, tokens)`` or ``(batch,)``, nonzero for tokens or samples that count.

        None: all count. ``StepwiseCalibration`` asks for it before each run in which modules observe the call.
        """
        call: _Call = self._batches.note(index)
        return call.mask

    def warn_of_calls_left_out(self) -> None:
        """Warn if some calls did not fit in the memory for kept calls.

        :meth:`.KeptRuns.calibrate` calls this before the kept calls run again.
        """
        kept = len(self)
        if self.obstacle is None and kept < self._batches.offered:
            warn(
                f"rounding on quantized inputs runs the model's calls again, and {kept} of {self._batches.offered} fit "
                f"in {KEPT_BYTES / 2**30:.1f} GiB. The others are not observed."
            )

    def _note_arguments(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments with which the model is called; its first forward pre-hook."""
        self._arguments = args, kwargs

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep one call; a forward pre-hook of the model, which runs before each call, after those of the user's.

        It sets ``calls.is_kept``, so that hooks do not observe the modules during this call, even if there was no room
        to keep it. :meth:`_end_call` resets the mark. Nothing happens while the observation is paused, in a
        :func:`~lightning_obs.quantized` block (hooks do not observe such calls either), after an obstacle, or in a call
        that the model's forward makes itself: it runs again with the call around it.

        Args:
            model: the model.
            args, kwargs: of the call, as the user's hooks have left them.

        Raises:
            CalibrationError: an argument cannot be copied, and the user has named the rounding.
        """
        arguments = self._arguments
        self._arguments = (), {}
        calls = self._observation.calls
        if calls.is_paused or calls.depth > 1 or is_inside_quantized(model) or self.obstacle is not None:
            return
        parameter = next(model.parameters(), None)
        token_weights = self.token_weights
        random_token_weights = None
        if token_weights is not None and self.random_tokens is not None:
            batch = len(self)
            random_token_weights = token_weights.with_random_tokens(model, args, kwargs, self.random_tokens, batch)
        call = _Call(
            mask=calls.mask,
            autocast=Autocast.of(None if parameter is None else parameter.device),
            token_weights=None if token_weights is None else token_weights.of_call,
            random_token_weights=random_token_weights,
        )
        try:
            self._batches.add(arguments, call)
        except CalibrationError as error:
            if not self._observation.options.rounding_is_of_recipe:
                raise
            self.obstacle = str(error)
            return
        calls.is_kept = True

    def _end_call(self, *_: Any) -> None:
        """Let modules be observed again; a forward hook of the model, which runs after each call, failed or not.

        It releases the arguments, too, if a hook of the user's has raised before :meth:`_keep`. After a call that the
        model's forward made itself, the call around it goes on, and its modules are not observed yet.
        """
        self._arguments = (), {}
        if self._observation.calls.depth == 0:
            self._observation.calls.is_kept = False


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call all functions in order; :meth:`KeptCalls.detach` removes its hooks so."""
    for function in functions:
        function()
