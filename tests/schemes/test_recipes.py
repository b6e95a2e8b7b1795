"""A recipe names observers and rounding; what the user names comes before it."""

from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationConfig
from omegaconf import OmegaConf

from lightning_obs import CalibrationError, CalibrationOptions
from lightning_obs.schemes.config import resolve_config
from lightning_obs.schemes.recipes import RECIPES, Recipe

INT4 = {"weights": {"num_bits": 4, "group_size": 32}}
ROUNDING = {"name": "gptq", "inputs": "quantized", "random_tokens": 0.2}


def group_of(scheme, **options):
    (group,) = resolve_config(scheme, **options).config_groups.values()
    return group


@pytest.mark.parametrize(
    ("scheme", "observer", "hyperparameters"),
    [
        ("W4A16", "imatrix_mse", {"norm": 2.0, "signed": True, "weigh_tokens": True, "rounding": ROUNDING}),
        ("W4A16_ASYM", "imatrix_mse", {"norm": 2.0, "weigh_tokens": True, "rounding": ROUNDING}),
        ("W4A8", "imatrix_mse", {"norm": 2.0, "weigh_tokens": True, "rounding": ROUNDING}),
        ("Q4_0", "imatrix_mse", {"norm": 2.0, "signed": True, "weigh_tokens": True, "rounding": ROUNDING}),
        ("NVFP4A16", "nvfp4_expanded_imatrix", {"norm": 2.0, "weigh_tokens": True, "rounding": ROUNDING}),
        ("FP8", None, {}),
        ("W8A16", None, {}),
    ],
)
def test_the_accurate_recipe_has_a_choice_for_each_kind_of_weight(scheme, observer, hyperparameters):
    plain = group_of(scheme).weights
    weights = group_of(scheme, recipe="accurate").weights
    assert (weights.observer, weights.observer_kwargs) == (observer or plain.observer, hyperparameters)


def test_the_fast_recipe_needs_no_data():
    assert group_of("W4A16", recipe="fast").weights.observer == "memoryless_mse"
    assert group_of("NVFP4A16", recipe="fast").weights.observer == "nvfp4_expanded_mse"


def test_integer_inputs_are_observed_by_a_histogram_and_other_inputs_as_before():
    assert group_of("INT8_STATIC", recipe="accurate").input_activations.observer == "histogram"
    for scheme in ("FP8", "W8A8", "NVFP4"):
        assert group_of(scheme, recipe="accurate").input_activations == group_of(scheme).input_activations


def test_an_observer_that_the_user_names_replaces_the_recipe_of_its_tensor():
    weights = group_of(INT4, recipe="accurate", observers={"weight": "memoryless_mse"}).weights
    assert (weights.observer, weights.observer_kwargs) == ("memoryless_mse", {})
    other_tensor = group_of("INT8_STATIC", recipe="accurate", observers={"input": "minmax", "weight": {"name": None}})
    assert other_tensor.input_activations.observer == "minmax"


def test_a_rounding_that_the_user_names_replaces_the_recipes():
    weights = group_of(INT4, recipe="accurate", rounding={"name": "gptq", "damping": 0.5}).weights
    assert weights.observer == "imatrix_mse"
    assert weights.observer_kwargs["rounding"] == {"name": "gptq", "damping": 0.5}


def test_a_users_config_is_not_changed():
    config = QuantizationConfig(config_groups={"W4A16": ["Linear"]})
    before = config.model_copy(deep=True)
    resolve_config(config, recipe="accurate")
    assert config == before


def test_a_recipe_of_ones_own_is_a_dict():
    recipe = {"name": "mine", "symmetric_weights": {"observer": {"name": "mse", "norm": 3.0}}}
    weights = group_of(INT4, recipe=recipe).weights
    assert (weights.observer, weights.observer_kwargs) == ("mse", {"norm": 3.0})


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("acurate", r"unknown recipe 'acurate' \(did you mean `accurate`\?\)"),
        ({"name": "mine", "weights": {}}, "a recipe has no such field"),
        ({"nvfp4_weights": None}, "a recipe has no name"),
        ({"name": "mine", "nvfp4_weights": {"rounding": "gptq"}}, "a recipe's weights have no observer"),
        ({"name": "mine", "nvfp4_weights": {"observers": {}}}, "a recipe's weights have no such field"),
        (
            {"name": "mine", "nvfp4_weights": "mse"},
            "a recipe's weights. Got 'mse', expected a dict of observer, rounding",
        ),
        (3, "recipe. Got 3"),
    ],
)
def test_a_wrong_recipe_is_refused(recipe, text):
    with pytest.raises(CalibrationError, match=text):
        CalibrationOptions("NVFP4A16", recipe=recipe)


def test_a_wrong_hyperparameter_of_a_recipe_is_refused_before_data():
    with pytest.raises(CalibrationError, match="nrom"):
        CalibrationOptions(INT4, recipe={"name": "mine", "symmetric_weights": {"observer": {"name": "mse", "nrom": 2}}})


def test_recipes_for_less_leave_out_what_they_say():
    accurate = RECIPES["accurate"]
    for choice in (accurate.without_token_weights().symmetric_weights, accurate.without_rounding().nvfp4_weights):
        assert not choice.weighs_tokens
    assert accurate.without_token_weights().symmetric_weights.rounding == ROUNDING
    assert accurate.without_rounding().symmetric_weights.rounding is None
    assert accurate.without_quantized_inputs().mx_weights.rounding == {"name": "gptq"}
    assert accurate.without_data().symmetric_weights == RECIPES["fast"].symmetric_weights
    assert Recipe.of(accurate.as_dict()) == accurate


@pytest.mark.parametrize("name", RECIPES)
def test_the_config_of_a_recipe_has_its_choices(name):
    file = Path(__file__).parents[2] / "configs" / "recipe" / f"{name}.yaml"
    assert OmegaConf.to_container(OmegaConf.load(file)) == RECIPES[name].as_dict()
