"""The blocks of a decoder, and its own forward, run one block at a time.

A block reads more than the output of the block before: masks, position embeddings, tensors that the model adds between
blocks. So for each block the model's own forward runs again, up to that block. Earlier blocks compute nothing; the one
before returns its kept output of this batch. A model whose blocks pass on anything else (shared keys) is refused.
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
from lightning_obs.model.additions import set_attributes


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder's blocks: the only ``ModuleList`` of modules that transformers never splits.

    Without exactly one, a CalibrationError.
    """
    whole = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and whole.issuperset(type(block).__name__ for block in module)
        and any(module is inner for inner in decoder.modules())
    ]
    if len(found) != 1:
        raise CalibrationError(
            "the blocks of the model were not found",
            where=[name for name, _ in found] or [type(model).__name__],
            got=f"{len(found)} lists of {', '.join(sorted(whole)) or 'modules in _no_split_modules'}",
            expected="one ModuleList of decoder layers (model.model.layers)",
            remedy="calibrate the whole model, with a device_map that offloads it (device_map='auto').",
        )
    return found[0]


class _Done(BaseException):
    """Ends a forward; not an exception that a model would handle."""


class Relay:
    """Runs the forward of ``session.model`` on all batches up to one of its blocks, while the session observes it.

    Modules before the first block are observed in the first run, modules between two blocks with the second.
    """

    def __init__(
        self, session: CalibrationSession, blocks: Sequence[nn.Module], batches: Sequence[Any], device: torch.device
    ) -> None:
        self.session, self.blocks, self.batches, self._device = session, blocks, batches, device
        #: of the last block that was run: its output for each batch, on the CPU
        self.outputs: list[Any] = [None] * len(batches)
        self._is_first, self._observes, self._block, self._called = True, True, 0, 0
        self._output: Any = None

    def attach(self, stack: ExitStack) -> None:
        """Take the blocks' calls; ``stack`` gives them back."""
        for index, block in enumerate(self.blocks):
            stack.callback(set_attributes(block, forward=partial(self._call, index, block.forward)))

    def run(self, block: int, observe: bool = True, keep: bool = True) -> None:
        """Run a loaded block on all batches, from the outputs of the block before; past the last, the modules after it.

        ``observe``: let the session observe. ``keep``: keep the outputs, in place of the earlier ones.
        """
        self._block, self._observes = block, observe
        for index, batch in enumerate(self.batches):
            self._output, self._called = self.outputs[index], 0
            self.session.is_paused = not (observe and self._is_first)
            try:
                with suppress(_Done):
                    call_on(self.session.model, _moved(batch, self._device))
            except (CalibrationError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if block == 0:  # a fault of the batch is the caller's
                    raise
                raise self._refused(f"block {block} fails alone", error) from error
            if self._called != min(block + 1, len(self.blocks)):
                raise self._refused(f"{self._called} of {len(self.blocks)} blocks were called")
            if keep and block < len(self.blocks):
                self.outputs[index] = _moved(self._output, torch.device("cpu"))
            self._output = None
        self.session.is_paused, self._is_first = False, self._is_first and not observe
        self.session.read.forget()  # it holds the last Hessian twice

    def _call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index != self._called:
            raise self._refused(f"block {index} was called after {self._called} others")
        self._called += 1
        if index == self._block:
            self._output = forward(*args, **kwargs)
            raise _Done
        is_last = index == self._block - 1
        self.session.is_paused = not (self._observes and is_last)
        if is_last:
            return _moved(self._output, self._device)
        # Nobody reads the outputs of still earlier blocks; writing to an expanded tensor is an error.
        nothing = torch.zeros((), device=self._device)
        return tree_map_only(torch.Tensor, lambda x: nothing.to(x.dtype).expand(x.shape), self._output)

    def _refused(self, got: str, error: Exception | None = None) -> CalibrationError:
        return CalibrationError(
            "the model cannot be run block by block",
            where=[type(self.session.model).__name__],
            got=got if error is None else f"{got}: {type(error).__name__}: {error}",
            expected="blocks that are called one after the other, and read nothing of each other but the output",
            remedy="calibrate the whole model, with a device_map that offloads it (device_map='auto').",
        )


def _moved(tree: Any, device: torch.device) -> Any:
    """Copies of all tensors on a device: a block may write to its arguments."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().to(device, copy=True), tree)
