"""How much each token counts where a weight is chosen by its module's inputs: as the predictions depend on it there.

A module's output that changes by ``d`` at a token moves the predictions by ``1/2 E[(g^T d)^2]`` (Kullback-Leibler, to
second order), g the gradient at the output from a random probe of the logits. An error d is unknown before the weight
is quantized, so all its directions count alike: the token's ``x x^T`` counts ``|g|^2`` times.

Before each call of the model that is observed, the model runs once more, with gradients. For a rounding it also gathers
``sum |x|^2 g g^T``, by which outputs go together: beside the weighed ``x x^T`` a Kronecker factor of the Fisher
information.

Reference:
    Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193 (KL and the Fisher);
    Kim et al., GuidedQuant, 2025, arXiv:2505.07004 (gradients of outputs as weights of a layer's quadratic form);
    Martens, Grosse, K-FAC, 2015, arXiv:1503.05671 (Kronecker factors).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_obs.calibration.hooks import GRADIENTS
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.forward.calls import in_evaluation_mode, logits_of
from lightning_obs.forward.probe import fisher_probe, parameters_without_gradients, tapped
from lightning_obs.forward.quantized_forward import unobserved
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.weight import in_shards

if TYPE_CHECKING:
    from lightning_obs.calibration.session import CalibrationSession

#: the most outputs whose products are gathered: 1 GiB, where a vocabulary would take more than the model
MOST_OUTPUTS = 1 << 14


class TokenWeights:
    """The weights of the tokens of the call of ``session.model`` that runs now, in the session's ``weighed`` modules.

    Modules of a fused set read one tensor, and share the sum of their weights.

    Raises:
        CalibrationError: the model lies in shards, on other devices or on disk, or has experts.
    """

    def __init__(self, session: CalibrationSession) -> None:
        self._session, self.modules = session, {name: session.model.get_submodule(name) for name in session.weighed}
        text, remedy = "weigh_tokens runs the model backward, as a whole and in memory", "leave out weigh_tokens."
        refuse([n for n, m in self.modules.items() if in_shards(m) or is_dispatched(m)], text, remedy=remedy)
        refuse(list(session.experts.containers), "weigh_tokens does not know the tokens of experts", remedy=remedy)
        self._together = {name: tuple(fused) for fused in session.plan.fused for name in fused}
        self._given = defaultdict[str, int](int)
        #: by fused set or module, the weights ``(...)`` of the tokens of each of its calls
        self._found: dict[Any, dict[int, torch.Tensor]] = {}

    def measure(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a call of the model forward and backward, unobserved.

        Raises:
            CalibrationError: its output has no logits.
        """
        self._found, self._given = {}, defaultdict(int)
        number = defaultdict[str, int](int)
        with ExitStack() as stack:
            stack.enter_context(unobserved(model))
            stack.enter_context(in_evaluation_mode(model))
            stack.enter_context(parameters_without_gradients(model))

            def tap(name: str, value: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
                own, call = self._found.setdefault(self._together.get(name, name), {}), number[name]
                number[name] += 1
                outputs = self._session.fed.get((name, GRADIENTS))
                length = 1.0 if outputs is None else value.detach().float().norm(dim=-1, keepdim=True)

                def see(gradient: torch.Tensor) -> None:
                    own[call] = own.get(call, 0) + gradient.float().square().sum(-1)
                    if outputs is not None:
                        outputs.observe_inputs(gradient.float() * length)

                return tapped(output, see)

            for name, module in self.modules.items():

                def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> torch.Tensor:
                    return tap(name, next(iter((*args, *kwargs.values()))), output)

                stack.callback(keep_hook_out(module, module.register_forward_hook(hook, with_kwargs=True)))
            # Inference tensors have no backward. Not a call of the model: its hooks see the observed call alone.
            args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            logits = logits_of(model.forward(*args, **kwargs))
            per_token, session = logits.ndim > 2, self._session
            probe = fisher_probe(logits.detach(), 0 if per_token else session.batches, alike=per_token)
            mask = session.mask
            if mask is not None and mask.shape == logits.shape[:-1]:
                probe = probe * mask.to(probe.device).bool()[..., None]  # predictions after padding do not count
            logits.backward(probe)

    def weigh(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Inputs ``(..., C)`` of a module, each token times the root of its weight, in float32."""
        call = self._given[name]
        self._given[name] += 1
        weights = self._found.get(self._together.get(name, name), {}).get(call)
        if weights is None or weights.shape != value.shape[:-1]:
            raise CalibrationError(
                "weigh_tokens: a gradient is known for no token, or for other tokens",
                where=[name],
                got="none" if weights is None else f"gradients {tuple(weights.shape)}, inputs {tuple(value.shape)}",
                expected="a call of the whole model, whose logits depend on the module's output at each token",
                remedy="call the calibrated model itself, or leave out weigh_tokens.",
            )
        return value.float() * weights.sqrt()[..., None]
