"""Observers by name. Importing this package registers the built-in ones."""

from lightning_obs.observers.base import MinMaxTuple, Observer, QParamsDict
from lightning_obs.observers.min_max import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver
from lightning_obs.observers.moving_average import MovingAverageObserver
from lightning_obs.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver, NVFP4ExpandedMSEObserver

__all__ = [
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MinMaxTuple",
    "MovingAverageMSEObserver",
    "MovingAverageObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "QParamsDict",
    "StaticMinMaxObserver",
]
