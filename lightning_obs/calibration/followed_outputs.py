"""Outputs that are quantized one module later: a convolution's behind its batch norm and its ReLU.

An engine folds the batch norm into the convolution, and clips at the end of the range in place of the ReLU, so the
integers that leave its kernel are those of the last module. Which module reads which output is not known before the
model runs. Both are observed, the hooks note that a module was given the very tensor that another has returned, and
finalize then drops the output that was read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class FollowedOutputs:
    """The planned outputs that a follower reads, as the hooks of one rank saw it.

    A follower is a planned module that only rescales or clips its input (``schemes/planned_modules.py``). The hooks of
    outputs call :meth:`leave`, those of followers :meth:`enter`; finalize reads ``names``.

    Attributes:
        names: of the modules whose output a follower reads.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        #: as long as an output is alive, the name of its module and a copy of its first sample
        self._returned = WeakTensorKeyDictionary()
        #: names of the modules whose outputs no follower reads as they are
        self._changed: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the names only: other tensors run through it."""
        return {"names": set(self.names)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.names = state["names"]

    def leave(self, name: str, output: torch.Tensor) -> None:
        """A planned module returns its output."""
        if name in self.names or name in self._changed:
            return
        self._returned[output] = name, output[:1].clone()

    def enter(self, value: torch.Tensor) -> None:
        """A follower is given a value: the output of a planned module, if nothing was added to it in place."""
        name, first_sample = self._returned.pop(value, (None, None))
        if name is None:
            return
        is_unchanged = torch.equal(value[:1], first_sample)
        names = self.names if is_unchanged else self._changed
        names.add(name)
