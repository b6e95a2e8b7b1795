"""Modules that cannot be quantized are refused before any data, with the way out."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from lightning_obs import CalibrationSession, export_checkpoint, load_checkpoint, sensitivity, smooth_inputs
from lightning_obs.errors import CalibrationError, CalibrationWarning
from tests.schemes.plans import FP8_WEIGHTS, names, plan


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            {"weights": {"num_bits": 4, "group_size": 24}},
            "weight group size 24 .*columns: fc1. Got 16 columns.*size of 16, or",
        ),
        (
            {"weights": FP8_WEIGHTS, "input_activations": {"strategy": "group", "group_size": 12, "dynamic": True}},
            "input group size 12 .*: fc1. Got 16 columns, expected a multiple of 12.*group size of 16, or list",
        ),
    ],
)
def test_columns_that_the_group_size_does_not_divide_are_refused(mlp, scheme, message):
    with pytest.raises(CalibrationError, match=message):
        plan(mlp, scheme)


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 16), "lm_head": nn.Linear(16, 8, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("target", ["lm_head", "re:.*head"])
def test_a_tied_weight_that_a_target_names_is_refused(target):
    with pytest.raises(CalibrationError, match=r"shares its weight with embed \(tied\).*: lm_head.*or untie first"):
        plan(tied(), "FP8", targets=["Linear", target] if target == "lm_head" else [target])


def test_a_tied_head_that_its_class_targets_is_left_out():
    model = nn.ModuleDict({"tied": tied(), "fc": nn.Linear(4, 4)})
    found = plan(model, "FP8")
    assert [t.name for t in found.targets] == ["fc"]
    assert found.config.ignore == ["tied.lm_head"]
    assert found.left_out == {"tied.lm_head": "tied to tied.embed"}


def test_two_linears_that_share_a_weight_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(CalibrationError, match=r"shares its weight with 1 \(tied\)"):
        plan(model, "FP8")


def test_a_tied_weight_that_both_sides_target_is_refused():
    with pytest.raises(CalibrationError, match=r"shares its weight with lm_head \(tied\).*: embed, lm_head"):
        plan(tied(), {"weights": FP8_WEIGHTS}, targets=["Linear", "Embedding"])


def test_a_tied_weight_that_is_ignored_is_fine():
    model = nn.ModuleDict({"tied": tied(), "fc": nn.Linear(4, 4)})
    assert names(model, "FP8", ignore=["re:.*lm_head"]) == ["fc"]


def already_compressed():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].quantization_status = QuantizationStatus.COMPRESSED
    return model


@pytest.mark.parametrize(
    ("model", "scheme", "options", "message"),
    [
        (
            nn.Sequential(nn.Embedding(8, 4)),
            "FP8",
            {"targets": "Embedding"},
            "an Embedding's input is token indices.*: 0",
        ),
        (
            nn.TransformerEncoderLayer(8, 2),
            "FP8",
            {"targets": ["re:.*out_proj"]},
            r"reads the weights of these modules without calling them.*: self_attn.out_proj.*`ignore`",
        ),
        (already_compressed(), "FP8", {}, r"already quantized, its weights are on another grid: 0"),
        (
            nn.Sequential(nn.LayerNorm(4)),
            "W8A8",
            {"targets": "LayerNorm"},
            r"has no weight matrix to quantize: 0 \(LayerNorm\)",
        ),
        (
            nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
            "W8A8",
            {"targets": "ReLU"},
            r"has no weight matrix to quantize: 0 \(ReLU\).*target its input_activations only",
        ),
        (
            nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2)),
            "W8A8",
            {"targets": "ConvTranspose2d"},
            r"a transposed convolution with groups is no matrix.*: 0 \(ConvTranspose2d\).*`ignore`",
        ),
        (
            nn.Sequential(nn.Linear(8, 4)),
            {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "strategy": "group", "group_size": 4}},
            {},
            r"a calibrated scale per group.*: 0.*`dynamic: true`",
        ),
    ],
    ids=["Embedding input", "out_proj", "compressed", "LayerNorm", "ReLU", "grouped ConvTranspose", "static groups"],
)
def test_a_module_that_cannot_be_quantized_is_refused(model, scheme, options, message):
    with pytest.raises(CalibrationError, match=message):
        plan(model, scheme, **options)


def test_an_integer_weight_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(CalibrationError, match="the weight is not floating point: 0"):
        plan(model, "FP8")


@pytest.mark.parametrize("target", ["Conv2d", "ReLU"])
def test_a_module_that_compressed_tensors_cannot_hold_is_planned(target):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    scheme = {"input_activations": {"num_bits": 8}} | ({"weights": FP8_WEIGHTS} if target == "Conv2d" else {})
    assert names(model, scheme, targets=target) == [str(int(target == "ReLU"))]


def test_a_norm_that_a_pattern_matches_is_named(tiny_llama):
    with pytest.raises(CalibrationError, match=r"no weight matrix.*input_layernorm \(LlamaRMSNorm\)"):
        plan(tiny_llama(), "W8A8", targets="re:.*layers[.]0.*")


def test_a_parametrized_weight_is_refused():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(CalibrationError, match=r"computed at each access.*: 0\..*remove_parametrizations"):
        plan(model, "W8A8")


def test_buffers_that_were_cast_are_named(tiny_llama):
    plan(tiny_llama(torch.bfloat16), "FP8", ignore="lm_head")
    with pytest.warns(CalibrationWarning, match=r"other logits: .*rotary_emb[.]inv_freq.*dtype=torch[.]bfloat16"):
        plan(tiny_llama().to(torch.bfloat16), "FP8", ignore="lm_head")


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16-true"), (torch.float16, "16-true")])
def test_the_warning_of_cast_buffers_names_the_dtype_of_the_model(tiny_llama, dtype, precision):
    message = rf"other logits: .*dtype={dtype} instead of casting it \(model[.]to, Trainer\(precision='{precision}'\)\)"
    with pytest.warns(CalibrationWarning, match=message):
        plan(tiny_llama().to(dtype), "FP8")


@pytest.mark.parametrize("layer", [nn.LazyLinear(4), nn.LazyConv2d(4, 3)])
def test_a_module_without_shapes_yet_is_refused_with_the_remedy(layer):
    model = nn.Sequential(nn.Linear(8, 8), layer)
    with pytest.raises(CalibrationError, match=r"before the first forward pass: 1 \(Lazy\w+\).*run the model once"):
        plan(model, {"FP8": ["Linear", "LazyConv2d"]}, engines="unchecked")


def test_the_remedy_for_a_module_without_shapes_works(tmp_path):
    model, data = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4)), [torch.randn(4, 8)]
    for refused in (
        lambda: smooth_inputs(model, data, "INT8_STATIC"),
        lambda: sensitivity(model, data, ["W8A8", None]),
    ):
        with pytest.raises(CalibrationError, match=r"before the first forward pass: 1 \(LazyLinear\)"):
            refused()
    with torch.no_grad():
        model(data[0])
    with CalibrationSession(model, "W8A8"):
        pass
    folder = export_checkpoint(model, tmp_path / "out")
    reloaded = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    with pytest.raises(CalibrationError, match=r"before the first forward pass: 1 \(LazyLinear\)"):
        load_checkpoint(reloaded, folder)
    reloaded(data[0])
    load_checkpoint(reloaded, folder)
    assert isinstance(reloaded[1].weight_scale, torch.Tensor)


def test_a_buffer_that_comes_back_in_half_precision_is_not_named(tmp_path, recwarn):
    """transformers makes the scale of Gemma's embedding in the dtype in which it loads the model."""
    config = Gemma3TextConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = Gemma3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.model.embed_tokens.embed_scale.dtype == torch.bfloat16

    plan(model, "FP8", ignore="lm_head")
    assert not [warning for warning in recwarn if issubclass(warning.category, CalibrationWarning)]
    with pytest.warns(CalibrationWarning, match=r"other logits: (?!.*embed_scale).*rotary_emb"):
        plan(Gemma3ForCausalLM(config).to(torch.bfloat16), "FP8", ignore="lm_head")


def test_adapters_have_to_be_merged_first(tiny_llama):
    model = tiny_llama()
    model.peft_config = {}  # what peft's models have
    adapters = type("AdaptedAttention", (nn.Module,), {"__module__": "peft.tuners.adaption_prompt.layer"})
    model.model.layers[0].adapters = adapters()
    with pytest.raises(CalibrationError, match=r"adapters beside its weights.*merge_and_unload"):
        plan(model, "FP8", ignore="lm_head")


def test_a_model_whose_adapters_are_merged_may_have_their_config_still(tiny_llama):
    """So peft 0.18 leaves it."""
    model = tiny_llama()
    model.peft_config = {}
    assert plan(model, "FP8", ignore="lm_head")


def test_a_weight_that_is_computed_at_each_access_is_not_read():
    """In training each access to a weight of spectral_norm moves its buffers, so a read would change the training."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with CalibrationSession(model, "W8A8", ignore=["0"]):
        pass
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
