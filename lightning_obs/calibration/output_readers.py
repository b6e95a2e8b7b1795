"""The record of who reads which quantized output, a module or a function; :mod:`.quantized_outputs` fills and reads it.

An engine folds a batch norm into the convolution before it, and clips at the end of the range in place of a ReLU, so
the integers that leave its kernel are those of the last module: an output that such a follower reads is not quantized.
And an input that is a quantized output already keeps that output's range: quantizing it once more, with a range of its
own, would only lose.

An output that nothing but ``F.relu`` reads needs no levels below zero: its range begins there, and an engine clips at
the end of the range in place of the function.

A sum of quantized outputs, rectified or not, is no module's output, unless a block returns it, as residual blocks do:
then the block's output is quantized, and an engine adds integers.

A module may normalize and activate, as timm's do: it calls ``F.batch_norm``, and then modules of its own. The first of
these follows the convolution, through the function.

A module reads an output if it is given the very tensor that the other returned, and nothing was added to it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

#: operations whose results are the values above zero of their input, and zeros
_RECTIFIERS = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
#: F.batch_norm: under inference mode torch shows it whole
_NORMS = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class _Value(NamedTuple):
    """What a tensor holds, as far as it is known: a quantized output, or a sum of them."""

    name: str | None  # of the module that returned it; None: a sum
    is_rectified: bool = False  # whether a function has made its negative values zero
    is_normalized: bool = False  # whether F.batch_norm has read it: no more the values of the output
    first_sample: torch.Tensor = torch.empty(0)  # a copy


class OutputReaders:
    """The readers of quantized outputs, as one rank has seen them.

    Hooks of planned outputs call :meth:`leave`, those of planned inputs and of followers :meth:`enter`, those of
    transparent modules :meth:`pass_on`, those of blocks :meth:`judge_block`, and operations of torch :meth:`compute`
    (:class:`.WatchedFunctions`). Finalize reads the attributes.

    Attributes:
        followed: names of the modules whose output a follower reads, or an inner module has quantized.
        sources: by name of a module whose input is quantized, the name of the module whose output it reads; None: it
            reads other tensors, too.
        rectified: by name of a module whose output a function has read, whether ``F.relu`` alone has.
        sums: by name of a block, whether all its outputs are sums of quantized outputs.
    """

    def __init__(self) -> None:
        self.followed: set[str] = set()
        self.sources: dict[str, str | None] = {}
        self.rectified: dict[str, bool] = {}
        self.sums: dict[str, bool] = {}
        #: the values that are alive
        self._values = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no tensors: others run through it."""
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.followed, self.sources, self.rectified, self.sums = set(), {}, {}, {}
        self._values = WeakTensorKeyDictionary()
        self.add([state])

    def state_dict(self) -> dict[str, Any]:
        """What was seen, for other ranks and for a checkpoint."""
        return {
            "followed": sorted(self.followed),
            "sources": dict(self.sources),
            "rectified": dict(self.rectified),
            "sums": dict(self.sums),
        }

    def add(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add what others have seen: all ranks, or a run that is resumed.

        Args:
            states: of :meth:`state_dict`.
        """
        for state in states:
            self.followed.update(state["followed"])
            for name, source in state["sources"].items():
                self._add_source(name, source)
            for name, is_rectified in state["rectified"].items():
                self._add_function(name, is_rectified)
            for name, is_sum in state["sums"].items():
                self.sums[name] = is_sum and self.sums.get(name, True)

    @property
    def begin_at_zero(self) -> set[str]:
        """Names of the modules whose output nothing but ``F.relu`` reads."""
        return {name for name, is_rectified in self.rectified.items() if is_rectified}

    def leave(self, name: str, output: torch.Tensor) -> None:
        """A module returns an output that is to be quantized, unless a module inside of it has returned it before."""
        known = self._known(output)
        if known is not None and not known.is_normalized and (known.name or "").startswith(f"{name}."):
            self.followed.add(name)
        else:
            self.keep(_Value(name), output)

    def judge_block(self, name: str, output: Any) -> None:
        """A module of modules returns an output, which is to be quantized if it is a sum."""
        value = self._known(output) if isinstance(output, torch.Tensor) else None
        is_sum = value is not None and value.name is None
        self.sums[name] = is_sum and self.sums.get(name, True)

    def pass_on(self, value: torch.Tensor, output: torch.Tensor) -> None:
        """A transparent module has been given a value, and returns an output."""
        known = self._known(value)
        if known is not None:
            self.keep(known, output)

    def enter(self, name: str, value: torch.Tensor, is_follower: bool) -> None:
        """A module is given a value.

        Args:
            name: of the module.
            value: its input.
            is_follower: whether an engine makes it a part of the module that it reads from.
        """
        known = self._known(value)
        source = None if known is None else known.name
        if not is_follower:
            self._add_source(name, None if known is not None and known.is_normalized else source)
        elif source is not None:
            self.followed.add(source)

    def compute(self, operation: Any, tensors: Iterable[torch.Tensor]) -> _Value | None:
        """An operation is about to read tensors.

        Args:
            operation: of torch, an overload; None: the tensors leave the part of the model that is watched.
            tensors: its arguments.

        Returns:
            What its result holds, to be given to :meth:`keep` with it; None: it is not known.
        """
        values = [self._known(tensor) for tensor in tensors]
        is_rectifier = operation in _RECTIFIERS
        for value in values:
            if value is not None and value.name is not None and not value.is_rectified:
                self._add_function(value.name, is_rectifier)
        if operation in _NORMS:
            normalized = values[0]
            is_output = normalized is not None and normalized.name is not None and not normalized.is_rectified
            return normalized._replace(is_normalized=True) if normalized is not None and is_output else None
        if any(value is None or value.is_normalized for value in values):
            return None
        if is_rectifier:
            [value] = values
            return value and value._replace(is_rectified=True)
        return _Value(None) if operation in _SUMS and len(values) == 2 else None

    def keep(self, value: _Value, tensor: torch.Tensor) -> None:
        """Note what a tensor holds now."""
        self._values[tensor] = value._replace(first_sample=tensor[:1].clone())

    def _known(self, tensor: torch.Tensor) -> _Value | None:
        """The value that a tensor holds, if it has not changed since."""
        value: _Value | None = self._values.get(tensor)
        if value is None or not torch.equal(tensor[:1], value.first_sample):
            return None
        return value

    def _add_source(self, name: str, source: str | None) -> None:
        """Note that a module reads an output; None: another tensor."""
        if self.sources.setdefault(name, source) != source:
            self.sources[name] = None

    def _add_function(self, name: str, is_rectifier: bool) -> None:
        """Note that a function reads an output."""
        self.rectified[name] = is_rectifier and self.rectified.get(name, True)
