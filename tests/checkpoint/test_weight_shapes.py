"""Checkpoints hold weights of every shape: one row, one column, odd sizes, in every number of bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.numerics.fake_quantize import pack_nibbles

#: (outputs, inputs)
SHAPES = [(1, 64), (1, 8), (1, 5), (1, 1), (64, 1), (5, 1), (3, 7), (2, 64), (7, 24)]


class Layers(nn.Module):
    """A Linear of each shape, each on inputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in SHAPES)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([layer(x) for layer, x in zip(self.layers, inputs, strict=True)], dim=1)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("strategy", "symmetric", "rounding"),
    [("channel", True, "gptq"), ("channel", False, None), ("tensor", True, None), ("tensor", False, "gptq")],
    ids=["channel, rounded", "channel, asymmetric", "tensor", "tensor, asymmetric, rounded"],
)
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_shape_is_written_and_loaded(bits, strategy, symmetric, rounding, tmp_path):
    scheme = {"weights": {"num_bits": bits, "strategy": strategy, "symmetric": symmetric}}
    model, inputs = Layers(), [torch.randn(32, columns) for _, columns in SHAPES]
    session = CalibrationSession(model, scheme, rounding=rounding, engines="unchecked")
    with session, torch.no_grad():
        if session.needs_data:
            model(inputs)
    with quantized(model), torch.no_grad():
        expected = model(inputs)
    loaded = load_checkpoint(Layers(), export_checkpoint(model, tmp_path / "checkpoint"))
    with torch.no_grad():
        assert torch.equal(loaded(inputs), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_nibbles_are_packed_in_any_layout_of_the_memory(rows, transposed):
    codes = torch.randint(-8, 8, (rows, 8), dtype=torch.int8)
    value = codes.T.contiguous().T if transposed else codes
    low, high = pack_nibbles(value).int().bitwise_and(0xF), pack_nibbles(value).int() >> 4
    assert torch.equal(torch.stack([low, high], -1).flatten(1), codes.int() & 0xF)
    assert pack_nibbles(value).view(torch.int32).shape == (rows, 1)
