"""Experts under calibration: the tokens that the router sends them, all tokens for each of them, ranges without tokens.

With ``calibrate_all_experts`` the observers inside experts ignore the model's own forward. After it every expert runs
once more, on all tokens that the layer read, for the observers alone: outputs are dropped, random numbers and gradients
are not touched. Other forward hooks inside an expert see these runs too.

With ``on_missing="siblings"`` an expert that no token reached borrows the ranges of the layer's other experts: engines
run fused experts with one activation scale, the widest. Its weights need no tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.utils.helpers import patch_attr
from torch import nn

from lightning_obs.calibration.token_mask import Layout, TokenSelection, take
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.quantized_forward import INSIDE
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.moe.experts import LinearExperts, SortedExperts, expert_containers
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.min_max import StaticMinMaxObserver
from lightning_obs.observers.segments import observe_segments, takes_segments
from lightning_obs.observers.statistic import is_reached, observes_data

if TYPE_CHECKING:
    from lightning_obs.calibration.session import CalibrationSession


#: bytes of activations that wait on an accelerator for the other experts of their layer
_WAITING = 2**28


class ExpertWatch:
    """The experts of a model while it is calibrated; with ``all_experts``, every expert observes all tokens.

    The tokens of a :class:`LinearExperts` are its inputs; a ``ModuleList`` is never called, so its parent's are taken.
    """

    def __init__(self, model: nn.Module, all_experts: bool = False) -> None:
        self._all = all_experts
        self.containers = expert_containers(model)
        self._holders = {name: model.get_submodule(name) for name in self.containers}
        self._of: dict[str, str] = {}  # the container of each module inside an expert
        for name, experts in self.containers.items():
            for index, expert in enumerate(experts):
                self._of |= dict.fromkeys(
                    (n for n, _ in expert.named_modules(prefix=f"{name}.{index}".lstrip("."))), name
                )
        #: how many tokens the router sent to each expert since :meth:`attach`, by container; some on their device
        self.tokens: dict[str, list[Any]] = {}
        self._calls: dict[str, list[str]] = {}
        self.is_forcing = False  # whether experts run on all tokens now
        self._flattened = False
        #: by kind of observer, inputs and outputs that wait for the other experts of their layer
        self._waiting: dict[Hashable, dict[int, tuple[Observer, torch.Tensor, torch.Tensor | None]]] = {}
        self._bytes = 0  # that wait
        if all_experts and not self.containers:
            raise CalibrationError(
                "calibrate_all_experts, but no experts were found",
                got=type(model).__name__,
                expected="stacked experts after linearize_experts(model), or a ModuleList called `experts`",
                remedy="leave calibrate_all_experts out if the model has no experts.",
            )

    def attach(self, session: CalibrationSession, stack: ExitStack) -> None:
        """Register the hooks; ``stack`` removes them."""
        self.tokens = {name: [0] * len(experts) for name, experts in self.containers.items()}
        self._calls = {name: [] for name in self.containers}
        stack.callback(self._forget)  # what waits when a call of the model fails
        for name, experts in self.containers.items():
            holder = self._holders[name]
            if isinstance(holder, SortedExperts):
                stack.enter_context(patch_attr(holder, "only_sent", True))
            if isinstance(holder, LinearExperts):
                ended = holder.register_forward_hook(lambda *_: self.observe_waiting())
                stack.callback(keep_hook_out(holder, ended))
            for index, expert in enumerate(experts):
                count = partial(self._count, session, name, index)
                stack.callback(keep_hook_out(expert, expert.register_forward_pre_hook(count, with_kwargs=True)))
            if self._all:
                outer = session.model.get_submodule(name.rpartition(".")[0])
                reader = holder if isinstance(holder, LinearExperts) else outer
                run = partial(self._run_all, session, name)
                stack.callback(keep_hook_out(reader, reader.register_forward_hook(run, with_kwargs=True)))

    def is_waiting(self, name: str) -> bool:
        """Whether what a module reads may :meth:`wait`: inside an expert that a call of all experts runs."""
        return isinstance(self._holders.get(self._of.get(name, "")), LinearExperts)

    def wait(
        self,
        name: str,
        observers: Sequence[Observer],
        value: torch.Tensor,
        mask: torch.Tensor | None,
        measured: dict[Hashable, Any],
    ) -> Sequence[Observer]:
        """Keep a value for the observers that can see it together with the layer's other experts; returns the others.

        Only on an accelerator, where a launch costs more than memory does: see :func:`.observe_segments`.
        ``measured`` holds, by kind, the object that waits for all observers of one tensor.
        """
        if value.device.type == "cpu" or value.ndim != 2 or not value.numel():
            return observers
        chosen = None if mask is None else self._chosen(mask, self._of[name])
        able = [o for o in observers if takes_segments(o)] if mask is None or chosen is not None else []
        self._bytes += value.nbytes if able else 0
        if self._bytes > _WAITING or any(id(observer) in kept for observer in able for kept in self._waiting.values()):
            self.observe_waiting()
        for observer in able:
            kept = self._waiting.setdefault((observer.kind, value.dtype, value.shape[1:]), {})
            kept[id(observer)] = observer, *measured.setdefault((ExpertWatch, observer.kind), (value, chosen))
        return [observer for observer in observers if observer not in able]

    def _forget(self) -> None:
        self._waiting, self._bytes = {}, 0

    def observe_waiting(self) -> None:
        """Observe all values that wait."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        for kept in waiting.values():
            observers, values, masks = zip(*kept.values(), strict=True)
            seen = {id(value): (value, mask) for value, mask in zip(values, masks, strict=True)}
            rows, lengths = torch.cat([value for value, _ in seen.values()]), [len(value) for value, _ in seen.values()]
            if masks[0] is not None:
                rows = take(rows, torch.cat([mask for _, mask in seen.values()]))
                lengths = [int(mask.sum()) for _, mask in seen.values()]
            numbers = {key: number for number, key in enumerate(seen)}
            observe_segments(observers, rows, lengths, [numbers[id(value)] for value in values])

    def is_forced(self, name: str) -> bool:
        """Whether the observers of a module take part only while experts run on all tokens."""
        return self._all and name in self._of

    def select(
        self, value: torch.Tensor, mask: torch.Tensor, name: str, selection: TokenSelection, layout: Layout
    ) -> torch.Tensor:
        """The rows of an activation that count, also inside experts that got only some tokens."""
        if name not in self._of or layout != "tokens":
            return selection.of(value, mask, name, layout)
        chosen = self._chosen(mask, self._of[name])
        if chosen is not None:
            return take(value, chosen)
        if not self.is_forcing:
            return selection.of(value, mask, name, "routed")
        return selection.of(value, mask, name, "flattened" if self._flattened else "tokens")

    def _chosen(self, mask: torch.Tensor, container: str) -> torch.Tensor | None:
        """Which of the tokens that an expert was sent count, on the host; None if it is not known which were sent."""
        experts = self._holders[container]
        if not isinstance(experts, LinearExperts) or experts.rows is None:
            return None
        of_tokens = _of_tokens(mask, experts.total)
        return of_tokens.flatten()[experts.rows].bool() if experts.total == of_tokens.numel() else None

    def _count(
        self, session: CalibrationSession, name: str, index: int, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        if self.is_forcing or session.is_paused or INSIDE in vars(module):
            return
        value = first_input(args, kwargs)
        given = [x for x in (*args, *kwargs.values()) if x is not None]
        fits = value is not None and len(given) == 1 and value.is_floating_point()
        self._calls[name].append("" if fits else f"expert {index} called with {len(given)} arguments")
        if value is None:
            return
        number: Any = value.shape[:-1].numel()
        if session.mask is not None:
            chosen = self._chosen(session.mask, name)
            mask = _of_tokens(session.mask, number) if chosen is None else chosen
            if number == mask.numel():
                number = mask.bool().sum()
        self.tokens[name][index] = self.tokens[name][index] + number  # stays on the device

    def _run_all(
        self, session: CalibrationSession, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if session.is_paused or INSIDE in vars(module):
            return
        tokens = first_input(args, kwargs)
        calls, self._calls[name] = self._calls[name], []
        wrong = sorted({call for call in calls if call})
        if tokens is None or not tokens.is_floating_point():
            wrong.append(f"{type(module).__name__} called without hidden states")
        elif isinstance(module, SortedExperts):
            wrong.append("tokens that are already multiplied by the router's weight for each expert")
        elif not calls and tokens.numel():
            wrong.append(f"{type(module).__name__} ran without calling any of them")
        if wrong or tokens is None:
            raise _cannot(name, wrong)
        if not tokens.numel():
            return
        # If rows are flattened already, or there are as many samples as tokens, only transformers' order is known.
        apart = tokens.ndim > 2 and tokens.shape[0] != tokens.shape[1]
        self._flattened = apart or isinstance(module, LinearExperts)
        tokens = tokens.detach().reshape(-1, tokens.shape[-1])
        devices = [tokens.device] if tokens.device.type == "cuda" else []
        with patch_attr(self, "is_forcing", True), torch.no_grad(), torch.random.fork_rng(devices=devices):
            for index, expert in enumerate(self.containers[name]):
                try:
                    expert(tokens)
                except torch.OutOfMemoryError:
                    raise
                except (TypeError, RuntimeError) as error:
                    raise _cannot(name, [f"expert {index} on {tuple(tokens.shape)}: {error}"]) from error
        self.observe_waiting()


def _of_tokens(mask: torch.Tensor, total: int) -> torch.Tensor:
    """A mask of samples as a mask of their ``total`` tokens, if each has as many; any other mask as it is."""
    divide = mask.ndim == 1 and len(mask) and total and total % len(mask) == 0
    return mask.repeat_interleave(total // len(mask)) if divide else mask


def _cannot(name: str, got: list[str]) -> CalibrationError:
    return CalibrationError(
        "calibrate_all_experts cannot run these experts on all tokens",
        where=[name],
        got="; ".join(got),
        expected="a layer that reads (..., hidden) and calls its experts with one tensor (tokens, hidden) each",
        remedy="leave calibrate_all_experts out; for experts that no token reaches see on_missing.",
    )


# ---------------------------------------------------------------------- experts that no token reached


def borrow_ranges(
    observers: Mapping[Key, Observer],
    containers: Mapping[str, Sequence[nn.Module]],
    fused: Sequence[Sequence[str]],
    join_ranges: bool = False,
) -> dict[Key, Observer]:
    """Stand-ins for the observers of experts that no data reached, if data reached their siblings.

    Modules of a ``fused`` set borrow together, and their stand-ins are fused (:meth:`Observer.fuse`). That of an
    activation has the union of the siblings' ranges for the same projection; that of a weight is its own observer.
    """
    needing = [key for key, observer in observers.items() if observes_data(observer)]
    unreached = {name for name, base in needing if not is_reached(observers[name, base])}
    unreached |= {name for group in fused if unreached & set(group) for name in group}
    borrowed: dict[Key, Observer] = {}
    for name in sorted(unreached):
        siblings = _siblings(name, containers)
        reached = {
            base: [o for sibling in siblings if (o := observers.get((sibling, base))) is not None and is_reached(o)]
            for own, base in needing
            if own == name
        }
        if all(reached.values()):
            for base, others in reached.items():
                own = observers[name, base]
                borrowed[name, base] = own if base == "weight" else _union(own, others)
    for group in fused:
        for base in ("input", "output"):
            Observer.fuse([borrowed[name, base] for name in group if (name, base) in borrowed], join_ranges)
    return borrowed


def _siblings(name: str, containers: Mapping[str, Sequence[nn.Module]]) -> list[str]:
    """The same projection in the other experts of the innermost container that ``name`` is in."""
    for container in sorted(containers, key=len, reverse=True):
        prefix, count = f"{container}." if container else "", len(containers[container])
        index, *rest = name.removeprefix(prefix).split(".", 1)
        if name.startswith(prefix) and index.isdecimal() and int(index) < count:
            return [".".join([f"{prefix}{other}", *rest]) for other in range(count) if other != int(index)]
    return []


def _union(own: Observer, others: Sequence[Observer]) -> Observer:
    stand_in = StaticMinMaxObserver(own.base_name, own.args.model_copy(update={"observer_kwargs": {}}))
    stand_in.qparams_dtype = own.qparams_dtype
    lows, highs = zip(*(other.get_min_max() for other in others), strict=True)
    stand_in.min_vals = torch.stack([low.to(lows[0].device) for low in lows]).amin(0)
    stand_in.max_vals = torch.stack([high.to(lows[0].device) for high in highs]).amax(0)
    return stand_in
