from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    initialize_module_for_quantization,
    initialize_qparams,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics import flatten_for_calibration

TENSOR = QuantizationArgs(strategy="tensor")
CHANNEL = QuantizationArgs(strategy="channel")
TOKEN = QuantizationArgs(strategy="token", dynamic=True)
HEAD = QuantizationArgs(strategy="attn_head")


def group(size: int, strategy: str = "group") -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, strategy=strategy, group_size=size)


def block(height: int, width: int) -> QuantizationArgs:
    return QuantizationArgs(strategy="block", block_structure=[height, width])


def registered_shape(base_name: str, args: QuantizationArgs, observed: tuple[int | None, ...]) -> torch.Size:
    """The shape of the scale that compressed-tensors registers."""
    module = nn.Linear(1, 1)
    initialize_qparams(module, base_name, args, observed, torch.float32)
    return getattr(module, f"{base_name}_scale").shape


quick = settings(max_examples=60)


@quick
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2, 3, 8]))
def test_a_flattened_weight_has_the_shape_of_the_registered_scale(rows, groups, height, size):
    weight = torch.randn(rows, groups * size)
    for args in (TENSOR, CHANNEL, group(size), group(size, "tensor_group"), block(height, size)):
        flat = flatten_for_calibration(weight, "weight", args)
        assert flat.shape[1:-1] == registered_shape("weight", args, weight.shape)


@quick
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.integers(1, 16))
def test_blocks_that_do_not_divide_are_rounded_up(rows, columns, height, width):
    weight = torch.randn(rows, columns)
    flat = flatten_for_calibration(weight, "weight", block(height, width))
    assert flat.shape == (1, -(-rows // height), -(-columns // width), height * width)
    low, high = flat.amin((0, -1)), flat.amax((0, -1))
    for i in range(low.shape[0]):
        for j in range(low.shape[1]):
            part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
            assert low[i, j].clamp(max=0) == part.min().clamp(max=0)
            assert high[i, j].clamp(min=0) == part.max().clamp(min=0)


@quick
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 4), st.sampled_from([1, 4, 8]))
def test_a_flattened_activation_has_the_shape_of_the_registered_scale(leading, groups, size):
    value = torch.randn(*leading, groups * size)
    for base_name in ("input", "output"):
        for args in (TENSOR, group(size), group(size, "tensor_group")):
            flat = flatten_for_calibration(value, base_name, args)
            assert flat.shape[1:-1] == registered_shape(base_name, args, value.shape[-1:])
            assert flat.shape[0] == value[..., 0].numel()
            assert flat.numel() == value.numel()


@pytest.mark.parametrize("base_name", ["q", "k", "v"])
@pytest.mark.parametrize("args", [TENSOR, HEAD], ids=["tensor", "attn_head"])
def test_a_flattened_attention_state_has_the_shape_of_the_registered_scale(base_name, args):
    flat = flatten_for_calibration(torch.randn(2, 3, 5, 4), base_name, args)
    assert flat.shape[0] == 10
    assert flat.shape[1:-1] == registered_shape(base_name, args, (3, None, 4))


@pytest.mark.parametrize("module", [nn.Linear(20, 6), nn.Embedding(6, 20)], ids=["Linear", "Embedding"])
@pytest.mark.parametrize(
    "args",
    [TENSOR, CHANNEL, group(4), group(5, "tensor_group"), block(4, 7)],
    ids=["tensor", "channel", "group", "tensor_group", "block"],
)
def test_a_weight_fits_the_module_that_compressed_tensors_initializes(module, args):
    initialize_module_for_quantization(module, QuantizationScheme(targets=["Linear"], weights=args))
    flat = flatten_for_calibration(module.weight, "weight", args)
    assert flat.shape[1:-1] == module.weight_scale.shape == module.weight_zero_point.shape


# ---------------------------------------------------------------------- which numbers stand under which scale


