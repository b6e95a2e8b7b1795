"""Experts of mixture models under calibration: the tokens that each expert gets, and ranges for experts without tokens.

:class:`ExpertWatch` belongs to an observation. It counts the tokens that the router sends to each expert, tells the
observers' hooks which rows of an expert's input are padding, and on an accelerator collects the inputs of a layer's
experts to observe them together. A *container* is the module that holds the experts of one layer.

With ``calibrate_all_experts``, the observers inside experts ignore the model's own forward. After that forward, every
expert runs once more, on all tokens that the layer read, only to be observed: the outputs are dropped, and random
numbers and gradients are not touched. Other forward hooks inside an expert see these runs too.

With ``on_missing="siblings"``, an expert that no token reached takes the ranges of the other experts of its layer
(:func:`borrow_ranges`), because engines run fused experts with one activation scale, the widest of the layer. The
weights of such an expert are observed without inputs.
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

#: the most bytes of activations that wait on an accelerator for the other experts of their layer (256 MiB): more are
#: observed early, at the price of more kernel launches
_MOST_WAITING_BYTES = 2**28


class _Waiting(NamedTuple):
    """An activation of one expert, and the observer that will observe it with those of the layer's other experts.

    :meth:`ExpertWatch.wait` makes one, and :func:`_observe_together` reads it.
    """

    observer: Observer
    value: torch.Tensor
    #: a boolean mask of the rows of ``value`` that count, on the host; None: all rows count
    rows_that_count: torch.Tensor | None


class ExpertWatch:
    """Watches the experts of a model while it is calibrated.

    Made by ``Observation.of_model`` for a model with experts. :class:`.ObserverHooks` attaches it, and the hooks of
    modules inside experts ask it which rows count. ``finalize`` reads the counts in ``ObservedCalls.expert_tokens``.

    Args:
        model: the calibrated model.
        containers: the experts of each layer, by the name of the module that holds them
            (:func:`.expert_containers`).
        all_experts: ``calibrate_all_experts``: let every expert observe all tokens of its layer, in an extra run.

    Attributes:
        containers: as given.
        is_forcing: whether the experts of a layer run on all its tokens now.
    """

    def __init__(self, model: nn.Module, containers: Mapping[str, list[nn.Module]], all_experts: bool = False) -> None:
        self.containers = containers
        self.is_forcing = False
        self._all_experts = all_experts
        #: by container name: the container
        self._holders: dict[str, nn.Module] = {}
        #: by container name: the module whose input holds all tokens of the layer. A LinearExperts is called with them;
        #: a ModuleList is never called, so its parent takes its place.
        self._readers: dict[str, nn.Module] = {}
        #: by name of an expert or of a module inside an expert: the name of its container
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
        #: with ``calibrate_all_experts``, by container name, for each call of an expert in the layer's present forward:
        #: why the expert cannot run on all tokens; None: it can
        self._faults_of_calls: dict[str, list[str | None]] = {}
        #: while experts are forced: whether the flattened rows of their inputs are known to be in the batch's order
        self._is_flattened_by_batch = False
        #: activations that wait: by kind of observer, dtype and channels, which are observed together; then by the
        #: observer's id
        self._waiting: dict[Hashable, dict[int, _Waiting]] = {}
        self._waiting_bytes = 0

    def attach(self, calls: ObservedCalls, stack: ExitStack) -> None:
        """Register the hooks on the experts; :meth:`.ObserverHooks.attach_modules` calls this before the data run.

        Args:
            calls: its ``expert_tokens`` are set to zero, and count the tokens from now on.
            stack: removes the hooks when it closes.
        """
        stack.callback(self._forget_waiting)  # a call of the model that failed may have left activations waiting
        calls.expert_tokens = {}
        for name, experts in self.containers.items():
            calls.expert_tokens[name] = [0] * len(experts)
            self._faults_of_calls[name] = []
            self._attach_layer(name, calls, stack)

    def _attach_layer(self, name: str, calls: ObservedCalls, stack: ExitStack) -> None:
        """Register the hooks of the experts of one container."""
        holder = self._holders[name]
        if isinstance(holder, SortedExperts):
            # each expert then runs on the tokens that were sent to it, so that its input shows them alone
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
        """Whether the activations of a module may wait (:meth:`wait`) for those of the layer's other experts.

        Only in a :class:`LinearExperts`, whose forward hook tells that all experts of the layer have run. The hooks of
        :mod:`.hooks` ask this before they call :meth:`wait`.

        Args:
            name: of an expert or of a module inside an expert.
        """
        return isinstance(self._holders[self._container_of[name]], LinearExperts)

    def wait(
        self,
        name: str,
        observers: Sequence[Observer],
        value: torch.Tensor,
        mask: torch.Tensor | None,
        measured: dict[Hashable, Any],
    ) -> Sequence[Observer]:
        """Keep an activation until all experts of its layer have run, for the observers that can wait.

        An observer can wait if it measures several tensors at once (:func:`.takes_segments`).

        A hook of :mod:`.hooks` calls this for each activation of a module that :meth:`may_wait`. Activations wait only
        on an accelerator, where a kernel launch for each expert costs more than its few tokens
        (:func:`.observe_segments`). An activation that is no matrix or has no elements does not wait, nor does an
        activation of which it is unknown which rows count. Before an activation waits, the observers observe those that
        wait already, if too many bytes would wait, or if an observer would have two activations.

        Args:
            name: of the module.
            observers: of the activation.
            value: the activation.
            mask: the tokens of the batch that count, on the host; None: all tokens count.
            measured: results from the tensor that was read last, which the hooks keep for the next module that reads
                it (:class:`.ReadCache`). The waiting activation is kept there, too, by kind of observer, so that
                modules that read the same tensor (gate, up) let one copy wait.

        Returns:
            The observers that must observe the activation now.
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
            self._make_room(waiting_observers, value, measured)
            for observer in waiting_observers:
                activations = self._waiting.setdefault((observer.kind, value.dtype, value.shape[1:]), {})
                shared = measured.setdefault((ExpertWatch, observer.kind), (value, rows_that_count))
                activations[id(observer)] = _Waiting(observer, *shared)
        return immediate_observers

    def _make_room(self, observers: Sequence[Observer], value: torch.Tensor, measured: Mapping[Hashable, Any]) -> None:
        """Count the bytes of an activation that will wait; before, observe those that wait if it cannot join them.

        :meth:`wait` calls it. ``observers`` are those for which ``value`` will wait; ``measured`` is that of
        :meth:`wait`.
        """
        # gate and up read one tensor: then the copy that waits for the first module waits for the second, too
        is_shared = any((ExpertWatch, observer.kind) in measured for observer in observers)
        further_bytes = 0 if is_shared else value.nbytes
        is_full = self._waiting_bytes + further_bytes > _MOST_WAITING_BYTES
        if is_full or any(map(self._is_waiting, observers)):
            self.observe_waiting()
            further_bytes = value.nbytes
        self._waiting_bytes += further_bytes

    def _is_waiting(self, observer: Observer) -> bool:
        """Whether an earlier activation of this observer waits: the layer has called the module twice."""
        return any(id(observer) in activations for activations in self._waiting.values())

    def _forget_waiting(self) -> None:
        """Drop the activations that wait."""
        self._waiting = {}
        self._waiting_bytes = 0

    def observe_waiting(self) -> None:
        """Let the observers observe the activations that wait for them.

        Called by a hook when all experts of a layer have run, by :meth:`wait` before too many bytes or two activations
        of one observer wait, and after experts have run on all tokens of their layer.
        """
        waiting = self._waiting
        self._forget_waiting()
        for activations in waiting.values():
            _observe_together(list(activations.values()))

    # ------------------------------------------------------------------ which tokens count

    def holds(self, name: str) -> bool:
        """Whether the module ``name`` is an expert or inside an expert; asked when its hook is made."""
        return name in self._container_of

    @property
    def are_forced(self) -> bool:
        """Whether observers inside experts ignore the model's own forward, because experts also run on all tokens.

        The hooks of :mod:`.hooks` ask this at each call of a module inside an expert.
        """
        return self._all_experts

    def select(
        self, value: torch.Tensor, mask: torch.Tensor, name: str, selection: TokenSelection, layout: Layout
    ) -> torch.Tensor:
        """The rows of an activation inside an expert that the mask keeps.

        The hooks of :mod:`.hooks` call this in place of :meth:`.TokenSelection.of`, because an expert gets only some of
        the batch's tokens, so that the shape of its input does not tell which tokens these are. The rows are known:

        - if a :class:`LinearExperts` says which tokens it has sent to the expert that runs. In a forced run it says
          nothing: it has ended, and has set its ``rows`` to None;
        - else in the model's own run only if the mask keeps all tokens (the layout ``"routed"``);
        - else in a forced run, in which the expert got all tokens of the layer: their order is known (``"flattened"``),
          or has to follow from the shape (``"tokens"``).

        Args:
            value: the activation.
            mask: the tokens of the batch that count, on the host.
            name: of the module, which is an expert or inside one.
            selection: selects rows by the shape, if nothing else tells which tokens the expert got.
            layout: of ``value``, as far as the module alone tells it (:data:`.Layout`). Other layouts than ``"tokens"``
                are passed to ``selection`` as they are.

        Raises:
            CalibrationError: which rows of ``value`` are padding cannot be told.
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
        """A mask ``(n,)`` of the rows of the running expert's input that count, on the host.

        Args:
            mask: the tokens of the batch that count.
            container: the name of the expert's container.

        Returns:
            The mask; None if it is not known which tokens the expert got (no :class:`LinearExperts`, or the mask does
            not fit the layer's number of tokens).
        """
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
        """Count the tokens of one call of an expert; a forward pre-hook of the expert.

        With ``calibrate_all_experts``, also note whether the expert could run on all tokens of the layer, for
        :meth:`_require_hidden_states`. Extra runs of the experts, calls while the observation is paused, and calls
        inside a quantized forward do not count.

        Args:
            calls: its ``expert_tokens`` count.
            name: of the container.
            index: of the expert in it.
            module, args, kwargs: of the call.
        """
        if self.is_forcing or calls.is_paused or is_inside_quantized(module):
            return
        value = first_input(args, kwargs)
        if self._all_experts:
            arguments = [argument for argument in (*args, *kwargs.values()) if argument is not None]
            can_run_on_all = value is not None and len(arguments) == 1 and value.is_floating_point()
            fault = None if can_run_on_all else f"expert {index} called with {len(arguments)} arguments"
            self._faults_of_calls[name].append(fault)
        if value is not None:
            counts = calls.expert_tokens[name]
            counts[index] = counts[index] + self._tokens_that_count(value, calls.mask, name)

    def _tokens_that_count(self, value: torch.Tensor, mask: torch.Tensor | None, name: str) -> Any:
        """How many tokens of an expert's input count.

        The mask tells it where the layer knows which tokens the expert got, and otherwise where the mask has as many
        tokens as the input. If neither is so, all tokens of the input are counted, padding, too. :meth:`_count_tokens`
        calls this.

        Args:
            value: the input.
            mask: the tokens of the batch that count; None: all tokens count.
            name: of the container.

        Returns:
            A scalar tensor if the mask tells the number, else an int.
        """
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
        """Run every expert of a layer on all tokens that the layer read; a forward hook of the layer.

        Args:
            calls: the record of the model's calls.
            name: of the container.
            module, args, kwargs, output: of the layer's call; the output is not used.

        Raises:
            CalibrationError: an expert cannot run on the layer's input.
        """
        if calls.is_paused or is_inside_quantized(module):
            return
        tokens = first_input(args, kwargs)
        self._require_hidden_states(name, module, tokens)
        if tokens is None or not tokens.numel():
            return
        # Two-dimensional inputs, and as many samples as tokens, leave the order of the flattened rows open, except in a
        # LinearExperts: transformers flattens (batch, tokens) in that order.
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
        """Raise a CalibrationError for a layer that does not call its experts with rows of its own input alone.

        Called after each forward of a layer whose experts are to run on all tokens; it clears the layer's
        ``_faults_of_calls``.

        Args:
            name: of the container.
            module: the layer.
            tokens: the layer's input; None: it has no tensor.
        """
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
    """Concatenate the rows of waiting activations, and let each observer observe its rows of them.

    Args:
        activations: of observers of one kind (class, base name, ``args`` and hyperparameters), in one batch; either all
            have a mask or none has. An activation that several observers share is concatenated once.
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
    """Expand a mask of samples ``(batch,)`` to one of ``total`` tokens, if every sample has as many tokens.

    A mask of tokens is returned as it is, as is one whose samples do not divide ``total``.
    """
    is_of_samples = mask.ndim == 1
    if not is_of_samples or not len(mask) or not total or total % len(mask):
        return mask
    return mask.repeat_interleave(total // len(mask))


def _cannot_run(name: str, faults: list[str]) -> CalibrationError:
    """The error to raise for a container whose experts cannot run on all tokens."""
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
    """Make observers that replace those of experts that no data reached, if data reached their siblings.

    ``finalize`` calls this with ``on_missing="siblings"``, after the ranks were reduced. Siblings are the same module
    (``up_proj``, say) in the other experts of the layer. The stand-in for an activation's observer has the union of the
    siblings' ranges. For a weight that wants inputs, the stand-in is the weight's own observer, which is then used
    without inputs. If one module of a fused set lacks data, all modules of the set borrow. The observers of a plan are
    fused for the weights and for the inputs of a set; stand-ins for inputs are new observers, so they are fused here.

    Args:
        observers: of the plan, with the statistics of all ranks.
        containers: the experts of each layer (:attr:`ExpertWatch.containers`).
        fused: names of the modules of each fused set.
        join_ranges: whether the observers of a fused set share their range per tensor (``join_fused_scales``); their
            global scale they share in any case.

    Returns:
        The stand-ins, by module name and base name.
    """
    data_observers = {key: observer for key, observer in observers.items() if observes_data(observer)}
    stand_ins: dict[Key, Observer] = {}
    for name in sorted(_unreached_modules(data_observers, fused)):
        siblings = _siblings(name, containers)
        for base, reached in _reached_siblings(name, siblings, data_observers).items():
            observer = observers[name, base]
            stand_ins[name, base] = observer if base == "weight" else _union(observer, reached)
    for group in fused:
        input_stand_ins = [stand_ins[name, "input"] for name in group if (name, "input") in stand_ins]
        Observer.fuse(input_stand_ins, join_ranges)
    return stand_ins


def _unreached_modules(data_observers: Mapping[Key, Observer], fused: Sequence[Sequence[str]]) -> set[str]:
    """Names of modules of which some observer has no data, and of the modules that are fused with them."""
    unreached = {name for (name, _), observer in data_observers.items() if not is_reached(observer)}
    fused_with_them: set[str] = set()
    for group in fused:
        if unreached.intersection(group):
            fused_with_them.update(group)
    return unreached | fused_with_them


def _reached_siblings(
    name: str, siblings: Collection[str], data_observers: Mapping[Key, Observer]
) -> dict[str, list[Observer]]:
    """The siblings' observers that have data, by base name.

    Args:
        name: of the module that borrows.
        siblings: names of its siblings.
        data_observers: the observers that need data.

    Returns:
        Empty if for some base name no sibling has data: then the module cannot borrow.
    """
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
    """Names of the module at the same place in the other experts of the innermost container around ``name``.

    Empty if ``name`` is in no container.
    """
    for container in sorted(containers, key=len, reverse=True):
        prefix = f"{container}." if container else ""
        index, dot, projection = name.removeprefix(prefix).partition(".")
        experts = len(containers[container])
        if name.startswith(prefix) and index.isdecimal() and int(index) < experts:
            return [f"{prefix}{other}{dot}{projection}" for other in range(experts) if other != int(index)]
    return []


def _union(observer: Observer, reached: Sequence[Observer]) -> Observer:
    """A min-max observer in place of ``observer``, with the union of the ranges of the observers in ``reached``."""
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


def add_counts(counts_of_ranks: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Add up the token counts of experts over all ranks, by name of the container.

    ``finalize`` calls this for the result.
    """
    totals: dict[str, list[int]] = {}
    for counts_by_name in counts_of_ranks:
        for name, counts in counts_by_name.items():
            earlier = totals.get(name, [0] * len(counts))
            totals[name] = [total + count for total, count in zip(earlier, counts, strict=True)]
    return totals
