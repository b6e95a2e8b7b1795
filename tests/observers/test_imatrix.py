from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme
from hypothesis import given, settings
from torch.distributed import ReduceOp

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.qparams import flatten_for_calibration
from lightning_obs.observers import Observer
from lightning_obs.observers.statistic import input_statistics, lacks_inputs
from tests.observers.contract import range_of, two_tensors

CHANNEL = QuantizationArgs(num_bits=4, strategy="channel")
GROUP = QuantizationArgs(num_bits=4, group_size=16)
BLOCK = QuantizationArgs(num_bits=4, strategy="block", block_structure=[3, 10])
TENSOR = QuantizationArgs(num_bits=4, strategy="tensor")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
SAME = {"maxshrink": 0.95, "grid": 20, "norm": 3.0}  # imatrix_mse's candidates but the last

every_strategy = pytest.mark.parametrize("args", [CHANNEL, GROUP, BLOCK, TENSOR], ids=lambda a: str(a.strategy))


def make(name: str = "imatrix_mse", args: QuantizationArgs = CHANNEL, **kwargs) -> Observer:
    return Observer.load_from_registry(name, base_name="weight", args=args, **kwargs)


def observe(args, weight, inputs, **kwargs) -> Observer:
    observer = make(args=args, **kwargs)
    observer.observe_inputs(inputs)
    return observer(weight)


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.distributions.StudentT(3.0).sample((8, 64))


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 5, 64) * torch.logspace(-2, 1, 64)


def test_sum_and_count_are_those_of_all_tokens_of_all_batches():
    observer = make()
    first, second = torch.randn(2, 3, 4), torch.randn(5, 4)
    observer.observe_inputs(first)
    observer.observe_inputs(second)
    everything = torch.cat([first.flatten(0, 1), second]).double()
    assert torch.allclose(observer.input_squares, everything.square().sum(0), rtol=1e-6)
    assert observer.input_count.item() == 2 * 3 + 5
    assert observer._act_sync_dict == {"input_squares": ReduceOp.SUM, "input_count": ReduceOp.SUM}


def test_inputs_in_bfloat16_are_squared_in_float32():
    observer = make()
    observer.observe_inputs(torch.full((4096, 2), 1.0078125, dtype=torch.bfloat16))
    assert observer.input_squares.tolist() == [4096 * 1.0078125**2] * 2


def test_an_empty_input_changes_nothing(weight):
    observer = make()
    observer.observe_inputs(torch.empty(0, 64))
    assert lacks_inputs(observer)


@every_strategy
def test_equal_importance_finds_the_range_of_memoryless_mse(args, weight):
    found = observe(args, weight, torch.ones(1, 64), maxshrink=0.9)
    expected = make("memoryless_mse", args, **SAME)(weight)  # 1 to 0.1 on both sides: 19 candidates
    assert torch.equal(torch.stack(found.get_min_max()), torch.stack(expected.get_min_max()))


@every_strategy
def test_the_range_has_the_least_weighted_error_of_all_candidates(args, weight, inputs):
    found = observe(args, weight, inputs, patience=0)
    importance = inputs.double().square().flatten(0, 1).mean(0)
    full = make("memoryless_minmax", args)(weight).get_min_max()
    weighted = flatten_for_calibration(importance.expand_as(weight), "weight", args)

    def error(low, high):
        candidate = make("memoryless_minmax", args)
        candidate(weight)
        candidate.min_vals, candidate.max_vals = low, high
        qparams = candidate.get_qparams()
        back = fake_quantize(weight, qparams["scale"], qparams["zero_point"], args)
        off = flatten_for_calibration((back - weight).double(), "weight", args)
        return (weighted * off.abs() ** 3).sum((0, -1))

    candidates = [error(full[0] * p, full[1] * p) for p in (1 - i / 20 for i in range(20))]
    least = torch.stack(candidates).amin(0)
    assert torch.allclose(error(*found.get_min_max()), least, rtol=1e-5)


def test_a_column_that_matters_is_kept_and_one_that_does_not_is_given_up():
    torch.manual_seed(0)
    weight = torch.rand(1, 64) / 10
    weight[0, 0] = 1.0
    matters, ignored = torch.ones(64), torch.ones(64)
    matters[0], ignored[0] = 1e4, 0.0
    kept = observe(CHANNEL, weight, matters.unsqueeze(0), patience=0).get_min_max()[1].item()
    given_up = observe(CHANNEL, weight, ignored.unsqueeze(0), patience=0).get_min_max()[1].item()
    assert kept > 0.9
    assert given_up < 0.2


