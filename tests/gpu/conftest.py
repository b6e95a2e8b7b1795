"""Each test runs on the CPU, which proves that it can run at all, and where there is a CUDA device also on that.

python -m pytest tests/gpu -m gpu

On the CPU one case of a test proves it; the others run every night.
"""

import pytest
import torch

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0


#: fixtures of this file, whose values say where a test runs
PLACES = {"device", "two_devices", "ranks"}


def pytest_itemcollected(item):
    """Called for each test of this folder. Comparing the CPU with itself says no more in a second case."""
    indices = getattr(item, "callspec", None) and item.callspec.indices
    is_first = not any(index for name, index in (indices or {}).items() if name not in PLACES)
    if not item.get_closest_marker("gpu") and not is_first:
        item.add_marker("nightly")


def on_cuda(value, devices: int = 1):
    """A parameter of a test that needs so many CUDA devices."""
    reason = "needs a CUDA device" if devices == 1 else f"needs {devices} CUDA devices"
    return pytest.param(value, marks=[pytest.mark.gpu, pytest.mark.skipif(devices > COUNT, reason=reason)])


@pytest.fixture(params=["cpu", on_cuda("cuda")])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[("cpu", "cpu"), on_cuda(("cuda:0", "cuda:1"), 2)], ids=["cpu", "cuda"])
def two_devices(request) -> tuple[torch.device, ...]:
    return tuple(map(torch.device, request.param))


@pytest.fixture(params=[("cpu", 1), ("cpu", 2), on_cuda(("cuda", 1)), on_cuda(("cuda", 2), 2)], ids=str)
def ranks(request) -> tuple[str, int]:
    """Where ranks run, and how many."""
    return request.param
