"""Each observer on 4.2 million bfloat16 values: the CPU's qparams, and what observing them may cost."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.observers import Observer
from tests.accelerator.budgets import FEW_SUMS, OBSERVERS, TENSOR
from tests.accelerator.common import assert_same_bits
from tests.observers.contract import NAMES, OF_INPUTS
from tests.support.pretend_device import DEVICE, counting

#: observers without a row of their own; those that want inputs are in test_calibration.py
OTHERS = [
    (name, "input", TENSOR, FEW_SUMS) for name in NAMES if name not in {path[0] for path in OBSERVERS} | OF_INPUTS
]
#: all but the searches of weights, the last four of OBSERVERS
WITHOUT_LOOPS = [path[:3] for path in [*OBSERVERS[:-4], *OTHERS]]


#: observers whose ranges are those of the CPU, or as good
SEARCHES = ("mse", "memoryless_mse")


def value_of(name: str, base_name: str) -> torch.Tensor:
    torch.manual_seed(0)
    if base_name == "weight":
        weight = (torch.randn(2048, 2048) * 0.02).bfloat16()
        return weight[:256] if name == "nvfp4_expanded_mse" else weight
    shape = (4, 8, 1024, 128) if base_name == "k" else (4, 512, 2048)
    return torch.randn(shape).bfloat16()


def observer_of(name: str, base_name: str, args: dict) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=QuantizationArgs(**args))


@pytest.mark.parametrize(("name", "base_name", "args", "budget"), [*OBSERVERS, *OTHERS])
def test_an_observer_has_the_cpus_bits_within_its_budget(name, base_name, args, budget):
    value = value_of(name, base_name)
    expected, found = observer_of(name, base_name, args)(value), observer_of(name, base_name, args)
    there = value.to(DEVICE)
    an_eighth = there[: max(1, len(there) // 8)]
    observer_of(name, base_name, args)(an_eighth)  # tables of candidates are made once in a process
    with counting() as counts:
        found(there)
    if name in SEARCHES:
        assert_as_good(value, found, expected)
    else:
        assert_same_bits(drop_none(found.get_qparams()), drop_none(expected.get_qparams()))
    budget.holds(counts, name, unit=value.numel())


@pytest.mark.parametrize(("name", "base_name", "args"), WITHOUT_LOOPS)
def test_on_a_device_without_loops_torchs_operations_find_the_same_bits(name, base_name, args, monkeypatch):
    monkeypatch.delitem(on_gpu.LOOPS, DEVICE.type)
    value = value_of(name, base_name)[:1]
    expected, found = observer_of(name, base_name, args)(value), observer_of(name, base_name, args)
    found(value.to(DEVICE))
    if name in SEARCHES:
        assert_as_good(value, found, expected)
    else:
        assert_same_bits(drop_none(found.get_qparams()), drop_none(expected.get_qparams()))


def assert_as_good(value: torch.Tensor, found: Observer, expected: Observer) -> None:
    """Where a scale is another, its error is at most 1 + 1e-5 times the expected one's, in float64."""
    scale, expected_scale = (observer.get_qparams()["scale"].cpu() for observer in (found, expected))
    assert scale.dtype == expected_scale.dtype
    differs = scale != expected_scale
    errors, expected_errors = (error_of(value, expected, each) for each in (scale, expected_scale))
    assert (errors <= expected_errors * (1 + 1e-5))[differs].all()


def error_of(value: torch.Tensor, observer: Observer, scale: torch.Tensor) -> torch.Tensor:
    """What a value loses by a scale of each part of it, in float64."""
    wide_scale = scale.double().unsqueeze(-1)
    observed = flatten_for_calibration(value, observer.base_name, observer.args).double()
    level = NumberGrid.of(observer.args).round((observed / wide_scale).float())
    return (level * wide_scale - observed).abs().pow(2.4).sum((0, -1))


def drop_none(qparams):
    return {key: value for key, value in qparams.items() if value is not None}
