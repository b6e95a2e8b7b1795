"""Learn the scales of a block's rounded weights, so that its outputs come close to the block's in full precision.

The block runs on the inputs that the quantized blocks before it give, and is held against what the unquantized block
gives on unquantized inputs: its weights make up for errors of the blocks before. Each step runs a few batches, with the
weights as they are scaled now, and moves the scales against the signs of their gradients (:class:`.LearnedWeight`). The
numbers stay as the rounding left them; the model's own weights take no gradient and do not change.

Ranks draw batches of their own and add up their gradients, so that all end with the same scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_obs.calibration.stepwise import BlockData
from lightning_obs.calibration.token_mask import TokenSelection
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.forward.quantized_tensors import WeightCache, quantization_of
from lightning_obs.model.module_qparams import ROUNDED, get_scheme, read_qparams, write_qparams
from lightning_obs.numerics.learned_rounding import LearnedWeight
from lightning_obs.numerics.qparams import rounding_of
from lightning_obs.numerics.rounding_options import RoundingOptions
from lightning_obs.ranks.collectives import Collectives, on_all_ranks
from lightning_obs.schemes.planned_modules import PlannedModule

# How often the error over all batches is taken while a block is learned.
_CHECKS = 4
#: by module of a block, its weight while it is learned
_Weights = dict[nn.Module, LearnedWeight]


@dataclass(frozen=True)
class _BlockRun:
    """Runs a block with other weights, on batches of this rank.

    Attributes:
        block: its planned modules run quantized.
        caches: by module whose weight is learned, what its quantized forward computes with.
    """

    block: BlockData
    caches: Mapping[nn.Module, WeightCache]

    @classmethod
    @contextmanager
    def of(cls, block: BlockData, learned: Sequence[nn.Module]) -> Iterator[_BlockRun]:
        """For a ``with`` block in which the planned modules run quantized, those in ``learned`` with given weights."""
        caches = {}
        with ExitStack() as stack:
            for target in block.targets:
                module = target.module
                if get_scheme(module) is None:
                    continue
                stack.callback(quantize_forward(module))
                cache = WeightCache()
                quantization_of(module).weight_cache = cache
                if module in learned:
                    caches[module] = cache
            yield cls(block, caches)

    def set_weights(self, weights: _Weights) -> list[torch.Tensor]:
        """Let the block compute with the weights as they are scaled now; returns them, as leaves of a new graph."""
        leaves = []
        for module, weight in weights.items():
            own_weight: Any = module.weight
            leaf = weight.dequantized().to(own_weight.dtype).requires_grad_()
            self.caches[module].weight = leaf
            leaves.append(leaf)
        return leaves

    def error(self, index: int) -> tuple[torch.Tensor, int]:
        """The sum of squared errors of the block's output on a batch, and the number of values in it."""
        block = self.block
        output = _rows_that_count(block.calls[index].repeat(block.module, block.device), block, index)
        expected = _rows_that_count(block.outputs[index], block, index).to(output.device)
        difference = output.float() - expected.float()
        return difference.square().sum(), difference.numel()


