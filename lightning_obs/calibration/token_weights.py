"""How much each token counts where a weight is chosen by its module's inputs: as the predictions depend on it there.

A module's output that changes by ``d`` at a token moves the predictions by ``1/2 E[(g^T d)^2]`` (Kullback-Leibler, to
second order), g the gradient at the output from a random probe of the logits. An error d is unknown before the weight
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
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_obs.calibration.hooks import GRADIENTS
from lightning_obs.calibration.probe_signs import ProbeSigns
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.forward.calls import first_input, logits_of
from lightning_obs.forward.class_axis import LastLayer
from lightning_obs.forward.extra_runs import random_numbers_restored
from lightning_obs.forward.model_copy import ModelCopy
from lightning_obs.forward.probe import fisher_probe, tapped
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.weight import in_shards

if TYPE_CHECKING:
    from lightning_obs.calibration.session import CalibrationSession

#: the most outputs whose products are gathered: 1 GiB, where a vocabulary would take more than the model
MOST_OUTPUTS = 1 << 14
#: predictions of a call that are compared with the copy's, and the largest difference, relative to their size
_COMPARED, _TOLERANCE = 16, 0.1


class TokenWeights:
    """The weights of the tokens of the call of ``session.model`` that runs now, in the session's ``weighed`` modules.

    Modules of a fused set read one tensor, and share the sum of their weights.

    Raises:
        CalibrationError: the model lies in shards, on other devices or on disk, or has experts.
    """

    def __init__(self, session: CalibrationSession) -> None:
        self._session = session
        self.modules = {name: session.model.get_submodule(name) for name in session.weighed}
        text = "weigh_tokens runs the model backward, as a whole and in memory"
        remedy = "leave out weigh_tokens."
        refuse([n for n, m in self.modules.items() if in_shards(m) or is_dispatched(m)], text, remedy=remedy)
        refuse(list(session.experts.containers), "weigh_tokens does not know the tokens of experts", remedy=remedy)
        self._together = {name: tuple(fused) for fused in session.plan.fused for name in fused}
        self._signs = ProbeSigns()
        #: by module, how many of its calls were weighed already
        self._calls = defaultdict[str, int](int)
        #: by fused set or module, the weights ``(...)`` of the tokens of each of its calls
        self._weights: dict[Any, dict[int, torch.Tensor]] = {}
        #: some of the copy's logits ``(n, classes)`` for the call that runs now; None: nothing to compare
        self._predicted: torch.Tensor | None = None
        self._is_compared = (
            False  # once: what the copy lacks, it lacks in each call, and an accelerator has to be awaited
        )
        self._last_layer = LastLayer()

    def attach(self, stack: ExitStack) -> None:
        """Compare the predictions of the first call with the copy's; ``stack`` removes the hook."""
        model = self._session.model
        stack.callback(keep_hook_out(model, model.register_forward_hook(self._compare, prepend=True)))

    def measure(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a copy of the model forward and backward on copies of the arguments of a call that is about to run.

        Raises:
            CalibrationError: the model cannot be copied; its output has no logits, or their classes are not known.
        """
        self._weights = {}
        self._calls.clear()
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(random_numbers_restored(model))
            stack.enter_context(self._session.paused())  # a forward may reach the model itself, by a closure
            copied = ModelCopy(model, args, kwargs)
            for module in copied.model.modules():
                module.training = False
            self._last_layer = LastLayer()
            self._last_layer.watch(copied.model, stack)
            for name, module in self.modules.items():
                copied.copy_of(module).register_forward_hook(self._tap(name), with_kwargs=True)
            # Not a call of the model: its own hooks have run before the call was copied.
            logits = self._last_layer.classes_last(logits_of(copied.model.forward(*copied.args, **copied.kwargs)))
            mask = self._session.mask
            probe = fisher_probe(logits.detach(), self._signs.of_call(logits, mask, args, kwargs))
            if mask is not None and mask.shape == logits.shape[:-1]:
                probe = probe * mask.to(probe.device).bool()[..., None]  # predictions after padding do not count
            logits.backward(probe)
        self._predicted = None
        if not self._is_compared and not any(module.training for module in model.modules()):
            self._predicted = self._some(logits.detach())

    def _tap(self, name: str) -> Any:
        """A forward hook that adds up the squared gradients at a module's output, when backward reaches it."""
        weights = self._weights.setdefault(self._together.get(name, name), {})
        outputs = self._session.fed.get((name, GRADIENTS))
        calls = 0

        def hook(_: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            value = first_input(args, kwargs)
            assert value is not None
            length = 1.0 if outputs is None else value.detach().float().norm(dim=-1, keepdim=True)
            see = partial(self._see, weights, calls, outputs, length)
            calls += 1
            return tapped(output, see)

        return hook

    def _see(
        self, weights: dict[int, torch.Tensor], call: int, outputs: Any, length: Any, gradient: torch.Tensor
    ) -> None:
        """Take in the gradient at the output of one call of a module."""
        weights[call] = weights.get(call, 0) + gradient.float().square().sum(-1)
        if outputs is not None:
            outputs.observe_inputs(gradient.float() * length)

    def _some(self, logits: torch.Tensor) -> torch.Tensor:
        """A few predictions ``(n, classes)`` of logits, none of padding."""
        mask = self._session.mask
        rows = logits.flatten(0, -2)
        if mask is not None and mask.shape == logits.shape[:-1]:
            numbers = mask.flatten().nonzero().flatten()
        else:
            numbers = torch.arange(len(rows))
        step = max(1, len(numbers) // _COMPARED)
        return rows[numbers[::step].to(rows.device)].float()

    def _compare(self, model: nn.Module, args: Any, output: Any) -> None:
        """Refuse weights of a copy that predicts something else than the model: they are not the model's."""
        predicted, self._predicted = self._predicted, None
        if predicted is None:
            return
        self._is_compared = True
        logits = self._some(self._last_layer.classes_last(logits_of(output)).detach())
        difference = torch.tensor(torch.inf, device=logits.device)
        if logits.shape == predicted.shape:
            difference = (logits - predicted).norm()
        size = (logits - logits.mean(-1, keepdim=True)).norm()
        if bool(torch.isfinite(size) & (difference > _TOLERANCE * size)):
            raise CalibrationError(
                "weigh_tokens runs a copy of the model, and the copy predicts something else than the model",
                where=[type(model).__name__],
                got=f"logits that differ by {float(difference):.3g}, of size {float(size):.3g}",
                expected="a forward that its modules, their attributes and its arguments determine",
                remedy="a hook that changes outputs has to be a method of one of the model's modules (other hooks are "
                "not run in the copy), and nothing may be kept in global variables; or leave out weigh_tokens.",
            )

    def weigh(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Inputs ``(..., C)`` of a module, each token times the root of its weight, in float32."""
        call = self._calls[name]
        self._calls[name] += 1
        weights = self._weights.get(self._together.get(name, name), {}).get(call)
        if weights is None or weights.shape != value.shape[:-1]:
            raise CalibrationError(
                "weigh_tokens: a gradient is known for no token, or for other tokens",
                where=[name],
                got="none" if weights is None else f"gradients {tuple(weights.shape)}, inputs {tuple(value.shape)}",
                expected="a call of the whole model, whose logits depend on the module's output at each token",
                remedy="call the calibrated model itself, or leave out weigh_tokens.",
            )
        return value.float() * weights.sqrt()[..., None]
