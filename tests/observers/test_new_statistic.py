"""What CONTRIBUTING shows: an observer with a hyperparameter, and a further statistic with its test of ranks."""

from __future__ import annotations

import inspect
import pathlib
from typing import Any, ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from torch import nn
from typing_extensions import override

from lightning_obs import CalibrationError, CalibrationSession, Observer, export_checkpoint, quantized
from lightning_obs.observers import StaticMinMaxObserver, Statistic, require_statistics
from lightning_obs.observers.observer import Hyperparameters, MinMaxTuple, require
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.ranks.sync import sync_statistics
from tests.observers.contract import make, range_of, two_tensors
from tests.support.markdown import page
from tests.support.rank_processes import run_ranks


class PowerMeanObserver(Observer):
    """``k`` times the mean of ``|x| ** power``, to the power of ``1 / power``, and no wider than the values.

    Keyword Args:
        power (float): 1 is the mean magnitude; the higher, the more the largest values count. Default: 4.
        k (float): above 0. Default: 3.

    Raises:
        CalibrationError: ``k`` not above 0.
    """

    hyperparameters: ClassVar[Hyperparameters] = {"power": 4.0, "k": 3.0}  # each becomes an attribute
    power: float
    k: float
    statistics = (
        Statistic("number", "sum"),
        Statistic("powers", "sum"),
        Statistic("largest", "max"),
    )

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require(self, "k", self.k > 0, "a value above 0")

    @override
    def measure(self, observed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        magnitudes = observed.abs()
        powers = magnitudes.double().pow(self.power).sum((0, -1))
        number = torch.full_like(powers, observed.shape[0] * observed.shape[-1])
        return number, powers, magnitudes.amax((0, -1))

    @override
    def get_min_max(self) -> MinMaxTuple:
        require_statistics(self)
        mean = (self.powers / self.number).pow(1 / self.power)
        reach = torch.minimum((self.k * mean).to(self.largest.dtype), self.largest)
        return -reach, reach


def register():
    if "power_mean" not in Observer.registered_names():
        Observer.register("power_mean")(PowerMeanObserver)


@pytest.fixture(autouse=True)
def registered(own_registry):
    register()


def test_a_bad_hyperparameter_is_refused_before_any_data():
    with pytest.raises(CalibrationError, match=r"k. Got 0, expected a value above 0"):
        PowerMeanObserver("input", QuantizationArgs(), k=0)


@given(two_tensors())
def test_the_range_reaches_at_most_to_the_largest_magnitude(pair):
    low, high, rounding = range_of(make("power_mean", k=2.0), *pair)
    largest = max(value.abs().max().item() for value in pair)
    assert 0 <= high <= largest + rounding
    assert low == -high


def test_a_model_calibrated_with_it_is_exported_and_loaded_with_the_same_logits(tiny_llama, batches, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    observers = {"input": {"name": "power_mean", "k": 2.5}}
    with CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"], observers=observers), torch.no_grad():
        for batch in batches:
            model(**batch)
    export_checkpoint(model, tmp_path / "out")
    with torch.no_grad(), quantized(model):
        expected = model(**batches[0]).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(**batches[0]).logits, expected)


def data():
    return torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))


def calibrated(parts, collectives=None):
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    observers = {"input": "power_mean"}
    with CalibrationSession(model, "INT8_STATIC", observers=observers, collectives=collectives):
        for x in parts:
            model(x)
    return model.input_scale


def on_half_of_the_data(rank):
    register()
    return calibrated(data()[rank::2], Collectives.of_group())


def test_two_ranks_find_the_scale_of_one():
    torch.testing.assert_close(torch.stack(run_ranks(on_half_of_the_data, 2)), torch.stack([calibrated(data())] * 2))


def test_a_batch_more_changes_nothing_but_the_data_and_reset_forgets():
    whole, parts = (PowerMeanObserver("input", QuantizationArgs()) for _ in range(2))
    whole(data())
    for x in data():
        parts(x)
    torch.testing.assert_close(whole.get_qparams()["scale"], parts.get_qparams()["scale"])
    parts.reset()
    assert not parts.has_statistics


# ---------------------------------------------------------------------- a further statistic, as CONTRIBUTING shows it


class ZerosObserver(StaticMinMaxObserver):
    statistics = (*StaticMinMaxObserver.statistics, Statistic("zeros", "sum"))
    keeps_extremes = True

    def measure(self, observed):
        return *super().measure(observed), (observed == 0).sum((0, -1))


def zeros_of_all_ranks(rank):
    observer = ZerosObserver("input", QuantizationArgs())
    observer(torch.tensor([[0.0, 1.0 + rank]]))
    sync_statistics({("layer", "input"): observer}, Collectives.of_group())
    return observer.zeros.tolist()


def test_the_zeros_of_all_ranks_are_added_up():
    assert run_ranks(zeros_of_all_ranks, 2) == [[2], [2]]


def test_contributing_shows_these_lines():
    text = page("CONTRIBUTING.md")
    for shown in (PowerMeanObserver, ZerosObserver, zeros_of_all_ranks, test_the_zeros_of_all_ranks_are_added_up):
        assert inspect.getsource(shown) in text
    shown_test = pathlib.Path(__file__).read_text().split("@given(two_tensors())\n")[1].split("\n\n\n")[0]
    assert shown_test in text


def test_batches_are_added_up_and_the_ends_of_all_values_are_still_kept():
    observer = ZerosObserver("input", QuantizationArgs())
    for low in (0.0, -3.0):
        observer(torch.tensor([[low, 0.0, 2.0]]))
    assert observer.zeros == 3
    assert (observer.min_vals, observer.max_vals) == (-3, 2)
    assert observer.keeps_extremes
    observer.reset()
    assert not hasattr(observer, "zeros")
