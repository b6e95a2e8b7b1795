"""Weigh tokens by how much the model's predictions depend on them (``weigh_tokens``).

Observers and roundings of weights gather ``sum x x^T`` over the tokens of a module's inputs x. Here each token gets a
weight in this sum. If the module's output at a token changes by ``d``, the predictions change by ``1/2 E[(g^T d)^2]``
(Kullback-Leibler divergence, to second order). g is the gradient at the module's output from a random probe of the
logits. In a model without logits, the same expression is half the squared change of the model's output
(:mod:`lightning_obs.calibration.output_probe`). The direction of d is unknown before the weight is quantized, so all
directions count alike: the weight of the token is ``|g|^2``.

Before each observed call of the model, a copy of the model runs forward and backward on copies of the arguments
(:mod:`lightning_obs.forward.model_copy`), apart from the user's run. The user's own forward cannot be used: with
gradients torch chooses other kernels, so outputs would differ, and key-value caches would keep the autograd graph.

For a rounding, ``sum |x|^2 g g^T`` is gathered, too. It tells how errors in different outputs of the module combine;
it and the weighted ``sum x x^T`` are the two Kronecker factors of the Fisher information.

Reference:
    Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193 (KL and the Fisher);
    Kim et al., GuidedQuant, 2025, arXiv:2505.07004 (gradients of outputs as weights of a layer's quadratic form);
    Martens, Grosse, K-FAC, 2015, arXiv:1503.05671 (Kronecker factors).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_obs.calibration.base_names import GRADIENTS
from lightning_obs.calibration.hold_out import Place
from lightning_obs.calibration.observation import Observation, fused_sets_by_module
from lightning_obs.calibration.output_probe import OutputProbe, rows_that_count
from lightning_obs.calibration.random_tokens import RandomTokens
from lightning_obs.errors import CalibrationError, name_list, refuse, warn
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.extra_runs import random_numbers_restored
from lightning_obs.forward.model_copy import ModelCopy
from lightning_obs.forward.probe import tapped
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.module_qparams import get_scheme
from lightning_obs.model.weight import in_shards
from lightning_obs.observers import Observer
from lightning_obs.schemes.planned_modules import Plan

#: the token weights in one call of the model: by fused set, or name of a module in none, and by number of the module's
#: call, the weights ``(...)`` in the shape of the input without its channels
WeightsOfCall: TypeAlias = dict[Hashable, dict[int, torch.Tensor]]
#: the option of an observer of weights that asks for token weights
_OPTION = "weigh_tokens"
#: about how many predictions of the model and of its copy are compared
_COMPARED = 16
#: the largest relative difference of these predictions. It is loose, because the copy may run with other kernels, and
#: only a copy that computes another function is to be refused.
_TOLERANCE = 0.1


class TokenWeights:
    """Measures and holds the weights of the tokens of the model's present call.

    :class:`.ObserverHooks` makes one when it attaches, if any observer weighs tokens. A pre-hook of the model calls
    :meth:`measure` before each call, and the hooks of modules call :meth:`weigh` with their inputs. The modules of a
    fused set read one tensor, so they share the sum of their weights.

    If no gradient reaches a module, the outcome depends on who asked for the weights. If a recipe did, all tokens of
    the module count alike, and a warning says so at the end. This happens when the steps of a LightningModule call
    parts of the model, so that no call of the model itself is seen. If the user has named ``weigh_tokens``, it is an
    error.

    Args:
        observation: its ``weighed_modules`` weigh tokens; its helper observers for :data:`.GRADIENTS` observe
            gradients.

    Attributes:
        modules: by name, the modules that weigh tokens.

    Raises:
        CalibrationError: the model is sharded, offloaded or spread over devices, or has experts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._calls = observation.calls
        model = observation.model
        self.modules = {name: model.get_submodule(name) for name in observation.weighed_modules}
        self._refuse_models_that_cannot_run_backward()
        self._fused_sets = fused_sets_by_module(observation.plan)
        self._probe = OutputProbe(model)
        #: by module name, how many of its calls in the present call of the model were weighed
        self._weighed_calls = defaultdict[str, int](int)
        self._weights: WeightsOfCall = {}
        #: for each tensor of the copy's output, some rows ``(n, C)`` in the present call; None: nothing is to compare
        self._predicted: list[torch.Tensor] | None = None
        # Only one call is compared: what the copy lacks it lacks in every call, and comparing makes the host wait.
        self._is_compared = False
        options = observation.options
        #: whether a recipe asks for token weights, not the user by name
        self._is_of_recipe = options.recipe is not None and not options.names_weight_observer
        #: by fused set or module name, whether its tokens are weighed; decided at its first call
        self._is_weighed: dict[Hashable, bool] = {}
        #: names of modules whose tokens count alike, and of which a warning has told
        self._warned: set[str] = set()
        #: why the copy of the model could not run; None: it could
        self._obstacle: str | None = None

    def _refuse_models_that_cannot_run_backward(self) -> None:
        """Raise a CalibrationError for models with sharded or offloaded weights, or with experts."""
        sharded = [name for name, module in self.modules.items() if in_shards(module) or is_dispatched(module)]
        remedy = "leave out weigh_tokens."
        refuse(sharded, "weigh_tokens runs the model backward, which needs whole weights in memory", remedy=remedy)
        experts = self._observation.experts
        containers = [] if experts is None else list(experts.containers)
        refuse(containers, "weigh_tokens does not know the tokens of experts", remedy=remedy)

    def attach(self, stack: ExitStack) -> None:
        """Register a hook on the model that compares its predictions in the first call with the copy's.

        :meth:`.ModelCalls.attach` calls this. When ``stack`` closes, it removes the hook, and warns of modules whose
        tokens count alike.
        """
        model = self._observation.model
        handle = model.register_forward_hook(self._compare, prepend=True)
        remove_hook = keep_hook_out(model, handle)
        stack.callback(self.warn_of_tokens_that_count_alike)
        stack.callback(remove_hook)

    def measure(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the token weights of a call of the model before it runs; a pre-hook of the model calls this.

        A copy of the model runs forward and backward on copies of the arguments. If that fails, a recipe asks for the
        weights, and no module was weighed in an earlier call, the error is kept and not raised: neither this call nor
        any later one is measured, and all tokens count alike.

        Args:
            model: the model.
            args, kwargs: of the call.

        Raises:
            CalibrationError: the model cannot be copied; no gradient leads from its output to a module; or the class
                dimension of its logits is unknown.
        """
        self._weighed_calls.clear()
        self._predicted = None
        self._measure(model, args, kwargs)

    def with_random_tokens(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], random_tokens: RandomTokens, batch: int
    ) -> WeightsOfCall:
        """Measure the token weights that the present call would have with random tokens; its own do not change.

        :class:`.KeptCalls` calls this after :meth:`measure`, and keeps the result for :meth:`use`.

        Args:
            model: the model.
            args, kwargs: of the call.
            random_tokens: that replace some tokens of the call.
            batch: the number of the call among the kept ones.

        Raises:
            CalibrationError: as :meth:`measure` says.
        """
        of_call = self._weights
        predicted = self._predicted
        try:
            self._measure(model, args, kwargs, partial(random_tokens.attach, batch))
            return self._weights
        finally:
            self._weights = of_call
            self._predicted = predicted

    def _measure(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attach: Callable[[ExitStack, Callable[[nn.Module], nn.Module]], None] | None = None,
    ) -> None:
        """Run the copy unless an earlier call has shown an obstacle; :meth:`measure` says what an error does.

        Args:
            model: the model.
            args, kwargs: of the call.
            attach: called with a stack and the function from modules to their copies, to register further hooks on the
                copy; None: there are none.
        """
        self._weights = {}
        if self._obstacle is not None:
            return
        try:
            self._run_copy(model, args, kwargs, attach)
        except CalibrationError as error:
            if not self._is_of_recipe or any(self._is_weighed.values()):
                raise  # sums in which some calls are weighed and others not would mean nothing
            self._obstacle = str(error)
            self._weights = {}

    def _run_copy(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attach: Callable[[ExitStack, Callable[[nn.Module], nn.Module]], None] | None,
    ) -> None:
        """Run the copy, whose hooks fill ``_weights``, and keep some of its predictions for the comparison."""
        mask = self._calls.mask
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(random_numbers_restored(model))
            stack.enter_context(self._calls.paused())  # a forward may reach the model itself, by a closure
            copied = ModelCopy(model, args, kwargs)
            for module in copied.model.modules():
                module.training = False
            self._probe.watch(copied.model, stack)
            if attach is not None:
                attach(stack, copied.copy_of)
            for name, module in self.modules.items():
                copied.copy_of(module).register_forward_hook(self._gradient_hook(name), with_kwargs=True)
            # Not copied.model(...): the model's own pre-hooks have run already, for the call that is copied.
            output = copied.model.forward(*copied.args, **copied.kwargs)
            tensors = self._probe.tensors_of(output)
            self._probe.run_backward(tensors, mask, args, kwargs)
        is_training = any(module.training for module in model.modules())
        if not self._is_compared and not is_training:
            self._predicted = [rows_that_count(tensor, mask, _COMPARED) for tensor in tensors]

    def _gradient_hook(self, name: str) -> Callable[..., torch.Tensor]:
        """Make a forward hook for the copy of a module: it takes in the gradient at the output in backward."""
        weights = self._weights.setdefault(self.reader_of(name), {})
        output_observers = self._output_observers(name)
        calls = 0

        def hook(_: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            """Return the output of one call, tapped so that backward passes its gradient to :func:`_take_gradient`."""
            nonlocal calls
            value = first_input(args, kwargs)
            assert value is not None
            token_lengths = None
            if output_observers:
                token_lengths = value.detach().float().norm(dim=-1, keepdim=True)
            take_gradient = partial(_take_gradient, weights, calls, output_observers, token_lengths)
            calls += 1
            return tapped(output, take_gradient)

        return hook

    def _output_observers(self, name: str) -> list[Observer]:
        """The observers that take the gradients at a module's outputs in the present batch; empty if none does.

        These are the helper of the module's rounding, and the same helper of its hold-out, by which the fit of a few
        modules is judged. The hold-out's observer takes only the batches that are kept out, every fourth of all ranks'
        batches; its :class:`.Place` says whether the present batch is one of them.
        """
        observers = []
        observer = self._observation.data_observers.get((name, GRADIENTS))
        if observer is not None:
            observers.append(observer)
        hold_out = self._observation.hold_outs.get(name)
        if hold_out is not None:
            observer = hold_out.gradient_observer(Place.of(self._calls, self._observation.collectives))
            if observer is not None:
                observers.append(observer)
        return observers

    def reader_of(self, name: str) -> Hashable:
        """The key of a module in ``_weights``: its fused set, or its name if it is in none.

        Also asked by :class:`.PairedInputs`: inputs of modules with different keys are weighed differently.
        """
        return self._fused_sets.get(name, name)

    def _compare(self, model: nn.Module, args: Any, output: Any) -> None:
        """Raise a CalibrationError if the copy predicted something else than the model; a forward hook of the model.

        Weights that a wrong copy gives are of no use. Only the first call in evaluation mode is compared. If the two
        outputs have different numbers of tensors, those that only one of them has are not compared. A call that the
        model's forward makes itself is not compared.
        """
        if self._calls.depth > 1:
            return
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
        """The token weights of the present call; :class:`.KeptCalls` keeps them for :meth:`use`."""
        return self._weights

    def use(self, weights: WeightsOfCall) -> None:
        """Weigh the tokens of the next run by ``weights``; ``KeptCalls.run`` calls this before it repeats a call."""
        self._weights = weights
        self._weighed_calls.clear()

    def weigh(self, name: str, value: torch.Tensor, call: int | None = None) -> torch.Tensor:
        """Return an input ``(..., C)`` of a module in float32, each token multiplied by the square root of its weight.

        The sum of ``x x^T`` over these tokens is the weighted sum. The hooks of :mod:`.hooks` call this for each input
        that a weight's observer observes, and :class:`.PairedInputs` for both inputs of a pair.

        Args:
            name: of the module.
            value: its input.
            call: the number of the module's call within the call of the model; None: the next call, which is counted.

        Raises:
            CalibrationError: the call has no weights, and the user has named ``weigh_tokens``, or earlier calls had
                weights.
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

    @property
    def names_that_count_alike(self) -> list[str]:
        """The names of the modules whose tokens count alike although a recipe asks for weights.

        ``CalibrationSession.finalize`` asks for them, to let the modules' schemes say so.
        """
        return [name for name in self.modules if not self._is_weighed.get(self.reader_of(name), True)]

    def warn_of_tokens_that_count_alike(self) -> None:
        """Warn once of modules whose tokens count alike although a recipe asks for weights, and say why.

        Called when the hooks are removed, and by :func:`.calibrate_on_quantized_inputs` after it has run the kept
        calls.
        """
        names = [name for name in self.names_that_count_alike if name not in self._warned]
        if not names:
            return
        self._warned.update(names)
        model = self._observation.model
        reason = self._obstacle
        if reason is None:
            reason = (
                f"no gradient reached {'it' if len(names) == 1 else 'them'} from an output of {type(model).__name__}. "
                "Where the steps call its parts, name the part that they call: module=..."
            )
        warn(f"weigh_tokens, of the recipe: all tokens count alike in {name_list(names)}: {reason}")


def count_tokens_alike(plan: Plan, names: Collection[str]) -> None:
    """Let the schemes of calibrated modules say that their tokens were not weighed: checkpoints record what was done.

    A session calls this when it has computed qparams, and when it loads a saved calibration.

    Args:
        plan: of the session. Its own schemes stay, since the next calibration may weigh the tokens.
        names: of the modules.
    """
    for target in plan.targets:
        scheme = get_scheme(target.module)
        if target.name in names and scheme is not None and scheme.weights is not None:
            scheme.weights.observer_kwargs.pop(_OPTION, None)  # the module has a scheme of its own


def names_calibrated_alike(plan: Plan) -> list[str]:
    """The names of the modules that :func:`count_tokens_alike` was called for; a session saves them in its state."""
    names = []
    for target in plan.targets:
        scheme = get_scheme(target.module)
        if target.scheme.weights is None or scheme is None or scheme.weights is None:
            continue
        if target.scheme.weights.observer_kwargs.get(_OPTION) and _OPTION not in scheme.weights.observer_kwargs:
            names.append(target.name)
    return names


def _require_alike(model: str, rows: torch.Tensor, of_copy: torch.Tensor, *, are_logits: bool) -> None:
    """Raise a CalibrationError if the predictions of the copy differ from the model's by more than the tolerance.

    Args:
        model: the name of the model's class, for the error.
        rows: ``(n, C)`` of the model's output.
        of_copy: the same rows of the copy's output.
        are_logits: whether rows are logits, whose common offset does not count in their size.
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
            expected="a forward that depends on its arguments, and on modules and their attributes, alone",
            remedy="a hook that changes outputs has to be a method of one of the model's modules (other hooks are "
            "not run in the copy), and nothing may be kept in global variables; or leave out weigh_tokens.",
        )


def _take_gradient(
    weights: dict[int, torch.Tensor],
    call: int,
    output_observers: Sequence[Observer],
    token_lengths: torch.Tensor | None,
    gradient: torch.Tensor,
) -> None:
    """Add the gradient at a module's output to the token weights; called in backward, once for each call of the module.

    Args:
        weights: by number of the call, the token weights, to which the squared gradient is added.
        call: the number of the call.
        output_observers: gather ``sum |x|^2 g g^T`` for the rounding; empty: rows are rounded independently.
        token_lengths: ``|x|`` of each token of the call's input, ``(..., 1)``; None without ``output_observers``.
        gradient: g, the gradient at the output, ``(..., R)``.
    """
    weights[call] = weights.get(call, 0) + gradient.float().square().sum(-1)
    if token_lengths is None:
        return
    for observer in output_observers:
        observer.observe_inputs(gradient.float() * token_lengths)
