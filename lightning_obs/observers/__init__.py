"""Observers by name. Importing this package registers the built-in ones."""

from lightning_obs.observers.base import MinMaxTuple, Observer, QParamsDict
from lightning_obs.observers.histogram import HistogramObserver
from lightning_obs.observers.min_max import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver
from lightning_obs.observers.normal import NormalObserver
from lightning_obs.observers.percentile import PercentileObserver

__all__ = [
    "HistogramObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MinMaxTuple",
    "NormalObserver",
    "Observer",
    "PercentileObserver",
    "QParamsDict",
    "StaticMinMaxObserver",
]
