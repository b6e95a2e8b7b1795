"""The pretend device itself: what it refuses, what it counts, and that it computes what the CPU computes."""

import copy
import io

import pytest
import torch
from torch import nn

from tests.support.pretend_device import DEVICE, OTHER, PretendTensor, counting, on_cpu, on_device


@pytest.fixture
def x():
    return torch.randn(4, 4).to(DEVICE)


@pytest.mark.parametrize("operation", [torch.add, torch.matmul, torch.maximum, lambda a, b: torch.cat([a, b])])
@pytest.mark.parametrize("device", ["cpu", OTHER])
def test_two_devices_are_not_mixed(x, operation, device):
    with pytest.raises(RuntimeError, match=f"Expected all tensors to be on the same device, but found .*{device}"):
        operation(x, torch.ones(4, 4, device=device))


def test_a_number_on_the_cpu_may_take_part_in_arithmetic_but_not_be_joined(x):
    assert torch.equal(on_cpu(x + torch.tensor(1.0)), on_cpu(x) + 1)
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([x[0, 0], torch.tensor(1.0)])


def test_an_index_may_lie_on_the_cpu(x):
    assert torch.equal(on_cpu(x[torch.tensor([2, 0])]), on_cpu(x)[[2, 0]])


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(3, device=d),
        lambda d: torch.full((3,), 2.0, device=d),
        lambda d: torch.tensor([1.0, 2.0], device=d),
        lambda d: torch.as_tensor([1, 2], device=d),
        lambda d: torch.arange(2, 9, 3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.ones(2, device=d).new_tensor([3.0]),
        lambda d: torch.ones(2, device=d).new_zeros(3),
        lambda d: torch.empty(3, device=d).fill_(1),
        lambda d: torch.randn(5, device=d),
        lambda d: torch.randint(9, (5,), device=d),
        lambda d: torch.randperm(5, device=d),
        lambda d: torch.rand(3, device=d, generator=torch.Generator(d).manual_seed(3)),
        lambda d: nn.functional.dropout(torch.ones(9, device=d), 0.5),
    ],
)
def test_factories_and_random_numbers_are_the_cpus(make):
    torch.manual_seed(5)
    expected = make("cpu")
    torch.manual_seed(5)
    found = make(DEVICE)
    assert isinstance(found, PretendTensor)
    assert found.dtype == expected.dtype
    assert torch.equal(on_cpu(found), expected)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.bincount(x.flatten().abs().int()),
        lambda x: torch.empty(4, 4).copy_(x),
        lambda x: torch.equal(x, x),
    ],
)
def test_whatever_the_host_waits_for_is_a_read(x, read):
    with counting() as counts:
        read(x)
    assert counts.reads.total() == 1


def test_memory_of_the_device_is_not_read_as_numpy(x):
    with pytest.raises((TypeError, RuntimeError), match="numpy"):
        x.numpy()


def test_launches_and_bytes_are_counted_and_views_are_free(x):
    with counting() as counts:
        y = x + 1
        y.view(16)[3:].unsqueeze(0)
        y.mul_(2)
        torch.neg(x, out=y)
    assert counts.launches.total() == 3
    assert counts.moved.total() == 2 * 64 + 2 * 64 + 2 * 64
    assert (counts.reads.total(), counts.uploads.total()) == (0, 0)
    with counting() as counts:
        torch.ones(2).to(DEVICE)
    assert counts.uploads.total() == 1


def test_training_has_the_cpus_bits():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    there, x = copy.deepcopy(model).to(DEVICE), torch.randn(16, 4)
    for each, data in ((model, x), (there, x.to(DEVICE))):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(data).square().mean().backward()
            optimizer.step()
    assert all(isinstance(parameter, nn.Parameter) for parameter in there.parameters())
    for mine, expected in zip(there.parameters(), model.parameters(), strict=True):
        assert torch.equal(on_cpu(mine.detach()), expected)


def test_autocast_casts_what_cudas_does(x):
    with torch.autocast("pretend", dtype=torch.bfloat16):
        assert nn.Linear(4, 4).to(DEVICE)(x).dtype == (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32


def test_modules_copies_and_files_keep_the_device(x):
    module = on_device(nn.Linear(4, 4), OTHER)
    assert {p.device for p in copy.deepcopy(module).parameters()} == {OTHER}
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["x"]
    assert loaded.device == DEVICE
    assert torch.equal(on_cpu(loaded), on_cpu(x))


def test_pinned_memory_is_uploaded():
    pinned = torch.ones(3).pin_memory()
    assert on_device(pinned).device == DEVICE
