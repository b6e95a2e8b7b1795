"""Run eagerly while hooks or forwards are replaced: a graph that was compiled before does not see them, in silence.

torch's own block restores the stance that it found. Of two blocks that do not end in reverse order (a session that is
detached inside ``quantized``), the last to end would restore the other's. Here the first sets and the last restores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_open = 0
_stance = ExitStack()


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Let no compiled graph run inside the ``with`` block. Several may begin and end in any order.

    >>> one, other = run_eagerly(), run_eagerly()
    >>> for block in (one, other):
    ...     block.__enter__()
    >>> for block in (one, other):
    ...     _ = block.__exit__(None, None, None)
    >>> torch._dynamo.eval_frame._stance.stance
    'default'
    """
    global _open
    if not _open:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _open += 1
    try:
        yield
    finally:
        _open -= 1
        if not _open:
            _stance.close()
