"""Calibrate a model step by step, each on the inputs that the quantized steps before it give.

A *position* is everything that the model calls after one block, up to the end of the next. A *step* is the planned
modules of a position that read one tensor (q, k and v), in the order in which they are called. For each step all
batches run from the kept outputs of the block before, with finished modules quantized; then its modules get their
qparams. A model without known blocks is one position, which runs from its beginning for each step.

Where a rounding makes up for a share of the errors of its inputs, each batch also runs in full precision, from outputs
that were kept of the full-precision blocks.

In memory :mod:`.quantized_inputs` runs all positions, from files to files ``streaming/layerwise.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lightning_obs.calibration.blocks import BlockForward, RunEnded, copied
from lightning_obs.calibration.finalize import finalize, result_of
from lightning_obs.calibration.hooks import ObserverHooks
from lightning_obs.calibration.observation import INPUT_ERRORS, CalibrationResult, Observation
from lightning_obs.calibration.paired_inputs import PairedInputs
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.calibration.total_progress import TotalProgress
from lightning_obs.errors import refuse
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.forward.quantized_tensors import WeightCache, quantization_of
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.module_qparams import get_scheme
from lightning_obs.model.weight import in_shards
from lightning_obs.ranks.collectives import on_all_ranks
from lightning_obs.schemes.planned_modules import PlannedModule

_CPU = torch.device("cpu")


class Batches(Protocol):
    """The calibration batches of this rank, each of which can be run any number of times."""

    def __len__(self) -> int: ...

    def run(self, index: int) -> Any:
        """Call the model on a batch; returns its output."""

    def mask(self, index: int) -> torch.Tensor | None:
        """Which tokens of a batch count; None: all."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, which it calls one after the other; none: it runs as a whole.

    Attributes:
        name: of the list of blocks in the model.
        modules: the blocks.
    """

    name: str = ""
    modules: Sequence[nn.Module] = ()

    def holds(self, index: int, name: str) -> bool:
        """Whether a module of the model, by its name, is in a block."""
        return name.startswith(f"{self.name}.{index}.")


def require_steps_possible(observation: Observation) -> None:
    """Refuse, before any data, a model or scheme that cannot be calibrated step by step.

    Raises:
        CalibrationError: weights in shards or offloaded; experts; quantized attention states or outputs.
    """
    remedy = "rounding='gptq', which rounds by inputs in full precision."
    subject = "rounding on quantized inputs runs the model block by block"
    elsewhere = []
    others = []
    for target in observation.plan.targets:
        if in_shards(target.module) or is_dispatched(target.module):
            elsewhere.append(target.name)
        if target.states or "output" in target.args:
            others.append(target.name)
    refuse(elsewhere, f"{subject}, with its weights whole and in memory", remedy=remedy)
    refuse(others, f"{subject}, and attention states and outputs are not observed there", remedy=remedy)
    containers = [] if observation.experts is None else list(observation.experts.containers)
    refuse(containers, f"{subject}, and the tokens of experts are not known there", remedy=remedy)


class StepwiseCalibration:
    """Calibrates the planned modules of a model position by position.

    Its owner enters :meth:`attached`, calls :meth:`calibrate_position` for each position in order, and
    :meth:`calibrate_rest` after the last.

    Args:
        observation: its model runs, in evaluation mode; its observers have no statistics yet.
        blocks: of the model.
        batches: of this rank.
        device: where the model runs; None: where its tensors are.
        token_weights: weighs the tokens of the batch that runs; None: all count alike.

    Attributes:
        result: of the positions so far; its qparams are on the CPU.
        exact_outputs: the output of the last block for each batch in full precision; None where nothing needs it.
        quantized_outputs: the same, of the blocks quantized so far. Both on the CPU.
    """

    def __init__(
        self,
        observation: Observation,
        blocks: Blocks,
        batches: Batches,
        device: torch.device | None = None,
        token_weights: TokenWeights | None = None,
    ) -> None:
        self.observation = observation
        self.result: CalibrationResult = result_of(observation)
        self.result.modules = []
        self.exact_outputs: list[Any] = [None] * len(batches)
        self.quantized_outputs: list[Any] = [None] * len(batches)
        self._blocks = blocks
        self._batches = batches
        self._token_weights = token_weights
        self._forward = BlockForward(observation.model, blocks.modules, device)
        self._unfinished = {target.name: target for target in observation.plan.targets}
        #: by module: modules that run quantized when a position runs, with their quantized weights
        self._finished: dict[nn.Module, WeightCache] = {}
        #: how often the first batch calls each module in the present position
        self._calls = Counter[str]()
        self._corrects = any(base == INPUT_ERRORS for _, base in observation.data_observers)
        self._progress = TotalProgress(observation)

    @property
    def positions(self) -> int:
        """How many positions there are: one more than blocks."""
        return len(self._blocks.modules) + 1

    @contextmanager
    def attached(self) -> Iterator[None]:
        """For a ``with`` block in which the model can be run block by block."""
        with ExitStack() as stack:
            stack.enter_context(run_eagerly())
            stack.enter_context(unfused(self.observation.model))
            self._forward.attach(stack)
            yield

    def calibrate_position(self, position: int) -> None:
        """Calibrate what the model calls after the last finished block, up to the end of the next. All ranks call this.

        Args:
            position: the number of the block; of the last position, the number of blocks.
        """
        for names in self._steps(position):
            self._calibrate(position, names)
        self._go_on(position)

    def calibrate_rest(self, module_names: Collection[str] | None = None) -> None:
        """Calibrate planned modules that no batch called: an error, or left in full precision, as the options say.

        Args:
            module_names: only of these; None: of all.
        """
        names = [name for name in self._unfinished if module_names is None or name in module_names]
        self._finalize(names)

    def go_on_after(self, blocks: int, exact_outputs: list[Any], quantized_outputs: list[Any]) -> None:
        """Take over from a run that was killed; its outputs were :attr:`exact_outputs` and :attr:`quantized_outputs`.

        Args:
            blocks: how many blocks were finished.
            exact_outputs, quantized_outputs: of the last of them.
        """
        self.exact_outputs = exact_outputs
        self.quantized_outputs = quantized_outputs
        for name in list(self._unfinished):
            if any(self._blocks.holds(index, name) for index in range(blocks)):
                del self._unfinished[name]

    # ------------------------------------------------------------------ the steps

    def _steps(self, position: int) -> list[list[str]]:
        """The names of the modules of each step, as the first batch of the lowest rank that has any calls them."""
        collectives = self.observation.collectives
        calls: list[tuple[str, int]] = []
        with on_all_ranks(collectives):
            if len(self._batches) and self._unfinished:
                calls = self._calls_of_first_batch(position)
        calls = next(filter(None, collectives.gather_object(calls)), [])
        self._calls = Counter(name for name, _ in calls)
        return steps_of(calls, self.observation.plan.fused)

    def _calls_of_first_batch(self, position: int) -> list[tuple[str, int]]:
        """The calls of unfinished modules in a position, and which tensor each reads: equal numbers, one tensor."""
        calls = []
        read: list[torch.Tensor] = []  # kept, so that no later tensor has the identity of an earlier one
        numbers: dict[tuple[int, int], int] = {}

        def note(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            value = first_input(args, kwargs)
            number = len(read)
            if value is not None:
                read.append(value)
                number = numbers.setdefault((id(value), value._version), number)
            calls.append((name, number))

        with ExitStack() as stack:
            for name, target in self._unfinished.items():
                _attach(target.module, partial(note, name), stack)
            self._run_quantized(position, 0)
        return calls

    def _calibrate(self, position: int, names: list[str]) -> None:
        """Observe the modules of a step on all batches, and compute their qparams."""
        part = self.observation.of(names)
        if part.data_observers:
            with on_all_ranks(part.collectives):
                self._observe(position, replace(part, model=self.observation.model))
        self.observation.calls.measurements = part.calls.measurements
        self._finalize(names)

    def _observe(self, position: int, part: Observation) -> None:
        """Run all batches up to the modules of a step, which observe their inputs."""
        pairs = self._pairs_of(part)
        for index in range(len(self._batches)):
            part.calls.mask = self._batches.mask(index)
            part.calls.cache.forget()
            if pairs is not None:
                with ExitStack() as stack:
                    pairs.watch_exact(stack)
                    _end_after(part.plan.targets, self._calls, stack)
                    self._run_exact(position, index)
            with ExitStack() as stack:
                ObserverHooks(part).attach_modules(self._token_weights, stack)
                if pairs is not None:
                    pairs.watch_quantized(stack)
                _end_after(part.plan.targets, self._calls, stack)
                self._run_quantized(position, index)
            if pairs is not None:
                pairs.forget()
        part.calls.mask = None
        part.calls.cache.forget()

    def _pairs_of(self, part: Observation) -> PairedInputs | None:
        """What pairs inputs of both runs for the modules of a step; None: none of them needs it."""
        observers = []
        for target in part.plan.targets:
            observer = part.data_observers.get((target.name, INPUT_ERRORS))
            if observer is not None:
                observers.append((target, observer))
        return PairedInputs(part.model, observers, part.calls, self._token_weights) if observers else None

    def _finalize(self, names: list[str]) -> None:
        """Compute and write the qparams of observed modules, and release what was gathered for their weights."""
        if not names:
            return
        part = self.observation.of(names, self._progress.of_part(names))
        part.others_have_data = bool(self.result.modules)
        try:
            part_result = finalize(part)
        finally:
            self.observation.lacks_data = part.lacks_data
        self.observation.skipped |= part.skipped
        self.result.add(part_result)
        self.result.qparams |= part_result.qparams
        self.result.modules += part_result.modules
        for name in names:
            target = self._unfinished.pop(name)
            if get_scheme(target.module) is not None:
                self._finished[target.module] = WeightCache()
        for observer in (part.observers | part.data_observers).values():
            if observer.base_name == "weight":
                observer.reset()

    # ------------------------------------------------------------------ runs

    def _run_exact(self, position: int, index: int) -> Any:
        """Run a batch through a position in full precision; returns the output of its block."""
        return self._forward.run(position, self.exact_outputs[index], partial(self._batches.run, index))

    def _run_quantized(self, position: int, index: int) -> Any:
        """Run a batch through a position with finished modules quantized; returns the output of its block."""
        with ExitStack() as stack:
            for module, cache in self._finished.items():
                stack.callback(quantize_forward(module))
                quantization_of(module).weight_cache = cache
            return self._forward.run(position, self.quantized_outputs[index], partial(self._batches.run, index))

    def _go_on(self, position: int) -> None:
        """Keep the outputs of a finished block, in full precision where they are needed, and quantized."""
        if position == len(self._blocks.modules):
            return
        with on_all_ranks(self.observation.collectives):
            for index in range(len(self._batches)):
                if self._corrects:
                    output = self._run_exact(position, index)
                    self.exact_outputs[index] = copied(output, _CPU)
                output = self._run_quantized(position, index)
                self.quantized_outputs[index] = copied(output, _CPU)
        self._leave(position)

    def _leave(self, position: int) -> None:
        """Let the modules of a finished block run quantized no more: the block does not run again."""
        for target in self.observation.plan.targets:
            if self._blocks.holds(position, target.name):
                self._finished.pop(target.module, None)


# ---------------------------------------------------------------------- parts of a step


def steps_of(calls: Sequence[tuple[str, int]], fused: Sequence[Sequence[str]]) -> list[list[str]]:
    """Which modules are calibrated together, in order.

    Args:
        calls: the modules in the order of their calls, and the number of the tensor that each reads.
        fused: names of modules that share scales, and are calibrated together, whatever they read.

    >>> steps_of([("q", 0), ("k", 0), ("o", 1), ("v", 2), ("up", 3)], fused=[["q", "k", "v"]])
    [['q', 'k', 'v'], ['o'], ['up']]
    """
    steps: dict[int, list[str]] = {}
    placed: set[str] = set()
    called = [name for name, _ in calls]
    for name, tensor in calls:
        together = [name]
        for group in fused:
            if name in group:
                together = [member for member in group if member in called]
        for member in together:
            if member not in placed:
                placed.add(member)
                steps.setdefault(tensor, []).append(member)
    return list(steps.values())


def _attach(module: nn.Module, hook: Callable[..., Any], stack: ExitStack) -> None:
    """Register a forward pre-hook; ``stack`` removes it."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    remove_hook = keep_hook_out(module, handle)
    stack.callback(remove_hook)


def _end_after(targets: Sequence[PlannedModule], calls: Mapping[str, int], stack: ExitStack) -> None:
    """End a run at the last call of some modules; registered after the hooks that observe them.

    Args:
        targets: the modules.
        calls: how often each is called.
        stack: removes the hooks.
    """
    left = sum(calls[target.name] for target in targets)

    def end(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RunEnded

    for target in targets:
        _attach(target.module, end, stack)
