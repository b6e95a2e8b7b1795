"""Checkpoints: what transformers and load_checkpoint give back."""

import errno
import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.files.tensors import TensorWriter
from tests.support.rank_processes import warm_context
from tests.support.versions import dequantizes_activations_too

#: what loads as it is, in any dtype and in bfloat16 only
ANY_DTYPE = [
    "INT8_STATIC",
    "INT8_STATIC_ASYM",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "W8A8",
    "W4A16",
    "W8A16",
    "W4A8",
    "W4AFP8",
    "Q4_0",
    "FP8 kv_cache=FP8",
]
BF16_ONLY = ["NVFP4", "NVFP4A16", "MXFP4", "MXFP8"]
DEQUANTIZED = ["W4A16_ASYM", "W4A16", "W8A16"]
IN_FLOAT32 = ["INT8_STATIC", "FP8", "FP8_BLOCK", "W4A16"]  # a way to store each; the others nightly
NIGHTLY = pytest.mark.nightly


def calibrated(model, scheme, batches, **kwargs):
    with CalibrationSession(model, scheme, **kwargs) as session:
        for batch in batches if session.needs_data else ():
            model(**batch)
    return model


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("scheme", "dtype", "engine"),
    [(s, torch.bfloat16, "transformers") for s in (*ANY_DTYPE, *BF16_ONLY)]
    + [(s, torch.bfloat16, "dequantize") for s in DEQUANTIZED]
    + [(s, torch.float32, "transformers") for s in IN_FLOAT32]
    + [pytest.param(s, torch.float32, "transformers", marks=NIGHTLY) for s in ANY_DTYPE if s not in IN_FLOAT32]
    + [pytest.param(s, torch.float32, "dequantize", marks=NIGHTLY) for s in DEQUANTIZED],
    ids=str,
)
def test_transformers_loads_it_with_the_same_logits(scheme, dtype, engine, tiny_llama, batches, tmp_path):
    scheme, _, kv_cache = scheme.partition(" kv_cache=")
    kv = {"kv_cache": kv_cache} if kv_cache else {}
    model = calibrated(tiny_llama(dtype), scheme, batches, ignore=["lm_head"], engines=engine, **kv)
    with torch.no_grad():
        before = model(**batches[0]).logits
        with quantized(model):
            expected = model(**batches[0]).logits
    assert not torch.equal(before, expected)
    export_checkpoint(model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(model(**batches[0]).logits, before)  # the live model was not touched
        how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if engine == "dequantize" else {}
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how).eval()
        assert torch.equal(reloaded(**batches[0]).logits, expected)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_negative_scales_come_back_with_the_same_logits(bits, dtype, tiny_llama, batches, tmp_path):
    observer = {"observer": "memoryless_mse", "observer_kwargs": {"signed": True}}
    scheme = {"weights": {"num_bits": bits, "group_size": 32, **observer}}
    model = calibrated(tiny_llama(dtype), scheme, batches, ignore=["lm_head"])
    assert (model.model.layers[0].mlp.up_proj.weight_scale < 0).any()
    with torch.no_grad(), quantized(model):
        expected = model(**batches[0]).logits
    export_checkpoint(model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(**batches[0]).logits, expected)


def test_two_schemes_in_one_checkpoint(tiny_llama, batches, tmp_path):
    scheme = {"FP8": ["re:.*self_attn[.].*_proj$"], "INT8_STATIC": ["re:.*mlp[.].*_proj$"]}
    model = calibrated(tiny_llama(torch.bfloat16), scheme, batches)
    export_checkpoint(model, tmp_path / "out")
    with torch.no_grad(), quantized(model):
        expected = model(**batches[0]).logits
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(**batches[0]).logits, expected)


