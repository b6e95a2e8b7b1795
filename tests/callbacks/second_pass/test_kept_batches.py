"""Copies of what user code holds: what is copied, and what is shared."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BatchEncoding

from lightning_obs.callbacks.copies import Copier, KeptBatches


def copier():
    return Copier(torch.clone)


def test_a_module_in_a_list_is_shared_with_its_weights():
    teacher = nn.Linear(2, 2)
    assert copier()([teacher])[0] is teacher


class Holder:
    def __init__(self):
        self.lock, self.values = threading.Lock(), []
        self.append = self.values.append


def test_an_object_that_cannot_be_copied_is_shared_alone():
    holder = Holder()
    copied = copier()(holder)
    copied.append(1)
    assert copied.lock is holder.lock
    assert (copied.values, holder.values) == ([1], [])


class Closes:
    closed = 0

    def __del__(self):
        type(self).closed += 1


@pytest.mark.parametrize("value", [Closes(), TensorDataset(torch.ones(2)), threading.Event(), (i for i in "a")])
def test_what_belongs_to_the_system_is_shared(value):
    assert copier()({"a": value})["a"] is value


def test_kept_batches_end_where_one_does_not_fit_and_are_not_what_the_step_changes():
    kept = KeptBatches(limit=2500)
    batches = [BatchEncoding({"x": torch.full((size,), float(size))}) for size in (100, 100, 1000, 1)]
    for number, batch in enumerate(batches):
        kept.add(batch, number)
        batch.pop("x").zero_()
    assert (len(kept), kept.seen) == (2, 4)
    for expected, (batch, number) in enumerate(kept.taken()):
        assert number == expected
        assert torch.equal(batch["x"], torch.full((100,), 100.0))
    assert not len(kept)
