"""Experts under calibration: which tokens the router sends them, and, if asked for, all tokens for all of them.

With ``calibrate_all_experts`` the observers inside experts are deaf while the model runs as it always does. After the
layer's own forward every expert is run once more, on all tokens that the layer read, for the observers only: outputs
are thrown away, random numbers and gradients are not touched, and no token is observed twice. Forward hooks that
somebody else put inside an expert see these runs too.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.token_mask import TokenSelection
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.quantized_forward import is_inside_quantized
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.moe.experts import LinearExperts, expert_containers


class ExpertWatch:
    """The experts of a model while it is calibrated.

    Experts are those of :func:`~lightning_obs.moe.experts.expert_containers`. What a :class:`LinearExperts` reads
    are its own inputs; a ``ModuleList`` is never called, so what its parent reads is taken.

    Args:
        model: the model.
        all_experts: let every expert observe all tokens.
    """

    def __init__(self, model: nn.Module, all_experts: bool = False) -> None:
        self._model = model
        self._all = all_experts
        self.containers = expert_containers(model)
        self._holders = {name: model.get_submodule(name) for name in self.containers}
        self._of: dict[str, str] = {}
        for name, experts in self.containers.items():
            for index, expert in enumerate(experts):
                self._of |= {".".join(filter(None, (name, str(index), n))): name for n, _ in expert.named_modules()}
        self._counts: dict[str, list[Any]] = {}
        self._calls: dict[str, list[str]] = {}
        self._forcing = False
        #: neither tokens are counted nor experts forced to run
        self.paused = False
        self._flattened = False
        self._selection = TokenSelection()
        self.mask: torch.Tensor | None = None
        if all_experts and not self.containers:
            raise CalibrationError(
                "calibrate_all_experts, but no experts were found",
                got=type(model).__name__,
                expected="stacked experts after linearize_experts(model), or a ModuleList called `experts`",
                remedy="leave calibrate_all_experts out if the model has no experts.",
            )

    @property
    def tokens(self) -> dict[str, list[int]]:
        """How many tokens the router sent to each expert since :meth:`attach`, by container."""
        return {name: [int(count) for count in counts] for name, counts in self._counts.items()}

    def attach(self, stack: ExitStack) -> None:
        """Register the hooks; ``stack`` removes them."""
        self._counts = {name: [0] * len(experts) for name, experts in self.containers.items()}
        self._calls = {name: [] for name in self.containers}
        self._forcing, self.mask = False, None
        self._selection = TokenSelection(batch_first=is_transformers_model(self._model))
        for name, experts in self.containers.items():
            for index, expert in enumerate(experts):
                handle = expert.register_forward_pre_hook(self._counter(name, index), with_kwargs=True)
                stack.callback(keep_hook_out(expert, handle))
            if self._all:
                reader = self._reader(name)
                handle = reader.register_forward_hook(self._runner(name), with_kwargs=True)
                stack.callback(keep_hook_out(reader, handle))

    def is_deaf(self, name: str) -> bool:
        """Whether the observers of a module have to ignore this call."""
        return self._all and not self._forcing and name in self._of

    def select(self, value: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
        """The rows that count, also inside experts that got only some tokens (:class:`TokenSelection`)."""
        rows, total = self._rows(self._of.get(name))
        of_tokens = _of_tokens(mask, total)
        if rows is None or total != of_tokens.numel():
            forced = name in self._of and self._forcing
            routed = name in self._of and not self._forcing
            return self._selection.of(value, mask, name, routed=routed, flattened=forced and self._flattened)
        return value[of_tokens.to(value.device).flatten()[rows].bool()]

    def select_state(self, value: torch.Tensor, mask: torch.Tensor, name: str) -> torch.Tensor:
        """The tokens of an attention state that count."""
        return self._selection.of(value, mask, name, heads=True)

    # ------------------------------------------------------------------ hooks

    def _rows(self, container: str | None) -> tuple[torch.Tensor | None, int]:
        module = None if container is None else self._holders[container]
        return (module.rows, module.total) if isinstance(module, LinearExperts) else (None, 0)

    def _counter(self, name: str, index: int) -> Any:
        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._forcing or self.paused or is_inside_quantized(module):
                return
            value = first_input(args, kwargs)
            given = [x for x in (*args, *kwargs.values()) if x is not None]
            number: Any
            fits = value is not None and len(given) == 1 and value.is_floating_point()
            self._calls[name].append("" if fits else f"expert {index} called with {len(given)} arguments")
            if value is None:
                return
            rows, total = self._rows(name)
            mask = None if self.mask is None else _of_tokens(self.mask, total or value.shape[:-1].numel())
            if mask is not None and rows is not None and total == mask.numel():
                chosen = mask.flatten().to(rows.device)[rows]
                number = chosen.bool().sum()
            elif mask is not None and value.shape[:-1].numel() == mask.numel():
                number = mask.bool().sum()
            else:
                number = value.shape[:-1].numel()
            self._counts[name][index] = self._counts[name][index] + number  # stays on the device

        return count

    def _reader(self, name: str) -> nn.Module:
        module = self._holders[name]
        return module if isinstance(module, LinearExperts) else self._model.get_submodule(name.rpartition(".")[0])

    def _runner(self, name: str) -> Any:
        def run_all(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.paused or is_inside_quantized(module):
                return
            tokens = first_input(args, kwargs)
            calls, self._calls[name] = self._calls[name], []
            wrong = sorted({call for call in calls if call})
            if tokens is None or not tokens.is_floating_point():
                wrong.append(f"{type(module).__name__} called without hidden states")
            elif not calls and tokens.numel():
                wrong.append(f"{type(module).__name__} ran without calling any of them")
            if wrong or tokens is None:
                raise _cannot(name, wrong)
            # Of rows that were flattened already, or of as many samples as tokens, only transformers' order is known.
            apart = tokens.ndim > 2 and tokens.shape[0] != tokens.shape[1]
            self._flattened = apart or isinstance(module, LinearExperts)
            if tokens.numel():
                self._run_all(name, tokens.detach().reshape(-1, tokens.shape[-1]))

        return run_all

    def _run_all(self, name: str, tokens: torch.Tensor) -> None:
        devices = [tokens.device] if tokens.device.type == "cuda" else []
        self._forcing = True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                for index, expert in enumerate(self.containers[name]):
                    try:
                        expert(tokens)
                    except (TypeError, RuntimeError) as error:
                        if isinstance(error, torch.OutOfMemoryError):
                            raise
                        raise _cannot(name, [f"expert {index} on {tuple(tokens.shape)}: {error}"]) from error
        finally:
            self._forcing = False


def _of_tokens(mask: torch.Tensor, total: int) -> torch.Tensor:
    """A mask of whole samples as one of ``total`` tokens, where they divide them."""
    if mask.ndim == 1 and len(mask) and total and total % len(mask) == 0:
        return mask.repeat_interleave(total // len(mask))
    return mask


def _cannot(name: str, got: list[str]) -> CalibrationError:
    return CalibrationError(
        "calibrate_all_experts cannot run these experts on all tokens",
        where=[name],
        got="; ".join(got),
        expected="a layer that reads (..., hidden) and calls its experts with one tensor (tokens, hidden) each",
        remedy="leave calibrate_all_experts out; for experts that no token reaches see on_missing.",
    )
