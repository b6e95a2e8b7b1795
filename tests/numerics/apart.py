"""What tests of numerics run in a process of their own (``run_apart``), which has not imported numba before."""

from __future__ import annotations

import sys
import warnings

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_obs import CalibrationSession
from lightning_obs.numerics.candidates import shrink_factors
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.search.grid_search import GridSearch
from lightning_obs.numerics.search.ranges import search_range
from lightning_obs.observers import Observer


def schemes_that_import_numba(schemes):
    """Whether numba is imported after each calibration of a weight, one after the other."""
    found = {}
    for scheme in schemes:
        with CalibrationSession(nn.Linear(128, 64), scheme, targets=["Linear"], engines="unchecked"):
            pass
        found[scheme] = "numba" in sys.modules
    return found


def short_search():
    """A range, and what is said when it is searched for twice."""
    torch.manual_seed(0)
    search = GridSearch(NumberGrid.of(QuantizationArgs(num_bits=4)), shrink_factors(0.2, 100))
    x = torch.randn(1, 20, 64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        search_range(x, search)
        low, high = search_range(x, search)
    return low, high, [str(w.message) for w in said if w.category.__name__ == "CalibrationWarning"]


def short_search_without_numba():
    """:func:`short_search` where numba is not installed."""
    assert "numba" not in sys.modules
    sys.modules["numba"] = None
    return short_search()


def count_without_a_cache():
    """What a loop counts, and the class of its cache, where no folder can hold one. It compiles in a second."""
    from numba.core import caching

    class Nowhere(caching.UserProvidedCacheLocator):
        @classmethod
        def from_function(cls, py_func, py_file):
            return None

    caching.CacheImpl._locator_classes = [Nowhere]
    from lightning_obs.numerics.kernels import launch, loops

    counts = launch.count_values(torch.ones(35, dtype=torch.bfloat16))
    return int(counts.sum()), type(loops.count._cache).__name__


class Searching(Dataset):
    """Each item is a range that the worker has searched for."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        args = QuantizationArgs(num_bits=8, strategy="channel")
        weight = torch.arange(64.0).reshape(8, 8).sin() + i
        return Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)(weight).min_vals


def ranges_of_a_worker(method):
    """Ranges that this process has found, and those of a worker that it has started in this way afterwards."""
    torch.set_num_threads(2)
    data = Searching()
    here = torch.stack([data[i] for i in range(4)])
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=method)
    return here, next(iter(loader))
