from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_obs.ranks.reduction import (
    BLOCK,
    WIDE,
    occupied_blocks,
    ordered,
    pack_tensors,
    union_of_blocks,
    unordered,
    unpack_tensors,
)

BITS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64)}


def floats(draw, dtype):
    integer, width = BITS[dtype]
    patterns = draw(st.lists(st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1), min_size=2, max_size=20))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45], dtype=dtype)
    values = torch.cat([torch.tensor(patterns, dtype=integer).view(dtype), special])
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(len(values)))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
def test_keys_are_ordered_as_the_values_are(dtype, data):
    values = floats(data.draw, dtype)
    values = values[~values.isnan()]
    keys = ordered(values)
    # numpy.sort knows the order of numbers; of the two zeros, the sign bit decides.
    for a, key_a in zip(values.tolist(), keys.tolist(), strict=True):
        for b, key_b in zip(values.tolist(), keys.tolist(), strict=True):
            assert (key_a < key_b) == ((a, math.copysign(1, a)) < (b, math.copysign(1, b)))
    assert np.array_equal(np.sort(values.numpy()), values[keys.argsort()].numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
def test_every_bit_pattern_comes_back(dtype, data):
    values = floats(data.draw, dtype)
    back = unordered(ordered(values).to(torch.int64), dtype)
    assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("dtype", list(WIDE), ids=str)
def test_widening_loses_nothing(dtype):
    if dtype.is_floating_point:
        ends = [torch.finfo(dtype).min, -torch.finfo(dtype).tiny, 0.0, torch.finfo(dtype).tiny, torch.finfo(dtype).max]
    else:
        ends = [torch.iinfo(dtype).min, 0, torch.iinfo(dtype).max]
    values = torch.tensor(ends, dtype=dtype)
    wide = values.to(WIDE[dtype])
    assert torch.equal(wide.to(dtype).view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (7, 1, 3)])
@pytest.mark.parametrize("dtype", [*WIDE, torch.bool, torch.complex64], ids=str)
def test_bytes_of_any_dtype_and_shape_come_back(dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    value = raw.view(dtype).reshape(shape)
    nest, packed = pickle.loads(pickle.dumps(pack_tensors({"ones": [torch.ones(3), "a"], "value": value})))
    found = unpack_tensors(nest, packed, torch.device("cpu"))
    assert torch.equal(found["ones"][0], torch.ones(3))
    back = found["value"]
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


@given(st.lists(st.sets(st.integers(0, 4 * 8 * BLOCK - 1), max_size=12), min_size=1, max_size=4))
def test_a_block_is_in_the_union_if_one_part_has_a_count_in_it(places):
    tensors = []
    for occupied in places:
        tensors.append(torch.zeros(4, 8 * BLOCK, dtype=torch.int64))
        tensors[-1].view(-1)[sorted(occupied)] = 1
    union = union_of_blocks(occupied_blocks(tensors))
    assert union.tolist() == sorted({place // BLOCK for occupied in places for place in occupied})
