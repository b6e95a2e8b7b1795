"""GGUF files: their weights are those of the quantized model, and all else is the base's."""

import logging
import re
import shutil

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import nn

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    export_gguf,
    linearize_experts,
    packages,
    quantized,
)
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.forward.quantized_module import quantized_weight
from lightning_obs.gguf.base_file import BaseFile
from lightning_obs.model.module_qparams import calibrated_modules, clear_qparams
from lightning_obs.model.stored import stored_weight
from tests.support.gguf_base import default_base, tiny, write_base
from tests.support.markdown import blocks, page
from tests.support.versions import converted_weights


def calibrate(model, scheme="Q4_0", **options):
    options = {"ignore": ["lm_head"], "engines": "unchecked", **options}
    with CalibrationSession(model, scheme, **options):
        pass
    return model


def written(tmp_path, kind="llama", scheme="Q4_0", base_dtype=torch.float32, **options):
    """A calibrated tiny model, its base, and the exported file."""
    model = tiny(kind)
    base = write_base(model, tmp_path / "base.gguf", base_dtype)
    calibrate(model, scheme, **options)
    return model, base, export_gguf(model, tmp_path / "model.gguf", base)


def weights_of(model):
    """The weight that each calibrated module computes with."""
    with quantized(model):
        return {name: quantized_weight(module) for name, module in calibrated_modules(model)}


def read(file, blocks=""):
    """The tensors of a file in float32; of a large one those of some blocks, a regular expression of their names."""
    tensors = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if re.match(blocks, tensor.name):
            tensors[tensor.name] = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    return tensors


# ---------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_transformers_reads_the_weights_of_the_quantized_model(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
    model, _, file = written(tmp_path, kind)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=file.name,
        config=tiny("llama").config if kind == "mistral" else model.config,  # it finds Mistral by a file's title
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    expected = {f"{name}.weight": weight for name, weight in weights_of(model).items()}
    assert len(expected) == 14 - 3 * 2 * (kind == "phi3")  # its q, k and v are one module, and gate and up
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected.get(name, model.state_dict()[name]), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("scheme", ["Q4_0", "Q5_0", "Q8_0", "MXFP4A16"])
def test_blocks_hold_the_weights_bit_for_bit(tmp_path, scheme):
    model, _, file = written(tmp_path, "qwen2", scheme)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == scheme.removesuffix("A16")
    values = read(file)
    for name, weight in weights_of(model).items():
        tensor = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2).get_name(name) + ".weight"
        torch.testing.assert_close(values[tensor], weight, rtol=0, atol=0)


