"""Run a model so that every module is called: no compiled graph, and no fused layer of torch, runs in its place.

Otherwise hooks and forwards that are put on modules would not run (:func:`run_eagerly`, :func:`unfused`).

torch has one compile stance for the whole process, an attention module one set of compressed-tensors' hooks. If two
blocks around one of these did not end in reverse order (a session that is detached inside ``quantized``), the second to
end would restore the state that the first had set. So all users share one block (:class:`SharedBlocks`): entered by the
first user, exited by the last.

In evaluation, without gradients, ``nn.TransformerEncoderLayer`` computes in one fused operation. It reads the weights
of its Linears and does not call them, so that no hook sees their data and their quantized forward does not run; and
``nn.TransformerEncoder`` packs a padded batch into a nested tensor for it, which nothing else takes. Both ask an
attribute of their own first, which is switched off here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import RLock
from types import ModuleType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_obs.model.mark import set_attributes

#: an object around which users share a block: an attention module, a model, or torch itself
_Shared: TypeAlias = nn.Module | ModuleType


@dataclass
class _Block:
    """An entered context manager and its users; :meth:`SharedBlocks.around` makes it, and counts the users.

    Attributes:
        stack: exits the context manager when it is closed.
        users: how many users are in the block.
    """

    stack: ExitStack = field(default_factory=ExitStack)
    users: int = 0


class SharedBlocks:
    """Shared context managers ("blocks") of one kind, at most one for each object. Threads may share them.

    :mod:`.attention` has one instance for each change of attention, and this file one for torch (``eager_blocks``).
    """

    def __init__(self) -> None:
        #: objects that a block is open around
        self.open: WeakKeyDictionary[_Shared, _Block] = WeakKeyDictionary()
        self._counting = RLock()  # reentrant: the garbage collector may exit a block while another is entered

    @contextmanager
    def around(self, shared: _Shared, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """For a ``with`` block: enter the shared block around an object, or join it if others are in it already.

        The last user to leave exits the shared block. Entered by :func:`run_eagerly` and ``hooked_attention``.

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

    A graph that was compiled before would not see the hooks and forwards that observing and quantizing put on modules.
    So it is entered while observers are attached, in ``quantized``, in a sanity check, and where layer errors or
    divergences are measured.
    """
    return eager_blocks.around(torch, lambda: torch.compiler.set_stance("force_eager"))


# ---------------------------------------------------------------------- torch's fused encoder layers


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """For a ``with`` block in which encoder layers of a model call their modules, as in training.

    Entered while observers are attached, in ``quantized`` and a fit, where layer errors or divergences are measured,
    and while a model is traced. Copies of the model are not changed.
    """
    with ExitStack() as stack:
        for module in model.modules():
            attributes = _switched_off(module)
            if attributes:
                stack.callback(set_attributes(module, **attributes))
        yield


def unfuse_for_good(model: nn.Module) -> None:
    """Let encoder layers of a model, and of its copies, call their modules from now on.

    Called by ``load_checkpoint``, whose modules run quantized for good, and by ``linearize_attention``, which replaces
    modules.
    """
    for module in model.modules():
        vars(module).update(_switched_off(module))


def _switched_off(module: nn.Module) -> dict[str, Any]:
    """The attributes that keep torch's encoder (layer) from computing fused, by name; empty for any other module."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return {"activation_relu_or_gelu": 0}
    if isinstance(module, nn.TransformerEncoder):
        return {"use_nested_tensor": False}
    return {}
