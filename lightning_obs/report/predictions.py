"""How far quantization moves a model's predictions: divergence, and how often the most likely class stays the same.

A metric of the text may improve by chance, or because a model was fine-tuned on similar text; predictions that are held
against the original's at the same positions cannot. So one pass keeps the original's logits on the CPU, as many as fit,
and later passes over the same batches compare theirs with them, call by call. No further forward is run, and a
fine-tuned model is compared with the one that it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_obs.calibration.token_mask import PADDING
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.calls import named_logits
from lightning_obs.forward.class_axis import LastLayer
from lightning_obs.forward.eager import run_eagerly
from lightning_obs.forward.kept_batches import KEPT_BYTES
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.numerics.divergence import compare
from lightning_obs.ranks.collectives import Collectives


@dataclass(frozen=True)
class Moved:
    """The effect of quantization on the predictions; :meth:`Comparison.reduced` makes it, and reports show it."""

    divergence: float  # Kullback-Leibler, from the original's predictions [nats], mean over positions
    agreement: float  # share of the positions at which both have the same most likely class
    positions: int  # the number of positions that were compared


class Predictions:
    """The original's logits of one pass, for later passes over the same batches to be compared with.

    Logits are in an output's ``logits``: ``(..., classes)``, or in the layout of the last layer (``(batch, classes,
    height, width)`` after a convolution); of other outputs nothing is known. Positions that the call's
    ``attention_mask`` leaves out do not count.

    A validation that is repeated quantized (``callbacks/quantized_validation.py``) makes one, and so does the command
    line's ``QualityMeter``.

    Args:
        limit: the largest memory for the kept logits [bytes].

    Attributes:
        batch: a key of the batch that runs now, set by the caller; None: all calls are of one batch. Calls are matched
            by their order within the batch.

    Examples:
        >>> class Head(nn.Linear):
        ...     def forward(self, x):
        ...         return {"logits": super().forward(x)}
        >>> model, original = Head(2, 2, bias=False), Predictions()
        >>> _ = nn.init.eye_(model.weight)
        >>> with original.kept(model):
        ...     _ = model(torch.eye(2))
        >>> with original.compared(model) as comparison:
        ...     _ = model(-torch.eye(2))
        >>> comparison.reduced(Collectives())
        Moved(divergence=0.46211..., agreement=0.0, positions=2)
    """

    def __init__(self, limit: float = KEPT_BYTES) -> None:
        self.batch: Hashable = None
        self._left = limit
        self._calls: dict[Hashable, list[torch.Tensor]] = {}

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        """Keep the logits of each call of ``model`` inside the ``with`` block, up to the first that does not fit.

        Entered for the pass in full precision, before :meth:`compared`.
        """

        # _each_call calls it with the logits of each call.
        def keep(logits: torch.Tensor) -> None:
            self._left -= logits.nbytes
            if self._left >= 0:
                with torch.inference_mode(False):
                    self._calls.setdefault(self.batch, []).append(logits.detach().to("cpu", copy=True))

        with _each_call(model, keep):
            yield

    @contextmanager
    def compared(self, model: nn.Module) -> Iterator[Comparison]:
        """Compare the logits of each call of ``model`` inside the ``with`` block with the kept logits.

        Entered for each pass of a quantized model over the same batches. It yields the :class:`Comparison`. Calls
        without kept logits, or with logits of another shape, are left out.
        """
        comparison = Comparison()
        waiting = {batch: iter(calls) for batch, calls in self._calls.items()}

        # _each_call calls it with the logits of each call.
        def compare(logits: torch.Tensor) -> None:
            original = next(waiting.get(self.batch, iter(())), None)
            if original is not None and original.shape == logits.shape:
                comparison.add(original, logits)

        with _each_call(model, compare):
            yield comparison


class Comparison:
    """Sums over the positions that were compared; :meth:`Predictions.compared` makes it for one pass."""

    def __init__(self) -> None:
        #: divergence, positions at which the most likely class is the same, positions
        self._sums = torch.zeros(3, dtype=torch.float64)

    @torch.no_grad()
    def add(self, original: torch.Tensor, quantized: torch.Tensor) -> None:
        """Add the positions of two tensors of logits, ``(positions, classes)``.

        Called for each call of the model that has kept logits.
        """
        divergence, agreeing = compare(quantized, original)
        self._sums += torch.tensor([*torch.stack([divergence, agreeing]).tolist(), len(original)], dtype=torch.float64)

    def reduced(self, collectives: Collectives) -> Moved | None:
        """The result over all ranks; None if no position was compared. Every rank must call this, after the pass."""
        divergence, agreeing, positions = collectives.reduce(self._sums.to(collectives.device), "sum").tolist()
        if positions:
            return Moved(divergence / positions, agreeing / positions, int(positions))
        return None


@contextmanager
def _each_call(model: nn.Module, see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``see`` with the logits ``(positions, classes)`` of each call of ``model`` inside the ``with`` block.

    Positions that the call's ``attention_mask`` leaves out are not in them. A call is passed over if its output has no
    logits, if it is not known which dimension of them the classes are, or if there is one class only (a regression),
    whose distribution never changes. :meth:`Predictions.kept` and
    :meth:`Predictions.compared` enter it. Its hook is not in copies that are made of the model meanwhile.
    """
    last_layer = LastLayer()

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        logits = named_logits(output)
        if not isinstance(logits, torch.Tensor) or logits.ndim < 2:
            return
        try:
            logits = last_layer.classes_last(logits)
        except CalibrationError:
            return
        if logits.shape[-1] > 1:
            mask = kwargs.get(PADDING)
            counts = isinstance(mask, torch.Tensor) and mask.shape == logits.shape[:-1]
            see(logits[mask.bool()] if counts else logits.flatten(0, -2))

    with run_eagerly(), ExitStack() as stack:
        last_layer.watch(model, stack)
        handle = model.register_forward_hook(hook, with_kwargs=True)
        remove_hook = keep_hook_out(model, handle)
        stack.callback(remove_hook)
        yield
