"""Kinds of validation loaders: samplers, datasets and loaders that change when asked. All give batches ``(B, 4)``."""

import functools
import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.support.lightning_package import CombinedLoader

COUNT = 8
SAMPLES = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(2))


class Plain(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return SAMPLES[index]


class Counts(Plain):
    """Other samples each time."""

    def __init__(self):
        self.calls = 0

    def __getitem__(self, index):
        self.calls += 1
        return SAMPLES[index] * (1 + 0.01 * self.calls)


class Draws(Plain):
    """Adds noise of its own."""

    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return SAMPLES[index] + float(self.draw())


class Cycle(Plain):
    """Forgets a sample each time it was asked for it."""

    def __init__(self):
        self.left = list(range(1000))

    def __getitem__(self, index):
        return SAMPLES[index] * self.left.pop(0)


class Stream(IterableDataset):
    """Another order in each epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch))
        return iter(SAMPLES[order] * self.epoch)


class NoisyStream(IterableDataset):
    def __init__(self):
        self.generator = np.random.default_rng(1)

    def __iter__(self):
        for sample in SAMPLES:
            yield sample * float(self.generator.random())


class Onwards(IterableDataset):
    """Goes on where the last epoch ended."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        for _ in range(COUNT):
            self.at += 1
            yield SAMPLES[self.at % COUNT] + self.at


class EpochSampler(Sampler):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return COUNT

    def __iter__(self):
        self.epoch += 1
        return iter(torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class SetEpochSampler(EpochSampler):
    def set_epoch(self, epoch):
        self.epoch = 10 * self.epoch + epoch


class OwnRandomSampler(EpochSampler):
    def __init__(self):
        self.random = random.Random(2)

    def __iter__(self):
        return iter(self.random.sample(range(COUNT), COUNT))


class EpochBatches(Sampler):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return COUNT // 4

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield order[:4]
        yield order[4:]


class Stateful(DataLoader):
    """Remembers how often it was begun, as torchdata's does."""

    epochs = 0

    def __iter__(self):
        self.epochs += 1
        return (batch * self.epochs for batch in super().__iter__())

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class NoLoader:
    """Any iterable is a loader."""

    def __init__(self):
        self.epochs = 0

    def __iter__(self):
        self.epochs += 1
        return iter((SAMPLES * self.epochs).split(4))


class OnceMore(NoLoader):
    def __len__(self):
        return 2


class Collate:
    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        return torch.stack(samples) * self.calls


def seeded(seed=1):
    return torch.Generator().manual_seed(seed)


def of(data=None, **options):
    return lambda: DataLoader(Plain() if data is None else data(), **{"batch_size": 4, **options})


def shuffled(make, **options):
    return lambda: DataLoader(Plain(), batch_size=4, sampler=make(), **options)


LOADER_KINDS = {
    "plain": of(),
    "tensors": lambda: DataLoader(TensorDataset(SAMPLES), batch_size=4),
    "shuffle": of(shuffle=True),
    "shuffle with a generator": lambda: DataLoader(Plain(), batch_size=4, shuffle=True, generator=seeded()),
    "RandomSampler": shuffled(lambda: RandomSampler(Plain())),
    "RandomSampler with a generator": shuffled(lambda: RandomSampler(Plain(), generator=seeded())),
    "BatchSampler of a RandomSampler with a generator": lambda: DataLoader(
        Plain(), batch_sampler=BatchSampler(RandomSampler(Plain(), generator=seeded()), 4, False)
    ),
    "BatchSampler as a sampler": lambda: DataLoader(
        Plain(), batch_size=None, sampler=BatchSampler(RandomSampler(Plain(), generator=seeded()), 4, False)
    ),
    "BatchSampler in order": lambda: DataLoader(
        Plain(), batch_sampler=BatchSampler(SequentialSampler(Plain()), 4, False)
    ),
    "SubsetRandomSampler": shuffled(lambda: SubsetRandomSampler(range(6), generator=seeded())),
    "WeightedRandomSampler": shuffled(lambda: WeightedRandomSampler([1.0] * COUNT, COUNT, generator=seeded())),
    "sampler with an epoch counter": shuffled(EpochSampler),
    "sampler with set_epoch": shuffled(SetEpochSampler),
    "sampler with its own random numbers": shuffled(OwnRandomSampler),
    "batch sampler with an epoch counter": lambda: DataLoader(Plain(), batch_sampler=EpochBatches()),
    "dataset that counts": of(Counts),
    "dataset that forgets": of(Cycle),
    "dataset with a torch Generator": of(lambda: Draws(functools.partial(torch.rand, (), generator=seeded()))),
    "dataset with a numpy Generator": of(lambda: Draws(np.random.default_rng(1).random)),
    "dataset with a random.Random": of(lambda: Draws(random.Random(1).random)),
    "dataset that draws torch's numbers": of(lambda: Draws(lambda: torch.rand(()))),
    "dataset that draws numpy's numbers": of(lambda: Draws(lambda: np.random.rand())),
    "IterableDataset": of(Stream),
    "IterableDataset with random numbers": of(NoisyStream),
    "IterableDataset that goes on": of(Onwards),
    "stateful loader": lambda: Stateful(Plain(), batch_size=4),
    "iterable without a length": NoLoader,
    "iterable with a length": OnceMore,
    "collate with a counter": lambda: DataLoader(Plain(), batch_size=4, collate_fn=Collate()),
    "several": lambda: [of()(), of(Counts)()],
    "several with generators": lambda: [shuffled(EpochSampler)(), of(Stream)()],
    "CombinedLoader max_size": lambda: CombinedLoader(
        [of(Stream)(), of(shuffle=True, generator=seeded())()], "max_size"
    ),
    "CombinedLoader min_size": lambda: CombinedLoader({"a": of()(), "b": of(Counts)()}, "min_size"),
    "CombinedLoader max_size_cycle": lambda: CombinedLoader(
        {"a": DataLoader(Plain(), batch_size=8), "b": of(Counts)()}, "max_size_cycle"
    ),
    "CombinedLoader sequential": lambda: CombinedLoader({"a": of()(), "b": of(Counts)()}, "sequential"),
    "workers": of(Counts, num_workers=1),
    "persistent workers": of(Counts, num_workers=1, persistent_workers=True),
}
