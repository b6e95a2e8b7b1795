"""The load of a written checkpoint in a new process: what it compares, and how it fails."""

import sys
from pathlib import Path

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_obs import CalibrationError
from lightning_obs.app.checkpoint import _answer_of_process, _first_sample
from lightning_obs.app.reload_check import align, first_tensor


def at_an_odd_address(value, offset):
    memory = torch.empty(value.numel() + 32)
    start = (offset - memory.data_ptr()) % 64 // 4
    return memory[start : start + value.numel()].view(value.shape).copy_(value)


def test_equal_models_at_other_addresses_give_the_same_bits():
    torch.manual_seed(0)
    models = [nn.Linear(32, 32) for _ in range(4)]
    for offset, model in zip((0, 4, 8, 24), models, strict=True):
        for name, value in models[0].state_dict().items():
            getattr(model, name).data = at_an_odd_address(value, offset)
    x = torch.randn(1, 32)
    for model in models:
        align(model)
        assert all(value.data_ptr() % 64 == 0 for value in model.parameters())
        assert torch.equal(model(x), models[0](x))


def test_tied_weights_stay_tied_and_buffers_are_moved_too():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.BatchNorm1d(8))
    model[0].weight.data = at_an_odd_address(model[0].weight.data, 8)
    model[1].weight = model[0].weight
    model[2].running_mean = at_an_odd_address(model[2].running_mean, 4)
    align(model)
    assert model[1].weight is model[0].weight
    assert model[0].weight.data_ptr() % 64 == model[2].running_mean.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "print('loading'); raise ValueError('no such weight')",
            r"cannot load it: out. Got ValueError: no such weight",
        ),
        ("import time; time.sleep(60)", r"in time: out. Got more than 0.5 s.*raise export\.verify_timeout"),
    ],
)
def test_a_process_that_fails_is_an_error_that_names_the_checkpoint(program, message):
    with pytest.raises(CalibrationError, match=message):
        _answer_of_process([sys.executable, "-c", program], Path("out"), seconds=0.5 if "sleep" in program else 60)


@pytest.mark.parametrize(
    "make_output", [lambda x: (None, x), lambda x: [{"scores": x}], lambda x: {"boxes": x[:0], "x": x}]
)
def test_the_first_tensor_of_nested_outputs_is_compared(make_output):
    values = torch.ones(2, 3)
    kind, compared = first_tensor(make_output(values))
    assert (kind, compared is values) == ("outputs", True)


def test_the_first_tensor_of_an_output_of_transformers_may_be_nested():
    hidden = torch.ones(2, 3)
    kind, compared = first_tensor(BaseModelOutput(hidden_states=(hidden[:0], hidden)))
    assert (kind, compared is hidden) == ("hidden states", True)


@pytest.mark.parametrize("output", [{"words": "none"}, BaseModelOutput()])
def test_an_output_without_tensors_cannot_be_compared(output):
    with pytest.raises(ValueError, match="has no tensor"):
        first_tensor(output)


def test_the_first_sample_of_a_batch_keeps_a_tensor_without_dimensions():
    batch = {"x": torch.ones(4, 3), "weight": torch.tensor(0.5)}
    sample = apply_to_collection(batch, torch.Tensor, _first_sample)
    assert (sample["x"].shape, sample["weight"].item()) == ((1, 3), 0.5)