def test_the_config_says_what_was_done(tiny_llama, batches, tmp_path):
    export_checkpoint(calibrated(tiny_llama(), "FP8", batches, ignore=["lm_head"]), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["quantization_status"] == "compressed"
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is False


def test_weights_are_stored_small(tiny_llama, batches, tmp_path):
    export_checkpoint(calibrated(tiny_llama(), "FP8", batches, ignore=["lm_head"]), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert tensors[f"{name}.weight"].dtype is torch.float8_e4m3fn
    assert tensors[f"{name}.input_scale"].shape == (1,)
    assert f"{name}.weight_zero_point" not in tensors  # symmetric


def test_training_goes_on_and_a_second_export_has_the_new_weights(tiny_llama, batches, tmp_path):
    model = calibrated(tiny_llama(), "FP8", batches, ignore=["lm_head"])
    export_checkpoint(model, tmp_path / "first")
    loss = model(**batches[0], labels=batches[0]["input_ids"]).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    calibrated(model, "FP8", batches, ignore=["lm_head"])
    export_checkpoint(model, tmp_path / "second")
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    key = "model.layers.0.mlp.down_proj.weight_scale"
    assert not torch.equal(first[key], second[key])


def test_a_tokenizer_is_saved_beside_it(tmp_path):
    from transformers import AutoTokenizer

    from tests.support.tiny_model import save_tiny_llama

    folder = save_tiny_llama(tmp_path / "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    calibrated(model, "W8A8", (), ignore=["lm_head"])
    export_checkpoint(model, tmp_path / "out", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hello").input_ids == tokenizer("hello").input_ids


def test_tied_embeddings_stay_tied(tmp_path):
    from tests.support.tiny_model import save_tiny_llama

    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path / "tiny"))
    calibrated(model, "W8A8", ())
    export_checkpoint(model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "lm_head" in reloaded.config.quantization_config.quantization_config.ignore
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight


@dequantizes_activations_too
def test_a_model_that_was_loaded_quantized_and_dequantized_is_exported_anew(tiny_llama, batches, tmp_path):
    export_checkpoint(calibrated(tiny_llama(), "FP8", batches, ignore=["lm_head"]), tmp_path / "fp8")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=CompressedTensorsConfig(dequantize=True)
    ).eval()
    calibrated(again, "INT8_STATIC", batches, ignore=["lm_head"])
    export_checkpoint(again, tmp_path / "int8")
    with torch.no_grad(), quantized(again):
        expected = again(**batches[0]).logits
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "int8")(**batches[0]).logits, expected)


# ---------------------------------------------------------------------- whole or not at all


def test_an_uncalibrated_model_is_not_exported(mlp, tmp_path):
    with pytest.raises(CalibrationError, match="MLP was not calibrated"):
        export_checkpoint(mlp, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten_unasked(mlp, tmp_path):
    with CalibrationSession(mlp, "W8A8"):
        pass
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(CalibrationError, match=r"out is already there.*overwrite=True"):
        export_checkpoint(mlp, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "precious"


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_no_half_checkpoint(mlp, tmp_path, monkeypatch, existing):
    with CalibrationSession(mlp, "W8A8"):
        pass
    if existing:
        export_checkpoint(mlp, tmp_path / "out")

    def full(writer, name, rows, first=0):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorWriter, "write", full)
    with pytest.raises(CalibrationError, match=r"out cannot be written. Got .*No space left"):
        export_checkpoint(mlp, tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])
    if existing:
        load_checkpoint(type(mlp)(), tmp_path / "out")


def export_and_be_killed(folder):
    """Runs in a process of its own, which ends in the middle of writing."""
    model = nn.Sequential(nn.Linear(4, 4))
    with CalibrationSession(model, "W8A8"):
        pass
    write = TensorWriter.write

    def write_and_die(*rows):
        write(*rows)
        os.kill(os.getpid(), signal.SIGKILL)

    TensorWriter.write = write_and_die
    export_checkpoint(model, folder)


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_under_the_final_name(tmp_path):
    process = warm_context().Process(target=export_and_be_killed, args=(tmp_path / "out",))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("max_shard_size", [100, "1KB"])
def test_a_module_comes_back_from_several_files(mlp, tmp_path, max_shard_size):
    with CalibrationSession(mlp, "W8A8"):
        pass
    out = export_checkpoint(mlp, tmp_path / "out", max_shard_size=max_shard_size)
    assert len(list(out.glob("*.safetensors"))) > 1
    one, other = (
        load_checkpoint(type(mlp)(), out),
        load_checkpoint(type(mlp)(), export_checkpoint(mlp, tmp_path / "one")),
    )
    assert all(value.equal(other.state_dict()[name]) for name, value in one.state_dict().items())


def test_a_transformers_model_comes_back_from_several_files(tiny_llama, tmp_path):
    model = tiny_llama()
    with CalibrationSession(model, "FP8_DYNAMIC", ignore=["lm_head"]):
        pass
    out = export_checkpoint(model, tmp_path / "out", max_shard_size="100KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (out, export_checkpoint(model, tmp_path / "one"))
    )
    tokens = torch.arange(8)[None]
    assert one(tokens).logits.equal(other(tokens).logits)


