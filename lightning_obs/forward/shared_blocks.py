"""Reference-counted context managers, one per object: entered by the first user, exited by the last.

torch has one compile stance for the whole process, an attention module one set of compressed-tensors' hooks. If two
blocks around one of these did not end in reverse order (a session that is detached inside ``quantized``), the second to
end would restore the state that the first had set. So all users share one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import RLock
from types import ModuleType
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

#: an object that users share a block around; torch itself is one
_Shared: TypeAlias = nn.Module | ModuleType


@dataclass
class _Block:
    """An entered context manager, which ``stack`` exits, and how many users are in it."""

    stack: ExitStack = field(default_factory=ExitStack)
    users: int = 0


class SharedBlocks:
    """Shared context managers ("blocks") of one kind, at most one for each object. Threads may share them."""

    def __init__(self) -> None:
        #: objects that a block is open around
        self.open: WeakKeyDictionary[_Shared, _Block] = WeakKeyDictionary()
        self._counting = RLock()  # reentrant: the garbage collector may exit a block while another is entered

    @contextmanager
    def around(self, shared: _Shared, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """For a ``with`` block: enter the shared block around an object, or stay in it if others are in it already.

        The last user to leave exits the shared block.

        Args:
            shared: the object.
            make: makes the context manager; called for the first user.
        """
        with self._counting:
            block = self.open.get(shared)
            if block is None:
                block = _Block()
                block.stack.enter_context(make())
                self.open[shared] = block
            block.users += 1
        try:
            yield
        finally:
            with self._counting:
                block.users -= 1
                if block.users == 0:
                    del self.open[shared]
                    block.stack.close()


#: blocks around torch in which no compiled graph runs
eager_blocks = SharedBlocks()


def run_eagerly() -> AbstractContextManager[None]:
    """For a ``with`` block in which no graph of torch.compile runs.

    A graph that was compiled before would not see the hooks and forwards that observing and quantizing put on modules,
    so both run the model in this block.
    """
    return eager_blocks.around(torch, lambda: torch.compiler.set_stance("force_eager"))
