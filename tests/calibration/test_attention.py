"""Attention states and the kv cache: what is observed, what is left behind, what transformers gives back."""

import copy
import json

import pytest
import torch
from compressed_tensors.modeling import QuantizedAttentionImpl
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.errors import CalibrationWarning
from lightning_obs.model.qparams import calibrated_modules, read_qparams
from lightning_obs.report.layer_errors import measure_layer_errors
from lightning_obs.schemes.attention import StatesConfig
from lightning_obs.schemes.config import label, resolve_config
from lightning_obs.schemes.options import CalibrationOptions
from lightning_obs.schemes.plan import build_plan

FLOAT8 = {"num_bits": 8, "type": "float"}
LAYERS, HEADS, KV_HEADS = 2, 4, 2
NAMES = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]


def attention(strategy="tensor", target="LlamaAttention", **kwargs):
    """A group that quantizes q, k and v."""
    args = {**FLOAT8, "strategy": strategy, "observer": "static_minmax", **kwargs}
    return {"attention": {"targets": [target], "input_activations": args}}


CASES = {
    "FP8 and kv": {"scheme": "FP8", "kv_cache": "FP8", "ignore": ["lm_head"]},
    "FP8 and kv per head": {"scheme": "FP8", "kv_cache": "FP8_HEAD", "ignore": ["lm_head"]},
    "kv": {"scheme": None, "kv_cache": "FP8"},
    "kv per head": {"scheme": None, "kv_cache": "FP8_HEAD"},
    "q, k, v": {"scheme": attention()},
    "q, k, v per head": {"scheme": attention("attn_head")},
    "q, k, v and Linear": {"scheme": {**attention("attn_head"), "FP8": ["re:.*_proj$"]}},
}


def calibrate(model, batches, scheme=None, **kwargs):
    with torch.no_grad(), CalibrationSession(model, scheme, **kwargs) as session:
        for batch in batches:
            model(**batch)
    return session


def logits(model, batch, **kwargs):
    with torch.no_grad():
        return model(**batch, **kwargs).logits


def interrupt(model, batch):
    logits(model, batch)
    raise KeyboardInterrupt


def cached_states(model, batches):
    """``{"k": [per layer, (all batches, heads, tokens, head_dim)], "v": ...}``, from transformers' own cache."""
    with torch.no_grad():
        caches = [model(**batch, use_cache=True).past_key_values for batch in batches]
    return {
        "k": [torch.cat([cache.layers[i].keys for cache in caches]) for i in range(LAYERS)],
        "v": [torch.cat([cache.layers[i].values for cache in caches]) for i in range(LAYERS)],
    }


