"""Weights quantized from a checkpoint's files: the tensors, and what else comes out."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    calibrate_layerwise,
    export_checkpoint,
    linearize_experts,
    quantize_checkpoint,
)
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.streaming import worker_processes
from tests.calibration import failing_observer  # noqa: F401  (registers it)
from tests.support.moe_models import W4A16_32, tiny_moe
from tests.support.rank_processes import run_ranks
from tests.support.tiny_model import tiny_tokenizer
from tests.support.versions import converted_weights

IGNORE = ["lm_head"]
DATA_FREE = {
    "W4A16": {},
    "W4A16 mse": {"weight": "memoryless_mse"},
    "FP8_DYNAMIC": {},
    "NVFP4A16": {},
    "MXFP4": {},
    "W8A8": {},
    "W4A16_ASYM": {},
}


def tiny_llama(folder, tied=False, **saved):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, **saved)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def in_memory(folder, out, scheme, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    linearize_experts(model)
    with CalibrationSession(model, scheme, **options):
        pass
    return export_checkpoint(model, out)


def sums(folder):
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    assert tensors
    return {
        name: (str(v.dtype), tuple(v.shape), hashlib.sha256(v.reshape(-1).view(torch.uint8).numpy().tobytes()).digest())
        for name, v in tensors.items()
    }


def quantization(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("scheme", "tied"), [*((scheme, False) for scheme in DATA_FREE), *((scheme, True) for scheme in [*DATA_FREE][:1])]
)
def test_tensors_are_those_of_an_export_from_memory(scheme, tied, tmp_path):
    source, name = tiny_llama(tmp_path / "llama", tied), scheme.partition(" ")[0]
    options = {"ignore": IGNORE, "observers": DATA_FREE[scheme], "engines": "unchecked"}
    expected = in_memory(source, tmp_path / "memory", name, **options)
    result = quantize_checkpoint(source, tmp_path / "files", name, **options)
    assert len(result.modules) == 14
    assert sums(tmp_path / "files") == sums(expected)
    assert quantization(tmp_path / "files") == quantization(expected)


@pytest.mark.slow_but_first
@converted_weights
@pytest.mark.parametrize("own_names", [False, True], ids=["hub names", "3-D experts"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "llama4_text", "nemotron_h"])
def test_experts_are_those_of_an_export_from_memory(kind, own_names, tmp_path):
    model = tiny_moe(kind, torch.bfloat16)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "moe", save_original_format=not own_names)
    routers = ["re:.*router"] if kind in ("gpt_oss", "granitemoe", "llama4_text") else []
    options = {"ignore": [*IGNORE, *routers], "engines": "unchecked"}
    expected = in_memory(tmp_path / "hub", tmp_path / "memory", W4A16_32, **options)
    quantize_checkpoint(tmp_path / "moe", tmp_path / "files", W4A16_32, **options)
    assert sums(tmp_path / "files") == sums(expected)
    one, other = quantization(tmp_path / "files"), quantization(expected)
    assert sorted(one.pop("ignore")) == sorted(other.pop("ignore"))
    assert one == other


@pytest.mark.filterwarnings("ignore:.*bytes of XLNet")
@pytest.mark.parametrize("kind", ["diffllama", "xlnet"])
def test_tensors_that_a_constructor_makes_itself_are_those_of_the_files(kind, tmp_path):
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes = {"vocab_size": 96, "d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 64} if kind == "xlnet" else sizes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "hub")
    options = {"ignore": ["lm_loss" if kind == "xlnet" else "lm_head"], "observers": {"weight": "memoryless_mse"}}
    expected = in_memory(tmp_path / "hub", tmp_path / "memory", W4A16_32, **options)
    quantize_checkpoint(tmp_path / "hub", tmp_path / "files", W4A16_32, **options)
    assert sums(tmp_path / "files") == sums(expected)


@converted_weights
def test_an_architecture_whose_tensors_are_merged_from_those_of_files_is_refused(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("nomic_bert", vocab_size=96, **sizes)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "hub")
    with pytest.raises(CalibrationError, match=r"makes these from other tensors.*q_proj\.weight.*in memory"):
        quantize_checkpoint(tmp_path / "hub", tmp_path / "files", W4A16_32)
    assert not (tmp_path / "files").exists()


def test_members_of_a_fused_set_lie_in_different_files(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    tensors = load_file(source / "model.safetensors")
    files = {name: f"model-{1 + i % 5:05d}-of-00005.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, source / file, metadata={"format": "pt"})
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    expected = in_memory(source, tmp_path / "memory", "NVFP4A16", ignore=IGNORE)
    quantize_checkpoint(source, tmp_path / "files", "NVFP4A16", ignore=IGNORE, max_shard_size="50KB")
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 1
    assert sums(tmp_path / "files") == sums(expected)


def test_float32_files_of_a_bfloat16_model_are_quantized_as_transformers_loads_them(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    tensors = {name: value.float() for name, value in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    expected = in_memory(source, tmp_path / "memory", "W4A16", ignore=IGNORE)
    quantize_checkpoint(source, tmp_path / "files", "W4A16", ignore=IGNORE)
    found, expected = sums(tmp_path / "files"), sums(expected)
    assert {n: v for n, v in found.items() if "proj" in n} == {n: v for n, v in expected.items() if "proj" in n}


def test_all_that_was_in_the_folder_comes_out(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    tensors = load_file(source / "model.safetensors")
    further = {
        "mtp.layers.0.proj.weight": torch.randn(4, 4),
        "mtp.norm.weight": torch.randn(4),
        "model.layers.2.x.weight": torch.ones(3),
    }
    save_file({**tensors, **further}, source / "model.safetensors", metadata={"format": "pt"})
    others = ["chat_template.jinja", "LICENSE", "modeling_own.py", "preprocessor_config.json", "templates/tool.jinja"]
    (source / "templates").mkdir()
    for name in others:
        (source / name).write_text(f'"{name}"')
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    seen = []
    quantize_checkpoint(source, tmp_path / "out", "W4A16", ignore=IGNORE, progress=lambda *told: seen.append(told))
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert all(out[name].equal(value) for name, value in further.items())
    assert {r"re:mtp($|\.)", r"re:model\.layers\.2($|\.)", "lm_head"} == set(quantization(tmp_path / "out")["ignore"])
    for name in [*others, "tokenizer.json", "generation_config.json"]:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert seen[-1][1] == seen[-1][2] == sum(value.nbytes for value in out.values())
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name, *_ in seen))
    assert modules[:3] == [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(in_memory(source, tmp_path / "memory", "W4A16", ignore=IGNORE))
    tokens = torch.arange(8)[None]
    assert loaded(tokens).logits.equal(model(tokens).logits)


def test_other_weights_are_left_out_and_said(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    shutil.copy(source / "model.safetensors", source / "consolidated.safetensors")
    with pytest.warns(UserWarning, match=r"were left out: consolidated.safetensors"):
        quantize_checkpoint(source, tmp_path / "out", "W4A16", ignore=IGNORE)
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()


@pytest.mark.parametrize(
    ("scheme", "options", "needs"),
    [
        ("FP8", {}, "static input activations"),
        ("NVFP4", {}, "static input activations"),
        ("W4A16", {"observers": {"weight": "imatrix_mse"}}, "imatrix_mse on the inputs"),
        ("W4A16", {"kv_cache": "FP8"}, "the kv cache"),
        ("W4A16", {"rounding": "gptq"}, "rounding"),
        ("W4A16", {"observers": {"weight": {"name": "memoryless_mse", "rounding": "gptq"}}}, "rounding"),
    ],
)
def test_a_scheme_that_needs_data_is_refused_before_anything_is_read(scheme, options, needs, tmp_path):
    with pytest.raises(CalibrationError, match=f"needs data, .*reads weights alone: {needs}"):
        quantize_checkpoint(tmp_path / "not there", tmp_path / "out", scheme, **options)


def drop(name):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name)
        save_file(tensors, folder / "model.safetensors")

    return damage


def change(name, changed):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = changed(tensors.get(name))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def in_config(**entries):
    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **entries}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config.json does not exist"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model.safetensors is missing"),
        (
            drop("model.layers.1.mlp.up_proj.weight"),
            r"other tensors than its config says: .*up_proj.weight \(missing\)",
        ),
        (drop("model.norm.weight"), r"other tensors than its config says: model.norm.weight \(missing\)"),
        (
            change("model.layers.1.mlp.up_proj.weight", lambda x: (100 * x).int()),
            r"numbers of another kind than the model has: .*up_proj.weight \(torch.int32 instead of torch.bfloat16\)",
        ),
        (
            change("model.layers.1.mlp.up_proj.weight", lambda x: (100 * x).int().view(torch.uint32)),
            r"numbers of another kind .*\(torch.uint32 instead of torch.bfloat16\)",
        ),
        (
            change("model.layers.1.mlp.up_proj.weight_packed", lambda _: torch.zeros(4, 4, dtype=torch.int32)),
            r"in quantized modules that the model does not know: model.layers.1.mlp.up_proj.weight_packed",
        ),
        (
            change("model.layers.1.mlp.up_proj.weight_shape", lambda _: torch.zeros(2, dtype=torch.int64)),
            r"in quantized modules that the model does not know: model.layers.1.mlp.up_proj.weight_shape",
        ),
        (in_config(intermediate_size=512), r"gate_proj.weight \(\(256, 128\) instead of \(512, 128\)\)"),
        (in_config(quantization_config={}), "is quantized already"),
        (in_config(architectures=["MyOwnModel"]), "does not know the architecture"),
    ],
)
def test_a_folder_that_cannot_be_quantized_is_named_and_nothing_is_written(damage, message, tmp_path):
    source = tiny_llama(tmp_path / "llama")
    damage(source)
    with pytest.raises(CalibrationError, match=message):
        quantize_checkpoint(source, tmp_path / "out", "W4A16", ignore=IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@converted_weights
def test_a_stack_of_experts_that_is_missing_is_not_read_from_another(tmp_path):
    source, stack = tmp_path / "moe", "model.layers.0.mlp.experts.down_proj"
    tiny_moe("qwen3_moe", torch.bfloat16).save_pretrained(source, save_original_format=False)
    drop(stack)(source)
    with pytest.raises(CalibrationError, match=r"experts\.0\.down_proj\.weight \(missing\)"):
        quantize_checkpoint(source, tmp_path / "out", W4A16_32, ignore=IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["moe"]


def test_too_little_disk_is_named_before_anything_is_written(tmp_path, monkeypatch):
    source = tiny_llama(tmp_path / "llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(CalibrationError, match=r"out cannot be written. Got .*10 bytes are free"):
        quantize_checkpoint(source, tmp_path / "out", "W4A16", ignore=IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CalibrationError, match=r"layers.1.mlp.up_proj"):
        quantize_checkpoint(source, tmp_path / "out", "W4A16", ignore=IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


# ---------------------------------------------------------------------- several processes


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def with_unknown(folder):
    """The folder, with tensors that the model's class does not know, enough for several files of 50 KB."""
    path = folder / "model.safetensors"
    further = {f"mtp.{number}.weight": torch.full((4096,), float(number)) for number in range(12)}
    save_file({**load_file(path), **further}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", pytest.param("NVFP4A16", marks=pytest.mark.nightly)])
def test_workers_write_the_files_of_one_process(scheme, tmp_path, warm_workers):
    folder = with_unknown(tiny_llama(tmp_path / "model"))
    quantize_checkpoint(folder, tmp_path / "one", scheme, ignore=IGNORE, max_shard_size="50KB")
    told = []
    result = quantize_checkpoint(
        folder, tmp_path / "two", scheme, ignore=IGNORE, max_shard_size="50KB", workers=2,
        progress=lambda *seen: told.append(seen),
    )  # fmt: skip
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert len(result.modules) == 14
    assert told[-1][1] == told[-1][2]


def on_rank(rank, folder, out, observer):
    try:
        quantize_checkpoint(
            folder, out, "W4A16", ignore=IGNORE, observers={"weight": observer}, workers=Collectives.of_group()
        )
    except (CalibrationError, RuntimeError) as error:
        return str(error)
    return (out / "config.json").is_file()


@pytest.mark.slow
def test_ranks_share_the_work_and_one_that_fails_leaves_nothing(tmp_path):
    folder = with_unknown(tiny_llama(tmp_path / "model"))
    quantize_checkpoint(folder, tmp_path / "one", "W4A16", ignore=IGNORE, observers={"weight": "memoryless_minmax"})
    assert run_ranks(on_rank, 2, folder, tmp_path / "two", "memoryless_minmax") == [True, True]
    assert files(tmp_path / "two") == files(tmp_path / "one")
    found = run_ranks(on_rank, 2, folder, tmp_path / "three", "fails_elsewhere")
    assert all(text.startswith("rank 1: RuntimeError: no memory: model.layers.") for text in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one", "two"]


def test_a_worker_imports_the_classes_of_all_engines(tmp_path, monkeypatch):
    def executor(workers, context, start, arguments):
        (setup,) = arguments
        raise RuntimeError(f"imports {setup.imports}")

    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", executor)
    folder = tiny_llama(tmp_path / "model")
    with pytest.raises(RuntimeError, match=r"imports .*'lightning_obs\.engines\.vllm'"):
        quantize_checkpoint(
            folder, tmp_path / "out", "W4A16", ignore=IGNORE, engines=["transformers", "vllm"], workers=2
        )


@pytest.mark.slow
def test_a_worker_that_fails_is_the_error_and_nothing_is_written(tmp_path, warm_workers):
    folder = tiny_llama(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CalibrationError, match=r"not finite: model\.layers\.1\.mlp\.down_proj \(weight"):
        quantize_checkpoint(folder, tmp_path / "out", "W4A16", ignore=IGNORE, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


KILLED_AT_ITS_FIRST_TENSOR = """
import os, signal, sys
from lightning_obs import quantize_checkpoint

if __name__ == "__main__":
    kill = lambda name, done, total: os.kill(os.getpid(), signal.SIGKILL)
    quantize_checkpoint(*sys.argv[1:], "W8A8", ignore=["lm_head"], workers=2, progress=kill)
"""


@pytest.mark.slow
def test_workers_end_if_the_process_that_started_them_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED_AT_ITS_FIRST_TENSOR)
    command = [sys.executable, str(script), str(tiny_llama(tmp_path / "model")), str(tmp_path / "out")]
    # The pipe of the output is open as long as a worker lives; a worker that lives on is a TimeoutExpired.
    done = subprocess.run(command, capture_output=True, timeout=150, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_nothing_is_written(tmp_path, warm_workers):
    folder = tiny_llama(tmp_path / "model")
    observers = {"weight": "fails_elsewhere"}
    with pytest.raises(CalibrationError, match=r"a worker ended before its work was done.*try fewer"):
        quantize_checkpoint(folder, tmp_path / "out", "W4A16", ignore=IGNORE, workers=2, observers=observers)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("workers", [0, -1, 1.5, "2", True, None])
def test_workers_are_one_or_more(workers, tmp_path):
    with pytest.raises(CalibrationError, match=rf"workers\. Got {workers!r}, expected a whole number, one or more"):
        quantize_checkpoint(tmp_path, tmp_path / "out", "W4A16", workers=workers)


@pytest.mark.parametrize("out", ["", "out", "a/b", "../llama/out"])
def test_nothing_is_written_into_the_checkpoint_that_is_read(out, tmp_path):
    source = tiny_llama(tmp_path / "llama")
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.rglob("*"))
    for folder in (source, tmp_path / "link"):
        with pytest.raises(CalibrationError, match=r"is inside the checkpoint that is read, .*Remedy: write beside it"):
            quantize_checkpoint(folder, source / out, "W4A16", ignore=IGNORE, overwrite=True)
        with pytest.raises(CalibrationError, match=r"is inside the checkpoint that is read"):
            calibrate_layerwise(folder, [], "W4A16", source / out, ignore=IGNORE)
    assert sorted(source.rglob("*")) == before


def test_code_that_comes_with_a_checkpoint_is_not_run_and_not_asked_about(tmp_path, monkeypatch):
    source = tiny_llama(tmp_path / "llama")
    in_config(model_type="mine", architectures=["Mine"], auto_map={"AutoConfig": "mine.Config"})(source)
    (source / "mine.py").write_text("raise SystemExit('this code was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    with pytest.raises(CalibrationError, match=r"llama comes with code of its own, which is not run unasked"):
        quantize_checkpoint(source, tmp_path / "out", "W4A16", ignore=IGNORE)
