"""Which module reads which quantized output: seen while the first batch runs, used when ranges are computed.

An engine folds a batch norm into the convolution before it, and clips at the end of the range in place of a ReLU, so
the integers that leave its kernel are those of the last module: an output that such a follower reads is not quantized.
And an input that is a quantized output already keeps that output's range: quantizing it once more, with a range of its
own, would only lose.

A module reads an output if it is given the very tensor that the other returned, and nothing was added to it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

#: modules whose output has values of their input alone
_TRANSPARENT = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.Flatten,
    nn.Unflatten,
)


def is_transparent(module: nn.Module) -> bool:
    """Whether all values of the module's output are values of its input: pooling by the maximum, another shape."""
    return type(module) in _TRANSPARENT


class OutputReaders:
    """The readers of quantized outputs, as the hooks of one rank have seen them.

    Hooks of planned outputs call :meth:`leave`, those of planned inputs and of followers :meth:`enter`, those of
    transparent modules :meth:`pass_on`. Finalize reads the attributes.

    Attributes:
        followed: names of the modules whose output a follower reads.
        sources: by name of a module whose input is quantized, the name of the module whose output it reads; None: it
            reads other tensors, too.
    """

    def __init__(self) -> None:
        self.followed: set[str] = set()
        self.sources: dict[str, str | None] = {}
        #: as long as an output is alive, the name of its module and a copy of its first sample
        self._returned = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no tensors: others run through it."""
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.followed, self.sources, self._returned = set(), {}, WeakTensorKeyDictionary()
        self.add([state])

    def state_dict(self) -> dict[str, Any]:
        """What was seen, for other ranks and for a checkpoint."""
        return {"followed": sorted(self.followed), "sources": dict(self.sources)}

    def add(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add what others have seen: all ranks, or a run that is resumed.

        Args:
            states: of :meth:`state_dict`.
        """
        for state in states:
            self.followed.update(state["followed"])
            for name, source in state["sources"].items():
                self._add_source(name, source)

    def leave(self, name: str, output: torch.Tensor) -> None:
        """A module returns an output that is to be quantized."""
        self._returned[output] = name, output[:1].clone()

    def pass_on(self, value: torch.Tensor, output: torch.Tensor) -> None:
        """A transparent module has been given a value, and returns an output."""
        name = self._source_of(value)
        if name is not None:
            self.leave(name, output)

    def enter(self, name: str, value: torch.Tensor, is_follower: bool) -> None:
        """A module is given a value.

        Args:
            name: of the module.
            value: its input.
            is_follower: whether an engine makes it a part of the module that it reads from.
        """
        source = self._source_of(value)
        if not is_follower:
            self._add_source(name, source)
        elif source is not None:
            self.followed.add(source)

    def _source_of(self, value: torch.Tensor) -> str | None:
        """The name of the module that returned the value, if it has not changed since."""
        name, first_sample = self._returned.get(value, (None, None))
        if name is None or not torch.equal(value[:1], first_sample):
            return None
        return str(name)

    def _add_source(self, name: str, source: str | None) -> None:
        """Note that a module reads an output; None: another tensor."""
        if self.sources.setdefault(name, source) != source:
            self.sources[name] = None
