"""Batches that are kept for a second run."""

import threading
from dataclasses import dataclass

import pytest
import torch
from transformers import BatchEncoding

from lightning_obs import CalibrationError
from lightning_obs.forward.kept_batches import KeptBatches


def test_kept_batches_end_where_one_does_not_fit_and_are_not_what_the_step_changes():
    kept = KeptBatches(byte_limit=2500)
    batches = [BatchEncoding({"x": torch.full((size,), float(size))}) for size in (100, 100, 1000, 1)]
    for number, batch in enumerate(batches):
        kept.add(batch, number)
        batch.pop("x").zero_()
    assert (len(kept), kept.offered) == (2, 4)
    for expected, (batch, number) in enumerate(kept.pop_all()):
        assert number == expected
        assert torch.equal(batch["x"], torch.full((100,), 100.0))
    assert not len(kept)


@dataclass
class Graph:
    nodes: torch.Tensor
    names: list


def test_a_batch_of_any_class_is_kept_without_its_history():
    kept = KeptBatches()
    nodes = torch.ones(2, 3, requires_grad=True) * 2
    graph = Graph(nodes, ["a", "b"])
    kept.add((graph, nodes))
    graph.names.clear()
    [((copied, same_nodes), _)] = kept.pop_all()
    assert copied.names == ["a", "b"]
    assert same_nodes is copied.nodes
    assert torch.equal(copied.nodes, nodes)
    assert not copied.nodes.requires_grad


def test_a_part_of_a_large_tensor_counts_as_the_part():
    kept = KeptBatches(byte_limit=4 * 10)
    kept.add(torch.ones(1000)[:10])
    [(copied, _)] = kept.pop_all()
    assert copied.untyped_storage().nbytes() == 4 * 10


def test_a_batch_that_cannot_be_copied_is_refused():
    with pytest.raises(CalibrationError, match=r"cannot be copied\. Got dict: TypeError: cannot pickle '_thread.lock'"):
        KeptBatches().add({"lock": threading.Lock()})
