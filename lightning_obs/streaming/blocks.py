"""Runs the blocks of a decoder one after the other on all batches; ``layerwise.py`` loads the blocks and frees them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.blocks import BlockForward, copied
from lightning_obs.calibration.random_tokens import RandomTokens
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.token_mask import find_mask
from lightning_obs.forward.calls import call_on


class FileBatches:
    """Batches that are run any number of times by a model whose weights are read from files.

    ``layerwise.py`` makes one for a calibration layer by layer that rounds on quantized inputs. `StepwiseCalibration`
    calls the methods: the length is the number of batches.

    Args:
        model: the model that is called on each batch.
        batches: arguments of the model's forward, as :func:`.call_on` takes them.
        device: where the model runs.
        token_mask: name of the argument that is nonzero for tokens that count; None: all count.
        random_tokens: with which each batch runs a second time; None: no batch does.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        device: torch.device,
        token_mask: str | None = None,
        random_tokens: RandomTokens | None = None,
    ) -> None:
        self.random_tokens = random_tokens
        self._model = model
        self._batches = batches
        self._device = device
        self._token_mask = token_mask

    def __len__(self) -> int:
        return len(self._batches)

    def run(self, index: int, has_random_tokens: bool = False) -> Any:
        """Call the model on a copy of batch ``index``, and return its output; called for each run of a block.

        Args:
            index: of the batch.
            has_random_tokens: whether ``random_tokens`` replace some of its tokens.
        """
        with ExitStack() as stack:
            if has_random_tokens:
                assert self.random_tokens is not None
                self.random_tokens.attach(index, stack)
            return call_on(self._model, copied(self._batches[index], self._device))

    def mask(self, index: int) -> torch.Tensor | None:
        """Return the mask of the tokens of batch ``index`` that count, on the CPU; None: all tokens count.

        Asked before each run in which modules observe the batch.
        """
        if self._token_mask is None:
            return None
        return find_mask(self._batches[index], self._token_mask).cpu()


class BlockRunner:
    """Runs the model of a session on all batches, one block at a time, while the session observes it.

    A calibration layer by layer makes one, and calls :meth:`run` once for each block, or twice if the next block's
    inputs are to be quantized: then a block's second run observes nothing. Modules before the first block are observed
    in the first run of all, modules between two blocks in the first run of the later block.

    Args:
        session: its model is run, and its observers see the block that runs.
        blocks: the decoder's blocks in order.
        batches: arguments of the model's forward, as :func:`.call_on` takes them.
        device: where the model runs.

    Attributes:
        outputs: the output of the last block that ran, for each batch, on the CPU.
    """

    def __init__(
        self, session: CalibrationSession, blocks: Sequence[nn.Module], batches: Sequence[Any], device: torch.device
    ) -> None:
        self.session = session
        self.blocks = blocks
        self.batches = batches
        self.outputs: list[Any] = [None] * len(batches)
        self._device = device
        self._forward = BlockForward(session.model, blocks, device)
        self._no_block_was_observed = True

    def go_on_after(self, outputs: list[Any]) -> None:
        """Continue a run that was killed; called before the first :meth:`run`.

        Args:
            outputs: the attribute after the last finished block. Modules before the first block were observed with it.
        """
        self.outputs = outputs
        self._no_block_was_observed = False

    def attach(self, stack: ExitStack) -> None:
        """Replace the blocks' forwards until ``stack`` closes; called once, before the first :meth:`run`."""
        self._forward.attach(stack)

    def run(self, block: int, observe: bool = True, keep: bool = True) -> None:
        """Run a loaded block on all batches, from the outputs of the block before.

        ``BlockForward`` runs the model's own forward up to the end of the block. It passes the earlier blocks over and
        calls ``on_skipped`` for each of them. Observers ignore calls (``session.ignore_calls``) until the model has
        passed over the block directly before this one. So they see what is between the two blocks, and this block; in
        the first run of all also what is before the first block. Each batch runs once for every block: its number tells
        the observers which batch it is (``number_batch``), so that they do not count it again.

        Args:
            block: its number; ``len(blocks)``: the modules after the last block.
            observe: whether the session observes it.
            keep: whether its outputs replace :attr:`outputs`.

        Raises:
            CalibrationError: the model cannot be run block by block.
        """

        def on_skipped(index: int) -> None:
            """Called for each block that is passed over: observe only what follows the block before this one."""
            is_block_before = index == block - 1
            self.session.ignore_calls(not (observe and is_block_before))

        for index, batch in enumerate(self.batches):
            # Modules before the first block run again with each block, and are observed once.
            self.session.ignore_calls(not (observe and self._no_block_was_observed))
            self.session.observation.calls.number_batch(index)
            call_model = partial(self._call, batch)
            output = self._forward.run(block, self.outputs[index], call_model, on_skipped=on_skipped)
            if keep and block < len(self.blocks):
                self.outputs[index] = copied(output, torch.device("cpu"))
        self.session.ignore_calls(False)
        self.session.observation.calls.number_batch(None)
        if observe:
            self._no_block_was_observed = False

    def _call(self, batch: Any) -> Any:
        """Call the model on a copy of the batch on the device."""
        return call_on(self.session.model, copied(batch, self._device))
