"""A rounded weight whose scales are learned keeps its numbers, and ends where its module loses less."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.numerics.fake_quantize import dequantize
from lightning_obs.numerics.learned_rounding import LearnedWeight, can_learn_scale
from lightning_obs.numerics.rounding import round_by_hessian
from lightning_obs.schemes.config import make_observer

GROUPS = {"strategy": "group", "group_size": 16}
FORMATS = {
    "int4": QuantizationArgs(num_bits=4, **GROUPS),
    "int4, zero points": QuantizationArgs(num_bits=4, symmetric=False, **GROUPS),
    "int4, signed": QuantizationArgs(num_bits=4, observer_kwargs={"signed": True}, **GROUPS),
    "int4 channels": QuantizationArgs(num_bits=4, strategy="channel"),
    "int4 blocks": QuantizationArgs(num_bits=4, strategy="block", block_structure=[8, 16]),
    "nvfp4": QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    ),
}


def rounded_weight(args):
    """A weight ``(24, 64)`` with its qparams, the Hessian of correlated inputs, and the codes that it rounds to."""
    torch.manual_seed(0)
    weight = torch.randn(24, 64)
    inputs = torch.randn(256, 8) @ torch.randn(8, 64) + 0.5 * torch.randn(256, 64)
    hessian = inputs.T @ inputs
    qparams = make_observer("weight", args)(weight).get_qparams()
    return weight, qparams, hessian, round_by_hessian(weight, qparams, args, hessian, damping=0.1)


def error_of(difference, hessian):
    return (difference @ hessian * difference).sum().item()


@pytest.mark.parametrize("args", FORMATS.values(), ids=FORMATS)
def test_numbers_stay_as_a_rounding_left_them_and_scales_make_their_error_less(args):
    weight, qparams, hessian, codes = rounded_weight(args)
    learned = LearnedWeight(codes, qparams, args)
    assert torch.equal(learned.scale(), qparams["scale"])
    errors = []
    for step in range(40):
        difference = learned.dequantized() - weight
        errors.append(error_of(difference, hessian))
        learned.step(difference @ hessian, 0.005 * (1 - step / 40))
    if args.scale_dtype is None:
        assert min(errors) < 0.98 * errors[0]
    scale = learned.scale()
    assert scale.dtype == qparams["scale"].dtype
    assert torch.equal(scale.float().sign(), qparams["scale"].float().sign())
    stored = dequantize(codes, scale, qparams.get("zero_point"), args, global_scale=qparams.get("global_scale"))
    assert torch.equal(stored, learned.dequantized())


@pytest.mark.parametrize(
    "args",
    [
        QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
        QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
    ],
)
def test_scales_of_tensors_and_powers_of_two_cannot_be_learned(args):
    assert not can_learn_scale(args)
