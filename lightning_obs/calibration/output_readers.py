"""The record of which module or function reads which quantized output.

Hooks of :mod:`.quantized_outputs` fill the record in the first batch, and ``finalize`` reads it there. From the record
follows which outputs are quantized, and with which range:

- A *follower* is a module that an engine folds into the convolution or product before it: a batch norm, or a ReLU,
  which becomes the lower end of the output's range. The engine's kernel then returns the follower's output as integers.
  So the output that a follower reads is not quantized; the follower's own output is.
- An input that is already a quantized output takes that output's range. A second quantization with another range would
  only add error.
- An output that only ``F.relu`` reads needs no levels below zero: its range begins at zero, so the engine's clipping
  replaces the function.
- A sum of quantized outputs, rectified or not, is computed by no module. If a block returns the sum, as residual
  blocks do, the block's output is quantized, and the engine adds integers.
- timm's modules that normalize and activate call ``F.batch_norm`` and then submodules. The first of these submodules
  follows the convolution, although a function stands between the two.

A module reads an output if its input is the tensor object that the other module returned, unchanged since then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

#: ATen operations that set negative values to zero
_RECTIFIERS = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
#: the ATen operations of F.batch_norm: a dispatch mode sees the first one under inference mode, one of the others else
_NORMS = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class _Value(NamedTuple):
    """Describes the content of a tensor: a module's quantized output, or a sum of quantized outputs.

    :class:`OutputReaders` keeps one for each such tensor.
    """

    name: str | None  # of the module that returned the output; None: the tensor is a sum
    is_rectified: bool = False  # whether a function has set the negative values to zero
    is_normalized: bool = False  # whether the tensor is the result of F.batch_norm on the output
    first_sample: torch.Tensor = torch.empty(0)  # a copy of tensor[:1], which shows a change in place


class OutputReaders:
    """The readers of quantized outputs, as one rank has seen them.

    An observation makes one if its plan quantizes outputs (``Observation.of_model``). The hooks of
    ``quantized_outputs.py`` call the ``note_...`` methods while the first batch runs. ``finalize`` adds the records of
    the other ranks and reads the attributes.

    Attributes:
        followed: names of the modules whose output is not quantized, because a follower reads it or because an inner
            module has returned the same tensor. ``finalize`` adds blocks whose output is no sum, and followers that
            the model never called.
        sources: by name of a module whose input is quantized, the name of the module whose quantized output it reads;
            None: it reads other tensors, or more than one output.
        rectified: by name of a module whose output any ATen operation has read, whether all these operations were
            ReLUs. The call of an ``nn.ReLU`` counts, too. If that module is a follower, the output before it is in
            ``followed``, and its entry here has no effect.
        sums: by name of a block, whether all its outputs are sums of quantized outputs.
    """

    def __init__(self) -> None:
        self.followed: set[str] = set()
        self.sources: dict[str, str | None] = {}
        self.rectified: dict[str, bool] = {}
        self.sums: dict[str, bool] = {}
        #: by living tensor, what it holds
        self._values = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tensors out of a copy or pickle: the copied model computes its own."""
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore a copy or pickle."""
        self.followed, self.sources, self.rectified, self.sums = set(), {}, {}, {}
        self._values = WeakTensorKeyDictionary()
        self.add([state])

    def state_dict(self) -> dict[str, Any]:
        """The record as plain data.

        ``finalize`` sends it to the other ranks, and a fit's checkpoint stores it while an observation is incomplete.
        """
        return {
            "followed": sorted(self.followed),
            "sources": dict(self.sources),
            "rectified": dict(self.rectified),
            "sums": dict(self.sums),
        }

    def add(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Merge other records into this one.

        ``finalize`` calls this with the records of all ranks, and a resumed fit with the record of its checkpoint.

        Args:
            states: results of :meth:`state_dict`.
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
        """Names of the modules whose output no operation but a ReLU reads.

        ``settle_outputs`` (:mod:`.quantized_outputs`) reads this once the records of all ranks were merged.
        """
        return {name for name, is_rectified in self.rectified.items() if is_rectified}

    def note_output(self, name: str, output: torch.Tensor) -> None:
        """Record that a module with a planned output returns ``output``; a forward hook of the module calls this.

        If the tensor is the output of a submodule, or F.relu of it, the submodule's output is quantized, and the outer
        module goes to ``followed``. Every other tensor is recorded as the module's own output, also F.batch_norm of a
        submodule's output, because its values need another scale than that output.
        """
        known = self._known(output)
        if known is not None and not known.is_normalized and (known.name or "").startswith(f"{name}."):
            self.followed.add(name)
        else:
            self.keep(_Value(name=name), output)

    def note_block_output(self, name: str, output: Any) -> None:
        """Record whether the output that a block returns is a sum of quantized outputs: only then is it quantized.

        A forward hook of the block calls this, before the hook that calls :meth:`note_output`.
        """
        value = self._known(output) if isinstance(output, torch.Tensor) else None
        is_sum = value is not None and value.name is None
        self.sums[name] = is_sum and self.sums.get(name, True)

    def note_passed_on(self, value: torch.Tensor, output: torch.Tensor) -> None:
        """Record that a transparent module (max pooling, flatten) was given ``value`` and returns ``output``.

        The output then holds whatever ``value`` holds. A forward hook of the transparent module calls this.
        """
        known = self._known(value)
        if known is not None:
            self.keep(known, output)

    def note_input(self, name: str, value: torch.Tensor, is_follower: bool) -> None:
        """Record which quantized output a module reads; a pre-hook of the module calls this before the module runs.

        Args:
            name: of the module, whose input is quantized or which is a follower.
            value: the module's input.
            is_follower: whether an engine folds the module into the one whose output it reads.
        """
        known = self._known(value)
        source = None if known is None else known.name
        if not is_follower:
            self._add_source(name, None if known is not None and known.is_normalized else source)
        elif source is not None:
            self.followed.add(source)

    def note_operation(self, operation: Any, tensors: Iterable[torch.Tensor]) -> _Value | None:
        """Record which quantized outputs an ATen operation reads, and return what its result will hold.

        For each quantized output among the arguments, ``rectified`` notes whether the operation is a ReLU. Called by
        :class:`.WatchedFunctions` before the operation runs.

        Args:
            operation: the overload (``torch.ops.aten.relu.default``); None: the model returns the tensors, so an
                unknown reader follows.
            tensors: the tensors among the operation's arguments.

        Returns:
            The description of the result, which the caller gives to :meth:`keep` once the result exists; None: the
            result is neither a quantized output, perhaps normalized or rectified, nor a sum of quantized outputs. A
            rectified output that F.batch_norm reads gives None, too: engines fold a norm only into the convolution
            directly before it.
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
        quantized_values = [value for value in values if value is not None and not value.is_normalized]
        if len(quantized_values) < len(values):  # another tensor, or a normalized output, is among the arguments
            return None
        if is_rectifier:
            [rectified] = quantized_values
            return rectified._replace(is_rectified=True)
        return _Value(name=None) if operation in _SUMS and len(quantized_values) == 2 else None

    def keep(self, value: _Value, tensor: torch.Tensor) -> None:
        """Record what ``tensor`` holds, until it is freed or changed in place.

        The ``note_...`` methods call this for outputs of modules, and :class:`.WatchedFunctions` for results of
        operations.
        """
        self._values[tensor] = value._replace(first_sample=tensor[:1].clone())

    def _known(self, tensor: torch.Tensor) -> _Value | None:
        """What a tensor holds; None if nothing was recorded, or if its first sample has changed since."""
        value: _Value | None = self._values.get(tensor)
        if value is None or not torch.equal(tensor[:1], value.first_sample):
            return None
        return value

    def _add_source(self, name: str, source: str | None) -> None:
        """Record in ``sources`` that a module reads the output of ``source``; None: it reads another tensor."""
        if self.sources.setdefault(name, source) != source:
            self.sources[name] = None

    def _add_function(self, name: str, is_rectifier: bool) -> None:
        """Record in ``rectified`` that an operation reads the output of the module ``name``."""
        self.rectified[name] = is_rectifier and self.rectified.get(name, True)
