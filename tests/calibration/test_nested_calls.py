"""A forward that calls the model itself is one call, and gives what a forward without such calls gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, CalibrationWarning
from lightning_obs.model.module_qparams import read_qparams

INT4 = {"weights": {"num_bits": 4, "group_size": 8}}
BATCHES = [torch.randn(2 + number % 2, 6, 16, generator=torch.Generator().manual_seed(number)) for number in range(5)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Plain(nn.Module):
    """Its output depends on the batch, and before that on the first sample alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.requires_grad_(False).eval()

    def body(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def of_first(self, x, mask):
        return self.body(x[:1])

    def forward(self, x, mask=None, is_whole=True):
        if not is_whole:
            return self.body(x)
        first = self.of_first(x, mask)
        return self.body(x) + first.mean()


class CallsItself(Plain):
    """The same model, but the first sample runs through the model's own call."""

    def of_first(self, x, mask):
        return self(x[:1], None if mask is None else mask[:1], is_whole=False)


def calibrated(model, **options) -> CalibrationSession:
    with CalibrationSession(model, options.pop("scheme", INT4), **options) as session:
        for batch in BATCHES:
            model(batch)
    return session


def weights_of(session) -> list[torch.Tensor]:
    """The numbers and scales of all weights."""
    tensors = []
    for name in session.result.modules:
        module = session.model.get_submodule(name)
        tensors += [read_qparams(module)["weight_scale"], getattr(module, "weight_rounded", torch.zeros(0))]
    return tensors


WEIGHED = {"observers": {"weight": {"name": "hessian", "weigh_tokens": True}}}


@pytest.mark.parametrize(
    "options",
    [
        WEIGHED,
        WEIGHED | {"rounding": {"name": "gptq", "inputs": "quantized"}},
        {"recipe": "accurate", "rounding": "gptq"},
    ],
)
def test_a_forward_that_calls_the_model_itself_gives_the_numbers_of_one_that_does_not(options):
    session, expected = calibrated(CallsItself(), **options), calibrated(Plain(), **options)
    assert session.result.batches == expected.result.batches == len(BATCHES)
    assert len(session.result.modules) == 4
    for tensor, of_plain in zip(weights_of(session), weights_of(expected), strict=True):
        assert torch.equal(tensor, of_plain)


def test_a_recipe_rounds_in_full_precision_where_the_forward_calls_the_model_itself():
    """The blocks are called twice, so the model does not run block by block, and its kept calls are observed."""
    with pytest.warns(CalibrationWarning, match="block by block: CallsItself. Got block 0 was called after 2 others"):
        session = calibrated(CallsItself(), recipe="accurate")
    expected = calibrated(Plain(), recipe="accurate", rounding="gptq")
    assert session.result.batches == len(BATCHES)
    for tensor, of_plain in zip(weights_of(session), weights_of(expected), strict=True):
        assert torch.equal(tensor, of_plain)


def test_the_mask_of_the_outer_call_is_in_force_again_after_an_inner_call():
    model = CallsItself()
    session = CalibrationSession(model, "INT8_STATIC", observers={"input": "static_minmax"}, token_mask="mask")
    batch = torch.ones(2, 3, 16)
    batch[1, 2] = 100.0  # padding, outside of the first sample
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with session:
        model(batch, mask)
    assert session.result.input_ranges["layers.0.up"] == (1.0, 1.0)


class Fails(CallsItself):
    """Its own call fails, and it goes on without."""

    def of_first(self, x, mask):
        try:
            return self(x[:1, :, :1], mask, is_whole=False)
        except RuntimeError:
            return x[:1]


def test_an_inner_call_that_fails_does_not_end_the_outer_one():
    session = calibrated(Fails(), scheme="INT8_STATIC")
    assert session.result.batches == len(BATCHES)
    assert sorted(session.result.input_ranges) == ["layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up"]
