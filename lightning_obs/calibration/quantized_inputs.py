"""Calibrate a model in memory on quantized inputs, from calls that were kept while the user's code ran the model.

Called by :meth:`.KeptRuns.calibrate` when a session finalizes whose weights are rounded on quantized inputs
(``recipe="accurate"``, or ``rounding={"name": "gptq", "inputs": "quantized"}``). The steps are in :mod:`.stepwise`;
this file finds the model's blocks, takes as many calls as fit in memory, and leaves the model's modes, caches and
random numbers as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_obs.calibration.blocks import BlockForward, Blocks, known_blocks
from lightning_obs.calibration.fitted_recipe import memory_of
from lightning_obs.calibration.hooks import ObserverHooks
from lightning_obs.calibration.kept_calls import KeptCalls
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.random_tokens import RandomTokens
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.stepwise import Batches, StepwiseCalibration
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.errors import CalibrationError, name_list, warn
from lightning_obs.forward.calls import first_input
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.extra_runs import left_as_it_was, without_caches
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.ranks.collectives import on_all_ranks
from lightning_obs.schemes.planned_modules import PlannedModule, shares_in_float

#: the share of the machine's memory that the outputs of a block may take, which are kept for the next block
_SHARE_OF_MEMORY = 0.25
#: beside None, the leaves of a block's output that no run of the next block can change, and tensors, which are copied
_COPIED = (torch.Tensor, bool, int, float, complex, str, torch.dtype, torch.device)


@torch.inference_mode(False)
@torch.no_grad()
def calibrate_on_quantized_inputs(
    observation: Observation, batches: Batches, token_weights: TokenWeights | None = None
) -> CalibrationResult:
    """Calibrate all planned modules step by step, and write their qparams. Every rank must call this.

    :meth:`.KeptRuns.calibrate` calls this in place of :func:`.finalize` when the data have run. Afterwards the model's
    training mode, its buffers and the random number generators are as before.

    The positions, which are the blocks of the model and the modules after the last block, are calibrated one after the
    other: while the model runs block by block, the batches run through each. Then the planned modules that no batch
    has called are finalized without another run: they are quantized if they need no data, and else treated as
    ``on_missing`` says.

    Args:
        observation: of the model, without statistics.
        batches: the kept calls of the model on this rank.
        token_weights: has the weights of the tokens of the call that runs; None: all tokens count alike.

    Returns:
        The result; its ``seconds`` are for the caller to add.

    Raises:
        CalibrationError: data are missing or not finite, or some rank failed, as in :func:`.finalize`. Under a recipe,
            also if the model cannot be run block by block. Some qparams may have been written by then; the caller
            restores the earlier ones.
    """
    model = observation.model
    observation.coverage.skipped = set()
    observation.calls.is_paused = False  # the callback may have paused it for the last batches of the user's run
    with left_as_it_was(model), without_caches(model):
        blocks, size = _blocks_that_run_alone(observation, batches)
        batches = _that_fit(batches, size)
        stepwise = StepwiseCalibration(observation, blocks, batches, _device_of(model), token_weights)
        with stepwise.attached():
            for position in range(stepwise.positions):
                stepwise.calibrate_position(position)
        stepwise.calibrate_rest()
    if token_weights is not None:
        token_weights.warn_of_tokens_that_count_alike()
    result = stepwise.result
    result.batches = observation.calls.batches
    result.measurements = observation.calls.measurements
    result.plan.in_float = shares_in_float(model, observation.plan.targets, result.skipped)
    return result


@torch.inference_mode(False)
@torch.no_grad()
def observe_kept_calls(observation: Observation, kept_calls: KeptCalls, hooks: ObserverHooks) -> None:
    """Run the kept calls once more in full precision, and observe all planned modules. Every rank must call this.

    :meth:`.KeptRuns.calibrate` calls this when the data have run, if a recipe cannot round weights on quantized inputs
    after all. Afterwards the model's training mode, its buffers and the random number generators are as before.

    Args:
        observation: of the model; what is observed is added to the statistics that it has.
        kept_calls: of the model, on this rank.
        hooks: of the observation, detached; they are detached again afterwards.

    Raises:
        CalibrationError: a call fails on some rank, or token weights cannot be measured.
    """
    model = observation.model
    observation.calls.is_paused = False
    with on_all_ranks(observation.collectives), left_as_it_was(model), without_caches(model):
        hooks.attach(count_calls=False, keep_token_weights=True)
        try:
            for index in range(len(kept_calls)):
                observation.calls.number_batch(index)  # by it the hold-outs of judged modules keep batches out
                hooks.calls.mask_tokens(kept_calls.mask(index))
                kept_calls.run(index)
        finally:
            observation.calls.number_batch(None)
            hooks.detach()


def _device_of(model: nn.Module) -> torch.device | None:
    """The device of the model's first parameter; None if it has no parameters."""
    parameter = next(model.parameters(), None)
    return None if parameter is None else parameter.device


