"""How much each token counts where a weight is chosen by its module's inputs: as the predictions depend on it there.

A module's output that changes by ``d`` at a token moves the predictions by ``1/2 E[(g^T d)^2]`` (Kullback-Leibler, to
second order), g the gradient at the output from a random probe of the logits; of a model without logits it is half the
squared change of the output (:mod:`lightning_obs.calibration.output_probe`). An error d is unknown before the weight
is quantized, so all its directions count alike: the token's ``x x^T`` counts ``|g|^2`` times.

Before each call of the model that is observed, a copy of the model runs on copies of the arguments, with gradients
(:mod:`lightning_obs.forward.model_copy`): the user's run has no part in it. The same forward could not serve both:
with gradients torch takes other kernels, so outputs would differ, and caches would keep the graph. For a rounding it
also gathers ``sum |x|^2 g g^T``, by which outputs go together: beside the weighed ``x x^T`` a Kronecker factor of the
Fisher information.

Reference:
    Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193 (KL and the Fisher);
    Kim et al., GuidedQuant, 2025, arXiv:2505.07004 (gradients of outputs as weights of a layer's quadratic form);
    Martens, Grosse, K-FAC, 2015, arXiv:1503.05671 (Kronecker factors).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_obs.calibration.observation import GRADIENTS, Observation, fused_sets_by_module
from lightning_obs.calibration.output_probe import OutputProbe, rows_that_count
from lightning_obs.errors import CalibrationError, name_list, refuse, warn
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.extra_runs import random_numbers_restored
from lightning_obs.forward.model_copy import ModelCopy
from lightning_obs.forward.probe import tapped
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.weight import in_shards
from lightning_obs.observers import Observer

#: the weights ``(...)`` of the tokens of each call of a module, by fused set or name of the module
WeightsOfCall: TypeAlias = dict[Hashable, dict[int, torch.Tensor]]
#: about how many predictions of a call are compared with the copy's
_COMPARED = 16
#: the largest difference of these predictions, relative to their size
_TOLERANCE = 0.1


class TokenWeights:
    """The weights of the tokens of the present call of the model, in the modules that weigh them.

    Modules of a fused set read one tensor, and share the sum of their weights.

    Where a recipe asks for the weights, a module that no gradient reaches counts all its tokens alike, and a warning
    says so at the end: the steps of a LightningModule may call its parts, and no call of the model is seen then. Where
    the user has named ``weigh_tokens``, that is an error.

    Args:
        observation: its ``weighed_modules`` weigh tokens. The observers of :data:`.GRADIENTS` observe gradients.

    Attributes:
        modules: the modules that weigh tokens, by name.

    Raises:
        CalibrationError: the model is in shards, on other devices or on disk, or has experts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._calls = observation.calls
        model = observation.model
        self.modules = {name: model.get_submodule(name) for name in observation.weighed_modules}
        self._refuse_models_that_cannot_run_backward()
        self._fused_sets = fused_sets_by_module(observation.plan)
        self._probe = OutputProbe(model)
        #: how many calls of each module were weighed, by its name
        self._weighed_calls = defaultdict[str, int](int)
        self._weights: WeightsOfCall = {}
        #: some rows of the copy's output ``(n, C)`` for the present call; None: there is nothing to compare
        self._predicted: list[torch.Tensor] | None = None
        # One comparison is enough: what the copy lacks, it lacks in each call, and the host waits for an accelerator.
        self._is_compared = False
        options = observation.options
        self._is_of_recipe = options.recipe is not None and not options.names_weight_observer
        #: fused sets, or names of modules, by whether their tokens are weighed; it is settled at the first token
        self._is_weighed: dict[Hashable, bool] = {}
        #: why the copy could not run; None: it could
        self._obstacle: str | None = None

    def _refuse_models_that_cannot_run_backward(self) -> None:
        sharded = [name for name, module in self.modules.items() if in_shards(module) or is_dispatched(module)]
        remedy = "leave out weigh_tokens."
        refuse(sharded, "weigh_tokens runs the model backward, as a whole and in memory", remedy=remedy)
        experts = self._observation.experts
        containers = [] if experts is None else list(experts.containers)
        refuse(containers, "weigh_tokens does not know the tokens of experts", remedy=remedy)

    def attach(self, stack: ExitStack) -> None:
        """Compare the predictions of the first call with the copy's; ``stack`` removes the hook."""
        model = self._observation.model
        handle = model.register_forward_hook(self._compare, prepend=True)
        remove_hook = keep_hook_out(model, handle)
        stack.callback(self.warn_of_tokens_that_count_alike)
        stack.callback(remove_hook)

    def measure(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a copy of the model forward and backward on copies of the arguments of a call that is about to run.

        Raises:
            CalibrationError: the model cannot be copied; no gradient leads from its output to a module; it has logits
                whose classes are not known. Where a recipe asks for weights, tokens count alike instead.
        """
        self._weights = {}
        self._weighed_calls.clear()
        self._predicted = None
        if self._obstacle is not None:
            return
        try:
            self._run_copy(model, args, kwargs)
        except CalibrationError as error:
            if not self._is_of_recipe or any(self._is_weighed.values()):
                raise
            self._obstacle = str(error)
            self._weights = {}

    def _run_copy(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fill the weights of a call, and keep some of the copy's predictions where they are to be compared."""
        mask = self._calls.mask
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(random_numbers_restored(model))
            stack.enter_context(self._calls.paused())  # a forward may reach the model itself, by a closure
            copied = ModelCopy(model, args, kwargs)
            for module in copied.model.modules():
                module.training = False
            self._probe.watch(copied.model, stack)
            for name, module in self.modules.items():
                copied.copy_of(module).register_forward_hook(self._gradient_hook(name), with_kwargs=True)
            # Not a call of the model: its own hooks have run before the call was copied.
            output = copied.model.forward(*copied.args, **copied.kwargs)
            tensors = self._probe.tensors_of(output)
            self._probe.run_backward(tensors, mask, args, kwargs)
        is_training = any(module.training for module in model.modules())
        if not self._is_compared and not is_training:
            self._predicted = [rows_that_count(tensor, mask, _COMPARED) for tensor in tensors]

    def _gradient_hook(self, name: str) -> Callable[..., torch.Tensor]:
        """A forward hook that adds up the squared gradients at a module's output, when backward reaches it."""
        weights = self._weights.setdefault(self.reader_of(name), {})
        output_observer = self._observation.data_observers.get((name, GRADIENTS))
        calls = 0

        def hook(_: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            value = first_input(args, kwargs)
            assert value is not None
            token_lengths = None
            if output_observer is not None:
                token_lengths = value.detach().float().norm(dim=-1, keepdim=True)
            take_gradient = partial(_take_gradient, weights, calls, output_observer, token_lengths)
            calls += 1
            return tapped(output, take_gradient)

        return hook

    def reader_of(self, name: str) -> Hashable:
        """The fused set of a module, whose modules share weights; without one, its name."""
        return self._fused_sets.get(name, name)

    def _compare(self, model: nn.Module, args: Any, output: Any) -> None:
        """Refuse weights of a copy that predicts something else than the model: they are not the model's."""
        predicted = self._predicted
        self._predicted = None
        if predicted is None:
            return
        self._is_compared = True
        tensors = self._probe.tensors_of(output)
        for tensor, of_copy in zip(tensors, predicted, strict=False):
            rows = rows_that_count(tensor, self._calls.mask, _COMPARED)
            _require_alike(type(model).__name__, rows, of_copy, are_logits=tensor.are_logits)

    @property
    def of_call(self) -> WeightsOfCall:
        """The weights of the tokens of the present call, for :meth:`use` when it runs again."""
        return self._weights

    def use(self, weights: WeightsOfCall) -> None:
        """Weigh the tokens of the next run by the weights that an earlier call had."""
        self._weights = weights
        self._weighed_calls.clear()

    def weigh(self, name: str, value: torch.Tensor, call: int | None = None) -> torch.Tensor:
        """Inputs ``(..., C)`` of a module, each token times the root of its weight, in float32.

        Args:
            name: of the module.
            value: its input.
            call: the number of the module's call; None: the next one, which is then counted.
        """
        if call is None:
            call = self._weighed_calls[name]
            self._weighed_calls[name] += 1
        reader = self.reader_of(name)
        weights = self._weights.get(reader, {}).get(call)
        has_weights = weights is not None and weights.shape == value.shape[:-1]
        is_weighed = self._is_weighed.setdefault(reader, has_weights or not self._is_of_recipe)
        if not is_weighed:
            return value.float()
        if weights is None or not has_weights:
            raise CalibrationError(
                "weigh_tokens: no gradient for this call of the module",
                where=[name],
                got="none" if weights is None else f"gradients {tuple(weights.shape)}, inputs {tuple(value.shape)}",
                expected="a call of the whole model, whose output depends on the module's output at each token",
                remedy="call the calibrated model itself, or leave out weigh_tokens.",
            )
        return value.float() * weights.sqrt()[..., None]

    def warn_of_tokens_that_count_alike(self) -> None:
        """Say, when the observation ends, which modules of a recipe's count all their tokens alike, and why."""
        names = [name for name in self.modules if not self._is_weighed.get(self.reader_of(name), True)]
        if not names:
            return
        model = self._observation.model
        reason = self._obstacle
        if reason is None:
            reason = (
                f"no gradient reached {'it' if len(names) == 1 else 'them'} from an output of {type(model).__name__}. "
                "Where the steps call its parts, name the part that they call: module=..."
            )
        warn(f"weigh_tokens, of the recipe: all tokens count alike in {name_list(names)}: {reason}")


def _require_alike(model: str, rows: torch.Tensor, of_copy: torch.Tensor, *, are_logits: bool) -> None:
    """Refuse a copy whose predictions differ from the model's.

    Args:
        model: name of its class.
        rows: ``(n, C)`` of the model's output.
        of_copy: the same rows of the copy's.
        are_logits: whether a constant that is added to a row changes nothing.
    """
    difference = torch.tensor(torch.inf, device=rows.device)
    if rows.shape == of_copy.shape:
        difference = (rows - of_copy).norm()
    size = (rows - rows.mean(-1, keepdim=True)).norm() if are_logits else rows.norm()
    differs = difference > _TOLERANCE * size
    if bool(torch.isfinite(size) & differs):
        raise CalibrationError(
            "weigh_tokens runs a copy of the model, and the copy predicts something else than the model",
            where=[model],
            got=f"predictions that differ by {float(difference):.3g}, of size {float(size):.3g}",
            expected="a forward that its modules, their attributes and its arguments determine",
            remedy="a hook that changes outputs has to be a method of one of the model's modules (other hooks are "
            "not run in the copy), and nothing may be kept in global variables; or leave out weigh_tokens.",
        )


def _take_gradient(
    weights: dict[int, torch.Tensor],
    call: int,
    output_observer: Observer | None,
    token_lengths: torch.Tensor | None,
    gradient: torch.Tensor,
) -> None:
    """Take in the gradient at the output of one call of a module; called when backward reaches it.

    Args:
        weights: the weights of the tokens of each call, to which the squared gradient is added.
        call: the number of the call.
        output_observer: gathers ``sum |x|^2 g g^T``; None: the rows of the weight are rounded one by one.
        token_lengths: ``|x|`` of the call's input, ``(..., 1)``; given with ``output_observer``.
        gradient: ``(..., R)``.
    """
    weights[call] = weights.get(call, 0) + gradient.float().square().sum(-1)
    if output_observer is not None and token_lengths is not None:
        output_observer.observe_inputs(gradient.float() * token_lengths)
