"""Architectures whose tensors transformers changes between modules and files: what it loads, and what is refused."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, CompressedTensorsConfig

from lightning_obs import CalibrationSession, export_checkpoint, quantized
from lightning_obs.engines import transformers_engine
from lightning_obs.errors import CalibrationError
from lightning_obs.model.conversions import initializer_fault, names_in_files
from tests.support.versions import converted_weights, needs_architectures, needs_release

pytestmark = converted_weights
splits_weights_of_dinov2 = needs_release("transformers", "5.21", "it loads the weights of DINOv2 as they are")

W4 = {"weights": {"num_bits": 4, "group_size": 32}}
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
IDS = torch.arange(3, 35).view(2, 16)
GTE = pytest.param("gte MaskedLM", marks=needs_architectures("gte"))
MERGED_IN_FILES = ["nomic_bert MaskedLM", GTE, "hrm_text CausalLM"]
SWIGLU = {"use_swiglu_ffn": True, "mlp_ratio": 3}  # an inner width of 128


def make(kind: str, **own):
    """A random model of two layers, and an input of it."""
    torch.manual_seed(0)
    name, _, task = kind.partition(" ")
    if name == "dinov2":
        own = {"image_size": 32, "patch_size": 8, **own}
    sizes = {n: v for n, v in SIZES.items() if hasattr(AutoConfig.for_model(name), n)}
    if name == "t5":
        sizes, own = {"vocab_size": 128}, {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = AutoConfig.for_model(name, **{**sizes, **own})
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config).eval()
    if name == "dinov2":
        return model, {"pixel_values": torch.randn(1, 3, 32, 32)}
    return model, {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})


def difference_after_loading(model: nn.Module, inputs, folder, scheme, engines="transformers", **options) -> float:
    options = {"ignore": [], **options}
    with torch.no_grad(), CalibrationSession(model, scheme, engines=engines, **options) as session:
        if session.needs_data:
            model(**inputs)
    with torch.no_grad(), quantized(model):
        expected = model(**inputs).logits
    export_checkpoint(model, folder)
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if engines == "dequantize" else {}
    loaded = type(model).from_pretrained(folder, dtype="auto", **how).eval()
    with torch.no_grad():
        return (loaded(**inputs).logits - expected).abs().max().item()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", MERGED_IN_FILES)
@pytest.mark.parametrize("scheme", ["INT8_STATIC", W4], ids=["int8", "int4"])
def test_weights_that_are_one_in_files_are_loaded_with_their_scales(kind, scheme, tmp_path):
    model, inputs = make(kind)
    assert difference_after_loading(model, inputs, tmp_path / "m", scheme, ignore=["lm_head"] * ("Causal" in kind)) == 0


def test_q_k_and_v_that_are_one_in_files_may_stay_in_full_precision(tmp_path):
    model, inputs = make("nomic_bert MaskedLM")
    assert difference_after_loading(model, inputs, tmp_path / "m", "INT8_STATIC", ignore=["re:.*self_attn.*"]) == 0


@pytest.mark.parametrize("scheme", ["INT8_STATIC", W4], ids=["int8", "int4"])
@pytest.mark.parametrize("kind", MERGED_IN_FILES)
def test_weights_that_are_one_in_files_cannot_be_dequantized(kind, scheme):
    model, _ = make(kind)
    ignore = ["lm_head"] * ("Causal" in kind)
    with pytest.raises(CalibrationError, match=r"cannot dequantize weights that it merges.*_proj.*\"transformers\""):
        CalibrationSession(model, scheme, engines="dequantize", ignore=ignore)


@pytest.mark.filterwarnings("ignore::lightning_obs.CalibrationWarning")
def test_the_loader_does_dequantize_weights_that_are_one_in_files_to_other_numbers(tmp_path):
    model, inputs = make("nomic_bert MaskedLM")
    with torch.no_grad(), CalibrationSession(model, W4), quantized(model):
        expected = model(**inputs).logits
    export_checkpoint(model, tmp_path / "m")
    how = CompressedTensorsConfig(dequantize=True)
    with torch.no_grad():
        found = type(model).from_pretrained(tmp_path / "m", quantization_config=how).eval()(**inputs).logits
    assert (found - expected).abs().max() > 0.01


def test_a_module_whose_forward_has_more_arguments_is_refused(tmp_path):
    model, inputs = make("opt CausalLM", word_embed_proj_dim=64, ffn_dim=64, tie_word_embeddings=False)
    scheme = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    with pytest.raises(CalibrationError, match=r"embed_positions \(OPTLearnedPositionalEmbedding\)"):
        CalibrationSession(model, scheme, targets=["Linear", "Embedding"])
    CalibrationSession(model, scheme, targets=["Linear", "Embedding"], ignore=["re:.*embed_positions"])
    options = {"targets": ["Linear", "Embedding"], "engines": "unchecked"}
    with pytest.raises(TypeError, match="unexpected keyword argument"):  # where it does fail
        difference_after_loading(model, inputs, tmp_path / "m", scheme, **options)


@pytest.mark.filterwarnings("ignore:.*bytes of Kimi")
def test_packed_weights_whose_rows_the_loader_reorders_are_refused():
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = AutoConfig.for_model("kimi_k25", text_config=SIZES | latent, vision_config=vision)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    with pytest.raises(CalibrationError, match=r"reorders the rows.*vision_tower\.layers\.0\.attn\.q_proj"):
        CalibrationSession(model, W4, ignore=["lm_head"])
    CalibrationSession(model, "FP8_DYNAMIC", ignore=["lm_head"])


def test_names_of_modules_that_are_one_in_files_are_their_own():
    model, _ = make("nomic_bert MaskedLM")
    names = [f"nomic_bert.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj")]
    assert names_in_files(model, names)[names[0]] == names[0]
    assert names_in_files(model, names)[names[1]] != names[1]


@splits_weights_of_dinov2
@pytest.mark.parametrize("scheme", ["INT8_STATIC", "FP8"])
@pytest.mark.parametrize("engine", ["transformers", "dequantize"])
def test_an_architecture_whose_loader_splits_a_weight_that_it_has_not_is_refused(scheme, engine):
    model, _ = make("dinov2 ImageClassification")
    with pytest.raises(
        CalibrationError, match=r"splits these weights.*Dinov2ForImageClassification.*weights_in\.weight"
    ):
        CalibrationSession(model, scheme, engines=engine)
    CalibrationSession(model, scheme, engines="unchecked")


@splits_weights_of_dinov2
def test_the_loader_does_fail_on_it(tmp_path):
    model, inputs = make("dinov2 ImageClassification")
    with pytest.raises(ValueError, match="one to many"):
        difference_after_loading(model, inputs, tmp_path / "m", "FP8", "unchecked")


def test_the_same_architecture_with_these_weights_is_loaded(tmp_path):
    model, inputs = make("dinov2 ImageClassification", **SWIGLU)
    assert difference_after_loading(model, inputs, tmp_path / "m", "INT8_STATIC") == 0


@pytest.mark.parametrize(
    ("kind", "where"),
    [("t5 Seq2SeqLM", r"layer\.0\.SelfAttention \(T5Att"), ("modernbert MaskedLM", r"layers\.0\.attn \(ModernBertAtt")],
)
def test_packed_weights_that_a_class_initializes_are_refused_and_load_dequantized(kind, where, tmp_path):
    model, inputs = make(kind)
    expected = rf"packed weights of {type(model).__name__}.*{where}.*no attribute 'weight'.*engines=\"dequantize\""
    with pytest.raises(CalibrationError, match=expected):
        CalibrationSession(model, W4)
    CalibrationSession(model, "FP8_DYNAMIC")
    if Version(version("transformers")) >= Version("5.23"):
        assert difference_after_loading(model, inputs, tmp_path / "m", W4, "dequantize") == 0
    else:
        with pytest.raises(CalibrationError, match=rf"{expected}.*with transformers>=5\.23"):
            CalibrationSession(model, W4, engines="dequantize")


@pytest.mark.parametrize("installed", ["5.22.2", "5.23.0"])
def test_before_5_23_packed_weights_that_a_class_initializes_are_not_dequantized_either(installed, monkeypatch):
    """The older release makes the packed modules first, and dequantizes them when all is loaded."""
    model, _ = make("t5 Seq2SeqLM")
    monkeypatch.setattr(transformers_engine, "version", {"transformers": installed}.__getitem__)
    if installed == "5.23.0":
        CalibrationSession(model, W4, engines="dequantize")
        return
    with pytest.raises(CalibrationError, match=r"transformers 5\.22\.2 cannot load packed.*with transformers>=5\.23"):
        CalibrationSession(model, W4, engines="dequantize")


def test_the_loader_does_fail_on_packed_weights_that_a_class_initializes(tmp_path):
    model, inputs = make("t5 Seq2SeqLM")
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        difference_after_loading(model, inputs, tmp_path / "m", W4, "unchecked")


def test_initializers_that_ask_whether_a_weight_is_there_are_no_fault(tiny_llama):
    model, _ = make("bert MaskedLM")
    names = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert initializer_fault(model, names) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert initializer_fault(tiny_llama(), {"model.layers.0.mlp.up_proj"}) is None


def test_a_weight_that_is_merged_stays_in_full_precision_beside_fp8_alone(tmp_path):
    own = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    model, inputs = make("olmo_hybrid CausalLM", **own)
    with pytest.raises(CalibrationError, match=r"weights that it merges in full precision.*conv1d.*use FP8"):
        CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"])
    assert difference_after_loading(model, inputs, tmp_path / "m", "FP8_DYNAMIC", ignore=["lm_head"]) == 0
