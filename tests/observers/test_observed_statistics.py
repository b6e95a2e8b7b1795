"""The statistics of an observer: finite, declared, shared by observers of one kind, reduced over ranks."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.distributed import ReduceOp

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer
from lightning_obs.observers.observer import observe_shared
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.sync import sync_statistics
from tests.observers.contract import BUILT_IN, INT8, MEMORYLESS, Largest, make
from tests.support.rank_processes import run_ranks

every_observer = pytest.mark.parametrize("name", BUILT_IN)

# ---------------------------------------------------------------------- values that are not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_observer
def test_a_value_that_is_not_finite_is_found_and_counted(name, bad):
    weight = torch.zeros(3, 4)
    weight[1, 2] = bad
    observer = make(name, "weight", QuantizationArgs(strategy="channel"))(weight)
    assert "1 of 3" in observer.nonfinite_statistics()
    with pytest.raises(CalibrationError, match=r"not finite. Got 1 of 3 (min|max)_vals not finite"):
        observer.get_qparams()


@pytest.mark.parametrize("name", ["static_minmax", "minmax"])
def test_a_nan_is_not_forgotten_with_the_next_tensor(name):
    observer = make(name)(torch.tensor([[1.0, float("nan")]]))(torch.ones(1, 2))
    assert observer.nonfinite_statistics() == "1 of 1 min_vals not finite, 1 of 1 max_vals not finite"


def test_a_nan_in_a_statistic_of_one_s_own_is_found():
    observer = Largest("input", INT8)(torch.tensor([[float("inf")]]))
    assert observer.nonfinite_statistics() == "1 of 1 largest not finite"


# ---------------------------------------------------------------------- declared statistics


class WithLast(type(make("static_minmax"))):
    """Declares what its parent does, and sets one attribute more."""

    def update_statistics_from_observed(self, observed):
        super().update_statistics_from_observed(observed)
        self.last = observed.flatten()


def test_an_attribute_that_a_subclass_sets_beside_the_declared_ones_is_a_statistic_too():
    observer = WithLast("input", INT8)(torch.tensor([[1.0, 2.0]]))
    assert observer.get_statistics().keys() == {"min_vals", "max_vals", "last"}
    observer(torch.tensor([[float("nan"), 2.0]]))
    assert "1 of 2 last not finite" in observer.nonfinite_statistics()
    observer.reset()
    assert not hasattr(observer, "last")


@pytest.mark.parametrize("make_one", [lambda: make("static_minmax"), lambda: Largest("input", INT8)])
def test_statistics_are_those_that_observing_changed(make_one):
    observer = make_one()
    assert observer.get_statistics() == {}
    observer(torch.ones(2, 4))
    other = make_one()
    other.load_statistics(observer.get_statistics())
    assert other.get_min_max() == observer.get_min_max()
    observer.reset()
    assert observer.get_statistics() == {}


@pytest.mark.parametrize("name", ["args", "_fused_observers", "get_qparams", "has_statistics"])
def test_a_statistic_cannot_take_the_name_of_the_observer_s_own(name):
    with pytest.raises(CalibrationError, match=f"has no such statistic: {name}"):
        make("static_minmax").load_statistics({name: 1})


def test_a_nan_is_found_after_statistics_were_found_to_be_finite():
    observer = make("static_minmax")(torch.ones(1, 2))
    sync_statistics({("fc", "input"): observer}, Collectives())
    assert observer.is_finite
    observer(torch.tensor([[float("nan"), 2.0]]))
    with pytest.raises(CalibrationError, match="1 of 1 min_vals not finite"):
        observer.get_qparams()


# ---------------------------------------------------------------------- sharing a measurement


@pytest.mark.parametrize("name", ["static_minmax", "minmax"])
def test_one_measurement_serves_observers_of_one_kind(name):
    measured = {}
    x = torch.randn(3, 8)
    first, second = make(name), make(name)
    observe_shared(first, x, measured)
    observe_shared(second, x, measured)
    assert len(measured) == 1
    assert first.get_min_max() == second.get_min_max() == (x.min(), x.max())


@pytest.mark.parametrize(
    "other",
    [
        make("static_minmax", args=QuantizationArgs(strategy="group", group_size=4, num_bits=4)),
        make("static_minmax", "q"),
        make("minmax"),
    ],
    ids=["another strategy", "another base name", "another class"],
)
def test_a_measurement_is_not_shared_by_observers_of_different_kinds(other):
    measured = {}
    x = torch.randn(1, 2, 3, 8)
    observe_shared(make("static_minmax"), x, measured)
    observe_shared(other, x, measured)
    assert len(measured) == 2


@pytest.mark.parametrize("method", ["update_statistics_from_observed", "measure"])
def test_a_subclass_that_observes_differently_does_not_take_its_parent_s_measurement(method):
    parent = type(make("static_minmax"))

    def clipped(self, observed):
        return getattr(parent, method)(self, observed.clamp(-1, 1))

    measured = {}
    x = torch.tensor([[-5.0, 5.0]])
    observe_shared(make("static_minmax"), x, measured)
    child = type("Clipped", (parent,), {method: clipped})("input", INT8)
    observe_shared(child, x, measured)
    assert child.get_min_max() == (-1, 1)


# ---------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("memoryless_minmax", {}),
        ("static_minmax", {"min_vals": ReduceOp.MIN, "max_vals": ReduceOp.MAX}),
        ("minmax", {"min_vals": ReduceOp.AVG, "max_vals": ReduceOp.AVG}),
    ],
)
def test_statistics_declare_their_reduction(name, expected):
    assert make(name)._act_sync_dict == expected


@pytest.mark.parametrize(("name", "has_observed"), [*((name, True) for name in MEMORYLESS), ("static_minmax", False)])
def test_there_is_nothing_to_sync_without_statistics_or_reductions(name, has_observed):
    observer = make(name)
    if has_observed:
        observer(torch.ones(1, 2))
    assert observer.sync_activation_stats() == []


def on_sync(rank):
    found = {}
    for name in ("static_minmax", "minmax"):
        observer = make(name)(torch.tensor([[-1.0, 2.0], [-4.0, 3.0]][rank]))
        handles = observer.sync_activation_stats()
        for handle in handles:
            handle.wait()
        found[name] = [len(handles), *(end.item() for end in observer.get_min_max())]
    shared, measured = [make("histogram"), make("histogram")], {}
    for observer in shared:
        observe_shared(observer, torch.ones(1, 8), measured)
    for observer in shared:
        for handle in observer.sync_activation_stats():
            handle.wait()
    return found | {"counts": [int(observer.counts.sum()) for observer in shared]}


def test_two_ranks_reduce_with_two_collectives_each():
    """static_minmax by MIN and MAX, minmax by AVG; counts that two observers share are added once for each."""
    for found in run_ranks(on_sync, 2):
        assert found == {"static_minmax": [2, -4, 3], "minmax": [2, -2.5, 2.5], "counts": [16, 16]}


class MovesToTheDevice(Observer):
    """Makes a tensor on the CPU, and replaces it by one on the device of what it observes; it declares nothing."""

    def __init__(self, base_name, args):
        super().__init__(base_name, args)
        self.total = torch.zeros(())

    def update_statistics_from_observed(self, observed):
        self.total = observed.sum()

    def get_min_max(self):
        return self.total, self.total


def test_a_tensor_on_another_device_is_a_statistic():
    observer = MovesToTheDevice("input", QuantizationArgs(num_bits=8))
    observer(torch.ones(2, 4, device="meta"))
    assert observer.get_statistics()["total"].device.type == "meta"
