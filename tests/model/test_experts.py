from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    export_checkpoint,
    linearize_experts,
    quantized,
)
from lightning_obs.model.experts import GATE_UP_DOWN_MODEL_TYPES, W123_MODEL_TYPES, fused_experts, hub_names, routers
from lightning_obs.schemes.config import preset_names
from tests.moe_models import EXPERTS, FAMILY, HIDDEN, StackedBlock, StackedExperts, tiny_moe
from tests.versions import dequantizes_activations_too

KINDS = ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3"]


@pytest.fixture
def tokens():
    return torch.randint(3, 128, (2, 16))


# ---------------------------------------------------------------------- linearize_experts


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_stay_those_of_the_eager_experts_to_the_bit(kind, tokens):
    model = tiny_moe(kind)
    with torch.no_grad():
        before = model(tokens).logits
        replaced = linearize_experts(model)
        after = model(tokens).logits
    assert replaced
    assert torch.equal(before, after)


def test_interleaved_transposed_experts_with_biases_stay_what_they_are_but_for_rounding(tokens):
    model = tiny_moe("gpt_oss")
    with torch.no_grad():
        before = model(tokens).logits
        assert linearize_experts(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_outputs_stay_those_of_other_implementations_but_for_rounding(implementation, tokens):
    model = tiny_moe("qwen3_moe", num_experts_per_tok=3)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        before = model(tokens).logits
        linearize_experts(model)
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_linearized_model_is_saved_under_the_names_of_the_hub(kind, tmp_path):
    model = tiny_moe(kind)
    model.save_pretrained(tmp_path / "stacked")  # transformers itself takes the stacks apart here
    linearize_experts(model)
    model.save_pretrained(tmp_path / "linear")
    expected = load_file(tmp_path / "stacked" / "model.safetensors")
    found = load_file(tmp_path / "linear" / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", [*GATE_UP_DOWN_MODEL_TYPES, *W123_MODEL_TYPES])
def test_the_names_are_those_of_transformers_own_mapping(kind):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    stacked = StackedExperts()
    stacked.config = type("Config", (), {"model_type": kind})()
    names = hub_names(stacked)
    sources = {
        source.removesuffix(".weight").rpartition(".")[2]
        for conversion in get_checkpoint_conversion_mapping(kind)
        for source in getattr(conversion, "source_patterns", ())
        if "experts.*." in source
    }
    assert set(names.values()) == sources


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_dtype_requires_grad_and_mode_are_kept(dtype, training):
    model = StackedBlock().to(dtype).train(training)
    model.experts.down_proj.requires_grad_(False)
    linearize_experts(model)
    expert = model.experts.get_submodule("1")
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert expert.gate_proj.weight.requires_grad
    assert expert.up_proj.weight.requires_grad
    assert not expert.down_proj.weight.requires_grad
    assert all(module.training == training for module in model.modules())


def test_linearizing_twice_is_fine():
    model = StackedBlock()
    assert linearize_experts(model) == ["experts"]
    before = dict(model.named_modules())
    assert linearize_experts(model) == []
    assert dict(model.named_modules()) == before


def test_experts_under_two_names_stay_one():
    model = nn.ModuleDict({"a": StackedBlock(), "b": StackedBlock()})
    model["b"].experts = model["a"].experts
    assert linearize_experts(model) == ["a.experts"]
    assert model["b"].experts is model["a"].experts
    assert fused_experts(model) == {}


def test_experts_alone_are_refused():
    with pytest.raises(CalibrationError, match=r"the model is itself the experts\. Remedy: wrap it"):
        linearize_experts(StackedExperts())


def test_weights_are_copies_and_the_stack_is_gone():
    model = StackedBlock()
    stack = model.experts.gate_up_proj.detach().clone()
    linearize_experts(model)
    names = [f"experts.{i}.{p}.weight" for i in range(EXPERTS) for p in ("gate_proj", "up_proj", "down_proj")]
    assert sorted(model.state_dict()) == sorted(names)
    assert torch.equal(
        torch.cat([model.experts.get_submodule("2")._modules[p].weight for p in ("gate_proj", "up_proj")]), stack[2]
    )
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 3 * EXPERTS


def test_gradients_stay_what_they_are():
    model = StackedBlock()
    x, index = torch.randn(1, 8, HIDDEN), torch.arange(16).view(8, 2) % EXPERTS
    linear = copy.deepcopy(model)
    linearize_experts(linear)
    for each in (model, linear):
        each(x, index).square().sum().backward()
    experts = linear.experts.experts
    found = torch.stack([torch.cat([e.gate_proj.weight.grad, e.up_proj.weight.grad]) for e in experts])
    torch.testing.assert_close(found, model.experts.gate_up_proj.grad)
    found = torch.stack([e.down_proj.weight.grad for e in experts])
    torch.testing.assert_close(found, model.experts.down_proj.grad)


def test_a_copy_of_a_linearized_model_is_independent():
    model = StackedBlock()
    linearize_experts(model)
    other = copy.deepcopy(model)
    x, index = torch.randn(1, 4, HIDDEN), torch.zeros(4, 1, dtype=torch.long)
    before = model(x, index)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(model(x, index), before)


def test_no_random_number_is_drawn():
    model = StackedBlock()
    state = torch.get_rng_state()
    linearize_experts(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_index_past_the_last_expert_is_no_expert():
    model = StackedBlock()
    linearize_experts(model)
    index = torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS]])
    output = model(torch.randn(1, 2, HIDDEN), index)
    assert output[0, 0].any()
    assert not output[0, 1].any()


