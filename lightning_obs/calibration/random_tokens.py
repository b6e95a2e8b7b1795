"""Runs of the calibration batches with random tokens, so that weights are not fitted to one kind of text alone.

A rounding fits a weight to the inputs that the calibration text gives. Tokens that this text lacks give inputs in other
directions, in which nothing keeps the weight's errors small. So each batch runs a second time, with random tokens of
the vocabulary in place of a share of its own (``rounding={..., "random_tokens": 0.2}``). Weights observe the inputs of
both runs; the ranges of activations are those of the batches alone.

:class:`.StepwiseCalibration` runs the batches, and :class:`.KeptCalls` or ``FileBatches`` (``streaming/blocks.py``)
attach the hooks of :class:`RandomTokens` for the second run of a batch. Measured: docs/evidence/four_bits.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.observation import Observation
from lightning_obs.errors import CalibrationError
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.schemes.config import random_tokens_of

#: how far apart the seeds of two ranks are; those of a rank's batches lie between them. torch's generator on the CPU
#: reads the low 32 bits of a seed alone.
_BATCHES_OF_RANK = 1 << 20


class RandomTokens:
    """Puts random tokens in place of a share of a batch's tokens, where the model looks up their embeddings.

    The tokens depend only on the number of the batch and on the rank, so that each run of a batch has the same ones.
    :class:`.KeptCalls` makes one, and ``streaming/layerwise.py`` for its ``FileBatches``; both attach it when such a
    run begins. :class:`.TokenWeights` attaches it to the copy of the model by which it weighs tokens.

    Args:
        embeddings: of the model's tokens.
        share: of the tokens, above 0 and at most 1.
        observation: of the model; its rank is asked at each run, because a session is made before a run has ranks.
    """

    def __init__(self, embeddings: list[nn.Embedding], share: float, observation: Observation) -> None:
        self._embeddings = embeddings
        self._share = share
        self._observation = observation

    @classmethod
    def of(cls, observation: Observation) -> RandomTokens | None:
        """The random tokens for the roundings of an observation; None: no rounding has any, or the model has no tokens.

        Called when a session or a calibration layer by layer prepares its batches.

        Raises:
            CalibrationError: the user has named ``random_tokens``, and the model has no embedding of tokens. Under a
                recipe such a model runs without.
        """
        share = random_tokens_of(observation.plan.config)
        if share == 0:
            return None
        embeddings = token_embeddings(observation.model)
        if embeddings:
            return cls(embeddings, share, observation)
        if observation.options.rounding_is_of_recipe:
            return None
        raise CalibrationError(
            "random_tokens: the model has no embedding of tokens",
            where=[type(observation.model).__name__],
            expected="a model of transformers, or a module with get_input_embeddings()",
            remedy="leave out random_tokens.",
        )

    def attach(
        self, batch: int, stack: ExitStack, copy_of: Callable[[nn.Module], nn.Module] = lambda module: module
    ) -> None:
        """Register hooks that replace the tokens of the next run; ``stack`` removes them.

        Called before a batch runs with random tokens.

        Args:
            batch: the number of the batch on this rank.
            stack: removes the hooks when it closes.
            copy_of: gives the module that runs in place of an embedding; default: the embedding itself.
        """
        seed = self._observation.collectives.rank * _BATCHES_OF_RANK + batch
        for embedding in self._embeddings:
            module = copy_of(embedding)
            hook = partial(_replace_tokens, self._share, embedding.num_embeddings, seed)
            # First, because from files a later hook loads the rows of the weight that the indices name.
            handle = module.register_forward_pre_hook(hook, prepend=True)
            stack.callback(keep_hook_out(module, handle))


def token_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """The embeddings of tokens that the modules of a model name by ``get_input_embeddings``, each once.

    Those of positions, segments and categories are not among them.
    """
    embeddings: dict[int, nn.Embedding] = {}
    for module in model.modules():
        get_input_embeddings = getattr(module, "get_input_embeddings", None)
        if get_input_embeddings is None:
            continue
        with suppress(NotImplementedError, AttributeError):
            embedding = get_input_embeddings()
            if isinstance(embedding, nn.Embedding):
                embeddings[id(embedding)] = embedding
    return list(embeddings.values())


def _replace_tokens(
    share: float, vocabulary: int, seed: int, _: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Replace a share of the indices that an embedding is given; a pre-hook of the embedding.

    Args:
        share: of the indices.
        vocabulary: the number of the embedding's rows.
        seed: of the random numbers. Calls with indices of one shape replace the same ones.
        args: of the embedding's forward.

    Returns:
        The arguments with other indices; None, which leaves them as they are, if the first is no tensor.
    """
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    indices = args[0]
    generator = torch.Generator().manual_seed(seed)
    is_replaced = torch.rand(indices.shape, generator=generator) < share
    tokens = torch.randint(vocabulary, indices.shape, generator=generator, dtype=indices.dtype)
    replaced = torch.where(is_replaced.to(indices.device), tokens.to(indices.device), indices)
    return (replaced, *args[1:])