def traces(model):
    """Everything that hooking can change."""
    return [
        list(model.state_dict()),
        [name for name, _ in model.named_modules()],
        [(len(m._forward_pre_hooks), len(m._forward_hooks), "forward" in vars(m)) for m in model.modules()],
        ["quantization_enabled" in vars(m) or "register_forward_pre_hook" in vars(m) for m in model.modules()],
        {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")},
        QuantizedAttentionImpl._original_impl,
    ]


# ---------------------------------------------------------------------- what is observed


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_scales_are_those_of_what_the_cache_holds(use_cache, tiny_llama, batches):
    model = tiny_llama()
    states = cached_states(model, batches)
    calibrate(model, [{**batch, "use_cache": use_cache} for batch in batches], kv_cache="FP8")
    for i, name in enumerate(NAMES):
        for base, found in states.items():
            scale = getattr(model.get_submodule(name), f"{base}_scale")
            torch.testing.assert_close(scale, found[i].abs().max().reshape(1) / 448, rtol=1e-6, atol=0)


def test_a_head_has_its_own_scale_in_grouped_query_attention(tiny_llama, batches):
    model = tiny_llama()
    states = cached_states(model, batches)
    calibrate(model, batches, attention("attn_head"))
    for i, name in enumerate(NAMES):
        module = model.get_submodule(name)
        assert module.q_scale.shape == (HEADS, 1, 1)
        for base, found in states.items():
            expected = found[i].abs().amax((0, 2, 3)).reshape(KV_HEADS, 1, 1) / 448
            torch.testing.assert_close(getattr(module, f"{base}_scale"), expected, rtol=1e-6, atol=0)


def test_q_is_observed_where_attention_reads_it(tiny_llama, batches, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, seen = tiny_llama(), {}
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watch(module, query, *args, **kwargs):
        seen[module.layer_idx] = torch.maximum(seen.get(module.layer_idx, torch.zeros(())), query.abs().max())
        return sdpa(module, query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watch)
    for batch in batches:
        logits(model, batch)
    monkeypatch.undo()
    calibrate(model, batches, attention())
    for i, name in enumerate(NAMES):
        torch.testing.assert_close(model.get_submodule(name).q_scale, seen[i].reshape(1) / 448, rtol=1e-6, atol=0)


def test_padding_reaches_no_state(tiny_llama, batches):
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 11:], mask[1, 5:] = 0, 0
    padded = [{"input_ids": b["input_ids"].masked_fill(mask == 0, 0), "attention_mask": mask} for b in batches]
    model = tiny_llama()
    states = cached_states(model, padded)
    calibrate(model, padded, kv_cache="FP8_HEAD", token_mask="attention_mask")
    keep = mask.bool().repeat(len(batches), 1)
    for i, name in enumerate(NAMES):
        expected = states["k"][i].transpose(1, 2)[keep].abs().amax((0, 2)).reshape(KV_HEADS, 1, 1) / 448
        torch.testing.assert_close(model.get_submodule(name).k_scale, expected, rtol=1e-6, atol=0)


def test_a_mask_of_another_length_is_refused(tiny_llama, batches):
    model = tiny_llama()
    session = CalibrationSession(model, None, kv_cache="FP8")
    session.attach()
    session.mask_tokens(torch.ones(2, 9))
    with pytest.raises(CalibrationError, match=r"cannot be told from the shape: model.*self_attn.*heads, tokens"):
        model(**batches[0])
    session.detach()


def test_each_state_can_have_an_observer_of_its_own(tiny_llama, batches):
    model = tiny_llama()
    states = cached_states(model, batches)
    own = {"q": "mse", "k": {"name": "percentile", "percentile": 75}, "v": "histogram"}
    session = calibrate(model, batches, attention("attn_head"), observers=own)
    kinds = [type(session.observers[NAMES[0], base]).__name__ for base in "qkv"]
    assert kinds == ["MovingAverageMSEObserver", "PercentileObserver", "HistogramObserver"]
    k_scale = model.get_submodule(NAMES[0]).k_scale
    assert (k_scale < states["k"][0].abs().amax((0, 2, 3)).reshape(KV_HEADS, 1, 1) / 448).all()


def test_an_observer_of_inputs_leaves_the_states_alone(tiny_llama, batches):
    scheme = {**attention(), "FP8": ["re:.*_proj$"]}
    session = calibrate(tiny_llama(), batches, scheme, observers={"input": "histogram"})
    assert type(session.observers[NAMES[0], "k"]).__name__ == "StaticMinMaxObserver"
    assert type(session.observers[f"{NAMES[0]}.k_proj", "input"]).__name__ == "HistogramObserver"


# ---------------------------------------------------------------------- nothing is changed, nothing is left


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calibrating_twice_changes_no_output_and_leaves_nothing(case, tiny_llama, batches):
    model = tiny_llama()
    before, plain = traces(model), [logits(model, batch) for batch in batches]
    for _ in range(2):  # the second time there are scales that could quantize
        with CalibrationSession(model, **case):
            assert all(torch.equal(logits(model, b), p) for b, p in zip(batches, plain, strict=True))
        assert traces(model) == before
    with quantized(model):
        assert not torch.equal(logits(model, batches[0]), plain[0])
    assert traces(model) == before
    assert torch.equal(logits(model, batches[0]), plain[0])


@pytest.mark.parametrize("case", ["kv", "q, k, v"])
def test_nothing_is_left_after_an_exception(case, tiny_llama, batches):
    model = tiny_llama()
    before = traces(model)
    with pytest.raises(KeyboardInterrupt), CalibrationSession(model, **CASES[case]):
        interrupt(model, batches[0])
    assert traces(model) == before
    assert not list(calibrated_modules(model))
    calibrate(model, batches, **CASES[case])
    with pytest.raises(KeyboardInterrupt), quantized(model):
        interrupt(model, batches[0])
    assert traces(model) == before


def test_attention_is_released_in_any_order(tiny_llama, batches):
    model = tiny_llama()
    before, plain = traces(model), logits(model, batches[0])
    calibrate(model, batches, attention())
    session = CalibrationSession(model, attention())
    with quantized(model):
        expected = logits(model, batches[0])
    session.attach()
    with quantized(model), quantized(model):
        assert torch.equal(logits(model, batches[0]), expected)
        session.detach()
        assert torch.equal(logits(model, batches[0]), expected)
    assert traces(model) == before
    with quantized(model):
        session.attach()
        assert torch.equal(logits(model, batches[0]), expected)
    assert torch.equal(logits(model, batches[0]), plain)
    session.detach()
    assert traces(model) == before


def test_a_switched_off_module_stays_switched_off(tiny_llama, batches):
    model = tiny_llama()
    plain = logits(model, batches[0])
    calibrate(model, batches, kv_cache="FP8")
    for name in NAMES:
        model.get_submodule(name).quantization_enabled = False
    with quantized(model):
        assert torch.equal(logits(model, batches[0]), plain)
    assert all(model.get_submodule(name).quantization_enabled is False for name in NAMES)


def test_q_of_two_models_with_one_attention_function_can_be_observed_together(tiny_llama, batches):
    one, two = tiny_llama(), tiny_llama()
    before = traces(one)
    with CalibrationSession(one, attention()), CalibrationSession(two, attention()):
        for batch in batches:
            assert torch.equal(logits(one, batch), logits(two, batch))
    assert traces(one) == before


def test_q_of_two_models_with_different_attention_functions_is_refused(tiny_llama):
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("other_sdpa", AttentionInterface._global_mapping["sdpa"])
    AttentionMaskInterface.register("other_sdpa", AttentionMaskInterface._global_mapping["sdpa"])
    one, two = tiny_llama(), tiny_llama()
    two.set_attn_implementation("other_sdpa")
    before = traces(two)
    first, second = CalibrationSession(one, attention()), CalibrationSession(two, attention())
    first.attach()
    with pytest.raises(
        CalibrationError, match=r"two models with different attention functions.*Got sdpa and other_sdpa"
    ):
        second.attach()
    first.detach()
    assert traces(two) == before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_cache_alone_works_with_any_attention_function(implementation, tiny_llama_folder, batches):
    model = LlamaForCausalLM.from_pretrained(tiny_llama_folder, attn_implementation=implementation).eval()
    plain = logits(model, batches[0])
    calibrate(model, batches, kv_cache="FP8_HEAD")
    assert torch.equal(logits(model, batches[0]), plain)
    with quantized(model):
        assert not torch.equal(logits(model, batches[0]), plain)


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_calibrated_model_generates_what_it_did(cache, tiny_llama, batches):
    def generate():
        options = {"cache_implementation": cache, "disable_compile": True} if cache else {}
        return model.generate(batches[0]["input_ids"], max_new_tokens=4, do_sample=False, **options)

    model = tiny_llama()
    expected = generate()
    calibrate(model, batches, attention("attn_head"))
    assert torch.equal(generate(), expected)
    with quantized(model):
        assert generate().shape == expected.shape


def test_observing_and_generating_with_a_cache_see_every_token(tiny_llama, batches):
    prompt = batches[0]["input_ids"]
    model = tiny_llama()
    with CalibrationSession(model, None, kv_cache="FP8") as session:
        tokens = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    states = cached_states(model, [{"input_ids": tokens[:, :-1]}])  # the last one is not fed back
    low, high = session.observers[NAMES[0], "k"].get_min_max()
    torch.testing.assert_close(torch.maximum(-low, high), states["k"][0].abs().max().reshape(1))


def test_layer_errors_are_those_of_layers(tiny_llama, batches):
    model = tiny_llama()
    calibrate(model, batches, "FP8", kv_cache="FP8", ignore=["lm_head"])
    assert {error.name for error in measure_layer_errors(model, batches)}.isdisjoint(NAMES)
    only = tiny_llama()
    calibrate(only, batches, kv_cache="FP8")
    assert measure_layer_errors(only, batches) == []


# ---------------------------------------------------------------------- state and copies


def test_a_resumed_session_has_the_same_states(tiny_llama, batches):
    first = calibrate(tiny_llama(), batches, kv_cache="FP8_HEAD", observers={"k": "histogram"})
    model = tiny_llama()
    second = CalibrationSession(model, None, kv_cache="FP8_HEAD", observers={"k": "histogram"})
    second.load_state_dict(first.state_dict())
    with quantized(model), quantized(first.model):
        assert torch.equal(logits(model, batches[0]), logits(first.model, batches[0]))


def test_a_state_with_another_observer_of_k_is_refused(tiny_llama, batches):
    first = calibrate(tiny_llama(), batches, kv_cache="FP8", observers={"k": "histogram"})
    second = CalibrationSession(tiny_llama(), None, kv_cache="FP8", observers={"k": "percentile"})
    with pytest.raises(CalibrationError, match=r"another scheme, other observers"):
        second.load_state_dict(first.state_dict())


def test_a_state_of_a_model_with_other_heads_is_refused(tiny_llama, batches):
    first = calibrate(tiny_llama(), batches, kv_cache="FP8_HEAD")
    model = tiny_llama()
    model.config.num_key_value_heads = HEADS
    session = CalibrationSession(model, None, kv_cache="FP8_HEAD")
    with pytest.raises(CalibrationError, match=r"other shapes: model.layers.0.self_attn"):
        session.load_state_dict(first.state_dict())


def test_a_copy_of_a_calibrated_model_is_quantized_too(tiny_llama, batches):
    model = tiny_llama()
    calibrate(model, batches, attention())
    copied = copy.deepcopy(model)
    with quantized(model):
        expected = logits(model, batches[0])
    with quantized(copied):
        assert torch.equal(logits(copied, batches[0]), expected)


def test_calibrating_without_the_cache_forgets_it(tiny_llama, batches):
    model = tiny_llama()
    calibrate(model, batches, attention("attn_head"))
    calibrate(model, batches, kv_cache={**FLOAT8, "observer": "static_minmax"})
    assert set(read_qparams(model.get_submodule(NAMES[0]))) == {"k_scale", "v_scale"}


def test_a_model_inside_a_module_is_quantized_through_it(tiny_llama, batches):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = tiny_llama(), tiny_llama()

    holder = Holder()
    calibrate(holder.one, batches, attention())
    calibrate(holder.two, batches, kv_cache="FP8")
    plain = logits(tiny_llama(), batches[0])
    with quantized(holder):
        one, two = logits(holder.one, batches[0]), logits(holder.two, batches[0])
    assert not torch.equal(one, plain)
    assert not torch.equal(two, plain)
    assert not torch.equal(one, two)


def test_a_layer_alone_cannot_be_quantized(tiny_llama, batches):
    model = tiny_llama()
    calibrate(model, batches, kv_cache="FP8")
    with pytest.raises(CalibrationError, match=r"through the transformers model.*Got LlamaDecoderLayer"):
        quantized(model.model.layers[0]).__enter__()


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
    with pytest.warns(CalibrationWarning, match=r"symmetric 8-bit float only, not int of 8 bits, asymmetric"):
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
    with pytest.raises(CalibrationError, match=r"quantized kv cache, which transformers loads.*from_pretrained"):
        load_checkpoint(tiny_llama(), tmp_path / "out")


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
    ],
)
def test_what_cannot_be_meant_is_refused_without_a_model(arguments, message):
    with pytest.raises(CalibrationError, match=message):
        resolve_config(**arguments)


