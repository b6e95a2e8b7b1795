"""What vLLM loads and on what it runs, as this package has it.

``tests/engines/test_schemes_in_vllm.py`` holds that against vLLM.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import linearize_experts
from lightning_obs.engines import Hardware
from lightning_obs.errors import CalibrationError, CalibrationWarning
from tests.schemes.plans import asked, plan
from tests.support.moe_models import tiny_moe
from tests.support.versions import converted_weights

TOKEN8 = {"num_bits": 8, "strategy": "token", "dynamic": True}
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.mark.parametrize(
    ("scheme", "hardware"),
    [
        ("INT8_STATIC", "CPU, CUDA capability 7.5 or newer"),
        ("W8A8", "CPU, CUDA capability 7.5 or newer"),
        ("W4A16", "CPU, CUDA capability 7.5 or newer"),
        ("W4A16_ASYM", "CPU, CUDA capability 7.5 or newer"),
        ("W8A16", "CUDA capability 7.5 or newer"),
        ("W4AFP8", "CUDA capability 9.0"),
        ("FP8", "CPU with AMX, CUDA capability 7.5 or newer"),
        ("FP8_DYNAMIC", "CPU, CUDA capability 7.5 or newer"),
        ("FP8_BLOCK", "CPU with AMX, CUDA capability 7.5 or newer"),
        ("NVFP4", "CUDA capability 7.5 or newer"),
        ("NVFP4A16", "CUDA capability 7.5 or newer"),
        ("MXFP4", "CUDA capability 8.0 or newer"),
        ("MXFP8", "CUDA capability 7.5 or newer"),
    ],
)
def test_the_plan_says_on_what_vllm_runs_a_scheme(scheme, hardware, tiny_llama):
    verdict = asked(tiny_llama(torch.bfloat16), scheme, "vllm", ignore="lm_head")[1]["vLLM"]
    assert (verdict.loads, verdict.text) == (True, hardware)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("W4A8", "does not quantize them.*down_proj"),
        ("MXFP4A16", "quantizes the inputs too.*down_proj"),
        ("MXFP8A16", "quantizes the inputs too.*down_proj"),
    ],
)
def test_what_vllm_computes_in_another_way_is_a_warning(scheme, message, tiny_llama):
    with pytest.warns(CalibrationWarning, match=message):
        plan(tiny_llama(torch.bfloat16), scheme, "vllm", ignore="lm_head")


@pytest.mark.parametrize("observer", [{"name": "memoryless_mse", "signed": True}, {"name": "lattice"}])
@pytest.mark.parametrize(("scheme", "loads"), [("W4A16", True), ("W8A16", True), ("W4A8", False), ("W4AFP8", False)])
def test_negative_scales_are_refused_where_its_kernels_misread_them(scheme, loads, observer, tiny_llama):
    signed = {"observers": {"weight": observer}, "ignore": "lm_head"}
    assert asked(tiny_llama(torch.bfloat16), scheme, "transformers", **signed)[1]["vLLM"].loads == loads
    if not loads:
        with pytest.raises(CalibrationError, match=r"does not read the negative scales.*q_proj.*signed=True"):
            plan(tiny_llama(torch.bfloat16), scheme, "vllm", **signed)


def test_a_mixture_runs_where_each_of_its_schemes_does(tiny_llama):
    groups = {"W4AFP8": ["re:.*mlp.*_proj"], "MXFP4": ["re:.*self_attn.*_proj"]}  # Hopper only; 8.0 or newer
    assert asked(tiny_llama(torch.bfloat16), groups, "vllm")[1]["vLLM"].text == "CUDA capability 9.0"


@pytest.mark.parametrize(
    ("scheme", "got"),
    [
        ({"weights": {"num_bits": 8, "symmetric": False}, "input_activations": TOKEN8}, "asymmetric int8 .* weights"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}, "block"),
        ({"weights": {"num_bits": 4, "group_size": 64}, "input_activations": {**TOKEN8, "type": "float"}}, "group"),
        ({"weights": {"num_bits": 8}, "input_activations": {**TOKEN8, "type": "float"}}, "dynamic float8 token inputs"),
        ({"input_activations": {"num_bits": 8}}, "int8 tensor inputs"),
        ("W8A8 outputs", "int8 tensor outputs"),
    ],
)
def test_what_vllm_does_not_compute_is_refused(scheme, got, tiny_llama):
    if scheme == "W8A8 outputs":
        scheme = {"weights": {"num_bits": 8}, "input_activations": TOKEN8, "output_activations": {"num_bits": 8}}
    with pytest.raises(
        CalibrationError, match=rf"vLLM 0\.32 has nothing that loads.*{got}.*docs/reference/engines\.md"
    ):
        plan(tiny_llama(torch.bfloat16), scheme, "vllm", ignore="lm_head")
    verdict = asked(tiny_llama(torch.bfloat16), scheme, "unchecked", ignore="lm_head")[1]["vLLM"]
    assert not verdict.loads


def test_other_kv_caches_than_fp8_are_refused(tiny_llama):
    with pytest.raises(CalibrationError, match=r"kv cache in symmetric 8-bit float only, not int8 tensor.*FP8_HEAD"):
        plan(tiny_llama(), "W8A8", "vllm", ignore="lm_head", kv_cache={**FP8_CACHE, "type": "int"})
    assert asked(tiny_llama(), "W8A8", "vllm", ignore="lm_head", kv_cache="FP8_HEAD")[1]["vLLM"].loads


def test_a_quantized_embedding_is_refused(tiny_llama):
    with pytest.raises(CalibrationError, match=r"Linear modules, no others.*embed_tokens \(Embedding\)"):
        plan(tiny_llama(), {"weights": {"num_bits": 8, "type": "float"}}, "vllm", targets="Embedding")


def test_a_part_of_a_fused_set_is_refused_for_vllm_and_warned_of_for_others(tiny_llama):
    with pytest.raises(CalibrationError, match=r"fuses these modules.*q_proj/k_proj/v_proj"):
        plan(tiny_llama(), "W8A8", "vllm", ignore=["lm_head", "re:.*q_proj"])
    with pytest.warns(CalibrationWarning, match=r"vLLM 0\.32 fuses these modules.*q_proj/k_proj/v_proj") as given:
        plan(tiny_llama(), "W8A8", ignore=["lm_head", "re:.*q_proj"])
    assert len(given) == 1


@converted_weights
@pytest.mark.parametrize(
    ("scheme", "taken"),
    [("FP8", True), ("W8A8", True), ("INT8_STATIC", False), ({"weights": {"num_bits": 4, "group_size": 32}}, True)],
)
def test_experts_have_rules_of_their_own(scheme, taken):
    model = tiny_moe("qwen3_moe", torch.bfloat16)
    linearize_experts(model)
    verdict = asked(model, scheme, "unchecked", ignore="lm_head")[1]["vLLM"]
    assert verdict.loads is taken
    assert (verdict.text == "CUDA capability 7.5 or newer") is taken  # no kernel for the CPU
    assert taken or "experts" in verdict.text


def test_a_model_that_is_not_of_transformers_is_refused():
    with pytest.raises(CalibrationError, match="vLLM does not load a Sequential"):
        plan(nn.Sequential(nn.Linear(8, 8)), "W8A8", "vllm")
    assert asked(nn.Sequential(nn.Linear(8, 8)), "W8A8")[1] == {}


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Hardware(75, cpu="CPU"), Hardware(90), "CUDA capability 9.0 or newer"),
        (Hardware(75, cpu="CPU"), Hardware(80, cpu="CPU with AMX"), "CPU with AMX, CUDA capability 8.0 or newer"),
        (Hardware(90, last=90), Hardware(75), "CUDA capability 9.0"),
        (Hardware(90, last=90), Hardware(100), "no hardware"),
        (Hardware(None, cpu="CPU"), Hardware(75), "no hardware"),
        (Hardware(cpu="any hardware"), Hardware(cpu="CPU"), "CPU"),
        (Hardware(cpu="any hardware"), Hardware(cpu="CPU with AMX"), "CPU with AMX"),
    ],
)
def test_what_runs_two_schemes_runs_each(one, other, both):
    assert str(one.and_(other)) == str(other.and_(one)) == both
