"""Run eagerly while hooks or forwards are replaced: a graph that was compiled before does not see them, in silence.

torch has one stance for the whole process, and its own block restores the stance that it found. Of two blocks that do
not end in reverse order (a session that is detached inside ``quantized``), the last to end would restore the other's.
So all blocks share one object beside torch's stance: the first block sets the stance, the last restores it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch


class EagerBlocks:
    """Blocks that let no compiled graph run. They may end in any order, and run in several threads."""

    def __init__(self) -> None:
        self.running = 0  # blocks that have begun and not ended
        self._stance = ExitStack()
        self._counting = Lock()

    @contextmanager
    def run_eagerly(self) -> Iterator[None]:
        """Let no compiled graph run inside the ``with`` block."""
        with self._counting:
            if not self.running:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self.running += 1
        try:
            yield
        finally:
            with self._counting:
                self.running -= 1
                if not self.running:
                    self._stance.close()


#: the blocks around torch's one stance
eager_blocks = EagerBlocks()
run_eagerly = eager_blocks.run_eagerly
