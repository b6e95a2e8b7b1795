"""Observers by name: one file per family, over the pure functions of ``numerics``.

An observer gathers statistics of one tensor of a module (its weight, inputs or outputs) and computes the quantization
parameters. A plan names an observer for each tensor that a scheme quantizes. The hooks of a calibration
(``calibration/hooks.py``) pass activations to it. At the end, ``calibration/finalize.py`` passes weights to their
observers, and asks all observers for the quantization parameters.

Start reading in ``observer.py``, the contract, and ``statistic.py``, the declaration of statistics. ``segments.py``
observes the tokens of all experts of a layer in one call; ``search_options.py`` has the hyperparameters of a range
search, which four families share.

Importing this package imports every file in it, and so registers the built-in observers: a new file needs no line here.
The classes that other code imports by their names are listed below.
"""

from importlib import import_module
from pkgutil import iter_modules

from lightning_obs.observers.counting import HistogramObserver, PercentileObserver
from lightning_obs.observers.hessian import HessianObserver, LocalHessianObserver
from lightning_obs.observers.imatrix import IMatrixMSEObserver, NVFP4ExpandedIMatrixObserver
from lightning_obs.observers.lattice import LatticeObserver
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

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

__all__ = [
    "HessianObserver",
    "HistogramObserver",
    "IMatrixMSEObserver",
    "Key",
    "LatticeObserver",
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
