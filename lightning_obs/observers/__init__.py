"""Observers by name, one file per family over the pure functions of ``numerics``, which is all that they import.

Importing this package registers the built-in ones. Start reading in ``observer.py``, which holds the contract.
"""

from lightning_obs.observers.counting import HistogramObserver, PercentileObserver
from lightning_obs.observers.hessian import HessianObserver, LocalHessianObserver
from lightning_obs.observers.imatrix import IMatrixMSEObserver, NVFP4ExpandedIMatrixObserver
from lightning_obs.observers.min_max import (
    MemorylessMinMaxObserver,
    MinMaxObserver,
    MovingAverageObserver,
    StaticMinMaxObserver,
)
from lightning_obs.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver, NVFP4ExpandedMSEObserver
from lightning_obs.observers.normal import NormalObserver
from lightning_obs.observers.observer import Key, MinMaxTuple, Observer, QParamsDict, require_statistics
from lightning_obs.observers.statistic import Statistic

__all__ = [
    "HessianObserver",
    "HistogramObserver",
    "IMatrixMSEObserver",
    "Key",
    "LocalHessianObserver",
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
    "Statistic",
    "require_statistics",
]