WEIGHT = torch.tensor([[1.0, -2.0, 3.0, -4.0], [5.0, 6.0, -7.0, 8.0]])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (TENSOR, [-7.0]),
        (CHANNEL, [[-4.0], [-7.0]]),
        (group(2), [[-2.0, -4.0], [5.0, -7.0]]),
        (group(2, "tensor_group"), [[-2.0, -4.0], [5.0, -7.0]]),
        (block(2, 2), [[-2.0, -7.0]]),
        (block(1, 4), [[-4.0], [-7.0]]),
    ],
    ids=["tensor", "channel", "group", "tensor_group", "block", "block of a row"],
)
def test_the_minimum_over_a_flattened_weight_is_the_minimum_of_each_scale(args, expected):
    assert flatten_for_calibration(WEIGHT, "weight", args).amin((0, -1)).tolist() == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [(TENSOR, [-7.0]), (TOKEN, [-7.0]), (group(2), [-2.0, -7.0])],
    ids=["tensor", "token", "group"],
)
@pytest.mark.parametrize("base_name", ["input", "output"])
def test_the_minimum_over_a_flattened_activation_is_the_minimum_of_each_scale(base_name, args, expected):
    assert flatten_for_calibration(WEIGHT[None], base_name, args).amin((0, -1)).tolist() == expected


def test_each_head_keeps_its_own_numbers():
    state = torch.randn(2, 3, 5, 4)
    flat = flatten_for_calibration(state, "k", HEAD)
    assert torch.equal(flat.amin((0, -1)).flatten(), state.amin((0, 2, 3)))


@pytest.mark.parametrize("args", [TENSOR, TOKEN, group(4)], ids=["tensor", "token", "group"])
def test_a_vector_is_one_observation(args):
    assert flatten_for_calibration(torch.randn(8), "input", args).shape[0] == 1


def test_a_number_is_one_observation():
    assert flatten_for_calibration(torch.tensor(3.0), "output", TENSOR).shape == (1, 1, 1)


def test_columns_in_activation_order_are_sorted_by_group():
    g_idx = torch.tensor([1, 0, 1, 0])
    flat = flatten_for_calibration(WEIGHT, "weight", group(2), g_idx=g_idx)
    assert flat.tolist() == [[[[-2.0, -4.0], [1.0, 3.0]], [[6.0, 8.0], [5.0, -7.0]]]]


def test_flattening_an_activation_copies_nothing():
    value = torch.randn(2, 3, 8)
    assert flatten_for_calibration(value, "input", group(4)).data_ptr() == value.data_ptr()


def test_a_weight_of_any_rank_can_have_one_scale():
    assert flatten_for_calibration(torch.randn(2, 3, 4, 5), "weight", TENSOR).shape == (1, 1, 120)


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("base_name", "args", "shape", "message"),
    [
        ("bias", TENSOR, (4,), r"unknown base name 'bias'. Expected one of weight, input, output, q, k, v"),
        (
            "input",
            CHANNEL,
            (2, 4),
            r"strategy channel cannot be applied to input. Expected one of tensor, token, group",
        ),
        ("input", QuantizationArgs(group_size=-1), (2, 4), r"strategy channel cannot be applied to input"),
        ("output", block(2, 2), (2, 4), r"strategy block cannot be applied to output"),
        ("weight", HEAD, (2, 4), r"strategy attn_head cannot be applied to weight"),
        ("k", group(4), (1, 2, 3, 4), r"strategy group cannot be applied to k. Expected one of tensor, attn_head"),
        ("weight", CHANNEL, (2, 3, 4), r"observed as a matrix. Got shape \(2, 3, 4\), expected \(rows, columns\)"),
        ("q", TENSOR, (2, 3, 4), r"q has four dimensions. Got shape \(2, 3, 4\)"),
        ("weight", group(4), (2, 6), r"group size 4 does not divide the columns. Got 6 columns.*`ignore`"),
        ("input", group(4), (2, 6), r"group size 4 does not divide the columns. Got 6 columns"),
    ],
)
def test_what_cannot_be_observed_is_refused(base_name, args, shape, message):
    with pytest.raises(CalibrationError, match=message):
        flatten_for_calibration(torch.zeros(shape), base_name, args)
