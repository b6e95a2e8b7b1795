"""Attention states and the kv cache: what is observed, what is left behind."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from lightning_obs import CalibrationError, CalibrationSession, quantized
from lightning_obs.model.module_qparams import calibrated_modules, read_qparams
from lightning_obs.report.layer_errors import measure_layer_errors
from tests.support.attention_models import (
    CASES,
    FLOAT8,
    HEADS,
    KV_HEADS,
    NAMES,
    attention,
    cached_states,
    calibrate,
    interrupt,
    logits,
    traces,
)

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


@pytest.mark.slow_but_first
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
    with pytest.raises(CalibrationError, match=r"does not fit: model.layers.0.self_attn.k_scale has shape"):
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


def test_other_heads_than_the_config_says_are_refused(tiny_llama, batches):
    model = tiny_llama()
    model.config.num_key_value_heads = HEADS
    with pytest.raises(CalibrationError, match=r"number of heads than.*k_scale \(2, 1, 1\) instead of \(4, 1, 1\)"):
        calibrate(model, batches, kv_cache="FP8_HEAD")
    assert not list(calibrated_modules(model))


def test_attention_that_no_data_reached_is_an_error_even_where_layers_may_be_left_out(tiny_llama, batches):
    model = tiny_llama()
    model.model.layers[1].forward = lambda hidden, *args, **kwargs: hidden
    with pytest.raises(CalibrationError, match=r"no data reached 2 of 4 .*layers.1.self_attn \(k\)"):
        calibrate(model, batches, kv_cache="FP8", on_missing="warn")
