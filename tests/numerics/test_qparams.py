from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_range
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_obs.numerics import compute_global_scale, compute_qparams
from lightning_obs.numerics.fake_quantize import fake_quantize, fake_quantize_dynamic
from lightning_obs.numerics.formats import NumberGrid

INT8 = QuantizationArgs(num_bits=8)
INT8_ASYMMETRIC = QuantizationArgs(num_bits=8, symmetric=False)
FP8 = QuantizationArgs(num_bits=8, type="float")
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights

floats = st.integers(-(10**6), 10**6).map(lambda n: n / 100)  # no subnormal numbers: their scales have no bits left


@pytest.mark.parametrize(
    ("args", "scale", "zero_point"),
    [(INT8, 3 / 127.5, 0), (INT8_ASYMMETRIC, 4 / 255, -64), (FP8, 3 / 448, 0)],
    ids=["int8", "int8 asymmetric", "fp8"],
)
def test_a_range_gives_the_scale_of_the_formula(args, scale, zero_point):
    found = compute_qparams(torch.tensor([-1.0]), torch.tensor([3.0]), args)
    assert found["scale"].item() == pytest.approx(scale, rel=1e-6)
    assert found["zero_point"].item() == zero_point
    assert found["zero_point"].dtype == args.zp_dtype
    assert found["global_scale"] is None


@settings(max_examples=100)
@given(floats, floats)
def test_both_ends_of_a_range_and_zero_survive_int8(a, b):
    low, high = torch.tensor([min(a, b)]), torch.tensor([max(a, b)])
    for args in (INT8, INT8_ASYMMETRIC):
        found = compute_qparams(low, high, args)
        scale, zero_point = found["scale"], found["zero_point"].float()
        assert (scale > 0).all()
        for x in (low, high, torch.zeros(1)):
            q = (x / scale + zero_point).round().clamp(-128, 127)
            back = (q - zero_point) * scale
            assert (back - x).abs() <= scale * 1.001  # half a step, and half for the rounded zero point
            assert x != 0 or back == 0


@settings(max_examples=50)
@given(floats, floats)
def test_zero_is_always_inside_the_range(a, b):
    low, high = torch.tensor([min(a, b)]), torch.tensor([max(a, b)])
    wide = compute_qparams(low.clamp(max=0), high.clamp(min=0), INT8_ASYMMETRIC)
    assert torch.equal(compute_qparams(low, high, INT8_ASYMMETRIC)["scale"], wide["scale"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("args", [INT8, INT8_ASYMMETRIC, FP8])
def test_an_all_zero_range_gives_a_positive_scale_in_the_range_s_dtype(args, dtype):
    zero = torch.zeros(2, 1, dtype=dtype)
    scale = compute_qparams(zero, zero, args)["scale"]
    assert scale.shape == (2, 1)
    assert scale.dtype == dtype
    assert (scale == torch.finfo(dtype).eps).all()


def test_a_global_scale_is_fp32_and_from_the_largest_magnitude_of_all_members():
    ranges = [(torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0, 0.5]])), (torch.tensor([-7.0]), torch.tensor([1.0]))]
    found = compute_global_scale(((low.bfloat16(), high.bfloat16()) for low, high in ranges), NVFP4)
    assert found is not None
    assert found.dtype == torch.float32
    assert found.tolist() == [448 * 6 / 7]


@pytest.mark.parametrize("args", [INT8, FP8, QuantizationArgs(num_bits=4, group_size=4)])
def test_only_tensor_group_has_a_global_scale(args):
    assert compute_global_scale([(torch.zeros(1), torch.ones(1))], args) is None


def test_nvfp4_local_scales_are_rounded_to_fp8_under_the_global_scale():
    low, high = torch.tensor([[-1.0, -3.1]]), torch.tensor([[2.0, 0.3]])
    global_scale = compute_global_scale([(low, high)], NVFP4)
    scale = compute_qparams(low, high, NVFP4, global_scale)["scale"]
    expected = (torch.tensor([[2.0, 3.1]]) / 6 * global_scale).to(torch.float8_e4m3fn).float()
    assert torch.equal(scale, expected)


class Operations(TorchDispatchMode):
    """The names of the operations inside the ``with`` block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_number_becomes_a_tensor_of_an_accelerator_without_an_upload():
    device = torch.device("meta")  # stands for any but the CPU
    low, high = torch.empty(2, 8, device=device)
    with Operations() as operations:
        compute_qparams(low, high, QuantizationArgs(num_bits=4))
    assert "full" in operations.names


ONE, TWO = torch.tensor([1.0]), torch.tensor([[-1.0, 2.0]])
#: by a number of bits that no other test uses, since compressed-tensors keeps what it makes by format
CALLS = {
    11: lambda args: fake_quantize(TWO, ONE, None, args),
    12: lambda args: fake_quantize_dynamic(TWO, args.model_copy(update={"strategy": "token", "dynamic": True})),
    13: lambda args: compute_qparams(-ONE, ONE, args),
    14: lambda args: NumberGrid.of(args).qparams(-ONE, ONE),
}


@pytest.mark.parametrize("bits", CALLS)
def test_what_compressed_tensors_keeps_of_a_validation_can_be_read_where_gradients_are_computed(bits):
    args = QuantizationArgs(num_bits=bits, strategy="tensor")
    with torch.inference_mode():
        CALLS[bits](args)
    assert not any(end.is_inference() for end in calculate_range(args, ONE.device))