@dataclass(frozen=True)
class _FirstBatches:
    """The first ``count`` of some batches; a :class:`.Batches` for :class:`.StepwiseCalibration`.

    Made by :func:`_that_fit` before the steps, if the outputs of all batches would take too much memory.

    Attributes:
        batches: all batches of this rank.
        count: how many of them run.
    """

    batches: Batches
    count: int

    def __len__(self) -> int:
        """How many batches run."""
        return self.count

    @property
    def random_tokens(self) -> RandomTokens | None:
        """With which each batch runs a second time; None: no batch does."""
        return self.batches.random_tokens

    def run(self, index: int, has_random_tokens: bool = False) -> Any:
        """Run batch ``index``, with random tokens or without; return the model's output."""
        return self.batches.run(index, has_random_tokens)

    def mask(self, index: int) -> torch.Tensor | None:
        """The mask of batch ``index``; None: all tokens count."""
        return self.batches.mask(index)


def _that_fit(batches: Batches, size: int) -> Batches:
    """The first batches whose outputs fit in a quarter of the machine's memory; a warning says how many if not all do.

    :func:`calibrate_on_quantized_inputs` calls this before the steps. They keep two outputs of a block for each run of
    a batch, one in full precision and one of the quantized blocks; with random tokens each batch has two runs.

    Args:
        batches: of this rank.
        size: of a block's largest output for one batch [bytes]; 0: there are no blocks, and nothing is kept.

    Returns:
        ``batches`` itself if all fit; at least one batch.
    """
    if not size:
        return batches
    runs = 1 if batches.random_tokens is None else 2
    most = max(1, int(_SHARE_OF_MEMORY * memory_of(torch.device("cpu"))) // (2 * size * runs))
    if len(batches) <= most:
        return batches
    warn(
        f"rounding on quantized inputs keeps the outputs of a block, and those of {most} of {len(batches)} calls fit "
        "in a quarter of the memory. The others are not observed."
    )
    return _FirstBatches(batches, most)


def _blocks_that_run_alone(observation: Observation, batches: Batches) -> tuple[Blocks, int]:
    """The blocks of the model, if running block by block gives the model's output on all ranks.

    Otherwise the result has no blocks: the model then runs as a whole for each step, which takes longer.
    :func:`calibrate_on_quantized_inputs` calls this before the steps, on every rank.

    Returns:
        The blocks, and the size of a block's largest output for the first batch on this rank [bytes]; 0 without blocks
        or batches.

    Raises:
        CalibrationError: a recipe asks for quantized inputs, and the model cannot be run block by block. As a whole it
            would take a time that grows with the square of its depth.
    """
    model = observation.model
    collectives = observation.collectives
    blocks = known_blocks(model)
    trial = _Trial()
    with on_all_ranks(collectives):
        if blocks.modules and len(batches):
            trial = _run_by_blocks(model, blocks, batches, observation.plan.targets)
    obstacle = next(filter(None, collectives.gather_object(trial.obstacle)), None)
    if obstacle is None:
        return blocks, trial.size
    if observation.options.rounding_is_of_recipe:
        raise CalibrationError("the model cannot be run block by block", where=[type(model).__name__], got=obstacle)
    return Blocks(), 0


@dataclass(frozen=True)
class _Trial:
    """What running the first batch block by block has shown; made by :func:`_run_by_blocks`.

    Attributes:
        size: of the largest output of a block [bytes].
        obstacle: why the model cannot be run block by block; None: it can.
    """

    size: int = 0
    obstacle: str | None = None


def _run_by_blocks(model: nn.Module, blocks: Blocks, batches: Batches, targets: Sequence[PlannedModule]) -> _Trial:
    """Try to run the first batch block by block, each block from the kept output of the block before.

    :func:`_blocks_that_run_alone` calls this once. The output of the model must be that of a run as a whole, and so
    must the inputs of each planned module, in the first position in which it is called: there it will be calibrated.
    They are others where a module reads the output of an earlier block (auxiliary heads, feature pyramids), or is
    called in several positions. Two runs count as the same up to rounding: kernels may differ from run to run.

    Args:
        model: in its present state.
        blocks: of the model.
        batches: of this rank, not empty.
        targets: the planned modules.
    """
    forward = BlockForward(model, blocks.modules, _device_of(model))
    call_model = partial(batches.run, 0)
    output: Any = None
    size = 0
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        stack.enter_context(unfused(model))
        with ExitStack() as hooks:
            expected_inputs = _watched_inputs(targets, hooks)
            expected = _first_tensor(call_model())
        forward.attach(stack)
        inputs: dict[str, list[torch.Tensor]] = {}
        try:
            for position in range(len(blocks.modules) + 1):
                with ExitStack() as hooks:
                    inputs_of_position = _watched_inputs(targets, hooks)
                    output = forward.run(position, output, call_model)
                inputs = inputs_of_position | inputs  # those of the first position in which a module is called
                if position < len(blocks.modules):
                    uncopied = _leaf_that_is_not_copied(output)
                    if uncopied is not None:
                        class_name = type(uncopied).__name__
                        return _Trial(obstacle=f"block {position} returns a {class_name}, which cannot be copied")
                    size = max(size, _size_of(output))
        except CalibrationError as error:
            return _Trial(obstacle=str(error.got or error.what))
    obstacle = _other_output(_first_tensor(output), expected)
    if obstacle is None:
        obstacle = _other_inputs(inputs, expected_inputs)
    if obstacle is not None:
        return _Trial(obstacle=obstacle)
    return _Trial(size)


def _other_output(stepwise: torch.Tensor | None, expected: torch.Tensor | None) -> str | None:
    """How the model's output of a run block by block differs from that of a run as a whole; None: it does not."""
    if expected is None or stepwise is None:
        return "an output of the model without a tensor"
    if not _are_close(stepwise, expected):
        return "another output of the model than in a run as a whole"
    return None


def _other_inputs(stepwise: Mapping[str, list[torch.Tensor]], expected: Mapping[str, list[torch.Tensor]]) -> str | None:
    """Which modules have other inputs in a run block by block than in a run as a whole, for a message; None: none."""
    names = _names_with_other_inputs(stepwise, expected)
    if not names:
        return None
    return f"other inputs than in a run as a whole: {name_list(names)}"


def _watched_inputs(targets: Sequence[PlannedModule], stack: ExitStack) -> dict[str, list[torch.Tensor]]:
    """Watch the inputs of planned modules until ``stack`` closes.

    Returns:
        A dict that fills as the modules are called: by name, the mean absolute value of the input of each call.
    """
    inputs: dict[str, list[torch.Tensor]] = {}

    def note(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        """The pre-hook of a module: note the input of its call."""
        value = first_input(args, kwargs)
        if value is not None:
            inputs.setdefault(name, []).append(value.detach().float().abs().mean())

    for target in targets:
        handle = target.module.register_forward_pre_hook(partial(note, target.name), with_kwargs=True)
        remove_hook = keep_hook_out(target.module, handle)
        stack.callback(remove_hook)
    return inputs


def _names_with_other_inputs(
    inputs: Mapping[str, list[torch.Tensor]], expected: Mapping[str, list[torch.Tensor]]
) -> list[str]:
    """The names of the modules that two runs have called with other inputs, by what :func:`_watched_inputs` noted."""
    others = []
    pairs: dict[str, torch.Tensor] = {}  # by module name, the means of its calls in both runs ``(2, calls)``
    for name in {**expected, **inputs}:
        values = inputs.get(name, [])
        expected_values = expected.get(name, [])
        if len(values) == len(expected_values):
            pairs[name] = torch.stack([torch.stack(values), torch.stack(expected_values)])
        else:
            others.append(name)
    if not pairs:
        return others
    device = next(iter(pairs.values())).device
    means = torch.cat([pair.to(device) for pair in pairs.values()], dim=1)  # compared at once: the host waits once
    if not _are_close(means[0], means[1]):
        others += [name for name, pair in pairs.items() if not _are_close(pair[0], pair[1])]
    return others


def _are_close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have one shape and, up to rounding, the same numbers."""
    if value.shape != expected.shape:
        return False
    return torch.allclose(value.float(), expected.float(), rtol=1e-3, atol=1e-5, equal_nan=True)


def _leaf_that_is_not_copied(output: Any) -> Any:
    """The first part of a block's output that is no tensor and no constant, in structures that torch's pytree knows.

    The output is kept, and copied for each run of the next block, which may write to it. In an object of another class
    (a dataclass that torch does not know) the next block would find what its earlier runs have written.

    Returns:
        The part; None: all parts are tensors or constants.
    """
    for leaf in tree_leaves(output):
        if leaf is not None and not isinstance(leaf, _COPIED):
            return leaf
    return None


def _size_of(output: Any) -> int:
    """The memory of an output's tensors [bytes]."""
    return sum(value.nbytes for value in tree_leaves(output) if isinstance(value, torch.Tensor))


def _first_tensor(output: Any) -> torch.Tensor | None:
    """The first tensor in a model's output: of a transformers model the loss, the logits, or the last hidden state."""
    tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
    return tensors[0] if tensors else None
