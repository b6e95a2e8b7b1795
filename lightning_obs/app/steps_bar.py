"""The progress bar of a fit."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def make_steps_bar(package: str) -> Any:
    """Make the progress bar of the command line's Trainers: Lightning's, without the "/-2" of "Epoch 0/-2".

    ``make_trainer`` calls this. Lightning writes this number of epochs if ``max_steps`` ends the fit.

    Args:
        package: the package of the Trainer (``lightning.pytorch`` or ``pytorch_lightning``), which takes only its own
            bars.
    """
    bar: Any = import_module(f"{package}.callbacks").RichProgressBar

    class StepsBar(bar):
        # Lightning calls it for the text beside the bar.
        def _get_train_description(self, current_epoch: int) -> str:
            description: str = super()._get_train_description(current_epoch)
            return description.replace("/-2", "   ")

    return StepsBar()
