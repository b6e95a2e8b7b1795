"""The blocks of a decoder, and its own forward, run one block at a time.

A block reads more than the output of the block before it: masks, position embeddings, tensors that the model adds
between blocks. So the model's own forward runs again for each block, up to that block. Earlier blocks compute nothing;
the block before the running one returns the output that was kept for this batch. A model whose blocks pass on anything
else (shared keys) is refused. ``layerwise.py`` loads the blocks, runs them by a :class:`BlockRunner`, and frees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import call_on
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


class _BlockDone(BaseException):
    """Ends the model's forward after the block that was to run. No ``except Exception`` of a model catches it."""


class BlockRunner:
    """Runs the model of a session on all batches, up to one block at a time, while the session observes it.

    Modules before the first block are observed in the first run, modules between two blocks with the second.

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
        self._no_block_was_observed = True
        # Of the forward that runs now:
        self._running_block = 0
        self._is_observing = True
        self._calls = 0  # how many blocks it has called
        self._output: Any = None  # before the block has run, the kept output of the block before; then its own

    def attach(self, stack: ExitStack) -> None:
        """Replace the blocks' forwards until ``stack`` closes; called once, before the first :meth:`run`."""
        for index, block in enumerate(self.blocks):
            replaced_forward = partial(self._on_block_call, index, block.forward)
            stack.callback(set_attributes(block, forward=replaced_forward))

    def run(self, block: int, observe: bool = True, keep: bool = True) -> None:
        """Run a loaded block on all batches, from the outputs of the block before.

        Args:
            block: its number; ``len(blocks)``: the modules after the last block.
            observe: whether the session observes it.
            keep: whether its outputs replace :attr:`outputs`.

        Raises:
            CalibrationError: the model cannot be run block by block.
        """
        self._running_block = block
        self._is_observing = observe
        for index, batch in enumerate(self.batches):
            self._output = self.outputs[index]
            self._calls = 0
            # Modules before the first block run again with each block, and are observed once.
            self.session.ignore_calls(not (observe and self._no_block_was_observed))
            self._run_model(batch)
            if self._calls != min(block + 1, len(self.blocks)):
                raise self._refusal(f"{self._calls} of {len(self.blocks)} blocks were called")
            if keep and block < len(self.blocks):
                self.outputs[index] = _copied(self._output, torch.device("cpu"))
            self._output = None
        self.session.ignore_calls(False)
        if observe:
            self._no_block_was_observed = False

    def _run_model(self, batch: Any) -> None:
        """Call the model; its forward ends at the running block."""
        try:
            with suppress(_BlockDone):
                call_on(self.session.model, _copied(batch, self._device))
        except (CalibrationError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._running_block == 0:  # the batch is at fault, not the order of blocks
                raise
            got = f"block {self._running_block} fails alone: {type(error).__name__}: {error}"
            raise self._refusal(got) from error

    def _on_block_call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run in place of a block's ``forward`` when the model calls the block.

        Args:
            index: the block's number.
            forward: its own forward, called only in the running block.
            args, kwargs: of the model's call.

        Returns:
            The kept output of the block before the running one; for earlier blocks, tensors without data.

        Raises:
            _BlockDone: the running block has run; its output is kept.
        """
        if index != self._calls:
            raise self._refusal(f"block {index} was called after {self._calls} others")
        self._calls += 1
        if index == self._running_block:
            self._output = forward(*args, **kwargs)
            raise _BlockDone
        is_block_before = index == self._running_block - 1
        self.session.ignore_calls(not (self._is_observing and is_block_before))
        if is_block_before:
            return _copied(self._output, self._device)
        return self._unread(self._output)

    def _unread(self, output: Any) -> Any:
        """The output of a block that is not computed, and that no block will read.

        Args:
            output: of another block, for the shapes and dtypes.

        Returns:
            The same tree with tensors that take no memory; writing to them is an error.
        """
        zero = torch.zeros((), device=self._device)

        def expanded(tensor: torch.Tensor) -> torch.Tensor:
            return zero.to(tensor.dtype).expand(tensor.shape)

        return tree_map_only(torch.Tensor, expanded, output)

    def _refusal(self, got: str) -> CalibrationError:
        """The error to raise for a model that cannot be run block by block; ``got`` is what happened."""
        return CalibrationError(
            "the model cannot be run block by block",
            where=[type(self.session.model).__name__],
            got=got,
            expected="blocks that are called one after the other, and read nothing of each other but the output",
            remedy=_IN_MEMORY,
        )


def _copied(tree: Any, device: torch.device) -> Any:
    """A copy of a tree of tensors on a device: a block may write to its arguments."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True)

    return tree_map_only(torch.Tensor, copied, tree)
