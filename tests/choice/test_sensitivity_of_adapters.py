"""Sensitivities of models in which a plan's names are not the model's: with LoRA adapters, and with wrappers."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_obs import CalibrationSession, mixed_precision, quantized, sensitivity

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
CANDIDATES = {"int4": INT4, "int8": "INT8_STATIC"}


def net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def adapted():
    """peft's wrapper of two Linear layers; adapters change the first a lot."""
    config = peft.LoraConfig(target_modules=["0"], r=4, lora_dropout=0.05, init_lora_weights=False)
    return peft.get_peft_model(net(), config)


def assert_equal_losses(found, expected):
    assert [group.weights for group in found.groups] == [group.weights for group in expected.groups]
    assert [group.sizes for group in found.groups] == [group.sizes for group in expected.groups]
    for of_group, of_expected in zip(found.groups, expected.groups, strict=True):
        assert of_group.losses == pytest.approx(of_expected.losses, rel=1e-3)
        assert min(of_group.losses.values()) > 0


@pytest.mark.parametrize("disabled", [False, True], ids=["active", "disabled"])
def test_adapters_count_as_a_part_of_the_weight(disabled):
    wrapper, x = adapted(), torch.randn(512, 32)
    if disabled:
        wrapper.base_model.disable_adapter_layers()
        merged = copy.deepcopy(wrapper).unload()
    else:
        merged = copy.deepcopy(wrapper).merge_and_unload()
    model = wrapper.get_base_model().eval()
    before = model(x)
    assert_equal_losses(sensitivity(model, [x], CANDIDATES), sensitivity(merged, [x], CANDIDATES))
    assert torch.equal(model(x), before)


def test_the_weights_own_error_is_the_merged_weights():
    wrapper = adapted()
    model, merged = wrapper.get_base_model(), copy.deepcopy(wrapper).merge_and_unload()
    assert_equal_losses(sensitivity(model, None, {"int4": INT4}), sensitivity(merged, None, {"int4": INT4}))


def test_a_budget_of_bits_for_a_model_with_adapters():
    model, x = adapted().get_base_model().eval(), torch.randn(64, 32)
    plan = mixed_precision(model, [x], CANDIDATES, budget=6)
    with CalibrationSession(model, plan) as session:
        if session.needs_data:
            model(x)
    with quantized(model):
        quantized_outputs = model(x)
    assert not torch.equal(quantized_outputs, model(x))


def test_wrappers_around_layers_are_no_part_of_names():
    model, x = net(), torch.randn(512, 32)
    wrapped = nn.Sequential(checkpoint_wrapper(copy.deepcopy(model[0])), model[1], model[2])
    found = sensitivity(wrapped, [x], CANDIDATES)
    assert [group.names for group in found.groups] == [("0",), ("2",)]
    assert_equal_losses(found, sensitivity(model, [x], CANDIDATES))
