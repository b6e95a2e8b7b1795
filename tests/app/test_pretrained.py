"""The command line's loader of transformers models: what is damaged is named."""

import json
import shutil

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BloomConfig, LlamaConfig

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint
from lightning_obs.app.models.pretrained import _refuse_damaged_scales, load_pretrained, positions_of
from lightning_obs.files.write import CONTENTS_FILE
from tests.support.tiny_model import save_tiny_bert, save_tiny_llama, save_tiny_t5


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    model, tokenizer = load_pretrained(save_tiny_llama(folder / "float"), AutoModelForCausalLM)
    with CalibrationSession(model, "W8A8", ignore="lm_head"):
        pass
    return export_checkpoint(model, folder / "out", tokenizer=tokenizer)


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "out")


def load(folder):
    return load_pretrained(folder, AutoModelForCausalLM)


def test_what_is_whole_is_loaded_also_without_its_list_of_files(folder):
    load(folder)
    (folder / CONTENTS_FILE).unlink()
    load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("at", [0.3, 0.99])
def test_a_changed_byte_of_an_export_is_named(folder, name, at):
    data = bytearray((folder / name).read_bytes())
    data[int(at * len(data))] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(CalibrationError, match=rf"files of .*out have changed since they were written: {name}"):
        load(folder)


def without_list(folder, change):
    """A checkpoint of somebody else, who lists no checksums."""
    (folder / CONTENTS_FILE).unlink()
    tensors = load_file(folder / "model.safetensors")
    change(next(value for name, value in tensors.items() if name.endswith("weight_scale")).view(-1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_cannot_be_are_named_where_there_are_no_checksums(folder, value):
    without_list(folder, lambda scale: scale[:1].fill_(value))
    with pytest.raises(CalibrationError, match=r"scales that are negative or not finite: .*weight_scale"):
        load(folder)


def test_a_scale_that_the_model_has_learned_may_be_negative():
    model = nn.Linear(2, 2)
    model.logit_scale = nn.Parameter(torch.tensor(-1.0))
    _refuse_damaged_scales(model, "float")


def exported(folder, scheme, **options):
    model, tokenizer = load_pretrained(save_tiny_llama(folder / "float"), AutoModelForCausalLM)
    with CalibrationSession(model, scheme, ignore="lm_head", **options):
        pass
    return export_checkpoint(model, folder / "out", tokenizer=tokenizer)


def test_signed_scales_are_loaded(tmp_path):
    scheme = {"weights": {"num_bits": 4, "group_size": 16}}
    folder = exported(tmp_path, scheme, observers={"weight": {"name": "memoryless_minmax", "signed": True}})
    tensors = load_file(folder / "model.safetensors")
    assert any((value < 0).any() for name, value in tensors.items() if name.endswith("weight_scale"))
    load(folder)


def test_a_negative_scale_of_floats_is_named(tmp_path):
    folder = exported(tmp_path, "FP8_DYNAMIC")
    without_list(folder, lambda scale: scale[:1].fill_(-1.0))
    with pytest.raises(CalibrationError, match=r"scales that are negative or not finite: .*weight_scale"):
        load(folder)


@pytest.mark.parametrize("damage", ["cut", "no object", "deep", "bytes"])
def test_a_config_that_transformers_cannot_read_is_named(folder, damage):
    (folder / CONTENTS_FILE).unlink()
    text = {"cut": b'{"model_type"', "no object": b"[1]", "deep": b'{"a":' * 100_000, "bytes": b"\xff\xfe{}"}[damage]
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CalibrationError, match=r"model\.path=.*out cannot be read"):
        load(folder)


def with_code(folder, entry):
    """A checkpoint whose config or tokenizer, as ``entry`` says, is of a class in a file beside it."""
    (folder / CONTENTS_FILE).unlink()
    file, auto_class = {
        "config": ("config.json", "AutoConfig"),
        "tokenizer": ("tokenizer_config.json", "AutoTokenizer"),
    }[entry]
    raw = json.loads((folder / file).read_text())
    own = {"auto_map": {auto_class: "own.Own" if entry == "config" else [None, "own.Own"]}}
    if entry == "config":
        own["model_type"] = "own"
    else:
        own["tokenizer_class"] = "OwnTokenizer"
    (folder / file).write_text(json.dumps({**raw, **own}))
    (folder / "own.py").write_text("raise RuntimeError('this code was run')")


@pytest.mark.parametrize("entry", ["config", "tokenizer"])
def test_code_that_comes_with_a_model_is_run_only_if_the_user_says_so(folder, entry, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with_code(folder, entry)
    with pytest.raises(CalibrationError, match=r"out comes with code of its own.*model.trust_remote_code=true"):
        load(folder)
    with pytest.raises(CalibrationError, match=r"this code was run"):
        load_pretrained(folder, AutoModelForCausalLM, trust_remote_code=True)


@pytest.mark.parametrize("value", ["false", "no", 1, None])
def test_trust_is_true_or_false(folder, value):
    with pytest.raises(CalibrationError, match=r"model.trust_remote_code. Got .*, expected true or false"):
        load_pretrained(folder, AutoModelForCausalLM, trust_remote_code=value)


def test_a_checkpoint_that_a_killed_overwrite_took_away_is_put_back(folder):
    hidden = folder.parent / ".lightning_obs.x.partial" / "replaced"
    hidden.mkdir(parents=True)
    folder.rename(hidden / folder.name)
    assert torch.is_tensor(load(folder)[0].lm_head.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["./absent", "~/absent", "/absent/model", "outputs/runs/model"])
def test_a_folder_that_does_not_exist_is_named_before_the_hub_is_asked(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CalibrationError, match=rf"model\.path={name} does not exist. Expected a folder .* on the hub"):
        load(name)


@pytest.mark.parametrize("name", ["bert", "somebody/bert"])
def test_a_name_of_the_hub_is_left_to_transformers(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somebody").mkdir()  # a folder of this name does not make it a path
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CalibrationError, match=rf"model\.path={name} cannot be read"):
        load(name)


# ---------------------------------------------------------------------- other weights than the model has


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def without_norm(folder):
    change_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))


