"""Each observer on 4.2 million bfloat16 values: the CPU's qparams, and what observing them may cost."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.observers import Observer
from tests.accelerator.common import Budget, assert_same_bits
from tests.observers.contract import NAMES, OF_INPUTS
from tests.support.pretend_device import DEVICE, counting

TENSOR = {"num_bits": 8, "strategy": "tensor"}
HEADS = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 128}
CHANNEL = {"num_bits": 8, "strategy": "channel"}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
#: observer, what it observes, its args: launches, bytes a value (2 is one read of bfloat16), reads by the host
PATHS = [
    ("static_minmax", "input", TENSOR, Budget(3, 2.01, 0)),
    ("minmax", "input", TENSOR, Budget(3, 2.01, 0)),
    ("histogram", "input", TENSOR, Budget(6, 4.64, 0)),
    ("percentile", "input", TENSOR, Budget(6, 4.64, 0)),
    ("mse", "input", TENSOR, Budget(39, 4.76, 0)),
    ("normal_observer", "input", TENSOR, Budget(6, 2.01, 0)),
    ("static_minmax", "k", HEADS, Budget(5, 8.01, 0)),
    ("histogram", "k", HEADS, Budget(8, 15.01, 0)),
    ("memoryless_minmax", "weight", GROUPS, Budget(4, 4.1, 0)),
    ("memoryless_minmax", "weight", CHANNEL, Budget(4, 4.02, 0)),
    ("memoryless_mse", "weight", GROUPS, Budget(34, 17.81, 0)),
    ("memoryless_mse", "weight", CHANNEL, Budget(34, 6.75, 0)),
    ("memoryless_mse", "weight", BLOCKS, Budget(35, 6.21, 0)),
    ("nvfp4_expanded_mse", "weight", NVFP4, Budget(42, 434.77, 0)),
]
#: what an observer may ask for that has no path here: statistics of a few passes, and no read by the host
FEW_PASSES = Budget(12, 8.01, 0)
#: paths of observers that have none above; those that want inputs are in test_calibration.py
OTHERS = [(name, "input", TENSOR, FEW_PASSES) for name in NAMES if name not in {path[0] for path in PATHS} | OF_INPUTS]
#: all but the searches of weights, the last four of PATHS
WITHOUT_LOOPS = [path[:3] for path in [*PATHS[:-4], *OTHERS]]


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


@pytest.mark.parametrize(("name", "base_name", "args", "budget"), [*PATHS, *OTHERS])
def test_an_observer_has_the_cpus_bits_within_its_budget(name, base_name, args, budget):
    value = value_of(name, base_name)
    expected, found = observer_of(name, base_name, args)(value), observer_of(name, base_name, args)
    there = value.to(DEVICE)
    observer_of(name, base_name, args)(there)  # tables of candidates are made once in a process
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
