"""Where fine-tuning stands between two hooks, as one value that checkpoints hold.

    NEW ------> OBSERVING ----> TRAINING ------> VALIDATED --> (OBSERVING | TRAINING)
     |                             ^    \\
     +-----------------------------+     +-----> GATHERED ---> TRAINING

A transition records what happened. Nothing here foresees what Lightning will do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Phase(Enum):
    """What the next training batch finds."""

    #: nothing was observed yet, or what was begun had to be given up
    NEW = "new"
    #: training batches are being observed
    OBSERVING = "observing"
    #: the ranges that are in force stay
    TRAINING = "training"
    #: a validation has ended: weights are observed anew before the next batch, which may be observed itself
    VALIDATED = "validated"
    #: a validation was observed: its ranges are in force from the next batch on
    GATHERED = "gathered"

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Phase:
        """The phase in a saved state; version 0.1.0 wrote it as four flags."""
        if "phase" in state:
            return cls(state["phase"])
        flags = {
            cls.GATHERED: state.get("gathered", False),
            cls.OBSERVING: bool(state.get("left", 0)),
            cls.VALIDATED: state.get("after_validation", False),
            cls.NEW: state.get("wanted", True),
        }
        return next((phase for phase, there in flags.items() if there), cls.TRAINING)
