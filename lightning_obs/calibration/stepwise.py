"""Calibrate a model step by step, so that each module is calibrated on the inputs that the quantized model gives.

A *position* is everything that the model calls after one block, up to the end of the next block. A *step* is the
planned modules of a position that read the same tensor (q, k and v). Steps follow each other in the order in which the
model calls them. For each step, all batches run through the position, with the modules of earlier steps quantized, and
the modules of the step observe their inputs; then these modules get their qparams.

In each run the model is called from its beginning, but the earlier blocks are skipped: :class:`.BlockForward` replaces
the block before the position by its kept output. A model without known blocks is one position, which runs in full for
each step. With :mod:`.random_tokens` each batch has two such runs.

If a rounding makes up for a share of the errors of its inputs (the *correction*), each batch also runs in full
precision, from outputs that were kept of the full-precision blocks.

:mod:`.quantized_inputs` runs all positions in memory, ``streaming/layerwise.py`` from files to files.
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

from lightning_obs.calibration.base_names import INPUT_ERRORS
from lightning_obs.calibration.blocks import BlockForward, Blocks, RunEnded, copied
from lightning_obs.calibration.finalize import finalize
from lightning_obs.calibration.hooks import ObserverHooks
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.paired_inputs import PairedInputs
from lightning_obs.calibration.random_tokens import RandomTokens
from lightning_obs.calibration.result import CalibrationResult, result_of
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.calibration.total_progress import TotalProgress
from lightning_obs.errors import refuse
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.forward.quantized_module import WeightCache, quantization_of
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.module_qparams import get_scheme, write_qparams
from lightning_obs.model.weight import in_shards
from lightning_obs.ranks.collectives import on_all_ranks
from lightning_obs.schemes.planned_modules import PlannedModule

_CPU = torch.device("cpu")


class Batches(Protocol):
    """The calibration batches of this rank, each of which can be run any number of times.

    A protocol: :class:`.KeptCalls`, the first few of them (:mod:`.quantized_inputs`), and ``FileBatches``
    (``streaming/blocks.py``) have these methods, and :class:`StepwiseCalibration` calls them.
    """

    @property
    def random_tokens(self) -> RandomTokens | None:
        """The random tokens with which each batch runs a second time; None: no batch does."""
        ...

    def __len__(self) -> int:
        """How many batches there are."""
        ...

    def run(self, index: int, has_random_tokens: bool = False) -> Any:
        """Call the model, from its beginning, on batch ``index``, and return its output.

        :meth:`.BlockForward.run` calls this for each run of a position. It skips the earlier blocks, and catches
        :class:`.RunEnded`, by which a hook ends the call early.

        Args:
            index: of the batch.
            has_random_tokens: whether :attr:`random_tokens` replace some of its tokens.
        """

    def mask(self, index: int) -> torch.Tensor | None:
        """The mask of the tokens of batch ``index`` that count, on the CPU; None: all tokens count.

        Asked before each run in which the modules of a step observe the batch.
        """


@dataclass(frozen=True)
class _Run:
    """One of the runs in which the modules of a step observe their inputs: a batch, with random tokens or without."""

    batch: int  # the number of the batch on this rank
    has_random_tokens: bool


def require_steps_possible(observation: Observation) -> None:
    """Raise a CalibrationError for a model or a plan that cannot be calibrated step by step.

    Called before any data: by :meth:`.KeptRuns.require_possible`, and by ``calibrate_layerwise``.

    Raises:
        CalibrationError: weights are in shards or offloaded; the model has experts; the plan quantizes attention states
            or outputs.
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
    refuse(elsewhere, f"{subject}, which needs whole weights in memory", remedy=remedy)
    refuse(others, f"{subject}, and attention states and outputs are not observed there", remedy=remedy)
    containers = [] if observation.experts is None else list(observation.experts.containers)
    refuse(containers, f"{subject}, and the tokens of experts are not known there", remedy=remedy)


