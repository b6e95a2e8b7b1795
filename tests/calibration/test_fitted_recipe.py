"""A recipe without what the model cannot run: said before any data, and the rest of it runs."""

import warnings

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    QuantizationAwareTraining,
    linearize_experts,
)
from lightning_obs.calibration import fitted_recipe
from lightning_obs.errors import CalibrationWarning
from tests.support.moe_models import tiny_moe

INT4 = {"weights": {"num_bits": 4, "group_size": 16}}


def weight_choices(session):
    """The observers' names of a session's weights, with what else was chosen for them."""
    choices = set()
    for target in session.plan.targets:
        weights = target.scheme.weights
        kwargs = weights.observer_kwargs
        choices.add((weights.observer, bool(kwargs.get("weigh_tokens")), "rounding" in kwargs))
    return choices


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()


def test_a_language_model_runs_the_whole_recipe():
    model = tiny_llama()
    tokens = torch.arange(24).view(2, 12)
    with CalibrationSession(model, INT4, ignore=["lm_head"], recipe="accurate") as session:
        model(input_ids=tokens)
    assert weight_choices(session) == {("imatrix_mse", True, True)}
    assert hasattr(session.plan.targets[0].module, "weight_rounded")


def test_all_tokens_count_alike_in_a_model_with_experts():
    model = tiny_moe("mixtral")
    linearize_experts(model)
    with pytest.warns(CalibrationWarning, match="has experts"):
        session = CalibrationSession(model, INT4, ignore=["lm_head"], recipe="accurate")
    assert weight_choices(session) == {("imatrix_mse", False, True)}


def test_weights_without_an_input_for_each_column_are_chosen_without_data():
    model = nn.Sequential(nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    with pytest.warns(CalibrationWarning, match="weights are chosen without data: 0 has no input for each column"):
        session = CalibrationSession(model, INT4, targets=["Conv2d", "Linear"], recipe="accurate")
    assert weight_choices(session) == {("memoryless_mse", False, False)}


def test_weights_whose_products_do_not_fit_are_chosen_without_data(monkeypatch):
    monkeypatch.setattr(fitted_recipe, "memory_of", lambda device: 4096)
    with pytest.warns(CalibrationWarning, match="the products take 0 GiB, more than half of the memory of cpu"):
        session = CalibrationSession(tiny_llama(), INT4, ignore=["lm_head"], recipe="accurate")
    assert not session.needs_data


def test_a_named_observer_is_not_replaced_by_a_fallback():
    model = nn.Sequential(nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    options = {"targets": ["Conv2d", "Linear"], "recipe": "accurate", "observers": {"weight": "mse"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = CalibrationSession(model, INT4, **options)
    assert weight_choices(session) == {("mse", False, False)}


@pytest.mark.parametrize("recipe", ["fast", "accurate"])
def test_a_scheme_that_a_recipe_has_nothing_for_runs_without_a_word(recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = CalibrationSession(nn.Linear(16, 16), {"preset": "FP8", "targets": ["re:.*"]}, recipe=recipe)
    assert session.label == "FP8"


def test_trained_weights_take_the_scales_of_a_recipe_without_its_rounding():
    weights = QuantizationAwareTraining(INT4, recipe="accurate").options.config.config_groups["group_0"].weights
    assert (weights.observer, weights.observer_kwargs) == ("imatrix_mse", {"norm": 2.0, "signed": True})
    scales = QuantizationAwareTraining(INT4, recipe="accurate", train="scales").options
    assert "rounding" in scales.config.config_groups["group_0"].weights.observer_kwargs


def test_a_recipe_beside_observers_that_are_chosen_by_measurement_is_refused():
    with pytest.raises(CalibrationError, match="leave out the recipe, or the observers to choose from"):
        CalibrationCallback("INT8_STATIC", recipe="accurate", observers="auto")
