"""Observers by name. Importing this package registers the built-in ones."""

from lightning_obs.observers.base import MinMaxTuple, Observer, QParamsDict
from lightning_obs.observers.histogram import HistogramObserver
from lightning_obs.observers.imatrix import IMatrixMSEObserver, NVFP4ExpandedIMatrixObserver
from lightning_obs.observers.min_max import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver
from lightning_obs.observers.moving_average import MovingAverageObserver
from lightning_obs.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver, NVFP4ExpandedMSEObserver
from lightning_obs.observers.normal import NormalObserver
from lightning_obs.observers.percentile import PercentileObserver

__all__ = [
    "HistogramObserver",
    "IMatrixMSEObserver",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MinMaxTuple",
    "MovingAverageMSEObserver",
    "MovingAverageObserver",
    "NVFP4ExpandedIMatrixObserver",
    "NVFP4ExpandedMSEObserver",
    "NormalObserver",
    "Observer",
    "PercentileObserver",
    "QParamsDict",
    "StaticMinMaxObserver",
]
