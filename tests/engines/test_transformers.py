"""What cannot be loaded back is refused before calibration, unless another engine will load it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_obs import CalibrationSession
from lightning_obs.errors import CalibrationError
from tests.schemes.plans import FP8_WEIGHTS, names, plan

EMBEDDING_INT4 = {"weights": {"num_bits": 4, "strategy": "channel"}}
EMBEDDING_FP8 = {"weights": FP8_WEIGHTS}


@pytest.mark.parametrize(
    ("scheme", "dtype", "options", "message"),
    [
        (
            "NVFP4",
            torch.float32,
            {},
            r"loads NVFP4 weights as bfloat16, which a torch.float32 model cannot run.*dtype=torch.bfloat16",
        ),
        (
            "NVFP4A16",
            torch.float16,
            {},
            r"loads NVFP4 weights as bfloat16, which a torch.float16 model cannot run",
        ),
        ("MXFP4", torch.float32, {}, r"loads MX weights as bfloat16, which a torch.float32 model cannot run"),
        ("MXFP8", torch.float32, {}, r"loads MX weights as bfloat16, which a torch.float32 model cannot run"),
        ("W4A16_ASYM", torch.bfloat16, {}, r"packed asymmetric weights.*symmetric scheme \(W4A16\).*dequantize=True"),
        (
            EMBEDDING_INT4,
            torch.bfloat16,
            {"targets": "Embedding"},
            r"packed integer Embedding.*use FP8 for the embedding",
        ),
    ],
)
@pytest.mark.parametrize("engine", ["transformers", "dequantize", "unchecked"])
def test_what_transformers_cannot_load_back_is_refused_with_the_way_out(
    tiny_llama, scheme, dtype, options, message, engine
):
    options = options or {"ignore": "lm_head"}
    if engine != "transformers":
        plan(tiny_llama(dtype), scheme, engine, **options)
        return
    with pytest.raises(CalibrationError, match=rf'{message}.*engines="unchecked"'):
        plan(tiny_llama(dtype), scheme, **options)


@pytest.mark.parametrize(
    ("scheme", "dtype", "options"),
    [
        ("NVFP4", torch.bfloat16, {}),
        ("MXFP4", torch.bfloat16, {}),
        ("W4A16", torch.float32, {}),
        ("FP8", torch.float16, {}),
        ("INT8_STATIC", torch.float32, {}),
        (EMBEDDING_FP8, torch.bfloat16, {"targets": "Embedding"}),
    ],
)
def test_what_transformers_can_load_back_is_planned(tiny_llama, scheme, dtype, options):
    assert plan(tiny_llama(dtype), scheme, **(options or {"ignore": "lm_head"})).targets


def test_a_dequantizing_load_has_a_verdict_of_its_own(tiny_llama):
    model = tiny_llama(torch.bfloat16)
    engines = CalibrationSession(model, "W4A16_ASYM", ignore=["lm_head"], engines=["vllm", "dequantize"]).engines
    assert not engines["transformers"].loads
    assert engines["transformers with dequantize=True"].loads


@pytest.mark.parametrize(("engine", "refused"), [("transformers", False), ("dequantize", True), ("unchecked", False)])
def test_several_schemes_cannot_be_dequantized(tiny_llama, engine, refused):
    scheme = {"FP8": ["re:.*mlp.*_proj"], "W4A16": ["re:.*self_attn.*_proj"]}
    if not refused:
        plan(tiny_llama(), scheme, engine)
        return
    with pytest.raises(
        CalibrationError, match=r"several schemes. Remedy: engines=\"transformers\", or .*engines=\"unchecked\""
    ):
        plan(tiny_llama(), scheme, engine)


@pytest.mark.parametrize("engine", ["transformers", "dequantize"])
@pytest.mark.parametrize("scheme", ["W8A8", {"inputs": {"targets": ["Conv1D"], "input_activations": {"num_bits": 8}}}])
def test_what_compressed_tensors_cannot_store_is_refused_in_a_transformers_model(scheme, engine):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(CalibrationError, match=r"modules only.*c_attn \(Conv1D\).*load_checkpoint"):
        plan(model, scheme, engine, **({"targets": "Conv1D"} if scheme == "W8A8" else {}))


@pytest.mark.parametrize(("rows", "group_size"), [(8, 64), (9, 64), (8, 128)])
def test_zero_points_in_one_packed_row_cannot_be_dequantized(tiny_llama, rows, group_size):
    model = tiny_llama()
    model.score = nn.Linear(128, rows)
    weights = {"num_bits": 4, "group_size": group_size, "symmetric": False}
    scheme = {"head": {"targets": ["score"], "weights": weights}}
    assert plan(model, scheme, "unchecked").targets
    if (rows, group_size) != (8, 64):
        assert plan(model, scheme, "dequantize").targets
        return
    with pytest.raises(CalibrationError, match=r"cannot unpack 4-bit zero points.*at most 8 output rows: score"):
        plan(model, scheme, "dequantize")


def test_one_scheme_in_two_groups_can_be_dequantized(tiny_llama):
    one, two = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "channel", "type": "int"}
    scheme = {"a": {"targets": ["re:.*mlp.*_proj"], "weights": one}, "b": {"targets": ["re:.*o_proj"], "weights": two}}
    assert len(names(tiny_llama(), scheme, "dequantize")) == 8


@pytest.mark.parametrize("scheme", ["MXFP4", "W4A16_ASYM"])
def test_a_module_of_one_s_own_is_not_asked_how_transformers_loads_it(scheme):
    assert names(nn.Sequential(nn.Linear(128, 32)), scheme) == ["0"]


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float32, True), (torch.bfloat16, False)])
def test_nvfp4_in_a_module_of_one_s_own_is_refused_where_it_comes_back_with_other_numbers(dtype, refused):
    model = nn.Sequential(nn.Linear(32, 32, dtype=dtype))
    assert names(model, "NVFP4", "unchecked") == ["0"]
    if not refused:
        assert names(model, "NVFP4") == ["0"]
        return
    with pytest.raises(CalibrationError, match=r"NVFP4 .* torch.float32 model would compute with other numbers: 0"):
        names(model, "NVFP4")


@pytest.mark.parametrize("scheme", ["MXFP4", "MXFP8"])
def test_microscaling_in_float16_is_refused(tiny_llama, scheme):
    with pytest.raises(
        CalibrationError, match=r"loads MX weights as bfloat16, which a torch\.float16 model cannot run"
    ):
        plan(tiny_llama(torch.float16), scheme, ignore="lm_head")