class Unknown(StackedExperts):
    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(EXPERTS, 1, 1))


class Deceptive(StackedExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


class Quantized(StackedExperts):
    def __init__(self):
        super().__init__()
        self.down_proj = nn.Parameter(self.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (Unknown, r"a layout that is not known: experts \(Unknown\).*scales.*`ignore`"),
        (Deceptive, r"compute something else than their parameters' names say: experts \(Deceptive\).*`ignore`"),
        (Quantized, r"quantized, sharded or offloaded.*experts.down_proj.*load the model in full precision"),
    ],
)
def test_experts_that_cannot_be_taken_apart_are_refused_and_left(experts, message):
    model = StackedBlock()
    model.experts = experts()
    with pytest.raises(CalibrationError, match=message):
        linearize_experts(model)
    assert isinstance(model.experts, experts)
    assert list(fused_experts(model)) == ["experts"]


# ---------------------------------------------------------------------- the plan


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
    session = CalibrationSession(model, "FP8", ignore=["lm_head"], reload="unchecked")
    names = {t.name for t in session.plan.targets if "experts" in t.name}
    assert names == {
        f"model.layers.{n}.mlp.experts.{i}.w{p}" for n in (0, 1) for i in range(EXPERTS) for p in (1, 2, 3)
    }


def test_a_gate_that_vllm_does_not_quantize_is_warned_of():
    model = tiny_moe("qwen2_moe")
    linearize_experts(model)
    with pytest.warns(CalibrationWarning, match=r"routers or gates.*model\.layers\.0\.mlp\.shared_expert_gate"):
        CalibrationSession(model, "FP8", ignore=["lm_head"], reload="unchecked")


def test_a_part_of_a_layer_s_experts_is_warned_of():
    model = StackedBlock()
    linearize_experts(model)
    with pytest.warns(CalibrationWarning, match=r"one scheme.*only some of their modules are targeted in: experts"):
        CalibrationSession(model, "FP8", ignore=["re:experts.0"])


W4A16_32 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}
W4A16_ASYM = {"weights": {**W4A16_32["weights"], "symmetric": False}}
FP8_BLOCK = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]}}


@pytest.mark.parametrize(
    ("scheme", "reload", "message"),
    [
        ("FP8", "default", r"does not quantize what they read.*experts\.0\..*reload=\"dequantize\".*\"unchecked\""),
        ("FP8_DYNAMIC", "default", r"does not quantize what they read"),
        ("W8A8", "dequantize", r"cannot load experts in this format.*int-quantized.*\"unchecked\""),
        ("NVFP4A16", "dequantize", r"cannot load experts in this format.*nvfp4"),
        (W4A16_ASYM, "dequantize", r"cannot load experts in this format.*pack-quantized"),
        (FP8_BLOCK, "dequantize", r"cannot load experts in this format.*FP8 per tensor or channel"),
    ],
)
def test_what_transformers_cannot_load_is_refused_before_calibration(scheme, reload, message):
    model = tiny_moe("qwen3_moe", torch.bfloat16)
    linearize_experts(model)
    with pytest.raises(CalibrationError, match=message):
        CalibrationSession(model, scheme, ignore=["lm_head"], reload=reload)


