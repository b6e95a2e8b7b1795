"""Checkpoints of experts: what transformers gives back, and the names that vLLM reads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, linearize_experts, quantized
from lightning_obs.schemes.config import preset_names
from tests.support.moe_models import FAMILY, FP8_BLOCK, KINDS, W4A16_32, tiny_moe
from tests.support.versions import converted_weights, dequantizes_activations_too

pytestmark = converted_weights


@pytest.fixture
def tokens():
    return torch.randint(3, 128, (2, 16))


def calibrated(folder, kind, scheme, engine, dtype=torch.bfloat16):
    """A linearized model, loaded from disk as its users do, calibrated and exported."""
    tiny_moe(kind, dtype).save_pretrained(folder / "original")
    model = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=dtype).eval()
    linearize_experts(model)
    linear_gates = {
        "qwen2_moe": "re:.*shared_expert_gate",
        "qwen3_next": "re:.*shared_expert_gate",
        "qwen3_5_moe_text": "re:.*shared_expert_gate",
        "phimoe": "re:.*router",
        "llama4_text": "re:.*router",
    }
    ignore = ["lm_head", *filter(None, [linear_gates.get(kind)])]
    session = CalibrationSession(model, scheme, ignore=ignore, engines=engine, on_missing="siblings")
    with session:
        if session.needs_data:
            model(torch.randint(3, 128, (8, 32)))
    export_checkpoint(model, folder / "quantized")
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "engine", "dtype"),
    [
        pytest.param(
            *(kind, engine, dtype),
            # in CI each kind once, and one in every way
            marks=[pytest.mark.nightly] * (kind != "mixtral" and (engine, dtype) != ("transformers", torch.bfloat16)),
        )
        for kind in KINDS
        for engine in ("transformers", "dequantize")
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_transformers_loads_weight_only_experts_with_the_same_logits(kind, engine, dtype, tokens, tmp_path):
    model = calibrated(tmp_path, kind, W4A16_32, engine, dtype)
    assert_reloads(model, tmp_path, engine, tokens)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", FAMILY)
def test_transformers_loads_the_experts_of_related_architectures(kind, tokens, tmp_path):
    model = calibrated(tmp_path, kind, W4A16_32, "transformers", torch.float32)
    assert_reloads(model, tmp_path, "transformers", tokens)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", [W4A16_32, "FP8_DYNAMIC", "INT8_STATIC"])
def test_transformers_loads_llama_4_with_a_linear_per_expert_and_its_quantized_inputs(scheme, tokens, tmp_path):
    model = calibrated(tmp_path, "llama4_text", scheme, "transformers", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized").eval()
    assert loaded.get_submodule("model.layers.0.feed_forward.experts.0.down_proj").quantization_scheme
    with quantized(model):
        expected = logits(model, tokens)
    assert torch.equal(logits(loaded, tokens), expected)
    assert (expected - logits(model, tokens)).abs().max() > 0.01


@pytest.mark.parametrize("scheme", [W4A16_32, "FP8_DYNAMIC"])
def test_llama_4_may_keep_experts_in_full_precision_only_as_a_linear_each(scheme, tokens, tmp_path):
    model, ignore = tiny_moe("llama4_text"), ["lm_head", "re:.*router", "re:.*experts"]
    with pytest.raises(CalibrationError, match=r"random weights: model\.layers\.0\.feed_forward\.experts"):
        CalibrationSession(model, scheme, ignore=ignore)
    linearize_experts(model)
    with CalibrationSession(model, scheme, ignore=ignore):
        pass
    export_checkpoint(model, tmp_path / "quantized")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized").eval()
    with quantized(model):
        assert torch.equal(logits(loaded, tokens), logits(model, tokens))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("engine", ["transformers", "dequantize"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_transformers_loads_fp8_weights_with_the_same_logits(kind, engine, tokens, tmp_path):
    scheme = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    assert_reloads(calibrated(tmp_path, kind, scheme, engine), tmp_path, engine, tokens)


@pytest.mark.slow_but_first
@dequantizes_activations_too
@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.filterwarnings("ignore::lightning_obs.CalibrationWarning")
def test_transformers_loads_fp8_experts_dequantized(kind, scheme, tokens, tmp_path):
    model = calibrated(tmp_path, kind, scheme, "dequantize")
    for module in model.modules():  # no activation is quantized in a dequantized model
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None
    assert_reloads(model, tmp_path, "dequantize", tokens)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "MXFP8A16", FP8_BLOCK])
@pytest.mark.parametrize("linear", [True, False])
def test_transformers_loads_experts_in_full_precision_beside_8_bit_floats(linear, scheme, tokens, tmp_path):
    model = tiny_moe("mixtral", torch.bfloat16)
    model.save_pretrained(tmp_path / "original")
    if linear:
        linearize_experts(model)
    with CalibrationSession(model, scheme, ignore=["lm_head", "re:.*experts.*"]):
        pass
    export_checkpoint(model, tmp_path / "quantized")
    assert_reloads(model, tmp_path, "transformers", tokens)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("engine", ["transformers", "dequantize"])
@pytest.mark.parametrize("scheme", [name for name in ("MXFP4A16", "MXFP6A16") if name in preset_names()])
def test_transformers_loads_microscaling_experts_with_the_same_logits(scheme, engine, tokens, tmp_path):
    model = calibrated(tmp_path, "qwen3_moe", scheme, engine)
    assert_reloads(model, tmp_path, engine, tokens)


def assert_reloads(model, folder, engine, tokens):
    arguments = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if engine == "dequantize" else {}
    loaded = AutoModelForCausalLM.from_pretrained(folder / "quantized", **arguments).eval()
    loaded.set_experts_implementation("eager")
    with quantized(model):
        expected = logits(model, tokens)
    assert torch.equal(logits(loaded, tokens), expected)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder / "original"), tokens), expected)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.0.gate_proj.weight_packed"),
        ("deepseek_v3", "model.layers.1.mlp.experts.3.down_proj.weight_scale"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w1.weight_packed"),
    ],
)
def test_checkpoints_have_the_names_that_vllm_reads(kind, name, tmp_path):
    calibrated(tmp_path, kind, W4A16_32, "unchecked")
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    assert name in tensors
    assert not any(key.endswith(("experts.gate_up_proj", "experts.down_proj")) for key in tensors)


def test_routers_are_listed_as_not_quantized(tmp_path):
    calibrated(tmp_path, "qwen3_moe", W4A16_32, "transformers")
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
