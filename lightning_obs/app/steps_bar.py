"""The progress bar of a fit."""

from __future__ import annotations

from lightning.pytorch.callbacks import RichProgressBar
from typing_extensions import override


class StepsBar(RichProgressBar):
    """The progress bar of the command line's Trainers: Lightning's, without the "/-2" of "Epoch 0/-2".

    Lightning writes this number of epochs where ``max_steps`` ends the fit.
    """

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        return super()._get_train_description(current_epoch).replace("/-2", "   ")
