"""It is easy to add an observer: this one is 25 lines, calibrates, is exported, loaded back, and runs on ranks."""

from __future__ import annotations

import inspect

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from lightning_obs import CalibrationSession, Observer, export_checkpoint, quantized
from lightning_obs.observers import Statistic, require_statistics
from lightning_obs.ranks.collectives import Collectives
from tests.support.rank_processes import run_ranks


class PowerMeanObserver(Observer):
    """``k`` times the mean of ``|x| ** power``, to the power of ``1 / power``, and no wider than the values.

    A number between the mean magnitude (power 1) and the largest (a high power). Exact in any partition, up to
    float64 addition.
    """

    hyperparameters = {"power": 4.0, "k": 3.0}  # noqa: RUF012
    statistics = (
        Statistic("number", "sum"),
        Statistic("powers", "sum"),
        Statistic("largest", "max"),
    )

    def measure(self, observed):
        magnitude = observed.abs().double()
        powers = magnitude.pow(self.power).sum((0, -1))
        return torch.full_like(powers, observed.shape[0] * observed.shape[-1]), powers, observed.abs().amax((0, -1))

    def get_min_max(self):
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


def test_the_class_is_short():
    assert len(inspect.getsource(PowerMeanObserver).splitlines()) <= 25


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
