"""Experts in the plan: what is reached, what is warned of, what transformers cannot load."""

from __future__ import annotations

import pytest
import torch

from lightning_obs import CalibrationError, CalibrationSession, CalibrationWarning, linearize_experts
from tests.support.moe_models import EXPERTS, FP8_BLOCK, W4A16_32, W4A16_ASYM, tiny_moe
from tests.support.versions import converted_weights

pytestmark = converted_weights


def test_stacked_experts_are_not_left_out_in_silence():
    with pytest.raises(
        CalibrationError,
        match=r"stacked in 3-D.*model\.layers\.0\.mlp\.experts \(MixtralExperts\).*linearize_experts\(model\)",
    ):
        CalibrationSession(tiny_moe("mixtral"), "FP8", ignore=["lm_head"])


@pytest.mark.parametrize(
    "options",
    [
        {"ignore": ["lm_head", "re:.*experts"]},
        {"ignore": ["lm_head", "MixtralExperts"]},
        {"ignore": ["lm_head", "re:.*experts.*"]},
        {"targets": ["re:.*self_attn.*proj"]},
    ],
    ids=["by pattern", "by class", "by the pattern of what they would become", "not meant by the targets"],
)
def test_stacked_experts_can_be_left_on_purpose(options):
    session = CalibrationSession(tiny_moe("mixtral"), "FP8_DYNAMIC", **options)
    assert not any("experts" in target.name for target in session.plan.targets)


def test_every_projection_of_every_expert_is_a_target():
    model = tiny_moe("mixtral")
    linearize_experts(model)
    session = CalibrationSession(model, "FP8", ignore=["lm_head"], engines="unchecked")
    names = {t.name for t in session.plan.targets if "experts" in t.name}
    assert names == {
        f"model.layers.{n}.mlp.experts.{i}.w{p}" for n in (0, 1) for i in range(EXPERTS) for p in (1, 2, 3)
    }


def test_a_gate_that_vllm_does_not_quantize_is_warned_of():
    model = tiny_moe("qwen2_moe")
    linearize_experts(model)
    with pytest.warns(CalibrationWarning, match=r"routers or gates.*model\.layers\.0\.mlp\.shared_expert_gate"):
        CalibrationSession(model, "FP8", ignore=["lm_head"], engines="unchecked")


def test_a_part_of_a_layer_s_experts_is_warned_of():
    model = tiny_moe("qwen3_moe")
    linearize_experts(model)
    with pytest.warns(CalibrationWarning, match=r"one scheme.*only some of their modules are targeted: .*experts"):
        CalibrationSession(model, "FP8", ignore=["lm_head", "re:.*experts.0.*"], engines="unchecked")


@pytest.mark.parametrize(
    ("scheme", "engine", "message"),
    [
        (
            "FP8",
            "transformers",
            r"does not quantize what they read.*experts\.0\..*engines=\"dequantize\".*\"unchecked\"",
        ),
        ("FP8_DYNAMIC", "transformers", r"does not quantize what they read"),
        ("W8A8", "dequantize", r"cannot load experts in this format.*int-quantized.*\"unchecked\""),
        ("NVFP4A16", "dequantize", r"cannot load experts in this format.*nvfp4"),
        (W4A16_ASYM, "dequantize", r"cannot load experts in this format.*pack-quantized"),
        (FP8_BLOCK, "dequantize", r"cannot load experts in this format.*FP8 per tensor or channel"),
        ("NVFP4A16", "transformers", r"cannot load experts in this format.*or MXFP4 and MXFP6 in bfloat16"),
    ],
)
def test_what_transformers_cannot_load_is_refused_before_calibration(scheme, engine, message):
    model = tiny_moe("qwen3_moe", torch.bfloat16)
    linearize_experts(model)
    with pytest.raises(CalibrationError, match=message):
        CalibrationSession(model, scheme, ignore=["lm_head"], engines=engine)


@pytest.mark.parametrize("ignore", [["lm_head"], ["lm_head", "re:.*experts"]])
def test_linear_experts_of_an_architecture_whose_files_hold_stacks_are_refused(ignore):
    model = tiny_moe("gpt_oss")
    linearize_experts(model)
    with pytest.raises(CalibrationError, match=r"one by one into GptOssForCausalLM.*mlp\.experts.*\"unchecked\""):
        CalibrationSession(model, W4A16_32, ignore=ignore, engines="dequantize")


@pytest.mark.parametrize("ignore", ["re:.*experts.0", "re:.*down_proj"])
def test_a_part_of_the_experts_does_not_load_and_is_refused(ignore):
    model = tiny_moe("qwen3_moe")
    linearize_experts(model)
    with pytest.raises(CalibrationError, match="all of them have to be quantized"):
        CalibrationSession(model, W4A16_32, ignore=["lm_head", ignore])


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("scheme", [W4A16_32, "W8A8"])
def test_experts_left_in_full_precision_do_not_load_beside_all_formats(scheme, linear):
    model = tiny_moe("mixtral")
    if linear:
        linearize_experts(model)
    with pytest.raises(CalibrationError, match=r"experts in full precision beside.*model\.layers\.0\.mlp\.experts"):
        CalibrationSession(model, scheme, ignore=["lm_head", "re:.*experts.*"], engines="dequantize")


def test_experts_stay_in_full_precision_beside_fp8_and_its_kv_cache_but_not_beside_a_kv_cache_alone():
    model, options = tiny_moe("mixtral"), {"kv_cache": "FP8", "ignore": ["lm_head", "re:.*experts"]}
    CalibrationSession(model, "FP8", **options)
    with pytest.raises(CalibrationError, match="experts in full precision beside"):
        CalibrationSession(model, None, **options)


def test_quantized_experts_beside_a_kv_cache_do_not_load():
    model = tiny_moe("mixtral")
    linearize_experts(model)
    with pytest.raises(CalibrationError, match=r"use one scheme \(a quantized kv cache is another one\)"):
        CalibrationSession(model, W4A16_32, kv_cache="FP8", ignore=["lm_head"])
