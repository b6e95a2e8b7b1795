"""The one table of number formats is what compressed-tensors and torch describe, and all that a format takes."""

import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, quant_args
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.numerics import formats
from lightning_obs.numerics.formats import FORMATS, NumberFormat, NumberGrid
from tests.support.versions import HAS_FLOATS_OF_6_BITS

E2M3 = "float6_e2m3fn"


@pytest.mark.parametrize("name", ["FP8_E4M3_DATA", "FP6_E2M3_DATA", "FP4_E2M1_DATA"])
def test_each_format_of_values_is_the_one_that_compressed_tensors_describes(name):
    described = getattr(quant_args, name, None)
    if described is None:
        pytest.skip(f"this release of compressed-tensors has no {name}")
    number = NumberGrid.of(QuantizationArgs(num_bits=described.bits, type="float", zp_dtype=torch.int8)).number
    assert (number.mantissa, number.last, number.dtype) == (described.mantissa, described.max, described.dtype)
    assert number.smallest == 2 - 2 ** (described.exponent - 1)


@pytest.mark.parametrize("name", [name for name, number in FORMATS.items() if number.dtype is not None])
def test_each_format_that_torch_has_is_the_one_that_torch_describes(name):
    number, described = FORMATS[name], torch.finfo(getattr(torch, name))
    assert number.dtype == getattr(torch, name)
    assert (number.bits, number.last) == (described.bits, described.max)
    assert 2.0**number.smallest == described.smallest_normal
    assert number.mantissa == -math.log2(described.eps)


def test_a_format_that_is_not_in_the_table_is_named_with_those_that_are():
    args = QuantizationArgs(num_bits=5, type="float", zp_dtype=torch.int8)
    with pytest.raises(CalibrationError, match=r"no such number format. Got .* of 5 bits, expected one of .*e4m3"):
        NumberGrid.of(args)


# ---------------------------------------------------------------------- a format is a row


def reloaded_difference(scheme, folder):
    """Calibrate a tiny model, export it, load it into another; by how much quantized and reloaded outputs differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16()
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    with CalibrationSession(model, scheme, observers={"weight": "memoryless_mse"}):
        pass
    with quantized(model), torch.no_grad():
        expected = model(x)
    assert (expected != model(x)).any()
    export_checkpoint(model, folder)
    torch.manual_seed(1)
    fresh = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16()
    with torch.no_grad():
        return (load_checkpoint(fresh, folder)(x) - expected).abs().max().item()


@pytest.mark.skipif(not HAS_FLOATS_OF_6_BITS, reason="compressed-tensors 0.19 has no MXFP6A16")
def test_a_format_of_values_is_calibrated_exported_and_reloaded_by_its_row_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(FORMATS, E2M3)
    with pytest.raises(CalibrationError, match=r"no such number format: 0 \(weight\). Got floating point of 6 bits"):
        reloaded_difference("MXFP6A16", tmp_path / "none")
    row = NumberFormat(bits=6, mantissa=3, smallest=0, last=7.5, codes=torch.float8_e4m3fn, mx_mantissa=3)
    monkeypatch.setitem(FORMATS, E2M3, row)
    assert reloaded_difference("MXFP6A16", tmp_path / "six bits") == 0.0


def test_scales_in_a_dtype_of_torch_are_calibrated_exported_and_reloaded(tmp_path):
    """Two formats of 8 bits: values stay E4M3, scales are rounded to E5M2."""
    args = QuantizationArgs(num_bits=4, group_size=16, scale_dtype=torch.float8_e5m2)
    assert formats.format_of(QuantizationArgs(num_bits=8, type="float")) is FORMATS["float8_e4m3fn"]
    assert reloaded_difference({"targets": ["Linear"], "weights": args.model_dump()}, tmp_path / "e5m2") == 0.0
