"""The one table of number formats is what compressed-tensors describes."""

import pytest
from compressed_tensors.quantization import quant_args

from lightning_obs.numerics.formats import FLOATS, FloatFormat


@pytest.mark.parametrize(("bits", "name"), [(8, "FP8_E4M3_DATA"), (6, "FP6_E2M3_DATA"), (4, "FP4_E2M1_DATA")])
def test_each_floating_format_is_the_one_that_compressed_tensors_describes(bits, name):
    described = getattr(quant_args, name, None)
    if described is None:
        pytest.skip(f"this release of compressed-tensors has no {name}")
    assert FLOATS[bits] == FloatFormat.of(described)
