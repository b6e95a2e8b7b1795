"""Weights that stay packed after loading: outputs, gradients, memory, adapters of peft, and what is refused."""

import copy
import io
import pickle
from contextlib import nullcontext

import peft
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    QuantizationAwareTraining,
    export_checkpoint,
    keep_packed,
    quantized,
)
from lightning_obs.model import packed_weight
from lightning_obs.model.packed_weight import PackedWeight
from tests.support.rank_processes import run_ranks
from tests.support.tiny_model import save_tiny_llama

#: peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
INT3 = {"weights": {"num_bits": 3, "strategy": "channel"}}
BLOCKS = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
}
SCHEMES = {
    "int4": INT4,
    "int3": INT3,
    "INT8_STATIC": "INT8_STATIC",
    "W8A8": "W8A8",
    "FP8": "FP8",
    "FP8_DYNAMIC": "FP8_DYNAMIC",
    "blocks": BLOCKS,
    "NVFP4": "NVFP4",
    "NVFP4A16": "NVFP4A16",
    "MXFP4": "MXFP4",
    "MXFP8A16": "MXFP8A16",
}
LORA = {"r": 4, "lora_dropout": 0.0, "target_modules": "all-linear", "init_lora_weights": False}
TOKENS = torch.randint(0, 200, (2, 20), generator=torch.Generator().manual_seed(0))
PROJECTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from a scheme to the folder of a tiny Llama in bfloat16, quantized by it."""
    root = tmp_path_factory.mktemp("checkpoints")
    source = save_tiny_llama(root / "float", torch.bfloat16)

    def make(name, **options):
        folder = root / name
        if not folder.exists():
            model = AutoModelForCausalLM.from_pretrained(source)
            with CalibrationSession(model, SCHEMES.get(name), ignore=["lm_head"], **options) as session:
                if session.needs_data:
                    model(TOKENS)
            export_checkpoint(model, folder)
        return folder

    return make


def load(folder):
    return keep_packed(AutoModelForCausalLM.from_pretrained(folder))


def with_adapters(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).train()


def weight_of(model, name=PROJECTION):
    return model.get_submodule(name).weight


class LanguageModel(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"], use_cache=False).loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def data():
    return DataLoader([{"input_ids": TOKENS}] * 3, batch_size=None)


def trainer(*callbacks, **options):
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )


def validated(module, *callbacks):
    return trainer(*callbacks).validate(module, data(), verbose=False)[0]["loss"]


# ---------------------------------------------------------------------- outputs and gradients


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", SCHEMES)
def test_outputs_equal_those_of_transformers(folder_of, name):
    folder = folder_of(name)
    expected = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
    model = load(folder)
    assert torch.equal(model(TOKENS).logits, expected)
    assert isinstance(weight_of(model), PackedWeight)
    assert torch.equal(copy.deepcopy(model)(TOKENS).logits, expected)


def test_a_model_is_pickled(folder_of):
    model = load(folder_of("int4"))
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(weight_of(again), nn.Parameter)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", SCHEMES)
def test_blocks_of_rows_decompress_as_the_whole(folder_of, name, monkeypatch):
    weights = [parameter for parameter in load(folder_of(name)).parameters() if isinstance(parameter, PackedWeight)]
    whole = [weight.dequantize() for weight in weights]
    monkeypatch.setattr(packed_weight, "_ELEMENTS_AT_ONCE", 1)
    for weight, expected in zip(weights, whole, strict=True):
        assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("name", ["int4", "NVFP4A16", "MXFP8A16"])
def test_adapters_get_the_gradients_that_decompressed_weights_give(folder_of, name):
    gradients = []
    for model in (load(folder_of(name)), decompressed(folder_of(name))):
        adapted = with_adapters(model)
        adapted(TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.requires_grad})
    assert len(gradients[0]) == 28
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def decompressed(folder):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


@pytest.mark.parametrize("name", ["INT8_STATIC", "FP8", "blocks", "NVFP4", "MXFP4"])
def test_gradients_pass_through_quantized_activations(folder_of, name):
    adapted = with_adapters(load(folder_of(name)))
    adapted(TOKENS, labels=TOKENS).loss.backward()
    for parameter in adapted.parameters():
        assert not parameter.requires_grad or parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("around", [nullcontext, quantized])
def test_no_decompressed_weight_waits_for_the_backward(folder_of, around):
    """Neither of the base alone, nor, quantized again, of the sum with the adapters."""
    kept = []
    adapted = with_adapters(load(folder_of("int4")))
    with CalibrationSession(adapted.base_model.model, INT4, ignore=["lm_head"]):
        pass
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value)
    with around(adapted), hooks:
        adapted(TOKENS, labels=TOKENS).loss.backward()
    shapes = {tuple(weight_of(adapted.base_model.model, name).shape) for name in projections(adapted)}
    dense = [value for value in kept if tuple(value.shape) in shapes and not isinstance(value, PackedWeight)]
    assert any(isinstance(value, PackedWeight) for value in kept)
    assert not dense


def projections(adapted):
    names = []
    for name, module in adapted.base_model.model.named_modules():
        if isinstance(getattr(module, "weight", None), PackedWeight) and name.endswith("base_layer"):
            names.append(name)
    return names


def test_a_bias_is_added_and_trained():
    weight = packed(torch.randn(8, 32))
    bias = nn.Parameter(torch.randn(8))
    inputs = torch.randn(3, 32, requires_grad=True)
    F.linear(inputs, weight, bias).square().sum().backward()
    gradients = [inputs.grad, bias.grad]
    inputs.grad = bias.grad = None
    F.linear(inputs, weight.dequantize(), bias).square().sum().backward()
    torch.testing.assert_close(gradients, [inputs.grad, bias.grad])


def packed(weight):
    scheme = QuantizationScheme(targets=["Linear"], weights={"num_bits": 8, "strategy": "channel"})
    scheme.format = "int-quantized"
    codes = weight.clamp(-1, 1).mul(127).to(torch.int8)
    return PackedWeight({"weight": codes, "weight_scale": torch.ones(len(codes), 1) / 127}, scheme, weight.shape,
                        weight.dtype)  # fmt: skip


def test_packed_zero_points_are_read():
    """transformers 5.23 does not load such a checkpoint."""
    scheme = QuantizationScheme(
        targets=["Linear"], weights={"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    )
    scheme.format = "pack-quantized"
    codes = torch.randint(-8, 8, (64, 96))
    scale = torch.rand(64, 3)
    zero_point = torch.randint(-8, 8, (64, 3), dtype=torch.int8)
    expected = ((codes.unflatten(1, (3, 32)) - zero_point[..., None]) * scale[..., None]).flatten(1)
    entries = {"weight": expected, "weight_scale": scale, "weight_zero_point": zero_point}
    tensors = BaseCompressor.get_value_from_registry(scheme.format).compress(entries, scheme)
    del tensors["weight_shape"]
    assert tensors["weight_zero_point"].dtype == torch.int32
    assert torch.equal(PackedWeight(tensors, scheme, (64, 96), torch.float32).dequantize(), expected)


def test_autocast_computes_as_with_the_decompressed_weight():
    weight = packed(torch.randn(8, 32))
    inputs = torch.randn(3, 32, requires_grad=True)
    gradients = []
    for matrix in (weight, weight.dequantize()):
        inputs.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            output = F.linear(inputs, matrix)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)


# ---------------------------------------------------------------------- as a tensor


def test_it_is_counted_by_its_packed_bytes(folder_of):
    weight = weight_of(load(folder_of("int4")))
    assert weight.packed_bytes == 64 * 64 // 2 + 64 * 2 * 2
    assert weight.nbytes == 64 * 64 * 2
    assert (weight.shape, weight.dtype) == ((64, 64), torch.bfloat16)


def test_an_operation_that_reads_it_gives_a_plain_tensor():
    weight = packed(torch.randn(8, 32))
    for result in (weight + 1, weight.T, weight[0], torch.randn(2, 8) @ weight):
        assert type(result) is torch.Tensor
    assert torch.equal(weight + 1, weight.dequantize() + 1)
    assert type(weight.detach()) is PackedWeight


def test_another_dtype_is_of_the_decompressed_weight(folder_of):
    model = load(folder_of("FP8"))
    before = weight_of(model).dequantize()
    adapted = with_adapters(model).float()
    weight = weight_of(model, f"{PROJECTION}.base_layer")
    assert isinstance(weight, PackedWeight)
    assert weight.dequantize().dtype == torch.float32
    assert torch.equal(weight.dequantize(), before.float())
    assert adapted(TOKENS).logits.dtype == torch.float32


def test_a_state_dict_is_saved_and_loaded(folder_of):
    saved = io.BytesIO()
    torch.save(load(folder_of("FP8")).state_dict(), saved)
    saved.seek(0)
    model = load(folder_of("FP8"))
    expected = weight_of(model).dequantize()
    with torch.no_grad():
        weight_of(model).weight_scale.fill_(1)
    model.load_state_dict(torch.load(saved, weights_only=False))
    assert torch.equal(weight_of(model).dequantize(), expected)


def test_equal_values_may_be_written_and_others_not(folder_of):
    weight = weight_of(load(folder_of("int4")))
    with torch.no_grad():
        weight.copy_(weight.dequantize())
        with pytest.raises(CalibrationError, match="cannot take other values"):
            weight.copy_(weight.dequantize() + 1)
    with pytest.raises(CalibrationError, match=r"cannot be changed in place.*zero_"):
        weight.data.zero_()
    with pytest.raises(CalibrationError, match=r"cannot be changed in place.*mul.out"):
        torch.mul(torch.ones(weight.shape), 2, out=weight.data)


# ---------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    "merge",
    [
        lambda adapted: adapted.merge_adapter(),
        lambda adapted: adapted.merge_and_unload(),
        lambda adapted: adapted.merge_and_unload(safe_merge=True),
    ],
)
def test_adapters_are_not_merged_into_packed_weights(folder_of, merge):
    adapted = with_adapters(load(folder_of("int4")))
    before = weight_of(adapted.base_model.model, f"{PROJECTION}.base_layer").dequantize()
    with pytest.raises(CalibrationError, match=r"adapters cannot be merged.*add_.*save_pretrained"):
        merge(adapted)
    assert torch.equal(weight_of(adapted.base_model.model, f"{PROJECTION}.base_layer").dequantize(), before)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["int4", "FP8", "NVFP4"])
def test_adapters_train_in_lightning_and_load_beside_the_checkpoint(folder_of, name, tmp_path):
    module = LanguageModel(with_adapters(load(folder_of(name))))
    before = validated(module)
    trainer(max_epochs=4).fit(module, data(), data())
    after = validated(module)
    assert after < 0.9 * before
    module.model.save_pretrained(tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(folder_of(name))
    base(TOKENS)  # transformers decompresses it, and peft can wrap it
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert validated(LanguageModel(adapted)) == after


def test_a_run_is_resumed_from_lightnings_checkpoint(folder_of, tmp_path):
    module = LanguageModel(with_adapters(load(folder_of("int4"))))
    first = trainer(max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=True)
    first.fit(module, data(), data())
    path = first.checkpoint_callback.best_model_path
    resumed = LanguageModel(with_adapters(load(folder_of("int4"))))
    second = trainer(max_epochs=2)
    second.fit(resumed, data(), data(), ckpt_path=path)
    assert second.current_epoch == 2
    assert validated(resumed) == validated(module)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["int4", "FP8", "NVFP4"])
def test_quantization_aware_training_trains_the_merged_checkpoint(folder_of, name, tmp_path):
    module = LanguageModel(with_adapters(load(folder_of(name))))
    callback = QuantizationAwareTraining(SCHEMES[name], ignore=["lm_head"], calibration_batches=1)
    before = validated(module, callback)
    trainer(callback, max_epochs=4).fit(module, data(), data())
    after = validated(module, callback)
    assert after < 0.9 * before
    assert isinstance(weight_of(module.model.base_model.model, f"{PROJECTION}.base_layer"), PackedWeight)
    callback.export(tmp_path / "merged")
    assert validated(LanguageModel(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))) == after


def test_adapters_are_merged_when_the_model_is_calibrated_again(folder_of, tmp_path):
    module = LanguageModel(with_adapters(load(folder_of("int4"))))
    callback = CalibrationCallback("FP8", ignore=["lm_head", PROJECTION])
    validated(module, callback)
    callback.export(tmp_path / "merged")
    model = decompressed(tmp_path / "merged")
    layer = module.model.base_model.model.get_submodule(PROJECTION)
    merged = (layer.base_layer.weight.dequantize() + layer.get_delta_weight("default")).bfloat16()
    assert torch.equal(weight_of(model), merged)  # left out, so it is in full precision


# ---------------------------------------------------------------------- refused


def test_a_model_in_full_precision_is_refused(folder_of):
    folder_of("int4")
    model = AutoModelForCausalLM.from_pretrained(folder_of("int4").parent / "float")
    with pytest.raises(CalibrationError, match="LlamaForCausalLM was not loaded from a compressed checkpoint"):
        keep_packed(model)


def test_a_model_that_has_run_is_refused(folder_of):
    model = AutoModelForCausalLM.from_pretrained(folder_of("int4"))
    model(TOKENS)
    with pytest.raises(CalibrationError, match=r"is decompressed already: it has run.*before the model runs"):
        keep_packed(model)


def test_a_quantized_kv_cache_is_refused(folder_of):
    model = AutoModelForCausalLM.from_pretrained(folder_of("kv cache", kv_cache="FP8"))
    with pytest.raises(CalibrationError, match=r"quantizes attention or the kv cache.*layers.0.self_attn"):
        keep_packed(model)


def test_training_a_packed_weight_is_refused(folder_of):
    model = load(folder_of("int4"))
    model.requires_grad_(True)
    with pytest.raises(CalibrationError, match=r"packed weights cannot be trained.*freeze them"):
        model(TOKENS)


def trained_on_a_rank(rank, folder):
    """Gradients of adapters, of one step under DDP; then what FSDP2 says."""
    adapted = with_adapters(load(folder))
    wrapped = nn.parallel.DistributedDataParallel(adapted)
    wrapped(TOKENS[rank : rank + 1], labels=TOKENS[rank : rank + 1]).loss.backward()
    gradients = [p.grad for p in adapted.parameters() if p.requires_grad]
    with pytest.raises(CalibrationError, match="cannot be cut into shards"):
        fully_shard(load(folder), mesh=init_device_mesh("cpu", (2,)))
    return gradients


def test_adapters_train_on_ranks_that_each_hold_the_packed_weights(folder_of):
    ranks = run_ranks(trained_on_a_rank, 2, folder_of("FP8"))
    adapted = with_adapters(load(folder_of("FP8")))
    for row in TOKENS:
        (adapted(row[None], labels=row[None]).loss / 2).backward()
    expected = [p.grad for p in adapted.parameters() if p.requires_grad]
    for gradients in ranks:
        torch.testing.assert_close(gradients, expected)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_gradients(folder_of):
    model = load(folder_of("int4"))
    del model.model.layers[1:]  # a second layer is traced as long again
    adapted = with_adapters(model)
    gradients = []
    for model in (adapted, torch.compile(adapted, backend="aot_eager")):
        adapted.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append([p.grad.clone() for p in adapted.parameters() if p.requires_grad])
    torch.testing.assert_close(*gradients)