def test_the_bytes_that_are_written_are_told_until_they_are_all(mlp, tmp_path):
    with CalibrationSession(mlp, "W8A8"):
        pass
    told = []
    out = export_checkpoint(mlp, tmp_path / "out", progress=lambda *seen: told.append(seen))
    stored = load_file(out / "model.safetensors")
    assert {name for name, *_ in told} == stored.keys()
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert told[-1][1] == told[-1][2] == sum(tensor.nbytes for tensor in stored.values())


# ---------------------------------------------------------------------- loading what does not fit


@pytest.fixture
def exported(mlp, tmp_path):
    with CalibrationSession(mlp, "INT8_STATIC"):
        mlp(torch.randn(4, 16))
    return export_checkpoint(mlp, tmp_path / "out")


def unchanged(model, state):
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("other", [nn.Linear(16, 8), nn.Sequential(nn.Linear(16, 4))])
def test_a_checkpoint_of_another_model_is_refused(exported, other):
    state = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CalibrationError, match="does not fit"):
        load_checkpoint(other, exported)
    assert unchanged(other, state)


def test_a_checkpoint_of_another_width_is_refused(exported, mlp):
    other = type(mlp)(width=64)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    message = r"does not fit.*fc1\.weight is int8 \(32, 16\) instead of int8 \(64, 16\)"
    with pytest.raises(CalibrationError, match=message):
        load_checkpoint(other, exported)
    assert unchanged(other, state)


def test_a_folder_without_a_checkpoint_is_refused(mlp, tmp_path):
    with pytest.raises(CalibrationError, match=r"config\.json does not exist"):
        load_checkpoint(mlp, tmp_path)


def test_no_uncalibrated_scale_can_be_exported(mlp, tmp_path):
    with pytest.raises(CalibrationError, match="saw no data"), CalibrationSession(mlp, "INT8_STATIC"):
        pass
    with pytest.raises(CalibrationError, match="was not calibrated"):
        export_checkpoint(mlp, tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda fc1: delattr(fc1, "input_scale"), r"fc1\.input_scale is missing"),
        (lambda fc1: fc1.weight_scale.fill_(float("nan")), r"fc1\.weight_scale is not finite and other than zero"),
    ],
)
def test_qparams_that_are_not_whole_are_not_exported(mlp, tmp_path, damage, message):
    with CalibrationSession(mlp, "INT8_STATIC"):
        mlp(torch.randn(4, 16))
    damage(mlp.fc1)
    with pytest.raises(CalibrationError, match=message):
        export_checkpoint(mlp, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_pruned_weight_has_to_be_made_permanent_first(mlp, tmp_path):
    from torch.nn.utils import prune

    prune.l1_unstructured(mlp.fc1, "weight", amount=0.5)
    with CalibrationSession(mlp, "W8A8"):
        pass
    with pytest.raises(CalibrationError, match=r"pruning.*fc1.*prune\.remove"):
        export_checkpoint(mlp, tmp_path / "out")
    prune.remove(mlp.fc1, "weight")
    assert (export_checkpoint(mlp, tmp_path / "out") / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("normalization", ["weight_norm", "spectral_norm"])
def test_a_normalized_weight_has_to_be_made_permanent_first(mlp, tmp_path, normalization):
    getattr(torch.nn.utils, normalization)(mlp.fc1)
    mlp.eval()
    with torch.no_grad():
        mlp(torch.randn(2, mlp.fc1.in_features))  # the first call computes the weight
    with CalibrationSession(mlp, "W8A8"):
        pass
    with pytest.raises(CalibrationError, match=rf"{normalization}.*fc1.*remove_{normalization}\(module\)"):
        export_checkpoint(mlp, tmp_path / "out")
    getattr(torch.nn.utils, f"remove_{normalization}")(mlp.fc1)
    assert (export_checkpoint(mlp, tmp_path / "out") / "model.safetensors").is_file()


def test_an_ignored_subclass_of_linear_is_listed(tmp_path):
    class Router(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(16, 16), Router(16, 4))
    with CalibrationSession(model, "W8A8", ignore=["1"]):
        pass
    export_checkpoint(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["1"]
    x = torch.randn(3, 16)
    loaded = load_checkpoint(nn.Sequential(nn.Linear(16, 16), Router(16, 4)), tmp_path / "out")
    with quantized(model):
        assert torch.equal(loaded(x), model(x))
