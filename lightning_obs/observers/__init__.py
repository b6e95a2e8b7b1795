"""Observers by name. Importing this package registers the built-in ones."""

from lightning_obs.observers.base import MinMaxTuple, Observer, QParamsDict
from lightning_obs.observers.min_max import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver

__all__ = [
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MinMaxTuple",
    "Observer",
    "QParamsDict",
    "StaticMinMaxObserver",
]