def test_an_architecture_that_was_not_tried_is_refused():
    model = tiny_moe("gpt_oss")
    linearize_experts(model)
    with pytest.raises(CalibrationError, match=r"not tried.*gpt_oss.*\"unchecked\""):
        CalibrationSession(model, W4A16_32, ignore=["lm_head"], reload="dequantize")


@pytest.mark.parametrize("ignore", ["re:.*experts.0", "re:.*down_proj"])
def test_a_part_of_the_experts_does_not_load_and_is_refused(ignore):
    model = tiny_moe("qwen3_moe")
    linearize_experts(model)
    with (
        pytest.warns(CalibrationWarning, match="only some"),
        pytest.raises(CalibrationError, match="all of them have to be quantized"),
    ):
        CalibrationSession(model, W4A16_32, ignore=["lm_head", ignore])


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("scheme", [W4A16_32, "W8A8"])
def test_experts_left_in_full_precision_do_not_load_beside_all_formats(scheme, linear):
    model = tiny_moe("mixtral")
    if linear:
        linearize_experts(model)
    with pytest.raises(CalibrationError, match=r"experts in full precision beside.*model\.layers\.0\.mlp\.experts"):
        CalibrationSession(model, scheme, ignore=["lm_head", "re:.*experts.*"], reload="dequantize")


def test_routers_are_found():
    model = tiny_moe("deepseek_v3")
    linearize_experts(model)
    assert routers(model) == ["model.layers.1.mlp.gate"]


# ---------------------------------------------------------------------- checkpoints


def calibrated(folder, kind, scheme, reload, dtype=torch.bfloat16):
    """A linearized model, loaded from disk as its users do, calibrated and exported."""
    tiny_moe(kind, dtype).save_pretrained(folder / "original")
    model = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=dtype).eval()
    linearize_experts(model)
    linear_gates = {
        "qwen2_moe": "re:.*shared_expert_gate",
        "qwen3_next": "re:.*shared_expert_gate",
        "phimoe": "re:.*router",
    }
    ignore = ["lm_head", *filter(None, [linear_gates.get(kind)])]
    session = CalibrationSession(model, scheme, ignore=ignore, reload=reload, on_missing="siblings")
    with session:
        if session.needs_data:
            model(torch.randint(3, 128, (8, 32)))
    export_checkpoint(model, folder / "quantized")
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reload", ["default", "dequantize"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_weight_only_experts_with_the_same_logits(kind, reload, dtype, tokens, tmp_path):
    model = calibrated(tmp_path, kind, W4A16_32, reload, dtype)
    assert_reloads(model, tmp_path, reload, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILY)
def test_transformers_loads_the_experts_of_related_architectures(kind, tokens, tmp_path):
    model = calibrated(tmp_path, kind, W4A16_32, "default", torch.float32)
    assert_reloads(model, tmp_path, "default", tokens)
    assert {*KINDS, *FAMILY} == {*W123_MODEL_TYPES, *GATE_UP_DOWN_MODEL_TYPES}


@pytest.mark.parametrize("reload", ["default", "dequantize"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_transformers_loads_fp8_weights_with_the_same_logits(kind, reload, tokens, tmp_path):
    scheme = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    assert_reloads(calibrated(tmp_path, kind, scheme, reload), tmp_path, reload, tokens)


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
    assert_reloads(model, tmp_path, "default", tokens)


@pytest.mark.parametrize("reload", ["default", "dequantize"])
@pytest.mark.parametrize("scheme", [name for name in ("MXFP4A16", "MXFP6A16") if name in preset_names()])
def test_transformers_loads_microscaling_experts_with_the_same_logits(scheme, reload, tokens, tmp_path):
    model = calibrated(tmp_path, "qwen3_moe", scheme, reload)
    assert_reloads(model, tmp_path, reload, tokens)


def assert_reloads(model, folder, reload, tokens):
    arguments = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if reload == "dequantize" else {}
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
    calibrated(tmp_path, "qwen3_moe", W4A16_32, "default")
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
