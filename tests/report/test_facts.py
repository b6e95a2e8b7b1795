"""The facts of a report, where the names of a plan are not the model's: with LoRA adapters, and with wrappers."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_obs import CalibrationSession
from lightning_obs.report.facts import known_facts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), nn.Linear(32, 16))


def facts(model):
    with CalibrationSession(model, "INT8_STATIC") as session, torch.no_grad():
        model(torch.ones(4, 32))
    known = known_facts(session)
    sizes = {name: (layer.before, layer.after) for name, layer in known["layers"].items()}
    return sizes, known["kinds"]


def test_the_bytes_of_a_layer_with_adapters_are_the_merged_layers():
    config = peft.LoraConfig(target_modules=["0.0"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(net(), config)
    merged = copy.deepcopy(adapted).merge_and_unload()
    sizes, kinds = facts(adapted.get_base_model().eval())
    assert (sizes, kinds) == facts(merged)
    assert sizes["0.0"] == (4 * 64 * 33, 64 * 32 + 4 * 64 + 4 * 64 + 4)  # and the bias, and scales


def test_the_bytes_of_a_layer_in_a_wrapper_are_its_own():
    model = net()
    wrapped = nn.Sequential(checkpoint_wrapper(copy.deepcopy(model[0])), model[1])
    assert facts(wrapped) == facts(model)


def channels_of(scheme, model):
    with CalibrationSession(model, scheme, engines="unchecked") as session:
        pass  # these schemes need no data
    layer = known_facts(session)["layers"]["0"]
    return layer.outputs, layer.channels


def test_the_largest_weight_of_a_channel_is_that_of_its_scale_divided_by_the_global_scale():
    model = nn.Sequential(nn.Linear(64, 4))
    largest_weights = model[0].weight.detach().abs().amax(1)
    outputs, channels = channels_of("NVFP4A16", model)
    assert outputs == 4
    torch.testing.assert_close(torch.tensor(channels), largest_weights, rtol=0.07, atol=0)  # a float8 scale: 1 in 16


def test_channels_whose_blocks_share_scales_have_no_scales_of_their_own():
    assert channels_of("FP8_BLOCK", nn.Sequential(nn.Linear(128, 256))) == (0, [])