class StepwiseCalibration:
    """Calibrates the planned modules of a model position by position.

    :func:`.calibrate_on_quantized_inputs` or a run of ``calibrate_layerwise`` owns one. The owner enters
    :meth:`attached`, calls :meth:`calibrate_position` for each position in order, and :meth:`calibrate_rest` for
    modules that no batch called. Every rank does the same.

    Args:
        observation: of the model, which must be in evaluation mode. Its observers have no statistics yet.
        blocks: of the model.
        batches: of this rank.
        device: where the model runs; None: on the devices on which its tensors are.
        token_weights: has the weights of the tokens of the batch that runs; None: all tokens count alike.

    Attributes:
        result: of the positions so far; its qparams are on the CPU.
        exact_outputs: for each run of a batch, the output of the last finished block in full precision, on the CPU;
            None without a correction.
        quantized_outputs: for each run of a batch, the output of the last finished block with quantized blocks, on the
            CPU.
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
        self._batches = batches
        self._runs = _runs_of(batches)
        self.exact_outputs: list[Any] = [None] * len(self._runs)
        self.quantized_outputs: list[Any] = [None] * len(self._runs)
        self._blocks = blocks
        self._token_weights = token_weights
        self._forward = BlockForward(observation.model, blocks.modules, device)
        self._unfinished = {target.name: target for target in observation.plan.targets}
        #: by module that has its qparams and runs quantized in the present position, its quantized weight
        self._finished: dict[nn.Module, WeightCache] = {}
        #: by module name, how often the first batch calls the module in the present position
        self._calls = Counter[str]()
        self._corrects = any(base == INPUT_ERRORS for _, base in observation.data_observers)
        self._progress = TotalProgress(observation)

    @property
    def positions(self) -> int:
        """The number of positions: one for each block, and one for the modules after the last block."""
        return len(self._blocks.modules) + 1

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Make the model run block by block inside the ``with`` block.

        Meanwhile no graph of ``torch.compile`` runs, and torch's encoder layers call their Linears instead of computing
        all in one operation: otherwise the hooks and quantized forwards of the modules would not run. The owner enters
        the block before the first position.
        """
        with ExitStack() as stack:
            stack.enter_context(run_eagerly())
            stack.enter_context(unfused(self.observation.model))
            self._forward.attach(stack)
            yield

    def calibrate_position(self, position: int) -> None:
        """Calibrate the steps of one position, and keep the outputs of its block. Every rank must call this.

        Args:
            position: the number of the position's block; ``len(blocks)`` for the modules after the last block.
        """
        for names in self._steps(position):
            self._calibrate(position, names)
        self._go_on(position)

    def calibrate_rest(self, module_names: Collection[str] | None = None) -> None:
        """Finalize the planned modules that no batch has called.

        A module that needs data then is an error, or stays in full precision, as ``on_missing`` says. Called after the
        last position, or from files after each position for the modules that were loaded.

        Args:
            module_names: only modules among these; None: all.
        """
        names = [name for name in self._unfinished if module_names is None or name in module_names]
        self._finalize(names)

    def go_on_after(self, blocks: int, exact_outputs: list[Any], quantized_outputs: list[Any]) -> None:
        """Continue a run that was killed; ``calibrate_layerwise`` calls this before the first position.

        Args:
            blocks: how many blocks the killed run had finished.
            exact_outputs, quantized_outputs: these attributes after the last finished block.
        """
        self.exact_outputs = exact_outputs
        self.quantized_outputs = quantized_outputs
        for name in list(self._unfinished):
            if any(self._blocks.holds(index, name) for index in range(blocks)):
                del self._unfinished[name]

    def take_over(self, qparams: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Give modules outside of blocks the qparams that a killed run has computed: they are finished.

        ``calibrate_layerwise`` calls this before the first position, after :meth:`go_on_after`.

        Args:
            qparams: by module name, as the module held them. The modules are loaded.
        """
        for name, qparams_of_module in qparams.items():
            target = self._unfinished.pop(name)
            write_qparams(target.module, target.scheme, qparams_of_module)
            self._finished[target.module] = WeightCache()

    # ------------------------------------------------------------------ the steps

    def _steps(self, position: int) -> list[list[str]]:
        """The names of the modules of each step of a position, the same on all ranks.

        They follow from the calls in the first batch, on the lowest rank on which a planned module was called.
        """
        collectives = self.observation.collectives
        calls: list[tuple[str, int]] = []
        with on_all_ranks(collectives):
            if self._runs and self._unfinished:
                calls = self._calls_of_first_batch(position)
        calls = next(filter(None, collectives.gather_object(calls)), [])
        self._calls = Counter(name for name, _ in calls)
        return steps_of(calls, self.observation.plan.fused)

    def _calls_of_first_batch(self, position: int) -> list[tuple[str, int]]:
        """Run the first batch, and list the calls of unfinished modules in the position.

        Returns:
            For each call the module's name, and a number that is equal for calls that read the same unchanged tensor. A
            call without a tensor among its arguments (a tuple of tensors, say) has a number of its own.
        """
        calls: list[tuple[str, int]] = []
        inputs: list[torch.Tensor] = []  # kept, so that no later tensor has the identity of an earlier one
        numbers: dict[tuple[int, int], int] = {}  # by identity and version of a tensor, the number of its first call

        def note(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            """The pre-hook of an unfinished module: list its call."""
            value = first_input(args, kwargs)
            number = len(calls)  # of this call, so that no earlier call has it
            if value is not None:
                inputs.append(value)
                number = numbers.setdefault((id(value), value._version), number)
            calls.append((name, number))

        with ExitStack() as stack:
            for name, target in self._unfinished.items():
                _attach(target.module, partial(note, name), stack)
            self._run_quantized(position, 0)
        return calls

    def _calibrate(self, position: int, names: list[str]) -> None:
        """Calibrate the modules of one step: observe all batches, then compute and write their qparams.

        Called by :meth:`calibrate_position` for each step. Without observers that need data, no batch runs.
        """
        part = self.observation.of(names)
        if part.data_observers:
            with on_all_ranks(part.collectives):
                # The model of a part is a list of its modules. The batches need the whole model, whose class also tells
                # the layout of activations.
                self._observe(position, replace(part, model=self.observation.model))
        # The part has counted on from the count of the steps before; the result reports the count of all steps.
        self.observation.calls.measurements = part.calls.measurements
        self._finalize(names)

    def _observe(self, position: int, part: Observation) -> None:
        """Run all batches through a position, up to the last call of the modules of a step, which observe their inputs.

        A run with random tokens is for the weights alone.
        A run ends after as many calls of these modules as the first batch has made. If another batch makes more calls,
        the further ones are not observed; if it makes fewer, it runs to the end of the position.

        Args:
            position: that runs.
            part: the record of the step's modules, with the whole model.
        """
        pairs = self._pairs_of(part)
        for index, run in enumerate(self._runs):
            part.calls.mask = self._batches.mask(run.batch)
            part.calls.number = run.batch  # by it the hold-outs of judged modules keep every fourth batch out
            part.calls.only_for_weights = run.has_random_tokens
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
        part.calls.number = None
        part.calls.only_for_weights = False
        part.calls.cache.forget()

    def _pairs_of(self, part: Observation) -> PairedInputs | None:
        """Make the object that pairs the inputs of the two runs of each batch, for modules of a step with a correction.

        None if no module of the step has a correction.
        """
        observers = []
        for target in part.plan.targets:
            observer = part.data_observers.get((target.name, INPUT_ERRORS))
            if observer is not None:
                observers.append((target, observer))
        if not observers:
            return None
        return PairedInputs(
            part.model,
            observers,
            part.calls,
            self._token_weights,
            part.hold_outs,
            part.collectives,
        )

    def _finalize(self, names: list[str]) -> None:
        """Compute and write the qparams of some modules, let them run quantized, and reset their weights' observers.

        Called for the modules of each step, once all batches were observed, and for the modules that no batch called.

        Raises:
            CalibrationError: as :func:`.finalize` says. Modules of the part then stay unfinished.
        """
        if not names:
            return
        part = self.observation.of(names, self._progress.of_part(names))
        # A finished module has had its data, so missing data of this part are those of some modules only.
        part.coverage.others_have_data = bool(self.result.modules)
        try:
            part_result = finalize(part)
        finally:
            # Only an error leaves this True, and no part follows it.
            self.observation.coverage.lacks_data = part.coverage.lacks_data
        self.observation.coverage.skipped |= part.coverage.skipped
        # ``add`` adds skipped modules, ranges, fit errors... It leaves out qparams and modules, which a calibration of
        # files sets in another way, so they are added here.
        self.result.add(part_result)
        self.result.qparams |= part_result.qparams
        self.result.modules += part_result.modules
        for name in names:
            target = self._unfinished.pop(name)
            if get_scheme(target.module) is not None:
                self._finished[target.module] = WeightCache()
        for observer in part.all_observers:
            if observer.base_name == "weight":  # their Hessians take much memory, and are used only once
                observer.reset()

    # ------------------------------------------------------------------ runs

    def _run_exact(self, position: int, index: int) -> Any:
        """Do one of the runs through a position in full precision.

        Returns the output of the position's block, or None if a hook ends the run.
        """
        return self._forward.run(position, self.exact_outputs[index], self._call_of(index))

    def _run_quantized(self, position: int, index: int) -> Any:
        """Do one of the runs through a position with finished modules quantized.

        Returns the output of the position's block, or None if a hook ends the run.
        """
        with ExitStack() as stack:
            for module, cache in self._finished.items():
                stack.callback(quantize_forward(module))
                quantization_of(module).weight_cache = cache
            return self._forward.run(position, self.quantized_outputs[index], self._call_of(index))

    def _call_of(self, index: int) -> Callable[[], Any]:
        """A function that calls the model, from its beginning, for one of the runs."""
        run = self._runs[index]
        return partial(self._batches.run, run.batch, run.has_random_tokens)

    def _go_on(self, position: int) -> None:
        """Run a finished block once more on all batches, keep its outputs for the next position, and leave the block.

        Nothing happens after the last position, which is no block's.
        """
        if position == len(self._blocks.modules):
            return
        with on_all_ranks(self.observation.collectives):
            for index in range(len(self._runs)):
                if self._corrects:
                    output = self._run_exact(position, index)
                    self.exact_outputs[index] = copied(output, _CPU)
                output = self._run_quantized(position, index)
                self.quantized_outputs[index] = copied(output, _CPU)
        self._leave(position)

    def _leave(self, position: int) -> None:
        """Forget the quantized weights of a finished block, which does not run again."""
        for target in self.observation.plan.targets:
            if self._blocks.holds(position, target.name):
                self._finished.pop(target.module, None)


# ---------------------------------------------------------------------- runs and parts of a step


def _runs_of(batches: Batches) -> list[_Run]:
    """The runs of each step: all batches, and with random tokens all once more."""
    runs = [_Run(number, has_random_tokens=False) for number in range(len(batches))]
    if batches.random_tokens is not None:
        runs += [_Run(number, has_random_tokens=True) for number in range(len(batches))]
    return runs


def steps_of(calls: Sequence[tuple[str, int]], fused: Sequence[Sequence[str]]) -> list[list[str]]:
    """Sort the modules of a position into steps.

    Args:
        calls: in the order of the calls, a module's name and the number of the tensor that it reads.
        fused: names of the modules of each fused set, which are in one step whatever they read.

    Returns:
        The names of the modules of each step, each module once.

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
    """Register a forward pre-hook with keyword arguments; ``stack`` removes it."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    remove_hook = keep_hook_out(module, handle)
    stack.callback(remove_hook)


def _end_after(targets: Sequence[PlannedModule], calls: Mapping[str, int], stack: ExitStack) -> None:
    """End a run (:class:`.RunEnded`) at the last call of the modules of a step, since nothing after it is needed.

    Registered after the hooks that observe the modules, so that these see the last call.

    Args:
        targets: the modules.
        calls: by module name, how often a batch calls the module.
        stack: removes the hooks.
    """
    left = sum(calls[target.name] for target in targets)

    def end(module: nn.Module, args: Any, kwargs: Any) -> None:
        """The pre-hook of each module: count its call, and end the run at the last one, before the module computes."""
        nonlocal left
        left -= 1
        if left == 0:
            raise RunEnded

    for target in targets:
        _attach(target.module, end, stack)
