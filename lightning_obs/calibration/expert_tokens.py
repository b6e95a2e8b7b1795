"""Experts under calibration: the tokens that the router sends them, all tokens for each of them, ranges without tokens.

With ``calibrate_all_experts`` the observers inside experts ignore the model's own forward. After it every expert runs
once more, on all tokens that the layer read, for the observers alone: outputs are dropped, random numbers and gradients
are not touched. Other forward hooks inside an expert see these runs too.

With ``on_missing="siblings"`` an expert that no token reached borrows the ranges of the layer's other experts: engines
run fused experts with one activation scale, the widest. Its weights need no tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from compressed_tensors.utils.helpers import patch_attr
from torch import nn

from lightning_obs.calibration.observed_calls import ObservedCalls
from lightning_obs.calibration.token_mask import Layout, TokenSelection, take
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import first_input
from lightning_obs.model.mark import is_inside_quantized, keep_hook_out
from lightning_obs.moe.experts import LinearExperts, SortedExperts
from lightning_obs.observers import Key, Observer
from lightning_obs.observers.min_max import StaticMinMaxObserver
from lightning_obs.observers.segments import observe_segments, takes_segments
from lightning_obs.observers.statistic import is_reached, observes_data

#: bytes of activations that wait on an accelerator for the other experts of their layer
_MOST_WAITING_BYTES = 2**28


class _Waiting(NamedTuple):
    """An activation of one expert that waits for the other experts of its layer."""

    observer: Observer
    value: torch.Tensor
    #: on the host, which of its rows count; None: all
    rows_that_count: torch.Tensor | None


class ExpertWatch:
    """The experts of a model while it is calibrated.

    The tokens of a :class:`LinearExperts` are its inputs; a ``ModuleList`` is never called, so its parent's are taken.

    Args:
        model: the calibrated model.
        containers: the experts of each of its layers, by the name of the module that holds them.
        all_experts: let every expert observe all tokens, in a run of its own.

    Attributes:
        containers: as given.
        is_forcing: whether experts run on all tokens now.
    """

    def __init__(self, model: nn.Module, containers: Mapping[str, list[nn.Module]], all_experts: bool = False) -> None:
        self.containers = containers
        self.is_forcing = False
        self._all_experts = all_experts
        self._holders: dict[str, nn.Module] = {}
        self._readers: dict[str, nn.Module] = {}
        #: the container of each module inside an expert
        self._container_of: dict[str, str] = {}
        for name, experts in self.containers.items():
            holder = model.get_submodule(name)
            self._holders[name] = holder
            parent = model.get_submodule(name.rpartition(".")[0])
            self._readers[name] = holder if isinstance(holder, LinearExperts) else parent
            for index, expert in enumerate(experts):
                prefix = f"{name}.{index}".lstrip(".")
                for module_name, _ in expert.named_modules(prefix=prefix):
                    self._container_of[module_name] = name
        #: for each call of an expert since its layer ran last, why it cannot run on all tokens; None: it can
        self._faults_of_calls: dict[str, list[str | None]] = {}
        self._is_flattened_by_batch = False
        #: activations that wait, by kind of observer, dtype and channels, and then by the observer's id
        self._waiting: dict[Hashable, dict[int, _Waiting]] = {}
        self._waiting_bytes = 0

    def attach(self, calls: ObservedCalls, stack: ExitStack) -> None:
        """Register the hooks that count tokens in ``calls``; ``stack`` removes them."""
        stack.callback(self._forget_waiting)  # after a call of the model that failed
        calls.expert_tokens = {}
        for name, experts in self.containers.items():
            calls.expert_tokens[name] = [0] * len(experts)
            self._faults_of_calls[name] = []
            self._attach_layer(name, calls, stack)

    def _attach_layer(self, name: str, calls: ObservedCalls, stack: ExitStack) -> None:
        """Register the hooks of the experts of one container."""
        holder = self._holders[name]
        if isinstance(holder, SortedExperts):
            stack.enter_context(patch_attr(holder, "only_sent", True))
        if isinstance(holder, LinearExperts):
            handle = holder.register_forward_hook(lambda *_: self.observe_waiting())
            remove_hook = keep_hook_out(holder, handle)
            stack.callback(remove_hook)
        for index, expert in enumerate(self.containers[name]):
            count = partial(self._count_tokens, calls, name, index)
            handle = expert.register_forward_pre_hook(count, with_kwargs=True)
            remove_hook = keep_hook_out(expert, handle)
            stack.callback(remove_hook)
        if self._all_experts:
            reader = self._readers[name]
            run_all = partial(self._run_on_all_tokens, calls, name)
            handle = reader.register_forward_hook(run_all, with_kwargs=True)
            remove_hook = keep_hook_out(reader, handle)
            stack.callback(remove_hook)

    # ------------------------------------------------------------------ activations that wait for other experts

    def may_wait(self, name: str) -> bool:
        """Whether the inputs of a module in an expert may be batched with those of the layer's other experts."""
        return isinstance(self._holders[self._container_of[name]], LinearExperts)

    def wait(
        self,
        name: str,
        observers: Sequence[Observer],
        value: torch.Tensor,
        mask: torch.Tensor | None,
        measured: dict[Hashable, Any],
    ) -> Sequence[Observer]:
        """Keep an activation for the observers that can see it together with the layer's other experts.

        Only on an accelerator, where a launch costs more than memory does: see :func:`.observe_segments`.

        Args:
            name: of a module that :meth:`may_wait`.
            observers: of the activation.
            value: the activation.
            mask: the tokens of the batch that count.
            measured: the statistics of the tensor that was read last. By kind of observer, it also holds the activation
                that waits for all observers of that tensor, so that it waits once.

        Returns:
            The observers that have to observe the activation now.
        """
        if value.device.type == "cpu" or value.ndim != 2 or not value.numel():
            return observers
        rows_that_count = None
        if mask is not None:
            rows_that_count = self._sent_rows_that_count(mask, self._container_of[name])
            if rows_that_count is None:
                return observers
        waiting_observers = []
        immediate_observers = []
        for observer in observers:
            if takes_segments(observer):
                waiting_observers.append(observer)
            else:
                immediate_observers.append(observer)
        if waiting_observers:
            self._waiting_bytes += value.nbytes
        if self._waiting_bytes > _MOST_WAITING_BYTES or any(map(self._is_waiting, waiting_observers)):
            self.observe_waiting()
        for observer in waiting_observers:
            activations = self._waiting.setdefault((observer.kind, value.dtype, value.shape[1:]), {})
            shared = measured.setdefault((ExpertWatch, observer.kind), (value, rows_that_count))
            activations[id(observer)] = _Waiting(observer, *shared)
        return immediate_observers

    def _is_waiting(self, observer: Observer) -> bool:
        """Whether an activation waits for this observer already: it is called once more in one call of the layer."""
        return any(id(observer) in activations for activations in self._waiting.values())

    def _forget_waiting(self) -> None:
        self._waiting = {}
        self._waiting_bytes = 0

    def observe_waiting(self) -> None:
        """Let all observers that wait observe their activations; called when all experts of a layer have run."""
        waiting = self._waiting
        self._forget_waiting()
        for activations in waiting.values():
            _observe_together(list(activations.values()))

    # ------------------------------------------------------------------ which tokens count

    def holds(self, name: str) -> bool:
        """Whether a module is an expert, or in one."""
        return name in self._container_of

    @property
    def are_forced(self) -> bool:
        """Whether the observers in experts take part only while experts run on all tokens."""
        return self._all_experts

    def select(
        self, value: torch.Tensor, mask: torch.Tensor, name: str, selection: TokenSelection, layout: Layout
    ) -> torch.Tensor:
        """The rows of an activation that count, inside an expert, which got only some tokens.

        Args:
            value: the activation.
            mask: the tokens of the batch that count.
            name: of a module in an expert.
            selection: selects rows by the layout of ``value``.
            layout: of ``value``, as far as it is known.
        """
        if layout != "tokens":
            return selection.of(value, mask, name, layout)
        rows_that_count = self._sent_rows_that_count(mask, self._container_of[name])
        if rows_that_count is not None:
            return take(value, rows_that_count)
        if not self.is_forcing:
            return selection.of(value, mask, name, "routed")
        return selection.of(value, mask, name, "flattened" if self._is_flattened_by_batch else "tokens")

    def _sent_rows_that_count(self, mask: torch.Tensor, container: str) -> torch.Tensor | None:
        """Which of the tokens that an expert was sent count, on the host; None if it is not known which were sent."""
        experts = self._holders[container]
        if not isinstance(experts, LinearExperts) or experts.rows is None:
            return None
        token_mask = _mask_of_tokens(mask, experts.total)
        if experts.total != token_mask.numel():
            return None
        return token_mask.flatten()[experts.rows].bool()

    # ------------------------------------------------------------------ hooks

    def _count_tokens(
        self, calls: ObservedCalls, name: str, index: int, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Count the tokens of a call of one expert, before it runs."""
        if self.is_forcing or calls.is_paused or is_inside_quantized(module):
            return
        value = first_input(args, kwargs)
        arguments = [argument for argument in (*args, *kwargs.values()) if argument is not None]
        can_run_on_all = value is not None and len(arguments) == 1 and value.is_floating_point()
        fault = None if can_run_on_all else f"expert {index} called with {len(arguments)} arguments"
        self._faults_of_calls[name].append(fault)
        if value is not None:
            counts = calls.expert_tokens[name]
            counts[index] = counts[index] + self._tokens_that_count(value, calls.mask, name)

    def _tokens_that_count(self, value: torch.Tensor, mask: torch.Tensor | None, name: str) -> Any:
        """How many tokens of an expert's input count; with a mask, a tensor that stays on its device."""
        tokens = value.shape[:-1].numel()
        if mask is None:
            return tokens
        token_mask = self._sent_rows_that_count(mask, name)
        if token_mask is None:
            token_mask = _mask_of_tokens(mask, tokens)
        return token_mask.bool().sum() if tokens == token_mask.numel() else tokens

    def _run_on_all_tokens(
        self, calls: ObservedCalls, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Run every expert of a layer on all tokens that the layer read, after its own forward."""
        if calls.is_paused or is_inside_quantized(module):
            return
        tokens = first_input(args, kwargs)
        self._require_hidden_states(name, module, tokens)
        if tokens is None or not tokens.numel():
            return
        # If rows are flattened already, or there are as many samples as tokens, only transformers' order is known.
        is_unambiguous = tokens.ndim > 2 and tokens.shape[0] != tokens.shape[1]
        self._is_flattened_by_batch = is_unambiguous or isinstance(module, LinearExperts)
        tokens = tokens.detach().reshape(-1, tokens.shape[-1])
        devices = [tokens.device] if tokens.device.type == "cuda" else []
        with patch_attr(self, "is_forcing", True), torch.no_grad(), torch.random.fork_rng(devices=devices):
            for index, expert in enumerate(self.containers[name]):
                try:
                    expert(tokens)
                except torch.OutOfMemoryError:
                    raise
                except (TypeError, RuntimeError) as error:
                    raise _cannot_run(name, [f"expert {index} on {tuple(tokens.shape)}: {error}"]) from error
        self.observe_waiting()

    def _require_hidden_states(self, name: str, module: nn.Module, tokens: torch.Tensor | None) -> None:
        """Raise a CalibrationError for a layer that does not call each expert with some rows of its own input."""
        faults_of_calls = self._faults_of_calls[name]
        self._faults_of_calls[name] = []
        faults = sorted({fault for fault in faults_of_calls if fault is not None})
        if tokens is None or not tokens.is_floating_point():
            faults.append(f"{type(module).__name__} called without hidden states")
        elif isinstance(module, SortedExperts):
            faults.append("tokens that are already multiplied by the router's weight for each expert")
        elif not faults_of_calls and tokens.numel():
            faults.append(f"{type(module).__name__} ran without calling any of them")
        if faults:
            raise _cannot_run(name, faults)


def _observe_together(activations: Sequence[_Waiting]) -> None:
    """Let observers of one kind observe the activations that wait for them, which are joined row by row.

    The observers of one tensor share its rows; all activations have a mask, or none.
    """
    tensors: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    lengths: list[int] = []
    number_of_tensor: dict[int, int] = {}
    observers = []
    numbers = []
    for observer, tensor, mask in activations:
        if id(tensor) not in number_of_tensor:
            number_of_tensor[id(tensor)] = len(tensors)
            tensors.append(tensor)
            if mask is None:
                lengths.append(len(tensor))
            else:
                lengths.append(int(mask.sum()))
                masks.append(mask)
        observers.append(observer)
        numbers.append(number_of_tensor[id(tensor)])
    rows = torch.cat(tensors)
    if masks:
        rows = take(rows, torch.cat(masks))
    observe_segments(observers, rows, lengths, numbers)


def _mask_of_tokens(mask: torch.Tensor, total: int) -> torch.Tensor:
    """A mask of samples as a mask of their ``total`` tokens, if each has as many; any other mask as it is."""
    is_of_samples = mask.ndim == 1
    if not is_of_samples or not len(mask) or not total or total % len(mask):
        return mask
    return mask.repeat_interleave(total // len(mask))


def _cannot_run(name: str, faults: list[str]) -> CalibrationError:
    return CalibrationError(
        "calibrate_all_experts cannot run these experts on all tokens",
        where=[name],
        got="; ".join(faults),
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

    A stand-in of an activation has the union of the siblings' ranges for the same projection; a weight keeps its own
    observer. Modules of a fused set borrow together, and their stand-ins are fused.

    Args:
        observers: of the plan; they have the statistics of all ranks.
        containers: the experts of each layer (:attr:`ExpertWatch.containers`).
        fused: names of the modules of each fused set.
        join_ranges: as of :meth:`Observer.fuse`.
    """
    data_observers = {key: observer for key, observer in observers.items() if observes_data(observer)}
    stand_ins: dict[Key, Observer] = {}
    for name in sorted(_unreached_modules(data_observers, fused)):
        siblings = _siblings(name, containers)
        for base, reached in _reached_siblings(name, siblings, data_observers).items():
            observer = observers[name, base]
            stand_ins[name, base] = observer if base == "weight" else _union(observer, reached)
    for group in fused:
        for base in ("input", "output"):
            fused_stand_ins = [stand_ins[name, base] for name in group if (name, base) in stand_ins]
            Observer.fuse(fused_stand_ins, join_ranges)
    return stand_ins


def _unreached_modules(data_observers: Mapping[Key, Observer], fused: Sequence[Sequence[str]]) -> set[str]:
    """Names of modules one of whose observers has no data, and of all modules that are fused with them."""
    unreached = {name for (name, _), observer in data_observers.items() if not is_reached(observer)}
    fused_with_them: set[str] = set()
    for group in fused:
        if unreached.intersection(group):
            fused_with_them.update(group)
    return unreached | fused_with_them


def _reached_siblings(
    name: str, siblings: Collection[str], data_observers: Mapping[Key, Observer]
) -> dict[str, list[Observer]]:
    """By base name of a module's observers, the siblings' observers that have data; empty if a base name has none."""
    reached: dict[str, list[Observer]] = {}
    for module_name, base in data_observers:
        if module_name != name:
            continue
        reached[base] = []
        for sibling in siblings:
            observer = data_observers.get((sibling, base))
            if observer is not None and is_reached(observer):
                reached[base].append(observer)
        if not reached[base]:
            return {}
    return reached


def _siblings(name: str, containers: Mapping[str, Sequence[nn.Module]]) -> list[str]:
    """The same projection in the other experts of the innermost container that ``name`` is in."""
    for container in sorted(containers, key=len, reverse=True):
        prefix = f"{container}." if container else ""
        index, dot, projection = name.removeprefix(prefix).partition(".")
        experts = len(containers[container])
        if name.startswith(prefix) and index.isdecimal() and int(index) < experts:
            return [f"{prefix}{other}{dot}{projection}" for other in range(experts) if other != int(index)]
    return []


def _union(observer: Observer, reached: Sequence[Observer]) -> Observer:
    """A stand-in for an observer, with the smallest range that holds the ranges of the ``reached`` ones."""
    args = observer.args.model_copy(update={"observer_kwargs": {}})
    stand_in = StaticMinMaxObserver(observer.base_name, args)
    stand_in.qparams_dtype = observer.qparams_dtype
    low, high = reached[0].get_min_max()
    for sibling in reached[1:]:
        sibling_low, sibling_high = sibling.get_min_max()
        low = torch.minimum(low, sibling_low.to(low.device))
        high = torch.maximum(high, sibling_high.to(high.device))
    stand_in.min_vals = low
    stand_in.max_vals = high
    return stand_in