class BlockLearning:
    """Learns the scales of one block after the other. A :class:`.StepwiseCalibration` calls it with each block.

    Modules whose scheme asks for it get new scales, unless those that they had lose less.

    Args:
        collectives: of this rank; every rank calls it with the same blocks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, block: BlockData) -> None:
        """Learn the scales of a block's weights, and write them to its modules.

        Raises:
            CalibrationError: the block's output has no tensor, or is not finite in full precision.
        """
        targets = [target for target in block.targets if _learning_of(target) is not None]
        if not targets:
            return
        options = _learning_of(targets[0])
        assert options is not None
        with on_all_ranks(self._collectives):
            weights = {target.module: _learned_weight(target) for target in targets}
        with _BlockRun.of(block, list(weights)) as run:
            best = self._learn(run, weights, options)
        for module, scale in best.items():
            _write(module, scale)

    def _learn(self, run: _BlockRun, weights: _Weights, options: RoundingOptions) -> dict[nn.Module, torch.Tensor]:
        """Take the steps, whose lengths decay to zero linearly; returns the scales with the least error.

        The error over all batches is taken before the first step and after each quarter of the steps.
        """
        minibatches = _minibatches(run.block, options.samples, self._collectives.size)
        best: dict[nn.Module, torch.Tensor] = {}  # those that the modules have
        least = self._mean_error(run, weights)
        if not least < math.inf:
            raise CalibrationError("the outputs of this block are not finite", where=[run.block.name])
        for step in range(1, options.steps + 1):
            left = 1 - (step - 1) / options.steps
            gradients = self._gradients(run, weights, next(minibatches))
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight.step(gradient, options.first_length * left)
            run.block.report(f"{run.block.name or 'the model'}: step {step} of {options.steps}")
            ends_quarter = _CHECKS * step // options.steps > _CHECKS * (step - 1) // options.steps
            if ends_quarter:
                error = self._mean_error(run, weights)
                if error < least:
                    least = error
                    best = {module: weight.scale() for module, weight in weights.items()}
        return best

    def _gradients(self, run: _BlockRun, weights: _Weights, indices: Sequence[int]) -> list[torch.Tensor]:
        """The gradients of the squared error over the batches of all ranks, at the weights as they are scaled now."""
        gradients: list[torch.Tensor] = []
        with on_all_ranks(self._collectives):
            leaves = run.set_weights(weights)
            gradients = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves]
            for index in indices:
                with torch.enable_grad():
                    error, _ = run.error(index)
                of_batch = torch.autograd.grad(error, leaves, allow_unused=True)
                for total, gradient in zip(gradients, of_batch, strict=True):
                    if gradient is not None:
                        total += gradient
        if self._collectives.size > 1:
            for gradient in gradients:
                gradient.copy_(self._added(gradient))
        return gradients

    def _mean_error(self, run: _BlockRun, weights: _Weights) -> float:
        """The mean squared error of the block's output over the batches of all ranks; not a number without any."""
        sums = torch.zeros(2, dtype=torch.float64)
        with on_all_ranks(self._collectives):
            run.set_weights(weights)
            for index in range(len(run.block.outputs)):
                error, values = run.error(index)
                sums += torch.tensor([error.item(), values], dtype=torch.float64)
        total, values_in_all = self._added(sums).tolist()
        return total / values_in_all if values_in_all else float("nan")

    def _added(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in float64."""
        flat = values.detach().to(self._collectives.device, torch.float64, copy=True).flatten()
        return self._collectives.reduce(flat, "sum").view_as(values)


def _learning_of(target: PlannedModule) -> RoundingOptions | None:
    """How a module's scales are learned; None: they are not, or the module is not quantized."""
    args = target.args.get("weight")
    if args is None or get_scheme(target.module) is None:
        return None
    options = rounding_of(args)
    return options if options is not None and options.is_learned else None


def _learned_weight(target: PlannedModule) -> LearnedWeight:
    """The rounded weight of a module, with the scale that it has."""
    qparams: Any = {}
    for name, value in read_qparams(target.module).items():
        if name.startswith("weight_"):
            qparams[name.removeprefix("weight_")] = value
    codes = qparams.pop(ROUNDED.removeprefix("weight_"))
    return LearnedWeight(codes, qparams, target.args["weight"])


def _write(module: nn.Module, scale: torch.Tensor) -> None:
    """Put learned scales on a module."""
    scheme = get_scheme(module)
    assert scheme is not None
    qparams = read_qparams(module) | {"weight_scale": scale}
    write_qparams(module, scheme, qparams)


def _rows_that_count(output: Any, block: BlockData, index: int) -> torch.Tensor:
    """The first floating tensor of an output, without rows that do not count."""
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            mask = block.masks[index]
            return value if mask is None else TokenSelection(batch_first=True).of(value, mask, block.name)
    raise CalibrationError("the output of this block has no tensor to learn from", where=[block.name])


def _minibatches(block: BlockData, samples: int, ranks: int) -> Iterator[list[int]]:
    """Numbers of the batches of this rank for one step after the other: all in a random order, then in another.

    Args:
        block: has the batches.
        samples: that a step runs at least, on all ranks together; all of them where there are no more.
        ranks: how many share them.
    """
    sizes = [_samples_in(output) for output in block.outputs]
    samples_here = min(-(-samples // ranks), sum(sizes))
    generator = torch.Generator().manual_seed(0)
    order: list[int] = []
    while True:
        indices: list[int] = []
        drawn = 0
        while drawn < samples_here:
            if not order:
                order = torch.randperm(len(sizes), generator=generator).tolist()
            index = order.pop()
            indices.append(index)
            drawn += sizes[index]
        yield indices


def _samples_in(output: Any) -> int:
    """How many samples an output has: the length of its first tensor that is no scalar; at least one."""
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.ndim:
            return max(1, len(value))
    return 1
