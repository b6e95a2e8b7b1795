"""What the new process does with the model before it compares."""

import torch
from torch import nn

from lightning_obs.app.reload_check import align


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