def test_columns_in_activation_order_take_their_importance_along(weight, inputs):
    order = torch.randperm(64)
    g_idx = torch.empty(64, dtype=torch.long)
    g_idx[order] = torch.arange(64) // 16  # column order[i] belongs to group i // 16
    by_group = torch.argsort(g_idx, stable=True)
    shuffled = make(args=GROUP)
    shuffled.observe_inputs(inputs)
    shuffled(weight, g_idx)
    expected = observe(GROUP, weight[:, by_group], inputs[..., by_group])
    assert torch.equal(torch.stack(shuffled.get_min_max()), torch.stack(expected.get_min_max()))


@pytest.mark.parametrize("name", ["imatrix_mse", "local_hessian", "hessian"])
def test_columns_whose_inputs_were_all_zero_count_alike(name, weight):
    zeros = observe(GROUP, weight, torch.zeros(3, 64), name=name)
    unseen = make(name, GROUP, strict=False)(weight)
    assert torch.equal(torch.stack(zeros.get_min_max()), torch.stack(unseen.get_min_max()))


def test_no_inputs_is_an_error(weight):
    with pytest.raises(CalibrationError, match=r"saw no inputs.*strict=False"):
        make()(weight)


def test_no_inputs_means_equal_weights_if_that_was_asked_for(weight):
    found = make(strict=False)(weight)
    expected = observe(CHANNEL, weight, torch.ones(1, 64))
    assert not lacks_inputs(found)
    assert torch.equal(torch.stack(found.get_min_max()), torch.stack(expected.get_min_max()))


def test_inputs_of_another_width_are_an_error(weight):
    with pytest.raises(CalibrationError, match=r"inputs of 32 channels, a weight of shape \(8, 64\)"):
        observe(CHANNEL, weight, torch.ones(3, 32))


@pytest.mark.parametrize("name", ["imatrix_mse", "nvfp4_expanded_imatrix"])
def test_only_weights_are_observed_with_inputs(name):
    with pytest.raises(CalibrationError, match="base name 'input'"):
        Observer.load_from_registry(name, base_name="input", args=QuantizationArgs())


@pytest.mark.parametrize("wrong", [{"norm": float("inf")}, {"grid": 0}, {"maxshrink": 1.5}, {"patience": -1}])
def test_hyperparameters_out_of_range_are_refused(wrong):
    with pytest.raises(CalibrationError, match=next(iter(wrong))):
        make(**wrong)


def test_a_nan_in_the_inputs_is_found(weight):
    observer = observe(CHANNEL, weight, torch.tensor([[torch.nan] + 63 * [1.0]]))
    assert "input_squares not finite" in observer.nonfinite_statistics()


def test_reset_forgets_the_inputs_too_unless_told_to_keep_them(weight, inputs):
    observer = observe(CHANNEL, weight, inputs)
    before = observer.get_min_max()
    observer.reset(keep=input_statistics(observer))
    assert not observer.has_statistics
    assert torch.equal(observer(weight).get_min_max()[1], before[1])
    observer.reset()
    assert lacks_inputs(observer)
    assert not observer.has_statistics


def test_a_forward_after_the_qparams_were_read_is_observed(weight, inputs):
    observer = observe(CHANNEL, weight, inputs)
    observer.get_qparams()
    observer.observe_inputs(inputs)
    assert observer.input_count.item() == 20


def test_nvfp4_tries_ranges_wider_than_the_values(weight, inputs):
    observer = make("nvfp4_expanded_imatrix", NVFP4)
    observer.observe_inputs(inputs)
    high = observer(weight).get_min_max()[1]
    plain = make("memoryless_minmax", NVFP4)(weight).get_min_max()
    assert (high > plain[1] * 1.2).any()
    assert observer.get_global_scale().shape == (1,)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("name", "least", "most"), [("imatrix_mse", 0.05, 1), ("nvfp4_expanded_imatrix", 0.8, 1.8)])
@settings(max_examples=25)
@given(pair=two_tensors())
def test_without_inputs_the_range_is_that_of_any_last_tensor_times_one_factor(name, least, most, pair):
    observer = make(name, QuantizationArgs(num_bits=8), strict=False)
    assert range_of(observer, *pair).is_scaled(pair[1], least, most)
