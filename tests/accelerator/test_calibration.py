"""Whole calibrations on the pretend device: the CPU's bits, no mixed device, and what each may ask of the device."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import dispatch_model

from lightning_obs import CalibrationSession, quantized
from tests.accelerator.common import Budget, assert_same_bits, llama, mixture, token_batches
from tests.support.moe_models import W4A16_32
from tests.support.pretend_device import DEVICE, OTHER, PretendTensor, counting, on_device

INT4 = {"weights": {"num_bits": 4, "group_size": 32}}
BLOCKS = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]}}
NOTHING = Budget(0, 0, 0)


class Path(NamedTuple):
    """A calibration, and the most that a batch, the end, and a quantized forward ask for (moved: megabytes)."""

    scheme: Any
    batch: Budget
    finalize: Budget
    quantized: Budget
    options: Mapping[str, Any] = MappingProxyType({})
    model: Callable[[], torch.nn.Module] = llama


def inputs(observer):
    return {"observers": {"input": observer}}


def weights(observer, **more):
    return {"observers": {"weight": observer}, **more}


#: 14 modules (mixture: 24), two sequences of 32 tokens a batch
PATHS = {
    "FP8": Path("FP8", Budget(36, 0.17, 0), Budget(459, 11.77, 5), Budget(239, 19.96, 1)),
    "FP8, kv cache": Path(
        "FP8", Budget(48, 0.21, 0), Budget(471, 11.77, 5), Budget(259, 20.25, 1), {"kv_cache": "FP8"}
    ),
    "FP8, kv cache per head": Path(
        "FP8", Budget(52, 0.24, 0), Budget(471, 11.77, 5), Budget(259, 20.25, 1), {"kv_cache": "FP8_HEAD"}
    ),
    "INT8_STATIC": Path("INT8_STATIC", Budget(36, 0.17, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1)),
    "minmax": Path("INT8_STATIC", Budget(156, 0.34, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1), inputs("minmax")),
    "mse": Path("INT8_STATIC", Budget(404, 0.55, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1), inputs("mse")),
    "histogram": Path(
        "INT8_STATIC", Budget(66, 34.94, 0), Budget(487, 27.29, 5), Budget(211, 19.11, 1), inputs("histogram")
    ),
    "entropy": Path(
        "INT8_STATIC",
        Budget(66, 34.94, 0),
        Budget(487, 27.29, 5),
        Budget(211, 19.11, 1),
        inputs({"name": "histogram", "criterion": "entropy"}),
    ),
    "percentile": Path(
        "INT8_STATIC", Budget(66, 34.94, 0), Budget(487, 27.29, 5), Budget(211, 19.11, 1), inputs("percentile")
    ),
    "normal_observer": Path(
        "INT8_STATIC", Budget(94, 0.34, 0), Budget(487, 12.61, 5), Budget(211, 19.11, 1), inputs("normal_observer")
    ),
    "token mask": Path(
        "INT8_STATIC", Budget(48, 0.45, 1), Budget(487, 12.61, 5), Budget(211, 19.11, 1), {"masked": True}
    ),
    "token mask, histogram": Path(
        "INT8_STATIC",
        Budget(74, 35.18, 1),
        Budget(487, 27.29, 5),
        Budget(211, 19.11, 1),
        {"masked": True, **inputs("histogram")},
    ),
    "W8A8": Path("W8A8", NOTHING, Budget(444, 12.61, 4), Budget(547, 20.76, 1)),
    "FP8_DYNAMIC": Path("FP8_DYNAMIC", NOTHING, Budget(430, 12.6, 4), Budget(561, 21.6, 1)),
    "FP8_BLOCK": Path("FP8_BLOCK", NOTHING, Budget(428, 12.68, 4), Budget(565, 22.39, 1)),
    "FP8 in small blocks, mse": Path(
        BLOCKS, NOTHING, Budget(850, 14.85, 4), Budget(169, 17.6, 1), weights("memoryless_mse")
    ),
    "W4A16": Path(INT4, NOTHING, Budget(444, 13.51, 4), Budget(155, 17.04, 1)),
    "W4A16 mse": Path(INT4, NOTHING, Budget(864, 27.94, 4), Budget(155, 17.04, 1), weights("memoryless_mse")),
    "W4A16 imatrix_mse": Path(
        INT4, Budget(64, 1.57, 0), Budget(947, 28.23, 6), Budget(155, 17.04, 1), weights("imatrix_mse")
    ),
    "W4A16 local_hessian": Path(
        INT4, Budget(48, 2.47, 0), Budget(1507, 494.11, 6), Budget(155, 17.04, 1), weights("local_hessian")
    ),
    "W4A16 hessian": Path(
        INT4, Budget(48, 5.48, 0), Budget(13023, 2221.66, 6), Budget(155, 17.04, 1), weights("hessian")
    ),
    "W4A16 gptq": Path(
        INT4,
        Budget(48, 5.48, 0),
        Budget(13463, 2276.76, 20),
        Budget(169, 20.34, 1),
        weights("hessian", rounding="gptq"),
    ),
    "NVFP4": Path("NVFP4", Budget(44, 0.34, 0), Budget(906, 15.32, 5), Budget(799, 56, 1)),
    "NVFP4 expanded": Path(
        "NVFP4", Budget(44, 0.34, 0), Budget(1202, 141.26, 5), Budget(799, 56, 1), weights("nvfp4_expanded_mse")
    ),
    "MXFP4": Path("MXFP4", NOTHING, Budget(640, 14.33, 4), Budget(953, 52.4, 1)),
    "experts, siblings": Path(
        W4A16_32,
        Budget(230, 1.19, 2),
        Budget(2025, 5.25, 6),
        Budget(407, 4.89, 3),
        weights("imatrix_mse", on_missing="siblings"),
        mixture,
    ),
    "experts, all tokens": Path(
        W4A16_32,
        Budget(270, 2.2, 2),
        Budget(2025, 5.25, 6),
        Budget(407, 4.89, 3),
        weights("imatrix_mse", calibrate_all_experts=True),
        mixture,
    ),
    "experts, FP8": Path(
        "FP8",
        Budget(110, 1.09, 2),
        Budget(991, 2.97, 5),
        Budget(585, 6.35, 3),
        {"on_missing": "siblings", "engines": "vllm"},
        mixture,
    ),
    "experts, FP8, all tokens": Path(
        "FP8",
        Budget(150, 2.12, 2),
        Budget(991, 2.97, 5),
        Budget(585, 6.35, 3),
        {"calibrate_all_experts": True, "engines": "vllm"},
        mixture,
    ),
    "experts, FP8, minmax, token mask": Path(
        "FP8",
        Budget(200, 1.62, 3),
        Budget(991, 2.97, 5),
        Budget(585, 6.35, 3),
        {"on_missing": "siblings", "engines": "vllm", "masked": True, **inputs("minmax")},
        mixture,
    ),
    "experts, token mask": Path(
        W4A16_32,
        Budget(260, 1.34, 3),
        Budget(2025, 5.25, 6),
        Budget(407, 4.89, 3),
        weights("imatrix_mse", on_missing="siblings", masked=True),
        mixture,
    ),
}


def calibrate(path: Path, device="cpu", place=None, watch=lambda phase: nullcontext()):
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


def watched(path: Path):
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


@pytest.mark.filterwarnings("ignore:.*needs no data")
@pytest.mark.parametrize("name", PATHS)
def test_a_calibration_has_the_cpus_bits_within_its_budget(name):
    path = PATHS[name]
    expected, logits = calibrate(path)
    found, on_the_device, counted = watched(path)
    assert_same_bits(found.qparams, expected.qparams, name)
    assert_same_bits({"logits": on_the_device}, {"logits": logits}, name)
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
    few, many = (
        watched(PATHS[name]._replace(model=lambda layers=layers: llama(layers)))[2]["finalize"] for layers in (1, 2)
    )
    assert few.reads.total() == many.reads.total()


@pytest.mark.parametrize("name", ["experts, FP8", "experts, FP8, minmax, token mask", "experts, FP8, all tokens"])
def test_neither_launches_of_observers_nor_uploads_grow_with_the_number_of_experts(name):
    def asked(experts):
        counts = watched(PATHS[name]._replace(model=lambda: mixture(experts)))[2]["batch"]
        launches = {place: count for place, count in counts.launches.items() if place.startswith("observers/")}
        return sum(launches.values()), counts.uploads.total()

    assert asked(4) == asked(8)


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
    expected, logits = calibrate(PATHS[name])
    found, there = calibrate(PATHS[name], DEVICE, place=place)
    assert_same_bits(found.qparams, expected.qparams)
    assert_same_bits({"logits": there}, {"logits": logits})
    scales = [layer.mlp.up_proj.weight_scale.device for layer in found.model.model.layers]
    assert scales == [DEVICE, OTHER]
