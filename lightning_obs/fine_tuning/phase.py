"""The phase of fine-tuning between two hooks: one value, which checkpoints hold.

    NEW ------> OBSERVING ----> TRAINING ------> VALIDATED --> (OBSERVING | TRAINING)
     |                             ^    \\
     +-----------------------------+     +-----> GATHERED ---> TRAINING

A transition records what happened. Nothing here foresees what Lightning will do next.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The state in which the next training batch runs."""

    #: nothing was observed yet, or an observation was abandoned
    NEW = "new"
    #: training batches are being observed
    OBSERVING = "observing"
    #: the ranges in force stay
    TRAINING = "training"
    #: a validation has ended: weights are observed anew before the next batch, which may be observed itself
    VALIDATED = "validated"
    #: a validation was observed: its ranges are in force from the next batch on
    GATHERED = "gathered"
