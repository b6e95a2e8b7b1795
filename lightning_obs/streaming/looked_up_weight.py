"""An embedding's weight that reads rows from the files when tokens look them up.

A vocabulary of 150,000 tokens takes gigabytes, and the calibration data use few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


class LookedUpWeight(torch.Tensor):
    """A weight ``(rows, columns)`` on the meta device; rows that were looked up are kept on the CPU, each read once.

    Made by :meth:`CheckpointSource.look_up`. ``F.embedding`` reads the rows of its tokens; indexing, which models do
    with learned positions, reads the whole weight. Every other function of torch sees a meta tensor.
    """

    #: the model's own meta tensor, kept alive because the source knows tensors by their ``id``
    meta_weight: torch.Tensor
    #: the weight's ``device`` for code that asks: the device on which the model runs
    run_device: torch.device
    #: reads a row ``(1, columns)`` by its number, or the whole weight
    read: Callable[..., torch.Tensor]
    #: for each row of the weight, its position in ``rows``; -1: not read yet
    positions: torch.Tensor
    #: the rows that were read, ``(rows read, columns)``, on the CPU
    rows: torch.Tensor

    @classmethod
    def of(
        cls, meta_weight: torch.Tensor, run_device: torch.device, read: Callable[..., torch.Tensor]
    ) -> LookedUpWeight:
        """Make the weight of an embedding; no row is read yet. Called by :meth:`CheckpointSource.look_up`.

        Args:
            meta_weight: the model's meta tensor ``(rows, columns)``, whose place this weight takes.
            run_device: where the model runs.
            read: returns a row ``(1, columns)`` by its number, or without a number the whole weight.
        """
        weight = meta_weight.detach().as_subclass(cls)
        weight.meta_weight = meta_weight
        weight.run_device = run_device
        weight.read = read
        height, width = meta_weight.shape
        weight.positions = torch.full((height,), -1)
        weight.rows = torch.empty(0, width, dtype=meta_weight.dtype)
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function of this weight; the class says which of them read the files."""
        if function == torch.Tensor.device.__get__:
            return args[0].run_device
        if function in (torch.Tensor.__getitem__, torch.Tensor.index_select):
            weight, *index = args
            whole = weight.read().to(weight.dtype)
            return function(whole, *index, **(kwargs or {})).to(weight.run_device)
        if function is F.embedding:
            # However a model calls it, F.embedding hands two positional arguments on, and the rest as keywords.
            tokens, weight = args
            return weight._embed(tokens, kwargs)
        return super().__torch_function__(function, types, args, kwargs)

    def _embed(self, tokens: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """The vectors of tokens ``(...)`` as ``F.embedding`` computes them, on the device of ``tokens``.

        Called in place of ``F.embedding``; ``options`` are its keyword arguments.
        """
        self._read_rows(tokens.unique().cpu())
        positions = self.positions[tokens.cpu()]
        options = {**options, "padding_idx": None}  # it only stops gradients, and would have to be a position
        return F.embedding(positions, self.rows, **options).to(tokens.device)

    def _read_rows(self, numbers: torch.Tensor) -> None:
        """Read the rows of these numbers, without duplicates, that were not read before."""
        is_unread = self.positions.index_select(0, numbers) < 0
        unread = numbers[is_unread]
        if len(unread) == 0:
            return
        rows = [self.rows]
        for number in unread.tolist():
            rows.append(self.read(number).to(self.dtype))
        self.positions[unread] = torch.arange(len(unread)) + len(self.rows)
        self.rows = torch.cat(rows)
