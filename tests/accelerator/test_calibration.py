"""Whole calibrations on the pretend device: the CPU's bits, no mixed device, and what each may ask of the device."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from accelerate import dispatch_model

from lightning_obs import CalibrationSession, quantized
from tests.accelerator.budgets import CALIBRATIONS, Calibration
from tests.accelerator.common import assert_same_bits, llama, mixture, token_batches
from tests.support.pretend_device import DEVICE, OTHER, PretendTensor, counting, on_device


def calibrate(path: Calibration, device="cpu", place=None, watch=lambda phase: nullcontext()):
    """The session, and the logits of the quantized model. ``place`` puts the model where it runs: on the device."""
    model, options = path.model(), dict(path.options)
    masked = options.pop("masked", False)
    model = model.to(device) if place is None else place(model)
    ignore = ["lm_head", *(["re:.*gate$"] if path.model is mixture else [])]
    session = CalibrationSession(model, path.scheme, ignore=ignore, **options)
    session.attach()
    mask = torch.ones(2, 32, dtype=torch.int64)
    mask[1, 20:] = 0
    with torch.no_grad():
        for ids in token_batches():
            given = on_device({"input_ids": ids, **({"attention_mask": mask} if masked else {})}, device)
            with watch("batch"):
                if masked:
                    session.mask_tokens(given["attention_mask"])
                model(**given, use_cache=False)
        with watch("finalize"):
            session.finalize()
        with watch("quantized"), quantized(model):
            logits = model(input_ids=given["input_ids"], use_cache=False).logits
    return session, logits


def watched(path: Calibration):
    counted = {}

    def watch(phase):
        context = counting()

        class Watch:
            def __enter__(self):
                counted[phase] = context.__enter__()  # of batches the last

            def __exit__(self, *error):
                context.__exit__(*error)

        return Watch()

    return *calibrate(path, DEVICE, watch=watch), counted


@cache
def in_memory(name):
    """What the CPU gives, once for all tests."""
    return calibrate(CALIBRATIONS[name])


@cache
def on_the_device(name):
    """What the device gives, and what it was asked for, once for all tests."""
    return watched(CALIBRATIONS[name])


#: a batch asks for what another row's batch does, or the observer is in test_observers.py
AT_NIGHT = {
    "FP8, kv cache", "FP8 in small blocks, mse", "entropy", "percentile", "normal_observer", "token mask, histogram",
    "W4A16 mse", "NVFP4 expanded", "experts, all tokens", "experts, FP8, all tokens", "experts, token mask",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*needs no data")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT)) for name in CALIBRATIONS]
)
def test_a_calibration_has_the_cpus_bits_within_its_budget(name):
    path = CALIBRATIONS[name]
    expected, logits = in_memory(name)
    found, logits_there, counted = on_the_device(name)
    assert_same_bits(found.qparams, expected.qparams, name)
    assert_same_bits({"logits": logits_there}, {"logits": logits}, name)
    assert found.result.input_ranges == expected.result.input_ranges
    assert found.result.chosen_input_ranges == expected.result.chosen_input_ranges
    assert found.result.expert_tokens == expected.result.expert_tokens
    for module in found.model.modules():
        assert all(isinstance(x, PretendTensor) for key, x in vars(module).items() if key.endswith("_scale"))
    for phase in ("batch", "finalize", "quantized"):
        getattr(path, phase).holds(counted[phase], f"{name}, {phase}")


@pytest.mark.filterwarnings("ignore:.*needs no data")
@pytest.mark.parametrize("name", ["FP8", "histogram", "mse", "W4A16 imatrix_mse", "W4A16 hessian", "NVFP4"])
def test_the_host_does_not_read_more_of_more_modules(name):
    _, _, of_one_layer = watched(CALIBRATIONS[name]._replace(model=lambda: llama(1)))
    _, _, of_two_layers = on_the_device(name)
    assert of_one_layer["finalize"].reads.total() == of_two_layers["finalize"].reads.total()


@pytest.mark.parametrize(
    "name",
    [
        "experts, FP8",
        "experts, FP8, minmax, token mask",
        pytest.param("experts, FP8, all tokens", marks=pytest.mark.nightly),
    ],
)
def test_neither_launches_of_observers_nor_uploads_grow_with_the_number_of_experts(name):
    def asked(counted):
        counts = counted["batch"]
        launches = {place: count for place, count in counts.launches.items() if place.startswith("observers/")}
        return sum(launches.values()), counts.uploads.total()

    _, _, of_four = on_the_device(name)
    _, _, of_eight = watched(CALIBRATIONS[name]._replace(model=lambda: mixture(8)))
    assert asked(of_four) == asked(of_eight)


def test_what_waits_for_other_experts_is_forgotten_with_the_hooks():
    model = mixture().to(DEVICE)
    session = CalibrationSession(model, "FP8", ignore=["lm_head", "re:.*gate$"], engines="vllm")

    def fail(*_):
        raise RuntimeError("the user's own")

    model.model.layers[0].mlp.experts.get_submodule("2").register_forward_hook(fail)
    session.attach()
    with pytest.raises(RuntimeError, match="the user's own"), torch.no_grad():
        model(input_ids=token_batches(1)[0].to(DEVICE), use_cache=False)
    assert session.observation.experts._waiting
    session.detach()
    assert not session.observation.experts._waiting


def by_hooks(model):
    """The first layer here, the second there, and a hook of the user's own between them."""
    first, second = model.model.layers
    for module in (second, model.model.norm, model.lm_head):
        module.to(OTHER)
    for module in (model.model.embed_tokens, model.model.rotary_emb, first):
        module.to(DEVICE)

    def move(module, args, kwargs):
        return tuple(on_device(args, OTHER)), on_device(kwargs, OTHER)

    second.register_forward_pre_hook(move, with_kwargs=True)
    return model


def by_device_map(model):
    """As accelerate dispatches a model, the embedding beside the second layer."""
    first, second = str(DEVICE), str(OTHER)
    places = {"model.layers.0": first, "model.layers.1": second, "model.norm": second, "model.embed_tokens": second}
    return dispatch_model(model, places | {"model.rotary_emb": first, "lm_head": second}, main_device=first)


@pytest.mark.parametrize(
    ("name", "place"), [("FP8", by_hooks), ("histogram", by_device_map), ("W4A16 hessian", by_device_map)]
)
def test_a_model_that_lies_on_two_devices_has_the_cpus_qparams(name, place):
    expected, logits = in_memory(name)
    found, there = calibrate(CALIBRATIONS[name], DEVICE, place=place)
    assert_same_bits(found.qparams, expected.qparams)
    assert_same_bits({"logits": there}, {"logits": logits})
    scales = [layer.mlp.up_proj.weight_scale.device for layer in found.model.model.layers]
    assert scales == [DEVICE, OTHER]
