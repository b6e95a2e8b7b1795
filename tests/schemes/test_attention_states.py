"""Attention states and the kv cache: what can be written, and what a model cannot have."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaForCausalLM

from lightning_obs import CalibrationError, export_checkpoint
from lightning_obs.errors import CalibrationWarning
from lightning_obs.schemes.attention_states import StatesConfig
from lightning_obs.schemes.config import label, resolve_config
from tests.schemes.plans import plan
from tests.support.attention_models import FLOAT8, LAYERS, NAMES, attention, calibrate

# ---------------------------------------------------------------------- what can be written


@pytest.mark.parametrize("kv_cache", ["FP8", "fp8", FLOAT8, QuantizationArgs(**FLOAT8)], ids=str)
def test_a_cache_is_a_name_a_dict_or_an_object(kv_cache):
    args = resolve_config("FP8", kv_cache=kv_cache).kv_cache_scheme
    assert (args.num_bits, args.type, args.strategy, args.dynamic) == (8, "float", "tensor", False)


def test_a_full_config_says_it_itself(tiny_llama, batches):
    written = {"config_groups": {}, "kv_cache_scheme": {**FLOAT8, "observer": "static_minmax"}}
    by_dict = calibrate(tiny_llama(), batches, written).result.qparams
    by_config = calibrate(tiny_llama(), batches, QuantizationConfig(**written)).result.qparams
    by_name = calibrate(tiny_llama(), batches, kv_cache="FP8").result.qparams
    assert by_dict.keys() == by_config.keys() == by_name.keys()
    assert all(torch.equal(by_dict[k], by_name[k]) and torch.equal(by_config[k], by_name[k]) for k in by_name)


def test_the_callers_objects_are_not_changed():
    args, config = QuantizationArgs(**FLOAT8), QuantizationConfig(config_groups={}, kv_cache_scheme=FLOAT8)
    before = args.model_dump_json(), config.model_dump_json()
    resolve_config("FP8", kv_cache=args, observers={"k": "mse"})
    resolve_config(config, observers={"v": "mse"})
    assert before == (args.model_dump_json(), config.model_dump_json())


def test_a_config_is_of_a_class_of_its_own_only_where_a_state_has_an_observer():
    assert type(resolve_config("FP8", kv_cache="FP8")) is QuantizationConfig
    assert type(resolve_config("FP8", kv_cache="FP8", observers={"v": "mse"})) is StatesConfig


@pytest.mark.parametrize(
    ("scheme", "kv_cache", "expected"),
    [
        ("FP8", "FP8", "FP8 + float8 tensor kv cache"),
        (None, "FP8_HEAD", "float8 attn_head kv cache"),
        ({}, "FP8", "float8 tensor kv cache"),
        (attention(), None, "float8 tensor attention states"),
    ],
)
def test_the_label_names_the_cache(scheme, kv_cache, expected):
    assert label(scheme, resolve_config(scheme, kv_cache=kv_cache)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": None}, "the scheme is empty"),
        ({"scheme": "FP8", "kv_cache": "INT4"}, "kv_cache. Got 'INT4', expected FP8, FP8_HEAD, a dict"),
        ({"scheme": "FP8", "kv_cache": {"bits": 8}}, "(?s)refuses kv_cache.*bits"),
        ({"scheme": {"config_groups": {}, "kv_cache_scheme": FLOAT8}, "kv_cache": "FP8"}, "given twice"),
        ({"scheme": "FP8", "observers": {"k": "mse"}}, "'mse' is given for k, .* Remedy: .*kv_cache for k and v"),
        ({"scheme": None, "kv_cache": "FP8", "observers": {"q": "mse"}}, "'mse' is given for q, .*attention group"),
        ({"scheme": None, "kv_cache": "FP8", "observers": {"k": {"name": "mse", "a": 1}}}, "no hyperparameter 'a'"),
        ({"scheme": None, "kv_cache": {**FLOAT8, "observer": "absent"}}, "unknown observer 'absent'"),
        (
            {"scheme": None, "kv_cache": "FP8", "targets": "Linear"},
            r"targets without a scheme.*Got targets=\['Linear'\]",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_without_a_model(arguments, message):
    with pytest.raises(CalibrationError, match=message):
        resolve_config(**arguments)


# ---------------------------------------------------------------------- what a model cannot have


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache": {**FLOAT8, "dynamic": True}}, "calibrated scales only: model.*Got dynamic=True"),
        ({"kv_cache": {**FLOAT8, "group_size": 32}}, "strategy group cannot be applied to attention states"),
        ({"scheme": {"FP8": ["LlamaAttention"]}}, "states to quantize, no weights and no outputs: model.layers.0"),
        ({"scheme": attention(), "kv_cache": "FP8_HEAD"}, "given two schemes"),
        (
            {"scheme": attention(target="re:.*0.self_attn$")},
            "every attention module of a model or in none: model.layers.1",
        ),
        ({"scheme": attention(), "ignore": ["re:.*1.self_attn$"]}, "or in none: model.layers.1.self_attn. Remedy"),
        ({"kv_cache": "FP8", "engines": "dequantize"}, "drops the quantization of attention.*engines=.transformers"),
    ],
)
def test_what_attention_cannot_have_is_refused(arguments, message, tiny_llama):
    with pytest.raises(CalibrationError, match=message):
        plan(tiny_llama(), **arguments)


def test_q_in_eager_attention_is_refused(tiny_llama_folder):
    model = LlamaForCausalLM.from_pretrained(tiny_llama_folder, attn_implementation="eager")
    with pytest.raises(CalibrationError, match=r'Got attn_implementation eager. Remedy: .*attn_implementation="sdpa"'):
        plan(model, attention())


def test_a_module_that_is_no_transformers_model_is_refused(mlp, tiny_llama):
    for model in (mlp, nn.ModuleDict({"model": tiny_llama()})):
        with pytest.raises(CalibrationError, match=r"in transformers models only, through model.config. Got M"):
            plan(model, kv_cache="FP8")


def test_attention_without_a_cache_that_can_be_found_is_refused():
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertModel(config)
    with pytest.raises(CalibrationError, match=r"no attention module whose cache .*Got.*attention.self.*k_proj"):
        plan(model, kv_cache="FP8")
    with pytest.raises(CalibrationError, match=r"finds no kv cache there: encoder.layer.0.attention.self"):
        plan(model, attention(target="BertSelfAttention"))


def test_cross_attention_is_refused():
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")
    }
    model = BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=8, **sizes))
    with pytest.raises(CalibrationError, match=r"BartForConditionalGeneration has cross-attention"):
        plan(model, kv_cache="FP8")


def test_heads_of_different_sizes_in_each_layer_are_refused():
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size": 64}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, **layers, pad_token_id=0))
    plan(model, "INT8_STATIC")
    with pytest.raises(CalibrationError, match="Got Gemma4TextConfig whose layers have heads of different sizes"):
        plan(model, kv_cache="FP8")


def test_a_config_that_does_not_tell_the_heads_is_refused():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8)
    config.word_embed_proj_dim = 8
    with pytest.raises(CalibrationError, match=r"number of heads.*Got OPTConfig without num_key_value_heads"):
        plan(OPTForCausalLM(config), kv_cache="FP8")


def test_a_pattern_of_what_is_inside_attention_means_the_linear_modules(tiny_llama):
    found = plan(tiny_llama(), {"FP8": ["re:.*self_attn.*"]})
    assert [t.name for t in found.targets] == [f"{n}.{k}_proj" for n in NAMES for k in "qkvo"]


def test_a_cache_ignores_ignore_and_says_so(tiny_llama):
    with pytest.warns(CalibrationWarning, match=r"quantized whole, ignore does not keep"):
        found = plan(tiny_llama(), kv_cache="FP8", ignore=["re:.*0.self_attn$"])
    assert [t.name for t in found.targets] == NAMES


def test_ignoring_the_modules_of_a_layer_is_no_matter_of_the_cache(tiny_llama):
    found = plan(tiny_llama(), "FP8", kv_cache="FP8", ignore=["lm_head", "re:.*layers.0.*"])
    assert {t.name for t in found.targets if t.states} == set(NAMES)


def test_a_pattern_for_attention_works_and_vllm_is_named(tiny_llama):
    with pytest.warns(CalibrationWarning, match=r"one target that ends in Attention \(LlamaAttention\)"):
        found = plan(tiny_llama(), attention(target="re:.*self_attn$"))
    assert [list(t.states) for t in found.targets] == [["q", "k", "v"]] * LAYERS


def test_one_scheme_may_be_said_as_group_and_as_cache(tiny_llama):
    found = plan(tiny_llama(), attention(), kv_cache="FP8")
    assert [list(t.args) for t in found.targets] == [["q", "k", "v"]] * LAYERS


def test_each_attention_group_has_its_own_observer(tiny_llama):
    groups = {}
    for name, observer in zip(NAMES, ["static_minmax", "minmax"], strict=True):
        groups[name] = attention(target=name, observer=observer)["attention"]
    with pytest.warns(CalibrationWarning, match="vLLM wants one target"):
        found = plan(tiny_llama(), groups)
    assert [t.states["k"].observer for t in found.targets] == ["static_minmax", "minmax"]


def test_a_model_with_a_quantized_cache_is_not_calibrated_again(tiny_llama, batches, tmp_path):
    model = tiny_llama()
    calibrate(model, batches, kv_cache="FP8")
    export_checkpoint(model, tmp_path / "out")
    with pytest.raises(CalibrationError, match=r"already quantized"):
        plan(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), kv_cache="FP8")
