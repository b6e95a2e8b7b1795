"""Observers of one tensor: the CPU's qparams where arithmetic is exact, else no more error than the CPU's."""

import warnings

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.fake_quantize import fake_quantize
from lightning_obs.numerics.moments import channel_products
from lightning_obs.observers import Observer
from tests.observers.contract import MEMORYLESS, NAMES, OF_INPUTS

INT8 = {"num_bits": 8, "strategy": "tensor"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
HEADS = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
CHANNEL = {"num_bits": 8, "strategy": "channel"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 128}
UNEVEN = {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
#: built-in observers of activations
OF_ACTIVATIONS = [name for name in NAMES if name not in OF_INPUTS | set(MEMORYLESS)]
#: those that compare, count or search, each in a test of its own
OTHERS = ["static_minmax", "minmax", "histogram", "percentile", "mse"]


def observe(device, name, base_name, args, dtype=torch.bfloat16):
    """An observer of the same values, wherever."""
    generator = torch.Generator().manual_seed(0)
    shape = {"weight": (256, 512), "k": (2, 4, 128, 64)}.get(base_name, (4, 64, 512))
    value = (torch.randn(shape, generator=generator) ** 3).to(dtype).to(device)
    observer = Observer.load_from_registry(name, base_name=base_name, args=QuantizationArgs(**args))
    if observer.needs_inputs:
        observer.observe_inputs((torch.randn(64, 512, generator=generator) ** 2).to(dtype).to(device))
    return observer(value), value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "base_name", "args"),
    [
        ("static_minmax", "input", INT8),
        ("minmax", "input", FP8),
        ("histogram", "input", INT8),
        ("percentile", "input", FP8),
        ("static_minmax", "k", HEADS),
        ("histogram", "k", HEADS),
        ("memoryless_minmax", "weight", CHANNEL),
        ("memoryless_minmax", "weight", GROUPS),
        ("memoryless_minmax", "weight", UNEVEN),
        ("memoryless_minmax", "weight", BLOCKS),
    ],
)
def test_what_compares_and_counts_has_the_cpus_bits(device, name, base_name, args, dtype):
    expected = observe("cpu", name, base_name, args, dtype)[0]
    found = observe(device, name, base_name, args, dtype)[0]
    for statistic, value in expected.get_statistics().items():
        assert torch.equal(found.get_statistics()[statistic].cpu(), value), statistic
    found.load_statistics({key: value.cpu() for key, value in found.get_statistics().items()})  # as finalize does
    for key in ("scale", "zero_point"):
        assert torch.equal(found.get_qparams()[key], expected.get_qparams()[key]), key


@pytest.mark.parametrize(
    ("name", "base_name", "args"),
    [
        ("memoryless_mse", "weight", CHANNEL),
        ("memoryless_mse", "weight", GROUPS),
        ("memoryless_mse", "weight", UNEVEN),
        ("memoryless_mse", "weight", BLOCKS),
        ("mse", "input", INT8),
        ("mse", "input", FP8),
    ],
)
def test_a_search_loses_no_more_than_the_cpus(device, name, base_name, args):
    lost = []
    for where in ("cpu", device):
        observer, value = observe(where, name, base_name, args)
        found = {key: x.cpu() for key, x in observer.get_qparams().items() if x is not None}
        zero = found["zero_point"] if args.get("symmetric") is False else None
        quantized = fake_quantize(value.cpu().float(), found["scale"].float(), zero, observer.args)
        lost.append((quantized.double() - value.cpu().double()).abs().pow(observer.norm).sum())
    assert lost[1] <= lost[0] * (1 + 1e-3)  # sums are in another order: of equal candidates the other may be taken


@pytest.mark.parametrize("name", ["imatrix_mse", "local_hessian", "hessian"])
def test_a_search_by_inputs_finds_the_cpus_ranges_but_for_ties(device, name):
    expected, found = (observe(where, name, "weight", GROUPS, torch.float32)[0] for where in ("cpu", device))
    high, same = expected.get_min_max()[1], found.get_min_max()[1].cpu() == expected.get_min_max()[1]
    assert same.double().mean() > 0.98
    torch.testing.assert_close(found.get_min_max()[1].cpu(), high, rtol=0.2, atol=0)


@pytest.mark.parametrize("name", [name for name in OF_ACTIVATIONS if name not in OTHERS])
def test_what_adds_up_has_the_cpus_range_up_to_float64_addition(device, name):
    expected, found = (observe(where, name, "input", INT8)[0] for where in ("cpu", device))
    for one, other in zip(found.get_min_max(), expected.get_min_max(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", OF_ACTIVATIONS)
def test_the_host_waits_for_nothing_while_an_observer_observes(device, name):
    observe(device, name, "input", INT8)  # tables are made once
    observer = Observer.load_from_registry(name, base_name="input", args=QuantizationArgs(**INT8))
    values = torch.randn(2, 4, 64, 512, dtype=torch.bfloat16, device=device)
    with no_waiting(device):
        for value in values:
            observer(value)
    assert observer.has_statistics


class no_waiting:
    """An operation for which the host waits is an error, on CUDA."""

    def __init__(self, device):
        self.is_cuda = device.type == "cuda"

    def __enter__(self):
        if self.is_cuda:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is a prototype, and does not see every wait
                torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error):
        if self.is_cuda:
            torch.cuda.set_sync_debug_mode("default")


def test_products_of_inputs_keep_float32_where_faster_products_are_allowed(device):
    value = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).to(device)
    exact = value.double().T @ value.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        products, _ = channel_products(value, 256)
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert after == "medium"
    torch.testing.assert_close(products[0].double(), exact, rtol=0, atol=1e-3)
