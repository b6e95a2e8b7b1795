"""Calibration layer by layer: the files are those of an export from memory, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
import transformers as t
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
from lightning_obs.ranks.collectives import Collectives
from tests.calibration.test_checkpoint_weights import IGNORE, quantization, sums, tiny_llama
from tests.moe_models import W4A16_32, tiny_moe
from tests.rank_processes import run_ranks

GPTQ = {"ignore": IGNORE, "observers": {"weight": "hessian"}, "rounding": "gptq"}
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


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("FP8", {}),
        ("INT8_STATIC", {"observers": {"input": "histogram"}}),
        ("NVFP4", {}),
        ("W4A16", {}),
        ("W4A16", {"observers": {"weight": "imatrix_mse"}}),
        ("W4A16", GPTQ),
        ("FP8", {"kv_cache": "FP8_HEAD"}),
        ("FP8", {"ignore": [], "reload": "unchecked"}),
    ],
    ids=["FP8", "histogram", "NVFP4", "data-free", "imatrix", "gptq", "kv cache", "head too"],
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


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("FP8", {"on_missing": "siblings"}),
        (W4A16_32, {**GPTQ, "on_missing": "siblings"}),
        ("INT8_STATIC", {"calibrate_all_experts": True}),
    ],
    ids=["FP8", "gptq", "all experts"],
)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_those_of_an_export_from_memory(kind, scheme, options, tmp_path):
    tiny_moe(kind, torch.bfloat16).save_pretrained(tmp_path / "moe")
    options = {"ignore": IGNORE, "reload": "unchecked", **options}
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


@pytest.mark.filterwarnings("ignore:these buffers were cast")  # Gemma's scale of embeddings is made in bfloat16
@pytest.mark.parametrize("make", [gemma, vision_language])
def test_blocks_that_differ_get_what_the_model_gives_each(make, tmp_path):
    torch.manual_seed(0)
    make(tmp_path / "source")
    options = {"ignore": ["re:.*visual.*", *IGNORE]} if make is vision_language else {"ignore": IGNORE}
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


def test_modules_that_no_data_reached_stay_in_full_precision(tmp_path):
    tiny_moe("mixtral", torch.bfloat16, num_local_experts=16).save_pretrained(tmp_path / "moe")
    options = {"ignore": IGNORE, "on_missing": "warn", "reload": "unchecked"}
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


# ---------------------------------------------------------------------- killed, and gone on with

_CALLS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate", "os.chmod")


def calibrate_and_die(rank, source, out, at, ranks=1, inputs="full_precision"):
    """Calibrate, and die at the ``at``-th call to the file system beside ``out``; how many there were."""
    seen = [0]

    def hook(event, args):
        if event in _CALLS and any(str(out.parent) in str(each) for each in args) and seen[0] >= 0:
            seen[0] += 1
            if seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        sys.addaudithook(hook)
    batches = make_batches(4)[rank::ranks]
    collectives = Collectives.of_group() if ranks > 1 else None
    runs = BlockRuns(inputs=inputs)
    result = calibrate_layerwise(source, batches, "FP8", out, **STATIC, collectives=collectives, runs=runs)
    calls, seen[0] = seen[0], -1
    return calls, result.measurements, result.input_ranges


#: a process that is killed may have compiled the loops, and kept nothing of that
LIMIT = 240


def killed_and_gone_on_with(tmp_path, points, inputs="full_precision"):
    source = tiny_llama(tmp_path / "llama")
    calls, *expected = run_ranks(calibrate_and_die, 1, source, tmp_path / "whole" / "out", 0, 1, inputs, timeout=LIMIT)[
        0
    ]
    for number, point in enumerate(points):
        out = tmp_path / str(number) / "out"
        with pytest.raises(RuntimeError, match="died"):
            run_ranks(calibrate_and_die, 1, source, out, max(1, int(calls * point)), 1, inputs, timeout=LIMIT)
        if out.exists():  # the last calls come after it was renamed
            assert sums(out) == sums(tmp_path / "whole" / "out")
            continue
        result = calibrate_layerwise(source, make_batches(4), "FP8", out, **STATIC, runs=BlockRuns(inputs=inputs))
        assert [result.measurements, result.input_ranges] == expected
        require_same(out, tmp_path / "whole" / "out")
        assert (out / "config.json").read_bytes() == (tmp_path / "whole" / "out" / "config.json").read_bytes()
        assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_files(tmp_path):
    killed_and_gone_on_with(tmp_path, [0.3, 0.8, 0.995])


@pytest.mark.nightly
@pytest.mark.parametrize("inputs", ["full_precision", "quantized"])
def test_a_run_that_is_killed_anywhere_goes_on_to_the_same_files(inputs, tmp_path):
    killed_and_gone_on_with(tmp_path, [random.random() for _ in range(20)], inputs)


def test_a_run_that_goes_on_reads_only_what_is_not_finished(tmp_path, monkeypatch):
    source, read = tiny_llama(tmp_path / "llama"), Counter()

    def stop(name, done, total):
        if name.startswith("model.layers.1."):
            raise KeyboardInterrupt

    runs = BlockRuns(progress=stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", **STATIC, runs=runs)
    original = TensorReader.read
    monkeypatch.setattr(TensorReader, "read", lambda self, name, *a: (read.update([name]), original(self, name, *a))[1])
    calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", **STATIC)
    assert not [name for name in read if name.startswith("model.layers.0.")]
    assert sums(tmp_path / "out") == sums(in_memory(source, tmp_path / "memory", make_batches(), "FP8", **STATIC)[0])


def test_other_data_or_options_than_those_of_the_killed_run_are_refused(tmp_path):
    source = tiny_llama(tmp_path / "llama")

    def stop(name, done, total):
        if name.startswith("model.layers.1."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", **STATIC, runs=BlockRuns(progress=stop))
    for batches, scheme in ((make_batches(2), "FP8"), (make_batches(), "INT8_STATIC")):
        with pytest.raises(CalibrationError, match=r"out.unfinished was begun with other arguments.*delete it"):
            calibrate_layerwise(source, batches, scheme, tmp_path / "out", **STATIC)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- several ranks


@pytest.mark.slow
def test_ranks_with_their_own_data_write_the_files_of_one_also_when_they_were_killed(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    expected, in_one = in_memory(source, tmp_path / "memory", make_batches(4), "FP8", **STATIC)
    (calls, _, ranges), _ = run_ranks(calibrate_and_die, 2, source, tmp_path / "out", 0, 2)
    require_same(tmp_path / "out", expected)
    assert ranges == in_one.input_ranges
    with pytest.raises(RuntimeError, match="died"):
        run_ranks(calibrate_and_die, 2, source, tmp_path / "again", int(calls * 0.6), 2)
    assert len(list((tmp_path / "again.unfinished").glob("state-1-*.pt"))) == 2
    run_ranks(calibrate_and_die, 2, source, tmp_path / "again", 0, 2)
    require_same(tmp_path / "again", expected)


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
        calibrate_layerwise(tmp_path / "source", make_batches(1), "FP8", tmp_path / "out", reload="unchecked", **STATIC)
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


def test_two_processes_do_not_write_one_checkpoint(tmp_path):
    source = tiny_llama(tmp_path / "llama")

    def again(name, done, total):
        with pytest.raises(CalibrationError, match="another process is writing"):
            calibrate_layerwise(source, make_batches(), "FP8", tmp_path / "out", ignore=IGNORE)

    runs = BlockRuns(progress=again)
    calibrate_layerwise(source, make_batches(1), "FP8", tmp_path / "out", ignore=IGNORE, runs=runs)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
