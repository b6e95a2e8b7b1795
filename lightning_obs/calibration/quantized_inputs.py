"""Calibrate a model in memory on quantized inputs, from calls that were kept while the user's code ran the model.

``CalibrationSession.finalize`` comes here if weights are rounded on quantized inputs
(``rounding={"name": "gptq", "inputs": "quantized"}``). The steps are in :mod:`.stepwise`; this file finds the model's
blocks, and leaves the model's modes, caches and random numbers as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from compressed_tensors.utils.helpers import patch_attrs
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_obs.calibration.blocks import BlockForward, find_blocks
from lightning_obs.calibration.observation import CalibrationResult, Observation
from lightning_obs.calibration.stepwise import Batches, Blocks, StepwiseCalibration
from lightning_obs.calibration.token_weights import TokenWeights
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.ranks.collectives import on_all_ranks
from lightning_obs.schemes.planned_modules import shares_in_float


@torch.inference_mode(False)
@torch.no_grad()
def calibrate_on_quantized_inputs(
    observation: Observation, batches: Batches, token_weights: TokenWeights | None = None
) -> CalibrationResult:
    """Calibrate all planned modules step by step, and write their qparams. Every rank must call this.

    ``CalibrationSession.finalize`` calls this in place of :func:`.finalize` if weights are rounded on quantized inputs.
    Afterwards the model's training mode, its buffers and the random number generators are as before.

    Args:
        observation: of the model, without statistics.
        batches: the kept calls of the model on this rank.
        token_weights: has the weights of the tokens of the call that runs; None: all tokens count alike.

    Returns:
        The result; its ``seconds`` are for the caller to add.

    Raises:
        CalibrationError: data are missing or not finite, or some rank failed, as in :func:`.finalize`. Some qparams may
            have been written by then; the caller restores the earlier ones.
    """
    model = observation.model
    observation.skipped = set()
    observation.calls.is_paused = False  # the callback may have paused it for the last batches of the user's run
    with left_as_it_was(model), _without_caches(model):
        blocks = _blocks_that_run_alone(observation, batches)
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


def _device_of(model: nn.Module) -> torch.device | None:
    """The device of the model's first parameter; None if it has no parameters."""
    parameter = next(model.parameters(), None)
    return None if parameter is None else parameter.device


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Set ``use_cache=False`` in the configs of transformers models inside the ``with`` block.

    A block run by itself would otherwise fill key-value caches that no later block reads.
    """
    configs: list[Any] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache") and not any(config is known for known in configs):
            configs.append(config)
    with patch_attrs(configs, "use_cache", [False] * len(configs)):
        yield


def _blocks_that_run_alone(observation: Observation, batches: Batches) -> Blocks:
    """The blocks of the model, if running block by block gives the model's output on all ranks.

    Otherwise the result has no blocks: the model then runs as a whole for each step, which takes longer.
    """
    model = observation.model
    collectives = observation.collectives
    blocks = _known_blocks(model)
    run_alone = True
    with on_all_ranks(collectives):
        if blocks.modules and len(batches):
            run_alone = _run_alone(model, blocks, batches)
    return blocks if all(collectives.gather_object(run_alone)) else Blocks()


def _known_blocks(model: nn.Module) -> Blocks:
    """The decoder's blocks if transformers knows them, else the longest list of modules of one class.

    A list is a ``ModuleList`` or ``Sequential`` of two or more modules, all with parameters. Without such a list the
    result has no blocks.
    """
    try:
        name, modules = find_blocks(model)
        return Blocks(name, list(modules))
    except CalibrationError:
        pass
    longest = Blocks()
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not name:
            continue
        classes = {type(child) for child in module}
        have_weights = all(next(child.parameters(), None) is not None for child in module)
        if len(classes) == 1 and have_weights and len(module) > max(1, len(longest.modules)):
            longest = Blocks(name, list(module))
    return longest


def _run_alone(model: nn.Module, blocks: Blocks, batches: Batches) -> bool:
    """Whether the first batch gives the same output block by block, each from the kept output of the block before.

    Outputs count as the same up to rounding (``allclose``): kernels may differ from run to run.
    """
    forward = BlockForward(model, blocks.modules, _device_of(model))
    call_model = partial(batches.run, 0)
    output: Any = None
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        stack.enter_context(unfused(model))
        expected = _first_tensor(call_model())
        forward.attach(stack)
        try:
            for position in range(len(blocks.modules) + 1):
                output = forward.run(position, output, call_model)
        except CalibrationError:
            return False
    stepwise_output = _first_tensor(output)
    if expected is None or stepwise_output is None or stepwise_output.shape != expected.shape:
        return False
    return torch.allclose(stepwise_output, expected, rtol=1e-3, atol=1e-5, equal_nan=True)


def _first_tensor(output: Any) -> torch.Tensor | None:
    """The first tensor in a model's output: of a transformers model the loss, the logits, or the last hidden state."""
    tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
    return tensors[0] if tensors else None
