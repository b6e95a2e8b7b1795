"""Calibration layer by layer: the files are those of an export from memory, whatever happens on the way."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_obs import (
    BlockRuns,
    CalibrationError,
    CalibrationSession,
    calibrate_layerwise,
    export_checkpoint,
    linearize_experts,
    quantize_checkpoint,
    quantized,
)
from lightning_obs.files.tensors import TensorReader
from tests.streaming.test_checkpoint_weights import IGNORE, quantization, sums, tiny_llama
from tests.support.moe_models import W4A16_32, tiny_moe
from tests.support.versions import converted_weights

GPTQ = {"ignore": IGNORE, "observers": {"weight": "hessian"}, "rounding": "gptq"}
ON_QUANTIZED_INPUTS = {
    "observers": {"weight": "imatrix_mse"},
    "rounding": {"name": "gptq", "inputs": "quantized", "random_tokens": 0.5},
}
STATIC = {"ignore": IGNORE, "observers": {"input": "static_minmax"}}


def make_batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(96, (2, 16), generator=generator)} for _ in range(count)]


def in_memory(folder, out, batches, scheme, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    linearize_experts(model)
    with CalibrationSession(model, scheme, **options) as session, torch.no_grad():
        for batch in batches if session.needs_data else ():
            model(**batch)
    return export_checkpoint(model, out), session.result


def require_same(found, expected):
    assert sums(found) == sums(expected)
    one, other = quantization(found), quantization(expected)
    assert {**one, "ignore": sorted(one["ignore"])} == {**other, "ignore": sorted(other["ignore"])}
    assert not list(found.parent.glob("*.unfinished"))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("FP8", {}),
        ("INT8_STATIC", {"observers": {"input": "histogram"}}),
        ("NVFP4", {}),
        ("W4A16", {}),
        ("W4A16", {"observers": {"weight": "imatrix_mse"}}),
        ("W4A16", GPTQ),
        ("W4A16", ON_QUANTIZED_INPUTS),
        ("FP8", {"kv_cache": "FP8_HEAD"}),
        ("FP8", {"ignore": [], "engines": "unchecked"}),
    ],
    ids=[
        "FP8",
        "histogram",
        "NVFP4",
        "data-free",
        "imatrix",
        "gptq",
        "gptq on quantized inputs",
        "kv cache",
        "head too",
    ],
)
def test_the_files_are_those_of_an_export_from_memory(scheme, options, tmp_path):
    source, options = tiny_llama(tmp_path / "llama"), {"ignore": IGNORE, **options}
    expected, in_one = in_memory(source, tmp_path / "memory", make_batches(), scheme, **options)
    result = calibrate_layerwise(source, make_batches(), scheme, tmp_path / "out", **options)
    require_same(tmp_path / "out", expected)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    for name in ("modules", "measurements", "input_ranges", "chosen_input_ranges", "skipped"):
        assert getattr(result, name) == getattr(in_one, name)
    tokens = torch.arange(8)[None]
    logits = [AutoModelForCausalLM.from_pretrained(tmp_path / each)(tokens).logits for each in ("out", "memory")]
    assert logits[0].equal(logits[1])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", [GPTQ, ON_QUANTIZED_INPUTS], ids=["gptq", "gptq on quantized inputs"])
def test_the_fit_of_weights_is_judged_as_in_memory(options, tmp_path):
    source, options = tiny_llama(tmp_path / "llama"), {"ignore": IGNORE, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fitted weights have larger errors")  # of an untrained model, random tokens
        _, in_one = in_memory(source, tmp_path / "memory", make_batches(8), "W4A16", **options)
        result = calibrate_layerwise(source, make_batches(8), "W4A16", tmp_path / "out", **options)
    assert in_one.fit_errors
    assert result.fit_errors.keys() == in_one.fit_errors.keys()
    for name, errors in result.fit_errors.items():
        assert errors == pytest.approx(in_one.fit_errors[name], rel=1e-3)
    assert result.facts()["fit"] == in_one.facts()["fit"]


@pytest.mark.slow_but_first
@converted_weights
@pytest.mark.parametrize(
    ("kind", "scheme", "options"),
    [
        ("mixtral", "FP8", {"on_missing": "siblings"}),
        ("mixtral", W4A16_32, {**GPTQ, "on_missing": "siblings"}),
        ("qwen3_moe", W4A16_32, {**GPTQ, "on_missing": "siblings"}),
        ("qwen3_moe", "INT8_STATIC", {"calibrate_all_experts": True}),
        ("llama4_text", "FP8", {"on_missing": "siblings"}),
        ("llama4_text", W4A16_32, {**GPTQ, "on_missing": "siblings"}),
    ],
    ids=["mixtral FP8", "mixtral gptq", "qwen3 gptq", "qwen3 all experts", "llama4 FP8", "llama4 gptq"],
)
def test_experts_are_those_of_an_export_from_memory(kind, scheme, options, tmp_path):
    tiny_moe(kind, torch.bfloat16).save_pretrained(tmp_path / "moe")
    ignore = [*IGNORE, "re:.*router"] if kind == "llama4_text" else IGNORE
    options = {"engines": "unchecked", **options, "ignore": ignore}
    expected, in_one = in_memory(tmp_path / "moe", tmp_path / "memory", make_batches(), scheme, **options)
    result = calibrate_layerwise(tmp_path / "moe", make_batches(), scheme, tmp_path / "out", **options)
    require_same(tmp_path / "out", expected)
    assert result.expert_tokens == in_one.expert_tokens
    assert result.fallback == in_one.fallback


def gemma(folder):
    """Sliding and full attention in turn: blocks have masks and position embeddings of their own."""
    config = t.Gemma3TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=4, pad_token_id=0, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    t.Gemma3ForCausalLM(config).bfloat16().save_pretrained(folder)


def vision_language(folder):
    """Two lists of blocks, those of the vision tower are left in full precision."""
    text = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": 0,
        "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = t.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    t.Qwen2_5_VLForConditionalGeneration(config).bfloat16().save_pretrained(folder)


def falcon_h1(folder):
    """The whole model computes a buffer of each block."""
    config = t.FalconH1Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=16, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    t.FalconH1ForCausalLM(config).bfloat16().save_pretrained(folder)


def whisper(folder):
    """The weight of its positions is indexed; nothing calls its attention to an encoder."""
    config = t.WhisperConfig(
        vocab_size=96, d_model=64, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=64, pad_token_id=0,
        max_target_positions=32, init_std=0.2, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    t.WhisperForCausalLM(config).bfloat16().save_pretrained(folder)


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore:these buffers were cast")  # Gemma's scale of embeddings is made in bfloat16
@pytest.mark.filterwarnings("ignore:.*bytes of")
@pytest.mark.parametrize("make", [gemma, vision_language, falcon_h1, whisper])
def test_blocks_that_differ_get_what_the_model_gives_each(make, tmp_path):
    torch.manual_seed(0)
    make(tmp_path / "source")
    ignore = {vision_language: ["re:.*visual.*", *IGNORE], whisper: ["proj_out", "re:.*encoder_attn.*"]}
    options = {"ignore": ignore.get(make, IGNORE)}
    kind = t.AutoModelForImageTextToText if make is vision_language else AutoModelForCausalLM
    model = kind.from_pretrained(tmp_path / "source", dtype="auto").eval()
    with CalibrationSession(model, "FP8", **options), torch.no_grad():
        for batch in make_batches():
            model(**batch)
    expected = export_checkpoint(model, tmp_path / "memory")
    calibrate_layerwise(tmp_path / "source", make_batches(), "FP8", tmp_path / "out", **options)
    require_same(tmp_path / "out", expected)


@pytest.mark.parametrize("count", [1, 4])
def test_each_tensor_is_read_once_however_many_batches(count, tmp_path, monkeypatch):
    source, read = tiny_llama(tmp_path / "llama"), Counter()
    for original in (TensorReader.read, TensorReader.blocks):

        def counted(self, name, *args, original=original):
            read[(name, *args)] += 1
            return original(self, name, *args)

        monkeypatch.setattr(TensorReader, original.__name__, counted)
    calibrate_layerwise(source, make_batches(count), "FP8", tmp_path / "out", ignore=IGNORE)
    assert set(read.values()) == {1}
    rows = {args[0] for name, *args in read if name == "model.embed_tokens.weight" and args}
    assert rows == {int(token) for batch in make_batches(count) for token in batch["input_ids"].unique()}
    assert len(read) == 21 + len(rows)


def test_all_that_was_in_the_folder_comes_out(tmp_path):
    source, seen = tiny_llama(tmp_path / "llama"), []
    extra = {f"mtp.layers.0.{name}.weight": torch.randn(8, 8).bfloat16() for name in ("up", "down")}
    save_file({**load_file(source / "model.safetensors"), **extra}, source / "model.safetensors", {"format": "pt"})
    (source / "LICENSE").write_text("mine")
    runs = BlockRuns(progress=lambda *told: seen.append(told))
    calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", ignore=IGNORE, runs=runs)
    reader = TensorReader(tmp_path / "out")
    assert all(reader.read(name).equal(value) for name, value in extra.items())
    assert seen[-1][1] == seen[-1][2] == sum(reader.meta(name).nbytes for name in reader)
    reader.close()
    assert (tmp_path / "out" / "LICENSE").read_text() == "mine"
    assert [name for name in quantization(tmp_path / "out")["ignore"] if "mtp" in name] == [r"re:mtp($|\.)"]


def test_padding_is_kept_out(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    batches = make_batches()
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 5:] = 0
    options = {"ignore": IGNORE, "token_mask": "attention_mask"}
    expected, _ = in_memory(source, tmp_path / "memory", batches, "FP8", **options)
    runs = BlockRuns(token_mask="attention_mask")
    calibrate_layerwise(source, batches, "FP8", tmp_path / "out", ignore=IGNORE, runs=runs)
    require_same(tmp_path / "out", expected)


@converted_weights
def test_modules_that_no_data_reached_stay_in_full_precision(tmp_path):
    tiny_moe("mixtral", torch.bfloat16, num_local_experts=16).save_pretrained(tmp_path / "moe")
    options = {"ignore": IGNORE, "on_missing": "warn", "engines": "unchecked"}
    batch = [{"input_ids": torch.ones(1, 1, dtype=torch.long)}]
    with pytest.warns(UserWarning, match="left in full precision"):
        expected, in_one = in_memory(tmp_path / "moe", tmp_path / "memory", batch, "FP8", **options)
    with pytest.warns(UserWarning, match="left in full precision"):
        result = calibrate_layerwise(tmp_path / "moe", batch, "FP8", tmp_path / "out", **options)
    assert result.skipped == in_one.skipped
    require_same(tmp_path / "out", expected)


# ---------------------------------------------------------------------- inputs as the quantized model will have them


def test_quantized_inputs_are_the_outputs_of_the_quantized_blocks_before(tmp_path):
    source, batches = tiny_llama(tmp_path / "llama"), make_batches()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    for index in range(2):
        targets = [rf"re:model\.layers\.{index}\..*proj"]
        session = CalibrationSession(model, "W4A16", targets=targets, observers=GPTQ["observers"], rounding="gptq")
        with session, ExitStack() as stack, torch.no_grad():
            for block in model.model.layers[:index]:
                stack.enter_context(quantized(block))
            for batch in batches:
                model(**batch)
    expected = sums(export_checkpoint(model, tmp_path / "memory"))
    runs = BlockRuns(inputs="quantized")
    calibrate_layerwise(source, batches, "W4A16", tmp_path / "out", **GPTQ, runs=runs)
    assert sums(tmp_path / "out") == expected
    calibrate_layerwise(source, batches, "W4A16", tmp_path / "full", **GPTQ)
    changed = {name for name, found in sums(tmp_path / "full").items() if found != expected[name]}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)


def test_an_unknown_kind_of_inputs_is_refused():
    with pytest.raises(CalibrationError, match=r"inputs\. Got 'int8', expected 'full_precision', 'quantized'"):
        BlockRuns(inputs="int8")


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize("function", [calibrate_layerwise, quantize_checkpoint])
def test_a_model_in_place_of_its_folder_is_refused(function, tmp_path):
    given = {"batches": []} if function is calibrate_layerwise else {}
    with pytest.raises(CalibrationError, match=r"read from its folder. Got Linear. Remedy: model.save_pretrained"):
        function(torch.nn.Linear(4, 4), scheme="W4A16", out=tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_list_of_blocks_is_refused(tmp_path):
    config = t.AlbertConfig(vocab_size=96, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    t.AlbertForMaskedLM(config).save_pretrained(tmp_path / "albert")
    with pytest.raises(CalibrationError, match=r"blocks of the model were not found: AlbertForMaskedLM.*device_map"):
        calibrate_layerwise(tmp_path / "albert", [], "FP8", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["albert"]


def test_a_model_whose_blocks_read_keys_of_others_is_refused(tmp_path):
    config = t.Gemma3nTextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=[64] * 3, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_kv_shared_layers=1, layer_types=["full_attention"] * 3, laurel_rank=8,
        vocab_size_per_layer_input=96, hidden_size_per_layer_input=16, altup_num_inputs=2, pad_token_id=0,
        activation_sparsity_pattern=[0.0] * 3,
    )  # fmt: skip
    t.Gemma3nForCausalLM(config).save_pretrained(tmp_path / "source")
    expected = r"cannot be run block by block: Gemma3nForCausalLM. Got block 2 fails alone: KeyError.*device_map"
    with pytest.raises(CalibrationError, match=expected):
        calibrate_layerwise(
            tmp_path / "source", make_batches(1), "FP8", tmp_path / "out", engines="unchecked", **STATIC
        )
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite_is_named_and_nothing_takes_the_name(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(source)
    with pytest.raises(CalibrationError, match=r"not finite: model.layers.1.mlp.down_proj \(input"):
        calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", ignore=IGNORE)
    assert not (tmp_path / "out").exists()


def test_no_data_for_a_scheme_that_needs_it_is_refused_and_nothing_is_left(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    with pytest.raises(CalibrationError, match="saw no data"):
        calibrate_layerwise(source, [], "FP8", tmp_path / "out", ignore=IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_too_little_disk_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    source = tiny_llama(tmp_path / "llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(CalibrationError, match=r"cannot be written. Got .*10 bytes are free"):
        calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", ignore=IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_folder_that_is_quantized_already_is_refused(tmp_path):
    source = quantize_checkpoint(tiny_llama(tmp_path / "llama"), tmp_path / "once", "FP8_DYNAMIC", ignore=IGNORE)
    with pytest.raises(CalibrationError, match=r"once is quantized already"):
        calibrate_layerwise(tmp_path / "once", make_batches(), "FP8", tmp_path / "out", ignore=IGNORE)
    assert source.modules
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_two_processes_do_not_write_one_checkpoint(tmp_path):
    source = tiny_llama(tmp_path / "llama")

    def again(name, done, total):
        with pytest.raises(CalibrationError, match="another process is writing"):
            calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", ignore=IGNORE)

    runs = BlockRuns(progress=again)
    calibrate_layerwise(source, make_batches(1), "FP8", tmp_path / "out", ignore=IGNORE, runs=runs)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
