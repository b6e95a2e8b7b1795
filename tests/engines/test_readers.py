"""What SGLang and llama.cpp's converter read, as this package has it (docs/evidence/engines.md)."""

from __future__ import annotations

import pytest
import torch

from lightning_obs import linearize_experts
from lightning_obs.errors import CalibrationError, CalibrationWarning
from tests.schemes.plans import asked, plan
from tests.support.moe_models import tiny_moe
from tests.support.versions import converted_weights

ENGINES = ("SGLang", "llama.cpp")
TOKEN8 = {"num_bits": 8, "strategy": "token", "dynamic": True}


def int_weights(bits=4, **args):
    return {"weights": {"num_bits": bits, **args}}


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
SIGNED = {"observers": {"weight": {"name": "memoryless_mse", "signed": True}}}
AMPERE = "CUDA capability 8.0 or newer"
INT8 = "CUDA capability 8.0 to 9.0"
ANY = "any hardware"
#: by scheme, the hardware that SGLang and llama.cpp name; None: they refuse it
SAID = {
    "W4A16 group 32": (int_weights(group_size=32), {}, AMPERE, ANY),
    "W4A16 group 16": (int_weights(group_size=16), {}, None, ANY),
    "W4A16 per channel": (int_weights(strategy="channel"), {}, AMPERE, None),
    "W4A16 asymmetric": (int_weights(group_size=32, symmetric=False), {}, AMPERE, ANY),
    "W4A16 signed": (int_weights(group_size=32), SIGNED, AMPERE, ANY),
    "W3A16": (int_weights(3, group_size=32), {}, None, None),
    "W8A16 groups": (int_weights(8, group_size=32), {}, AMPERE, ANY),
    "W8A16": (int_weights(8, strategy="channel"), {}, AMPERE, None),
    "W4A8": ({**int_weights(group_size=32), "input_activations": TOKEN8}, {}, None, ANY),
    "W8A8": ("W8A8", {}, INT8, ANY),
    "INT8_STATIC": ("INT8_STATIC", {}, None, None),
    "FP8": ("FP8", {}, AMPERE, None),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", {}, AMPERE, ANY),
    "FP8 weights": ({"weights": FP8_WEIGHTS}, {}, AMPERE, ANY),
    "NVFP4": ("NVFP4", {}, AMPERE, ANY),
    "NVFP4A16": ("NVFP4A16", {}, AMPERE, ANY),
    "MXFP4": ("MXFP4", {}, None, None),
    "MXFP8": ("MXFP8", {}, None, None),
    "kv cache": ("FP8_DYNAMIC", {"kv_cache": "FP8"}, AMPERE, None),
    "kv cache per head": ("FP8_DYNAMIC", {"kv_cache": "FP8_HEAD"}, None, None),
    "NVFP4, kv cache": ("NVFP4", {"kv_cache": "FP8"}, AMPERE, ANY),
}


@pytest.mark.parametrize("name", SAID)
def test_each_reader_says_what_it_takes_of_a_llama(name, tiny_llama):
    scheme, options, *said = SAID[name]
    verdicts = asked(tiny_llama(torch.bfloat16), scheme, "unchecked", ignore="lm_head", **options)[1]
    found = {engine: verdicts[engine].text if verdicts[engine].loads else None for engine in ENGINES}
    assert found == dict(zip(ENGINES, said, strict=True))


def test_llama_cpp_takes_one_scheme_or_several_of_nvfp4(tiny_llama):
    mixed = {"W8A8": ["re:.*mlp.*_proj"], "FP8_DYNAMIC": ["re:.*self_attn.*_proj"]}
    verdicts = asked(tiny_llama(torch.bfloat16), mixed, "unchecked")[1]
    assert (verdicts["SGLang"].loads, verdicts["llama.cpp"].loads) == (True, False)
    assert "one scheme, not several" in verdicts["llama.cpp"].what
    both = {"NVFP4": ["re:.*mlp.*_proj"], "NVFP4A16": ["re:.*self_attn.*_proj"]}
    assert asked(tiny_llama(torch.bfloat16), both, "unchecked")[1]["llama.cpp"].loads


@pytest.mark.parametrize(
    ("engine", "scheme", "message"),
    [
        ("sglang", "NVFP4", "below CUDA capability 10.0 SGLang does not quantize the inputs"),
        ("llama.cpp", "W8A8", "llama.cpp does not quantize the inputs"),
    ],
)
def test_what_a_reader_computes_in_another_way_is_a_warning(engine, scheme, message, tiny_llama):
    with pytest.warns(CalibrationWarning, match=message):
        plan(tiny_llama(torch.bfloat16), scheme, engine, ignore="lm_head")


@converted_weights
def test_sglang_has_rules_for_experts_of_its_own():
    model = tiny_moe("qwen3_moe", torch.bfloat16)
    linearize_experts(model)
    said = {s: asked(model, s, "unchecked", ignore="lm_head")[1]["SGLang"] for s in ("FP8", "W8A8", "NVFP4A16")}
    assert {scheme: verdict.loads for scheme, verdict in said.items()} == {"FP8": True, "W8A8": False, "NVFP4A16": True}
    assert said["FP8"].text == "CUDA capability 8.9 or newer"


def test_sglang_refuses_what_vllm_refuses_of_a_fused_set(tiny_llama):
    with pytest.raises(CalibrationError, match=r"SGLang 0\.5\.23 fuses these modules"):
        plan(tiny_llama(), "W8A8", "sglang", ignore=["lm_head", "re:.*q_proj"])
