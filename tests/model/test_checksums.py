from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint
from lightning_obs.model.checksums import changed_since, checksums
from lightning_obs.model.checksums import checksum as checksum_of_part


def checksum(value):
    holder = nn.Module()
    holder.register_buffer("value", value)
    return checksums([(holder, "value")])[0]


def negated_upper_lanes(weight):
    weight[:, 3::4] *= -1


def swapped_rows(weight):
    weight[[0, 5]] = weight[[5, 0]]


def swapped_columns(weight):
    weight[:, [1, 2]] = weight[:, [2, 1]]


def rectangle_of_steps(weight):
    bits = weight.view(torch.int16)
    bits[0, 0], bits[0, 9], bits[3, 0], bits[3, 9] = bits[0, 0] + 1, bits[0, 9] - 1, bits[3, 0] - 1, bits[3, 9] + 1


@pytest.mark.parametrize("change", [negated_upper_lanes, swapped_rows, swapped_columns, rectangle_of_steps])
def test_a_change_whose_bits_sum_to_nothing_is_seen(change):
    weight = torch.randn(64, 48, dtype=torch.bfloat16)
    before = checksum(weight)
    change(weight)
    assert checksum(weight) != before


def test_no_small_step_of_training_goes_unnoticed():
    weight = torch.randn(32, 32, dtype=torch.bfloat16)
    seen = {checksum(weight)}
    for step in range(400):
        places = torch.randint(1024, (2 + step % 3,))
        weight.view(-1).view(torch.int16)[places] += torch.randint(0, 2, places.shape, dtype=torch.int16) * 2 - 1
        seen.add(checksum(weight))
    # A walk of so few steps hardly returns to where it was; the sum of the bits would take a few dozen values.
    assert len(seen) > 395


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("cuts", [[0, 7, 7, 500, 300_001], [0, 1, 262_144, 262_147, 300_001]])
def test_parts_cut_anywhere_add_up_to_the_whole(dtype, cuts):
    value = torch.randn(300_001).to(dtype)
    parts = [checksum_of_part(value[a:b], a) for a, b in pairwise(cuts)]
    assert int(sum(parts)) == checksum(value)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, ids):
        self.calls += 1
        return self.head(self.norm(self.embed(ids)))


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight", "norm.running_mean", "head.bias", "head.weight"])
@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_export_refuses_whatever_the_last_validation_did_not_see(name, tmp_path):
    model = Mixed().eval()
    with CalibrationSession(model, "INT8_STATIC"):
        model(torch.arange(10))
    model(torch.arange(10))
    assert changed_since(model) == []
    with torch.no_grad():
        model.state_dict()[name].view(-1)[0] += 1e-3
    assert changed_since(model) == [name]
    with pytest.raises(CalibrationError, match=rf"1 parameters and buffers have changed since .*: {name}"):
        export_checkpoint(model, tmp_path / "out")
