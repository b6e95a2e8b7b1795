"""Every reader finds its modules in the config: transformers by its own names, vLLM by those of the stored tensors."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationSession, export_checkpoint, linearize_experts, quantized
from tests.support.moe_models import tiny_moe
from tests.support.versions import converted_weights

pytestmark = converted_weights

FP8_OUTSIDE_EXPERTS = {"ignore": ["lm_head", "re:.*experts.*"]}


def exported(model, folder, scheme, **options):
    """The checkpoint's quantization config and its tensors' names."""
    with CalibrationSession(model, scheme, engines="unchecked", **options):
        pass
    export_checkpoint(model, folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config, set(load_file(folder / "model.safetensors"))


def is_named(name, patterns):
    return any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in patterns)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("linear", "loaded"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.nightly),
        pytest.param(False, True, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "phimoe", "minimax_m2"])
def test_experts_in_full_precision_are_ignored_under_the_names_of_their_tensors(kind, linear, loaded, tmp_path):
    model = tiny_moe(kind, torch.bfloat16)
    if loaded:
        model.save_pretrained(tmp_path / "original")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.bfloat16)
    if linear:
        linearize_experts(model)
    options = {"ignore": [*FP8_OUTSIDE_EXPERTS["ignore"], *(["re:.*router"] if kind == "phimoe" else [])]}
    config, tensors = exported(model, tmp_path / "out", "FP8_DYNAMIC", **options)
    experts = {name.removesuffix(".weight") for name in tensors if ".experts." in name}
    assert len(experts) == 2 * 4 * 3  # layers, experts, projections
    assert experts <= set(config["ignore"])


def test_the_routers_are_ignored_under_the_names_of_their_tensors(tmp_path):
    model = tiny_moe("mixtral", torch.bfloat16)
    config, tensors = exported(model, tmp_path / "out", "FP8_DYNAMIC", **FP8_OUTSIDE_EXPERTS)
    assert "model.layers.0.block_sparse_moe.gate.weight" in tensors
    assert "model.layers.0.block_sparse_moe.gate" in config["ignore"]


def test_transformers_still_finds_what_is_ignored_under_its_own_names(tmp_path):
    model = tiny_moe("mixtral", torch.bfloat16)
    linearize_experts(model)
    config, _ = exported(model, tmp_path / "out", "FP8_DYNAMIC", **FP8_OUTSIDE_EXPERTS)
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".experts." in n}
    assert linears <= set(config["ignore"])


def test_a_pattern_that_names_the_experts_is_followed_by_the_names_of_their_tensors(tmp_path):
    model = tiny_moe("mixtral", torch.bfloat16)
    linearize_experts(model)
    config, tensors = exported(model, tmp_path / "out", "W8A8", targets=["re:.*mlp.experts.*"])
    targets = config["config_groups"]["group_0"]["targets"]
    stored = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    assert len(stored) == 2 * 4 * 3
    assert all(is_named(name, targets) for name in stored)


def test_nothing_is_added_where_names_are_the_same_everywhere(tiny_llama, tmp_path):
    config, _ = exported(tiny_llama(), tmp_path / "out", "FP8_DYNAMIC", ignore=["lm_head"])
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_a_quantized_output_embedding_is_a_target_by_name(tiny_llama, batches, tmp_path):
    model = tiny_llama()  # not tied
    config, tensors = exported(model, tmp_path / "out", "FP8_DYNAMIC")
    assert "lm_head.weight_scale" in tensors
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    with torch.no_grad(), quantized(model):
        expected = model(**batches[0]).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batches[0]).logits, expected)


def test_the_modules_keep_the_targets_that_the_user_wrote(tiny_llama, tmp_path):
    model = tiny_llama()
    exported(model, tmp_path / "out", "FP8_DYNAMIC")
    assert model.lm_head.quantization_scheme.targets == ["Linear"]


@pytest.mark.parametrize("scheme", ["W4A8", "W4AFP8"])
def test_integers_below_8_bits_are_packed_also_where_inputs_are_quantized(scheme, tiny_llama, tmp_path):
    model = tiny_llama()
    config, _ = exported(model, tmp_path / "out", scheme, ignore=["lm_head"])
    assert config["format"] == "pack-quantized"
    weight = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.down_proj.weight_packed"]
    columns = model.model.layers[0].mlp.down_proj.in_features
    assert (weight.dtype, weight.shape[1]) == (torch.int32, columns // 8)
