"""What SGLang, llama.cpp's converter, MLX and OpenVINO read, as this package has it (docs/engines.md)."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from lightning_obs import linearize_experts
from lightning_obs.errors import CalibrationError, CalibrationWarning
from tests.moe_models import tiny_moe
from tests.schemes.plans import asked, plan

ENGINES = ("SGLang", "llama.cpp", "MLX", "OpenVINO")
TOKEN8 = {"num_bits": 8, "strategy": "token", "dynamic": True}


def int_weights(bits=4, **args):
    return {"weights": {"num_bits": bits, **args}}


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
SIGNED = {"observers": {"weight": {"name": "memoryless_mse", "signed": True}}}
AMPERE, INT8, ANY, INTEL = "CUDA 8.0 or newer", "CUDA 8.0 to 9.0", "any hardware", "CPU, Intel GPU"
#: by scheme, what SGLang, llama.cpp and OpenVINO say; None: they refuse it. MLX refuses all of a Llama.
SAID = {
    "W4A16 group 32": (int_weights(group_size=32), {}, AMPERE, ANY, INTEL),
    "W4A16 group 16": (int_weights(group_size=16), {}, None, ANY, INTEL),
    "W4A16 per channel": (int_weights(strategy="channel"), {}, AMPERE, None, None),
    "W4A16 asymmetric": (int_weights(group_size=32, symmetric=False), {}, AMPERE, ANY, INTEL),
    "W4A16 signed": (int_weights(group_size=32), SIGNED, AMPERE, ANY, INTEL),
    "W3A16": (int_weights(3, group_size=32), {}, None, None, None),
    "W8A16 groups": (int_weights(8, group_size=32), {}, AMPERE, ANY, None),
    "W8A16": (int_weights(8, strategy="channel"), {}, AMPERE, None, None),
    "W4A8": ({**int_weights(group_size=32), "input_activations": TOKEN8}, {}, None, ANY, INTEL),
    "W8A8": ("W8A8", {}, INT8, ANY, None),
    "INT8_STATIC": ("INT8_STATIC", {}, None, None, None),
    "FP8": ("FP8", {}, AMPERE, None, None),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", {}, AMPERE, ANY, None),
    "FP8 weights": ({"weights": FP8_WEIGHTS}, {}, AMPERE, ANY, None),
    "NVFP4": ("NVFP4", {}, AMPERE, ANY, None),
    "NVFP4A16": ("NVFP4A16", {}, AMPERE, ANY, None),
    "MXFP4": ("MXFP4", {}, None, None, None),
    "MXFP8": ("MXFP8", {}, None, None, None),
    "kv cache": ("FP8_DYNAMIC", {"kv_cache": "FP8"}, AMPERE, None, None),
    "kv cache per head": ("FP8_DYNAMIC", {"kv_cache": "FP8_HEAD"}, None, None, None),
    "NVFP4, kv cache": ("NVFP4", {"kv_cache": "FP8"}, AMPERE, ANY, None),
}


@pytest.mark.parametrize("name", SAID)
def test_each_reader_says_what_it_takes_of_a_llama(name, tiny_llama):
    scheme, options, *said = SAID[name]
    verdicts = asked(tiny_llama(torch.bfloat16), scheme, "unchecked", ignore="lm_head", **options)[1]
    found = {engine: verdicts[engine].text if verdicts[engine].loads else None for engine in ENGINES}
    assert found == dict(zip(("SGLang", "llama.cpp", "OpenVINO"), said, strict=True)) | {"MLX": None}


def test_llama_cpp_takes_one_scheme_or_several_of_nvfp4(tiny_llama):
    mixed = {"W8A8": ["re:.*mlp.*_proj"], "FP8_DYNAMIC": ["re:.*self_attn.*_proj"]}
    verdicts = asked(tiny_llama(torch.bfloat16), mixed, "unchecked")[1]
    assert (verdicts["SGLang"].loads, verdicts["llama.cpp"].loads) == (True, False)
    assert "one scheme, not several" in verdicts["llama.cpp"].what
    both = {"NVFP4": ["re:.*mlp.*_proj"], "NVFP4A16": ["re:.*self_attn.*_proj"]}
    assert asked(tiny_llama(torch.bfloat16), both, "unchecked")[1]["llama.cpp"].loads


def deepseek():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 64}
    ranks = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ranks, **heads, **experts))


@pytest.mark.parametrize(
    ("scheme", "further", "message"),
    [
        (int_weights(group_size=32), ["re:.*kv_b_proj"], None),
        (int_weights(8, group_size=32), ["re:.*kv_b_proj"], "nothing that loads modules in this scheme"),
        (int_weights(group_size=32, symmetric=False), ["re:.*kv_b_proj"], "nothing that loads modules in this scheme"),
        (int_weights(group_size=32), [], r'quantizes the parts again.*in `ignore` \("re:\.\*kv_b_proj"\)'),
    ],
)
def test_mlx_takes_int4_groups_of_the_models_that_rename_them(scheme, further, message):
    ignore = ["lm_head", *further]
    if message is None:
        assert asked(deepseek(), scheme, "mlx", ignore=ignore)[1]["MLX"].text == "Apple silicon"
    else:
        with pytest.raises(CalibrationError, match=message):
            plan(deepseek(), scheme, "mlx", ignore=ignore)


def test_mlx_names_the_models_that_it_takes(tiny_llama):
    with pytest.raises(CalibrationError, match=r"of deepseek_v3, .* only\. Got llama\. .*mlx_lm\.convert"):
        plan(tiny_llama(), int_weights(group_size=32), "mlx", ignore="lm_head")


@pytest.mark.parametrize(
    ("reload", "scheme", "message"),
    [
        ("sglang", "NVFP4", "below CUDA 10.0 SGLang leaves the inputs alone"),
        ("llama.cpp", "W8A8", "llama.cpp leaves the inputs alone"),
    ],
)
def test_what_a_reader_computes_in_another_way_is_a_warning(reload, scheme, message, tiny_llama):
    with pytest.warns(CalibrationWarning, match=message):
        plan(tiny_llama(torch.bfloat16), scheme, reload, ignore="lm_head")


def test_openvino_says_who_does_not_hand_it_the_packed_checkpoint(tiny_llama):
    zero_points = pytest.warns(CalibrationWarning, match=r"transformers 5\.23 does not load the packed zero")
    with pytest.warns(CalibrationWarning, match="optimum-intel 2.2 unpacks"), zero_points:
        plan(tiny_llama(torch.bfloat16), int_weights(group_size=32, symmetric=False), "openvino", ignore="lm_head")


def test_sglang_has_rules_for_experts_of_its_own():
    model = tiny_moe("qwen3_moe", torch.bfloat16)
    linearize_experts(model)
    said = {s: asked(model, s, "unchecked", ignore="lm_head")[1]["SGLang"] for s in ("FP8", "W8A8", "NVFP4A16")}
    assert {scheme: verdict.loads for scheme, verdict in said.items()} == {"FP8": True, "W8A8": False, "NVFP4A16": True}
    assert said["FP8"].text == "CUDA 8.9 or newer"


def test_sglang_refuses_what_vllm_refuses_of_a_fused_set(tiny_llama):
    with pytest.raises(CalibrationError, match=r"SGLang 0\.5\.23 fuses these modules"):
        plan(tiny_llama(), "W8A8", "sglang", ignore=["lm_head", "re:.*q_proj"])
