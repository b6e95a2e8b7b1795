"""Blocks that several callers share: the first caller enters one, the last to leave exits it, in any order.

torch has one compile stance for the whole process, an attention module one set of compressed-tensors' hooks. Of two
blocks around either that do not end in reverse order (a session that is detached inside ``quantized``), the last to end
would restore what the other had set. So there is one block for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import RLock
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
from torch import nn


class SharedBlocks:
    """Blocks of one kind, one for each thing that it is around. They may be shared by threads."""

    def __init__(self) -> None:
        #: the object that a block is around -> (number of callers inside, the stack that the last of them closes)
        self.open: WeakKeyDictionary[nn.Module | ModuleType, tuple[int, ExitStack]] = WeakKeyDictionary()
        self._counting = RLock()  # the garbage collector may leave one while another is entered

    @contextmanager
    def around(self, thing: nn.Module | ModuleType, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Be in the block around a thing; the first one in makes it."""
        with self._counting:
            count, stack = self.open.get(thing) or (0, ExitStack())
            if not count:
                stack.enter_context(make())
            self.open[thing] = count + 1, stack
        try:
            yield
        finally:
            with self._counting:
                count, stack = self.open.pop(thing)
                if count > 1:
                    self.open[thing] = count - 1, stack
                else:
                    stack.close()


#: of torch, in which no compiled graph runs
eager_blocks = SharedBlocks()


def run_eagerly() -> AbstractContextManager[None]:
    """A block in which no graph runs that was compiled before: it would not see hooks and forwards put on since."""
    return eager_blocks.around(torch, lambda: torch.compiler.set_stance("force_eager"))
