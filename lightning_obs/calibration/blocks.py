"""Run a model's own forward one block at a time.

A block reads more than the output of the block before it: masks, position embeddings, tensors that the model adds
between blocks. So the model's own forward runs again for each block, up to the end of that block. During such a run,
earlier blocks compute nothing, and the block directly before the running block returns the output that was kept for
this batch. A model whose blocks exchange anything but this output (shared keys) is refused.

Used by the calibration from files to files (``streaming/``), which has one block in memory at a time, and by the
calibration on quantized inputs (:mod:`.stepwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_obs.errors import CalibrationError
from lightning_obs.model.mark import set_attributes

#: the remedy in errors about models that cannot be run block by block
_IN_MEMORY = "calibrate the whole model, with a device_map that offloads it (device_map='auto')."


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, which it calls one after the other. Without blocks, the model runs as a whole.

    Made by :func:`known_blocks` for a model in memory, and by ``calibrate_layerwise`` for one in files;
    :class:`.StepwiseCalibration` runs the model by them.

    Attributes:
        name: the name of the list of blocks in the model.
        modules: the blocks in order.
    """

    name: str = ""
    modules: Sequence[nn.Module] = ()

    def holds(self, index: int, name: str) -> bool:
        """Whether the module ``name`` of the model is inside the block ``index``; the block itself is not.

        :class:`.StepwiseCalibration` asks this when a block is finished, to free the quantized weights inside. A block
        that is itself a planned module (in a Sequential of Linears) keeps its quantized weight until the end, which
        costs memory only.
        """
        return name.startswith(f"{self.name}.{index}.")


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Find the decoder's list of blocks: its only ``ModuleList`` of modules that transformers never splits.

    Called once before a calibration block by block from files (``streaming/layerwise.py``), and by
    :func:`known_blocks` for a model in memory, which looks for another list if this raises.

    Args:
        model: a ``PreTrainedModel``. Blocks outside its decoder (a vision tower's) are not searched.

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
    """Whether a list of modules is not empty, and the class of each module is among ``class_names``."""
    held_classes = {type(module).__name__ for module in modules}
    return len(modules) > 0 and held_classes <= class_names


def known_blocks(model: nn.Module) -> Blocks:
    """Return the decoder's blocks if transformers knows them, else the longest list of modules of one class.

    Called before the data to fit a recipe to the model (``fitted_recipe.py``), and at their end, before the kept calls
    run block by block (``quantized_inputs.py``).

    Args:
        model: in memory, without wrappers.

    Returns:
        The blocks of a ``ModuleList`` or ``Sequential`` of two or more modules, all with parameters; no blocks if the
        model has no such list.
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


class RunEnded(BaseException):
    """Raised to end a model's forward early, once the rest of it is not needed; :meth:`BlockForward.run` catches it.

    A block's replaced forward raises it, or a hook of :mod:`.stepwise`. It is no ``Exception``, so that an
    ``except Exception`` in the model's code does not catch it.
    """


class BlockForward:
    """Runs a model's forward up to the end of one block, from the kept output of the block before.

    ``BlockRunner`` (``streaming/blocks.py``) and :class:`.StepwiseCalibration` have one each; :mod:`.quantized_inputs`
    makes one to try whether the model can be run block by block.

    Args:
        model: a model that calls its blocks one after the other.
        blocks: the blocks in order; empty: the model runs as a whole.
        device: where the model runs; None: kept outputs are used on the device on which they are.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device | None = None) -> None:
        self.blocks = blocks
        self._model = model
        self._device = device
        # The state of the present run:
        self._running_block: int | None = None  # None: nothing runs, and the blocks' own forwards are called
        self._calls = 0  # how many blocks the model has called
        self._output: Any = None  # until the block has run, the output of the block before it; then the block's output
        self._on_skipped: Callable[[int], None] | None = None

    def attach(self, stack: ExitStack) -> None:
        """Replace the blocks' forwards until ``stack`` closes; the owner calls this once, before the first run."""
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
        """Run one batch through a block, and through the modules between this block and the one before.

        The owner calls this for each block in order, with every batch.

        Args:
            block: the number of the block; ``len(blocks)``: run the modules after the last block.
            earlier_output: the output of the block before, for this batch; not used for block 0.
            call_model: calls the model on this batch. A hook in the model may raise :class:`RunEnded`.
            on_skipped: called with the number of each earlier block at the time when the model calls that block.

        Returns:
            The output of the block, or of the model for ``len(blocks)``; None if a hook ended the run before that.

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
            if block == 0:  # nothing was skipped, so the batch is at fault
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
        """Answer the model's call of a block; this stands in the place of the block's ``forward``.

        Args:
            index: the number of the called block.
            forward: the block's own forward.
            args, kwargs: of the model's call.

        Returns:
            For the block directly before the running block, a copy of its kept output; for earlier blocks, tensors
            without data. Outside of :meth:`run`, what ``forward`` returns.

        Raises:
            RunEnded: the called block is the running one, and its own forward has run; ``_output`` holds the output.
        """
        if self._running_block is None:
            return forward(*args, **kwargs)
        if index != self._calls:
            raise self._refusal(f"block {index} was called after {self._calls} others")
        self._calls += 1
        if index == self._running_block:
            self._output = None  # stays None if a hook ends the run inside the block
            self._output = forward(*args, **kwargs)
            raise RunEnded
        if self._on_skipped is not None:
            self._on_skipped(index)
        if index == self._running_block - 1:
            return copied(self._output, self._device)
        return self._unread(self._output)

    def _unread(self, output: Any) -> Any:
        """A stand-in for the output of a block that is skipped, and whose output no block will compute with.

        Args:
            output: the output of another block, which gives the structure, shapes and dtypes.

        Returns:
            The same tree, with expanded zeros in place of the tensors: they take no memory, and writing to them is an
            error.
        """

        def expanded(tensor: torch.Tensor) -> torch.Tensor:
            zero = torch.zeros((), dtype=tensor.dtype, device=self._device or tensor.device)
            return zero.expand(tensor.shape)

        return tree_map_only(torch.Tensor, expanded, output)

    def _refusal(self, got: str) -> CalibrationError:
        """The error to raise for a model that cannot be run block by block; ``got`` says what happened instead."""
        return CalibrationError(
            "the model cannot be run block by block",
            where=[type(self._model).__name__],
            got=got,
            expected="blocks that are called one after the other, and read only the output of the block before",
            remedy=_IN_MEMORY,
        )


def copied(tree: Any, device: torch.device | None) -> Any:
    """Copy all tensors of a nested structure, to ``device`` or (None) on the device of each.

    Called before a kept input or output is given to a model again, because a block may write to its arguments in place;
    and by ``streaming/blocks.py`` and :mod:`.stepwise`, to keep a block's output on the CPU.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device or tensor.device, copy=True)

    return tree_map_only(torch.Tensor, copy, tree)
