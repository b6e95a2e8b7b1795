"""The blocks of a model, and its own forward, run one block at a time.

A block reads more than the output of the block before it: masks, position embeddings, tensors that the model adds
between blocks. So the model's own forward runs again for each block, up to that block. Earlier blocks compute nothing;
the block before the running one returns the output that was kept for this batch. A model whose blocks pass on anything
else (shared keys) is refused. Used from files to files (``streaming/``) and in memory (:mod:`.stepwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_obs.errors import CalibrationError
from lightning_obs.model.mark import set_attributes

_IN_MEMORY = "calibrate the whole model, with a device_map that offloads it (device_map='auto')."


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Find the decoder's list of blocks: its only ``ModuleList`` of modules that transformers never splits.

    Args:
        model: a ``PreTrainedModel``, which may have a vision tower with blocks of its own beside the decoder.

    Returns:
        The name of the list in the model, and the list.

    Raises:
        CalibrationError: the decoder has no such list, or several.
    """
    block_classes: set[str] = set()
    for module in model.modules():
        block_classes.update(getattr(module, "_no_split_modules", None) or ())
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder_modules = set(decoder.modules())
    lists = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and module in decoder_modules and _holds_only(module, block_classes):
            lists.append((name, module))
    if len(lists) != 1:
        class_names = ", ".join(sorted(block_classes)) or "modules in _no_split_modules"
        raise CalibrationError(
            "the blocks of the model were not found",
            where=[name for name, _ in lists] or [type(model).__name__],
            got=f"{len(lists)} lists of {class_names}",
            expected="one ModuleList of decoder layers (model.model.layers)",
            remedy=_IN_MEMORY,
        )
    return lists[0]


def _holds_only(modules: nn.ModuleList, class_names: set[str]) -> bool:
    """Whether a list is not empty, and each of its modules is of one of the named classes."""
    held_classes = {type(module).__name__ for module in modules}
    return len(modules) > 0 and held_classes <= class_names


class RunEnded(BaseException):
    """Ends the model's forward where no more of it is needed. No ``except Exception`` of a model catches it."""


class BlockForward:
    """The forward of a model, run up to one block, from the output of the block before.

    Args:
        model: calls its blocks one after the other.
        blocks: in order; empty: the model runs as a whole.
        device: where the model runs; None: outputs are kept where they are.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device | None = None) -> None:
        self.blocks = blocks
        self._model = model
        self._device = device
        # Of the forward that runs now:
        self._running_block: int | None = None  # None: no run, and blocks are called as ever
        self._calls = 0  # how many blocks it has called
        self._output: Any = None  # before the block has run, the output of the block before; then its own
        self._on_skipped: Callable[[int], None] | None = None

    def attach(self, stack: ExitStack) -> None:
        """Replace the blocks' forwards until ``stack`` closes; called once, before the first :meth:`run`."""
        for index, block in enumerate(self.blocks):
            replaced_forward = partial(self._on_block_call, index, block.forward)
            stack.callback(set_attributes(block, forward=replaced_forward))

    def run(
        self,
        block: int,
        earlier_output: Any,
        call_model: Callable[[], Any],
        *,
        on_skipped: Callable[[int], None] | None = None,
    ) -> Any:
        """Run a block on one batch, and the modules between it and the block before.

        Args:
            block: its number; ``len(blocks)``: the modules after the last block.
            earlier_output: of the block before, for this batch.
            call_model: calls the model on this batch. A hook that it meets may raise :class:`RunEnded`.
            on_skipped: called with the number of each earlier block when the model calls it.

        Returns:
            The output of the block, or of the model after the last block; None if a hook ended the run before.

        Raises:
            CalibrationError: the model cannot be run block by block.
        """
        self._running_block = block
        self._calls = 0
        self._output = earlier_output
        self._on_skipped = on_skipped
        output: Any = None
        is_ended = True
        try:
            with suppress(RunEnded):
                output = call_model()
                is_ended = False
        except (CalibrationError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if block == 0:  # the batch is at fault, not the order of blocks
                raise
            got = f"block {block} fails alone: {type(error).__name__}: {error}"
            raise self._refusal(got) from error
        finally:
            self._running_block = None
        if not is_ended and (block < len(self.blocks) or self._calls < len(self.blocks)):
            raise self._refusal(f"{self._calls} of {len(self.blocks)} blocks were called")
        if self._calls > block:
            output = self._output
        return output

    def _on_block_call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run in place of a block's ``forward`` when the model calls the block.

        Args:
            index: the block's number.
            forward: its own forward, called only in the running block.
            args, kwargs: of the model's call.

        Returns:
            The kept output of the block before the running one; for earlier blocks, tensors without data.

        Raises:
            RunEnded: the running block has run; its output is kept.
        """
        if self._running_block is None:
            return forward(*args, **kwargs)
        if index != self._calls:
            raise self._refusal(f"block {index} was called after {self._calls} others")
        self._calls += 1
        if index == self._running_block:
            self._output = None  # where a hook ends the run inside the block, it has none
            self._output = forward(*args, **kwargs)
            raise RunEnded
        if self._on_skipped is not None:
            self._on_skipped(index)
        if index == self._running_block - 1:
            return copied(self._output, self._device)
        return self._unread(self._output)

    def _unread(self, output: Any) -> Any:
        """The output of a block that is not computed, and that no block will read.

        Args:
            output: of another block, for the shapes and dtypes.

        Returns:
            The same tree with tensors that take no memory; writing to them is an error.
        """

        def expanded(tensor: torch.Tensor) -> torch.Tensor:
            zero = torch.zeros((), dtype=tensor.dtype, device=self._device or tensor.device)
            return zero.expand(tensor.shape)

        return tree_map_only(torch.Tensor, expanded, output)

    def _refusal(self, got: str) -> CalibrationError:
        """The error to raise for a model that cannot be run block by block; ``got`` is what happened."""
        return CalibrationError(
            "the model cannot be run block by block",
            where=[type(self._model).__name__],
            got=got,
            expected="blocks that are called one after the other, and read nothing of each other but the output",
            remedy=_IN_MEMORY,
        )


def copied(tree: Any, device: torch.device | None) -> Any:
    """A copy of a tree of tensors on a device, or where they are: a block may write to its arguments."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device or tensor.device, copy=True)

    return tree_map_only(torch.Tensor, copy, tree)