def narrow_norm(folder):
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_norm, r"1 weights of LlamaForCausalLM are not in the files .*: model\.norm\.weight \(missing\)"),
        (narrow_norm, r"1 weights of .* model\.norm\.weight \(\(32,\) instead of \(64,\)\)"),
        (lambda folder: change_config(folder, num_hidden_layers=3), r"9 weights of .*: model\.layers\.2\."),
        (lambda folder: change_config(folder, num_hidden_layers=1), r"hold 9 tensors that .*: model\.layers\.1\."),
        (
            lambda folder: change_config(folder, tie_word_embeddings=False),
            r"1 weights of .*: lm_head\.weight \(missing",
        ),
    ],
)
def test_a_model_is_not_completed_by_random_weights(tmp_path, change, message):
    folder = save_tiny_llama(tmp_path / "float")
    change(folder)
    with pytest.raises(CalibrationError, match=message):
        load(folder)


def test_a_model_loaded_as_one_with_another_head_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"weights of BertLMHeadModel are not in the files .*model\._target_"):
        load(save_tiny_bert(tmp_path / "bert"))


def test_a_model_with_an_encoder_is_sent_to_the_page_about_modules_of_your_own(tmp_path):
    with pytest.raises(CalibrationError, match=r"t5 is no causal language model. Got T5Config. Remedy.*other_models"):
        load(save_tiny_t5(tmp_path / "t5"))


def test_a_model_has_as_many_positions_as_its_config_says_unless_they_adapt():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert positions_of(LlamaConfig(max_position_embeddings=96)) == 96
    assert positions_of(LlamaConfig(max_position_embeddings=96, rope_parameters=dynamic)) is None
    assert positions_of(BloomConfig()) is None


def test_a_run_that_would_have_shipped_random_weights_ends_with_an_error(command_line, tmp_path, tiny_folder):
    folder = shutil.copytree(tiny_folder, tmp_path / "float")
    without_norm(folder)
    done = command_line(f"model.path={folder}", "scheme=fp8_dynamic", "export.folder=out")
    assert done.returncode == 1
    assert "model.norm.weight (missing)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_remedy_for_tensors_without_a_place_works(tmp_path):
    folder = save_tiny_llama(tmp_path / "float")
    change_weights(folder, lambda tensors: tensors.update({"value_head.weight": torch.ones(1, 64)}))
    with pytest.raises(CalibrationError, match=r"hold 1 tensors .*: value_head\.weight.*LlamaForCausalLM\.from_pretr"):
        load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    _, tokenizer = load_pretrained(save_tiny_llama(tmp_path / "other"), AutoModelForCausalLM)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    load(tmp_path / "again")


def test_tied_weights_buffers_and_heads_that_belong_to_a_class_are_no_difference(tmp_path):
    folder = save_tiny_llama(tmp_path / "llama")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}  # as old checkpoints hold them
    change_weights(folder, lambda tensors: tensors.update(frequencies))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load(folder)
    load_pretrained(save_tiny_bert(tmp_path / "bert"))
    load_pretrained(save_tiny_bert(tmp_path / "classifier", ("bad", "good")))
    load_pretrained(save_tiny_t5(tmp_path / "t5"), AutoModelForSeq2SeqLM)


INT4 = {"weights": {"num_bits": 4, "group_size": 32}}


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", "NVFP4A16", INT4])
def test_the_tensors_of_a_quantized_checkpoint_belong_to_the_model(tmp_path, scheme):
    load(exported(tmp_path, scheme, engines="unchecked"))


def test_a_quantized_kv_cache_belongs_to_the_model(tmp_path):
    model, tokenizer = load_pretrained(save_tiny_llama(tmp_path / "float"), AutoModelForCausalLM)
    ids = tokenizer("some text to calibrate on", return_tensors="pt").input_ids
    with CalibrationSession(model, "FP8", kv_cache="FP8", ignore="lm_head"):
        model(input_ids=ids)
    load(export_checkpoint(model, tmp_path / "out", tokenizer=tokenizer))
