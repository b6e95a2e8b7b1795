"""The qparams of a session: shared global scales, and the values that llm-compressor's own tests pin."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import nn

from lightning_obs import CalibrationSession, quantized
from lightning_obs.model.module_qparams import read_qparams
from lightning_obs.observers import Observer
from tests.calibration.common import calibrate


def test_nvfp4_global_scales_are_equal_across_q_k_v_and_gate_up(tiny_llama, batches):
    model = tiny_llama(torch.bfloat16)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    with torch.no_grad():
        attention.k_proj.weight.mul_(4)
        mlp.up_proj.weight.mul_(4)
    with CalibrationSession(model, "NVFP4", ignore=["lm_head"]), torch.no_grad():
        for batch in batches:
            model(**batch)
    for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        absmax = torch.stack([m.weight.detach().abs().max() for m in group]).max()
        assert [m.weight_global_scale.item() for m in group] == [(448 * 6 / absmax).item()] * len(group)
        assert len({m.input_global_scale.item() for m in group}) == 1
        assert group[0].weight_global_scale.dtype == torch.float32
    assert attention.o_proj.weight_global_scale != attention.q_proj.weight_global_scale


def test_a_member_that_a_layer_does_not_have_is_skipped():
    """As the sliding attention of Gemma 4, whose v_proj is None."""
    attention = nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = nn.Linear(32, 8), nn.Linear(32, 4), None
    calibrate(nn.ModuleDict({"self_attn": attention}), "NVFP4A16", engines="unchecked")
    absmax = max(m.weight.detach().abs().max() for m in (attention.q_proj, attention.k_proj))
    for module in (attention.q_proj, attention.k_proj):
        assert module.weight_global_scale.item() == (448 * 6 / absmax).item()


# ---------------------------------------------------------------------- what llm-compressor's own tests pin


NVFP4_OF_3 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 3, "scale_dtype": torch.float8_e4m3fn,
}  # fmt: skip
FULL = ([0, 6, 12, 18], [5, 11, 17, 23])
THREES = ([[0, 3], [6, 9], [12, 15], [18, 21]], [[2, 5], [8, 11], [14, 17], [20, 23]])


@pytest.mark.parametrize(
    ("args", "ranges", "quantized_rows"),
    [
        (
            {"num_bits": 4, "strategy": "tensor"},
            ([0], [23]),
            [
                [0, 0, 3.0625, 3.0625, 3.0625, 6.125],
                [6.125, 6.125, 9.1875, 9.1875, 9.1875, 12.25],
                [12.25, 12.25, 15.3125, 15.3125, 15.3125, 18.375],
                [18.375, 18.375, 21.5, 21.5, 21.5, 21.5],
            ],
        ),
        (
            {"num_bits": 4, "strategy": "channel"},
            ([[n] for n in FULL[0]], [[n] for n in FULL[1]]),
            [
                [0, 1.3359, 2, 2.6719, 4, 4.6875],
                [5.875, 7.3438, 7.3438, 8.8125, 10.25, 10.25],
                [11.3125, 13.625, 13.625, 15.875, 15.875, 15.875],
                [18.375, 18.375, 21.5, 21.5, 21.5, 21.5],
            ],
        ),
        (
            {"num_bits": 4, "strategy": "group", "group_size": 3},
            THREES,
            [
                [0, 1.0703, 1.875, 2.6719, 4, 4.6875],
                [6.4375, 7.5, 7.5, 8.8125, 10.25, 10.25],
                [11.1875, 13.0625, 13.0625, 15.875, 15.875, 15.875],
                [18.75, 18.75, 18.75, 21.5, 21.5, 21.5],
            ],
        ),
        (
            NVFP4_OF_3,
            THREES,
            [
                [0, 1.0234, 2.0469, 3.2812, 3.2812, 4.9375],
                [5.4688, 8.1875, 8.1875, 10.6875, 10.6875, 10.6875],
                [9.875, 14.75, 14.75, 16.375, 16.375, 16.375],
                [19.75, 19.75, 19.75, 23, 23, 23],
            ],
        ),
        (
            {"num_bits": 4, "strategy": "block", "block_structure": [2, 3]},
            ([[0, 3], [12, 15]], [[8, 11], [20, 23]]),
            [
                [0, 1.0703, 2.1406, 2.9375, 4.4062, 4.4062],
                [6.4375, 7.5, 7.5, 8.8125, 10.25, 10.25],
                [10.6875, 13.375, 13.375, 15.3125, 15.3125, 18.375],
                [18.75, 18.75, 18.75, 21.5, 21.5, 21.5],
            ],
        ),
    ],
    ids=["tensor", "channel", "group", "tensor_group", "block"],
)
def test_a_weight_has_the_ranges_and_the_quantized_values_that_the_peer_pins(args, ranges, quantized_rows):
    model = nn.Sequential(nn.Linear(6, 4, bias=False, dtype=torch.bfloat16))
    model[0].weight.data = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    session = calibrate(model, {"weights": args}, engines="unchecked")
    low, high = session.observers["0", "weight"].get_min_max()
    assert (low.tolist(), high.tolist()) == ranges
    with quantized(model):
        rows = model(torch.eye(6, dtype=torch.bfloat16)).T
    torch.testing.assert_close(rows, torch.tensor(quantized_rows, dtype=torch.bfloat16), rtol=0, atol=0)
    assert model[0].quantization_status == QuantizationStatus.FROZEN
    assert not [value for value in vars(model[0]).values() if isinstance(value, Observer)]


@pytest.mark.parametrize(
    ("args", "quantized_rows"),
    [
        (
            {"num_bits": 4, "strategy": "tensor"},
            [[0, 1.4688, 1.4688, 2.9375, 4.4062, 4.4062], [5.875, 7.3438, 7.3438, 8.8125, 10.25, 10.25]],
        ),
        (
            {**NVFP4_OF_3, "dynamic": "local"},
            [[0, 0.9844, 1.9688, 3.4062, 3.4062, 5.125], [5.25, 7.875, 7.875, 7.3438, 11, 11]],
        ),
    ],
    ids=["tensor", "tensor_group"],
)
def test_an_input_has_the_range_and_the_quantized_values_that_the_peer_pins(args, quantized_rows):
    model = nn.Sequential(nn.Linear(6, 6, bias=False, dtype=torch.bfloat16))
    model[0].weight.data = torch.eye(6, dtype=torch.bfloat16)
    x = torch.arange(12, dtype=torch.bfloat16).reshape(1, 2, 6)
    session = calibrate(model, {"input_activations": args}, x, engines="unchecked")
    assert session.result.input_ranges["0"] == (0, 11)
    with quantized(model):
        found = model(x)[0]
    torch.testing.assert_close(found, torch.tensor(quantized_rows, dtype=torch.bfloat16), rtol=0, atol=0)


def test_two_calibrations_of_one_model_give_identical_qparams(tiny_llama, batches):
    found = []
    for _ in range(2):
        model = tiny_llama(torch.bfloat16)
        with CalibrationSession(model, "NVFP4", ignore=["lm_head"]) as session, torch.no_grad():
            for batch in batches:
                model(**batch)
        found.append(session.result.qparams)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# ---------------------------------------------------------------------- resume


def fp8_scales(model, batches, **options):
    with CalibrationSession(model, "FP8", ignore=["lm_head"], **options) as session:
        for batch in batches:
            model(**batch)
    return session.result.qparams


def test_modules_that_are_fused_share_the_widest_scale_per_tensor_if_asked(tiny_llama, batches):
    apart, joined = (fp8_scales(tiny_llama(), batches, join_fused_scales=join) for join in (False, True))
    layer = "model.layers.0"
    groups = (
        [f"{layer}.self_attn.{name}_proj.weight_scale" for name in "qkv"],
        [f"{layer}.mlp.{name}_proj.weight_scale" for name in ("gate", "up")],
    )
    for group in groups:
        assert len({float(apart[name]) for name in group}) > 1
        assert {float(joined[name]) for name in group} == {max(float(apart[name]) for name in group)}
    others = set(apart) - {name for name in apart if name.endswith("weight_scale")}
    others |= {name for name in apart if name.endswith(("o_proj.weight_scale", "down_proj.weight_scale"))}
    assert all(torch.equal(apart[name], joined[name]) for name in others)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A8"])  # a scale per channel
def test_scales_that_are_not_per_tensor_are_not_joined(scheme, tiny_llama):
    found = []
    for join in (False, True):
        with CalibrationSession(tiny_llama(), scheme, ignore=["lm_head"], join_fused_scales=join) as session:
            pass
        found.append(session.result.qparams)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_joined_scales_are_the_same_after_a_weight_was_observed_again(tiny_llama, batches):
    model = tiny_llama()
    session = CalibrationSession(model, "FP8", ignore=["lm_head"], join_fused_scales=True)
    with session:
        for batch in batches:
            model(**batch)
    first = {name: value.clone() for name, value in session.result.qparams.items()}
    with session:
        for batch in batches:
            model(**batch)
    assert all(torch.equal(first[name], session.result.qparams[name]) for name in first)


@torch.no_grad()
def test_weights_on_a_joined_scale_are_rounded_once(tiny_llama, batches):
    """What vLLM does with scales of their own is to round the rounded weights to the widest of them."""
    apart, joined = tiny_llama(), tiny_llama()
    fp8_scales(apart, batches)
    scale = fp8_scales(joined, batches, join_fused_scales=True)["model.layers.0.self_attn.q_proj.weight_scale"]
    q, k, v = (getattr(apart.model.layers[0].self_attn, f"{name}_proj") for name in "qkv")
    once = twice = 0.0
    for module in (q, k, v):
        first = round_fp8(module.weight, module.weight_scale)
        twice += float((round_fp8(first, scale) - module.weight).square().sum())
        once += float((round_fp8(module.weight, scale) - module.weight).square().sum())
    assert once < twice


def round_fp8(value, scale):
    return (value.detach() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_a_dynamic_input_does_not_keep_the_scale_of_an_earlier_static_calibration():
    model = nn.Sequential(nn.Linear(8, 4))
    with CalibrationSession(model, "INT8_STATIC"):
        model(torch.randn(3, 8))
    with CalibrationSession(model, "W8A8") as session:
        pass
    assert read_qparams(model[0]).keys() == {"weight_scale"}
    assert session.qparams.keys() == {"0.weight_scale"}