@pytest.mark.parametrize(("scheme", "lowest"), [("Q4_1", -8), ("Q5_1", -16)])
def test_the_number_of_the_lowest_code_is_rounded_to_float16(tmp_path, scheme, lowest):
    model, _, file = written(tmp_path, "qwen2", scheme)
    values = read(file)["blk.0.ffn_up.weight"]
    module = model.model.layers[0].mlp.up_proj
    stored = stored_weight(module)
    scale = stored.range.scale.repeat_interleave(32, dim=1)
    zero_point = stored.range.zero_point.repeat_interleave(32, dim=1)
    assert len(zero_point.unique()) > 2
    minimum = ((lowest - zero_point.float()) * scale).half().float()
    torch.testing.assert_close(values, scale * (stored.codes.float() - lowest) + minimum, rtol=0, atol=0)
    steps_beside = ((values - weights_of(model)["model.layers.0.mlp.up_proj"]) / scale).abs()
    assert 0 < steps_beside.max() <= 2.0**-11 * 32  # of a number of at most 32 steps


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "group_size": 64},
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "tensor"},
    ],
    ids=str,
)
def test_blocks_of_larger_groups_have_one_scale(tmp_path, weights):
    model = tiny("llama", torch.float16, intermediate_size=128)
    base = write_base(model, tmp_path / "base.gguf", torch.float16)
    calibrate(model, {"weights": weights}, targets=["re:.*down_proj"])
    values = read(export_gguf(model, tmp_path / "model.gguf", base))
    for layer in (0, 1):
        module = model.model.layers[layer].mlp.down_proj
        stored = stored_weight(module)
        groups = stored.range.scale.shape[-1]
        scale = stored.range.scale.float().repeat_interleave(128 // groups, dim=-1)
        zero_point = stored.range.zero_point.float().repeat_interleave(128 // groups, dim=-1)
        expected = scale * (stored.codes.float() - zero_point)
        error = (values[f"blk.{layer}.ffn_down.weight"] - expected).abs()
        assert (error <= scale * 2.0**-11 * 16 * (not weights.get("symmetric", True))).all()


@converted_weights
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_experts_of_a_layer_are_one_tensor(tmp_path, kind):
    model = tiny(kind)
    base = write_base(model, tmp_path / "base.gguf")
    linearize_experts(model)
    calibrate(model, ignore=["lm_head", "re:.*mlp.gate$"])
    values = read(export_gguf(model, tmp_path / "model.gguf", base))
    gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    weights = weights_of(model)
    for layer in (0, 1):
        for tensor, name in (("gate", gate), ("up", up), ("down", down)):
            experts = [weights[f"model.layers.{layer}.mlp.experts.{number}.{name}"] for number in range(4)]
            stack = values[f"blk.{layer}.ffn_{tensor}_exps.weight"]
            torch.testing.assert_close(stack, torch.stack(experts), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_base_may_be_rounded_otherwise_than_the_model(tmp_path, dtype):
    model, _, file = written(tmp_path, base_dtype=dtype)
    weight = weights_of(model)["model.layers.0.mlp.up_proj"]
    torch.testing.assert_close(read(file)["blk.0.ffn_up.weight"], weight, rtol=0, atol=0)


def test_everything_else_is_the_bases_byte_for_byte(tmp_path):
    _, base, file = written(tmp_path, targets=["re:.*layers.1.*_proj"])
    old, new = gguf.GGUFReader(base), gguf.GGUFReader(file)
    changed = {"general.file_type", "general.quantization_version", "GGUF.kv_count"}
    assert [name for name in new.fields if name not in changed] == [name for name in old.fields if name not in changed]
    for name, field in old.fields.items():
        if name not in changed:
            assert [part.tobytes() for part in field.parts] == [part.tobytes() for part in new.fields[name].parts]
    assert new.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    assert new.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    assert [tensor.name for tensor in new.tensors] == [tensor.name for tensor in old.tensors]
    replaced = []
    for before, after in zip(old.tensors, new.tensors, strict=True):
        assert before.shape.tolist() == after.shape.tolist()
        assert after.data_offset % new.alignment == 0
        if after.tensor_type == gguf.GGMLQuantizationType.Q4_0:
            replaced.append(after.name)
        else:
            assert (before.tensor_type, before.data.tobytes()) == (after.tensor_type, after.data.tobytes())
    assert len(replaced) == 7
    assert all(name.startswith("blk.1.") for name in replaced)


def test_a_file_that_was_written_is_a_base_for_the_rest_of_the_model(tmp_path):
    model, _, first = written(tmp_path, targets=["re:.*layers.0.*_proj"])
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            module = model.get_submodule(name)
            module.weight.copy_(weight)
            clear_qparams(module)
    calibrate(model, "Q8_0", targets=["re:.*layers.1.*_proj"])
    second = export_gguf(model, tmp_path / "second.gguf", first)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(second).tensors}
    assert (types["blk.0.attn_q.weight"], types["blk.1.attn_q.weight"]) == ("Q4_0", "Q8_0")


def test_scales_that_are_rounded_are_said(tmp_path):
    scheme = {"weights": {"num_bits": 4, "group_size": 32}}
    with pytest.warns(CalibrationWarning, match=r"those of 14 modules are rounded, by up to 0.05 %.*schemes Q4_0"):
        model, _, file = written(tmp_path, "qwen2", scheme)
    values, weight = read(file)["blk.0.ffn_up.weight"], weights_of(model)["model.layers.0.mlp.up_proj"]
    assert 0 < (values / weight - 1).abs().nan_to_num(0).max() <= 2.0**-11


def test_a_row_without_weights_is_zero(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = 0
    base = write_base(model, tmp_path / "base.gguf")
    calibrate(model)
    assert not read(export_gguf(model, tmp_path / "model.gguf", base))["blk.0.ffn_up.weight"][3].any()


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny("llama")
    base = write_base(model, tmp_path / "model-f16.gguf", torch.float16)
    known = {"model": model, "batch": {"input_ids": torch.arange(3, 19)[None]}}
    for code in blocks(page("docs/guide/gguf.md"), "python"):
        exec(compile(code, "gguf.md", "exec"), known)
    assert (tmp_path / "model-q4_0.gguf").stat().st_size < base.stat().st_size


@pytest.mark.slow
def test_the_default_model_is_written_into_the_file_that_it_came_from(tmp_path):
    """Three of its 30 layers; the others stay as the base has them."""
    model, _ = load_pretrained(dtype="float32")
    calibrate(model, targets=["re:.*[.](0|13|29)[.].*_proj"])
    file = export_gguf(model, tmp_path / "model.gguf", default_base())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    values = read(file, blocks="blk[.](0|13|29)[.]")
    weights = weights_of(model)
    assert len(weights) == 3 * 7
    for name, weight in weights.items():
        value = values[f"{names.get_name(name)}.weight"]
        heads = {"q_proj": 9, "k_proj": 3}.get(name.rpartition(".")[2])
        if heads:
            value = value.view(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        torch.testing.assert_close(value, weight, rtol=0, atol=0)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("scheme", "match"),
    [
        ("W4A8", r"GGUF cannot hold int4 group 128 weights, dynamic int8 token inputs: only weights: .*q_proj"),
        ("FP8_DYNAMIC", "only weights"),
        ({"weights": {"num_bits": 4, "group_size": 16}}, r"cannot hold int4 group 16 weights of 64 columns.*Q4_1"),
        (
            {"weights": {"num_bits": 3, "group_size": 32}},
            r"cannot hold int3 group 32 weights.*Expected integer weights",
        ),
        ({"weights": {"num_bits": 8, "group_size": 32, "symmetric": False}}, r"cannot hold asymmetric int8 group 32"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}, r"cannot hold float8 channel"),
        ("NVFP4A16", "cannot hold float4 tensor_group 16 weights with their global scale, which llama.cpp leaves out"),
    ],
    ids=str,
)
def test_schemes_that_gguf_cannot_hold_are_refused(tmp_path, scheme, match):
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
    model = tiny("llama", **(wide if scheme == "W4A8" else {}))
    base = write_base(model, tmp_path / "base.gguf")
    calibrate(model, scheme)
    with pytest.raises(CalibrationError, match=match):
        export_gguf(model, tmp_path / "model.gguf", base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf"]


def test_the_base_of_another_model_is_refused(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] *= 1.01
    base = write_base(model, tmp_path / "base.gguf", torch.float16)
    other = calibrate(tiny("llama"))
    match = r"base.gguf holds other weights than the model: blk.1.attn_k.weight \(model.layers.1.self_attn.k_proj\)"
    with pytest.raises(CalibrationError, match=match):
        export_gguf(other, tmp_path / "model.gguf", base)
    with torch.no_grad():
        model.load_state_dict(other.state_dict())
        model.model.embed_tokens.weight[0, 0] += 1
    base = write_base(model, tmp_path / "second.gguf")
    match = r"other weights than the model: model.embed_tokens \(token_embd.weight\)"
    with pytest.raises(CalibrationError, match=match):
        export_gguf(other, tmp_path / "model.gguf", base)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_hidden_layers": 1}, r"no tensors for calibrated modules.*: model.layers.1.self_attn.q_proj"),
        ({"intermediate_size": 128}, r"another shape.*: blk.0.ffn_gate.weight. Got \(128, 64\), .* have \(96, 64\)"),
    ],
)
def test_a_base_of_another_shape_is_refused(tmp_path, options, match):
    other = tiny("llama", **options)
    model = tiny("llama")
    other.model.embed_tokens.weight = model.model.embed_tokens.weight
    base = write_base(other, tmp_path / "base.gguf")
    calibrate(model)
    with pytest.raises(CalibrationError, match=match):
        export_gguf(model, tmp_path / "model.gguf", base)


@converted_weights
@pytest.mark.filterwarnings("ignore:vLLM .* runs the experts of a layer in one scheme")
def test_a_part_of_a_layers_experts_is_refused(tmp_path):
    model = tiny("qwen3_moe")
    base = write_base(model, tmp_path / "base.gguf")
    linearize_experts(model)
    calibrate(model, ignore=["lm_head", "re:.*mlp.gate$", "re:.*layers.1.*experts.3.*"])
    match = r"blk.1.ffn_gate_exps.weight. Got \(4, 32, 64\), .*\(3, 32, 64\).*all experts"
    with pytest.raises(CalibrationError, match=match):
        export_gguf(model, tmp_path / "model.gguf", base)
    calibrate(model, {"Q4_0": ["re:.*experts.[012].*"], "Q8_0": ["re:.*experts.3.*"]}, ignore=[])
    with pytest.raises(CalibrationError, match=r"experts of one layer are one tensor.*blk.0.ffn_gate_exps.weight"):
        export_gguf(model, tmp_path / "model.gguf", base)


def test_a_quantized_embedding_that_is_the_output_layer_is_refused(tmp_path):
    model = tiny("llama", tie_word_embeddings=True)
    base = write_base(model, tmp_path / "base.gguf")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    calibrate(model, "Q8_0", targets=["Embedding"])
    with pytest.raises(CalibrationError, match=r"no output layer: llama.cpp would take the quantized embedding"):
        export_gguf(model, tmp_path / "model.gguf", base)


def test_an_embedding_of_its_own_is_stored(tmp_path):
    model, _, file = written(tmp_path, scheme="Q8_0", targets=["Embedding"])
    weight = weights_of(model)["model.embed_tokens"]
    torch.testing.assert_close(read(file)["token_embd.weight"], weight, rtol=0, atol=0)


def test_scales_that_float16_cannot_hold_are_refused(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-6)
        model.model.layers[1].mlp.up_proj.weight.mul_(1e7)
    base = write_base(model, tmp_path / "base.gguf")
    calibrate(model, {"weights": {"num_bits": 4, "group_size": 32}})
    match = r"float16, which is too narrow for these: model.layers.0.mlp.up_proj, model.layers.1.mlp.up_proj\."
    with pytest.raises(CalibrationError, match=match):
        export_gguf(model, tmp_path / "model.gguf", base)


def test_a_model_that_is_not_as_it_was_calibrated_is_refused(tmp_path):
    model = tiny("llama")
    base = write_base(model, tmp_path / "base.gguf")
    with pytest.raises(CalibrationError, match="LlamaForCausalLM was not calibrated"):
        export_gguf(model, tmp_path / "model.gguf", base)
    calibrate(model)
    nn.init.zeros_(model.model.norm.weight)
    with pytest.raises(CalibrationError, match=r"have changed since.*model.norm.weight"):
        export_gguf(model, tmp_path / "model.gguf", base)


def test_a_base_that_cannot_be_read_is_refused(tmp_path):
    model = calibrate(tiny("llama"))
    with pytest.raises(CalibrationError, match=r"none.gguf does not exist.*convert_hf_to_gguf.py"):
        export_gguf(model, tmp_path / "model.gguf", tmp_path / "none.gguf")
    (tmp_path / "base.gguf").write_bytes(b"no GGUF file" * 10)
    with pytest.raises(CalibrationError, match=r"base.gguf cannot be read. Got ValueError: GGUF magic invalid"):
        export_gguf(model, tmp_path / "model.gguf", tmp_path / "base.gguf")
    for key, value, match in (
        ("split.count", 2, "one of several parts.*--merge"),
        ("general.architecture", "nobody", "no names for its architecture. Got 'nobody'.*pip install -U gguf"),
    ):
        file = tmp_path / f"{key}.gguf"
        writer = gguf.GGUFWriter(file, "nobody" if key == "general.architecture" else "llama")
        if key == "split.count":
            writer.add_uint16(key, value)
        writer.add_tensor("output.weight", np.zeros((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CalibrationError, match=match):
            export_gguf(model, tmp_path / "model.gguf", file)


def test_files_that_are_there_stay(tmp_path):
    model, base, file = written(tmp_path)
    content = file.read_bytes()
    with pytest.raises(CalibrationError, match=r"model.gguf is already there.*overwrite=True"):
        export_gguf(model, file, base)
    with pytest.raises(CalibrationError, match=r"base.gguf is the base itself"):
        export_gguf(model, base, base, overwrite=True)
    shutil.copy(base, file)
    assert export_gguf(model, file, base, overwrite=True).read_bytes() == content


def test_numbers_of_the_base_in_another_type_are_replaced(tmp_path, monkeypatch):
    def add_file_type(writer, number):
        writer.add_uint64("general.file_type", number)

    monkeypatch.setattr(gguf.GGUFWriter, "add_file_type", add_file_type)
    model, base, file = written(tmp_path)
    assert gguf.GGUFReader(base).fields["general.file_type"].types == [gguf.GGUFValueType.UINT64]
    new = gguf.GGUFReader(file)
    assert new.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    assert new.fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert torch.equal(read(file)["output_norm.weight"], model.model.norm.weight)


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    model, base, file = written(tmp_path)
    content = file.read_bytes()

    def write_half(self, file, types, numbers, data):
        file.write_bytes(data(next(iter(types))))
        raise OSError("no space left")

    monkeypatch.setattr(BaseFile, "write", write_half)
    with pytest.raises(CalibrationError, match=r"model.gguf cannot be written. Got no space left"):
        export_gguf(model, file, base, overwrite=True)
    assert file.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "model.gguf"]


def test_the_package_that_is_missing_is_named(tmp_path, monkeypatch):
    model = calibrate(tiny("llama"))

    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(packages.importlib, "import_module", refuse)
    with pytest.raises(CalibrationError, match=re.escape('pip install "lightning-obs[gguf]"')):
        export_gguf(model, tmp_path / "model.gguf", tmp_path / "base.gguf")
