"""What a strategy and its sampler say about the other ranks."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_obs.callbacks.strategies import repeated_samples, samples_that_count


def loaders(size, ranks, drop_last=False):
    data = TensorDataset(torch.arange(size))
    for rank in range(ranks):
        sampler = DistributedSampler(data, ranks, rank, shuffle=False, drop_last=drop_last)
        yield rank, DataLoader(data, batch_size=3, sampler=sampler)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_samples_that_a_sampler_repeats_are_those_behind_the_datasets_end(ranks):
    for size in range(1, 40):
        for rank, loader in loaders(size, ranks):
            places = [rank + at * ranks for at in range(len(loader.sampler))]
            assert repeated_samples(loader) == sum(place >= size for place in places)
            batches = [samples_that_count(loader, at) for at in range(len(loader))]
            if any(place >= size for place in places):
                assert torch.cat(batches).tolist() == [place < size for place in places]
            else:
                assert batches == [None] * len(loader)


def test_a_sampler_that_drops_the_rest_repeats_nothing():
    assert [repeated_samples(loader) for _, loader in loaders(10, 4, drop_last=True)] == [0] * 4