# ---------------------------------------------------------------------- what a model cannot have


def plan(model, scheme=None, reload="default", **kwargs):
    return build_plan(model, CalibrationOptions(scheme, reload=reload, **kwargs))


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
        ({"kv_cache": "FP8", "reload": "dequantize"}, "drops the quantization of attention states.*reload=.default"),
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


def test_a_config_that_does_not_tell_the_heads_is_refused():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8)
    config.word_embed_proj_dim = 8
    with pytest.raises(CalibrationError, match=r"number of heads.*Got OPTConfig without num_key_value_heads"):
        plan(OPTForCausalLM(config), kv_cache="FP8")


def test_other_heads_than_the_config_says_are_refused(tiny_llama, batches):
    model = tiny_llama()
    model.config.num_key_value_heads = HEADS
    with pytest.raises(CalibrationError, match=r"other heads than the config says.*k_scale \(2\).*k 4"):
        calibrate(model, batches, kv_cache="FP8_HEAD")
    assert not list(calibrated_modules(model))


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


def test_attention_that_no_data_reached_is_an_error_even_where_layers_may_be_left_out(tiny_llama, batches):
    model = tiny_llama()
    model.model.layers[1].forward = lambda hidden, *args, **kwargs: hidden
    with pytest.raises(CalibrationError, match=r"no data reached 2 of 4 .*layers.1.self_attn \(k\)"):
        calibrate(model, batches, kv_cache="FP8", on_missing="warn")


def test_a_model_with_a_quantized_cache_is_not_calibrated_again(tiny_llama, batches, tmp_path):
    model = tiny_llama()
    calibrate(model, batches, kv_cache="FP8")
    export_checkpoint(model, tmp_path / "out")
    with pytest.raises(CalibrationError, match=r"already quantized"):
        plan(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), kv_cache="FP8")


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
