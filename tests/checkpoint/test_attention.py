"""Checkpoints with a quantized kv cache or attention states: what transformers gives back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from lightning_obs import CalibrationError, export_checkpoint, load_checkpoint, quantized
from lightning_obs.errors import CalibrationWarning
from tests.support.attention_models import CASES, HEADS, KV_HEADS, NAMES, attention, calibrate, logits, traces


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_transformers_loads_it_with_the_same_logits(case, dtype, tiny_llama, batches, tmp_path):
    model = tiny_llama(dtype)
    calibrate(model, batches, **case)
    before = traces(model)
    with quantized(model):
        expected = logits(model, batches[0])
    export_checkpoint(model, tmp_path / "out")
    assert traces(model) == before
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(reloaded, batches[0]), expected)
    assert torch.equal(logits(reloaded, batches[0], use_cache=False), expected)


def test_the_checkpoint_names_scales_and_schemes_as_compressed_tensors_does(tiny_llama, batches, tmp_path):
    model = tiny_llama(torch.bfloat16)
    calibrate(model, batches, {**attention("attn_head"), "FP8": ["re:.*_proj$"]})
    export_checkpoint(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {n: tuple(v.shape) for n, v in tensors.items() if n.startswith(f"{NAMES[1]}.") and "proj" not in n}
    expected = {"q_scale": (HEADS, 1, 1), "k_scale": (KV_HEADS, 1, 1), "v_scale": (KV_HEADS, 1, 1)}
    assert found == {f"{NAMES[1]}.{key}": shape for key, shape in expected.items()}
    assert tensors[f"{NAMES[1]}.k_scale"].dtype is torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = {group["targets"][0]: group for group in config["config_groups"].values()}
    assert groups["LlamaAttention"]["input_activations"]["strategy"] == "attn_head"
    assert groups["LlamaAttention"]["weights"] is None
    assert config["kv_cache_scheme"]["strategy"] == "attn_head"


def test_a_cache_alone_is_no_group(tiny_llama, batches, tmp_path):
    model = tiny_llama()
    calibrate(model, batches, kv_cache="FP8")
    export_checkpoint(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"] == {}
    assert config["kv_cache_scheme"]["num_bits"] == 8
    assert config["format"] == "dense"


def test_an_asymmetric_integer_cache_loads_and_vllm_is_named(tiny_llama, batches, tmp_path):
    model = tiny_llama()
    with pytest.warns(CalibrationWarning, match=r"symmetric 8-bit float only, not asymmetric int8 tensor"):
        calibrate(model, batches, kv_cache={"num_bits": 8, "symmetric": False})
    with quantized(model):
        expected = logits(model, batches[0])
    export_checkpoint(model, tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(reloaded, batches[0]), expected)


def test_another_loader_says_who_loads_a_cache(tiny_llama, batches, tmp_path):
    model = tiny_llama()
    calibrate(model, batches, kv_cache="FP8")
    export_checkpoint(model, tmp_path / "out")
    with pytest.raises(CalibrationError, match=r"cannot load a quantized kv cache.*from_pretrained"):
        load_checkpoint(tiny_llama(), tmp_path / "out")


def test_layers_with_a_window_and_eager_attention_work(batches, tmp_path):
    config = Gemma2Config(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, initializer_range=0.1,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    calibrate(model, batches, kv_cache="FP8_HEAD")
    with quantized(model):
        expected = logits(model, batches[0])
    export_checkpoint(model, tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), batches[0]), expected)
