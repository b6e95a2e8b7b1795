"""The description of what is stored, from which every writer makes its file."""

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, quantized
from lightning_obs.forward.quantized_module import quantized_weight
from lightning_obs.model.kinds import from_matrix
from lightning_obs.model.stored import stored_range, stored_weight
from lightning_obs.numerics.fake_quantize import dequantize


def calibrated(scheme: str, layer: nn.Module, data: torch.Tensor, **options: object) -> nn.Module:
    """The layer, calibrated with the data."""
    model = nn.Sequential(layer)
    with CalibrationSession(model, scheme, targets=["0"], engines="unchecked", **options) as session, torch.no_grad():
        if session.needs_data:
            model(data)
    return layer


@pytest.mark.parametrize("rounding", [None, "gptq"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "FP8", "NVFP4A16", "MXFP4A16", "INT8_STATIC"])
def test_codes_stand_for_the_weight_that_the_quantized_model_has(scheme: str, rounding: str | None) -> None:
    torch.manual_seed(0)
    layer = calibrated(scheme, nn.Linear(128, 64), torch.randn(256, 128), rounding=rounding)
    with quantized(layer):
        expected = quantized_weight(layer)
    stored = stored_weight(layer)
    assert stored is not None
    args, scale, zero_point, global_scale = stored.range
    codes = stored.codes
    if args.type == "float" and args.num_bits == 4:
        levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        codes = levels[codes.long() & 7] * torch.where(codes.long() & 8 > 0, -1.0, 1.0)
    weight = dequantize(codes, scale, zero_point, args, global_scale=global_scale)
    torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def test_codes_of_a_convolution_are_those_of_its_matrix() -> None:
    layer = calibrated("INT8_STATIC", nn.ConvTranspose2d(4, 8, 3), torch.randn(1, 4, 5, 5))
    stored = stored_weight(layer)
    assert stored is not None
    assert stored.codes.shape == (8, 4 * 9)
    with quantized(layer):
        expected = quantized_weight(layer)
    matrix = dequantize(stored.codes, stored.range.scale, stored.range.zero_point, stored.range.args)
    torch.testing.assert_close(from_matrix(layer, matrix, layer.weight.shape), expected, rtol=0, atol=0)


def test_what_the_scheme_leaves_in_float_has_nothing_stored() -> None:
    layer = calibrated("W8A8", nn.Linear(8, 8), torch.randn(2, 8))
    assert stored_range(layer, "input") is None  # its range is computed as the model runs
    assert stored_range(layer, "output") is None
    assert stored_weight(nn.Linear(8, 8)) is None
