"""A handful of checkpoints of a tiny model, run by vLLM itself and by transformers on the same tokens."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_obs import CalibrationSession, QuantizationAwareTraining, export_checkpoint, quantized
from tests.engines.test_schemes_in_vllm import in_vllm, pytestmark

__all__ = ["pytestmark"]  # slow, and skipped where vLLM's environment is not there

TOKEN8 = {"num_bits": 8, "strategy": "token", "dynamic": True}
MIXED = {
    "attention": {
        "targets": ["re:.*self_attn.*_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": TOKEN8,
    },
    "mlp": {"targets": ["re:.*mlp.*_proj"], "weights": {"num_bits": 4, "group_size": 64}},
}
#: scheme, further options, and the model's dtype: vLLM runs packed integers in bfloat16 only
CASES = {
    "W8A8": ("W8A8", {}, "float32"),
    "INT8_STATIC": ("INT8_STATIC", {}, "float32"),
    "INT8_STATIC_ASYM": ("INT8_STATIC_ASYM", {}, "float32"),
    "W4A16": ("W4A16", {}, "bfloat16"),
    "kv cache": ("W8A8", {"kv_cache": "FP8"}, "float32"),
    "mixed": (MIXED, {}, "bfloat16"),
}
#: Mean difference of log-probabilities. vLLM scales dynamic int8 by amax / 127, compressed-tensors by amax / 127.5, and
#: one step of rounding in a layer decides others behind it: docs/evidence/vllm.md.
BOUND = 0.15


def blocks(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (1, 64), generator=generator) for _ in range(count)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=256,
        num_hidden_layers=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def log_probabilities(folder, dtype):
    found = []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    for block in blocks(1, 3):
        with torch.no_grad():
            of_all = model(block, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(of_all.gather(-1, block[0, 1:, None])[:, 0])
    return torch.stack(found)


def in_engine(folder, dtype, scratch, *arguments):
    job = {"blocks": [block[0].tolist() for block in blocks(1, 3)], "prompt": [5, 6, 7], "dtype": dtype}
    (scratch / "job.json").write_text(json.dumps(job))
    in_vllm("in_vllm.py", folder, scratch / "job.json", scratch / "answer.json", *arguments)
    answer = json.loads((scratch / "answer.json").read_text())
    assert "refused" not in answer, answer
    return torch.tensor(answer["logprobs"])


def difference(one, other):
    return float((one - other).abs().mean())


@pytest.mark.parametrize("name", CASES)
def test_vllm_gives_what_transformers_gives(model, tmp_path, name):
    scheme, options, dtype = CASES[name]
    folder = saved(model, tmp_path / "before")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with CalibrationSession(model, scheme, ignore=["lm_head"], engines="vllm", **options) as session, torch.no_grad():
        for block in blocks(2, 4) if session.needs_data else ():
            model(block)
    export_checkpoint(model, tmp_path / "checkpoint")
    here = log_probabilities(tmp_path / "checkpoint", dtype)
    bound = 0.35 if "kv_cache" in options else BOUND  # vLLM's operation on the CPU rounds the cache towards zero
    assert difference(in_engine(tmp_path / "checkpoint", dtype, tmp_path), here) < bound


@pytest.mark.parametrize(("bits", "arguments"), [(4, ()), (8, ("--plain",))])  # no kernel for W8A16 on the CPU
def test_vllm_reads_negative_scales_as_this_package_does(model, tmp_path, bits, arguments):
    model = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path / "before"), dtype=torch.bfloat16).eval()
    signed = {"weight": {"name": "memoryless_mse", "signed": True}}
    scheme = {"weights": {"num_bits": bits, "group_size": 64}}
    with CalibrationSession(model, scheme, ignore=["lm_head"], engines="vllm", observers=signed) as session:
        pass
    negative = [float((v < 0).float().mean()) for n, v in session.qparams.items() if n.endswith("weight_scale")]
    assert min(negative) > 0.2
    export_checkpoint(model, tmp_path / "checkpoint")
    with quantized(model), torch.no_grad():
        logits = [model(block, use_cache=False).logits[0, :-1].float().log_softmax(-1) for block in blocks(1, 3)]
    here = torch.stack([of.gather(-1, b[0, 1:, None])[:, 0] for of, b in zip(logits, blocks(1, 3), strict=True)])
    there = in_engine(tmp_path / "checkpoint", "bfloat16", tmp_path, *arguments)
    print(
        f"{bits} bits: {min(negative):.2f} of the scales negative, mean difference {difference(there, here):.4f} nats"
    )
    assert difference(there, here) < BOUND


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model.train()

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch, batch_idx):
        self.model(input_ids=batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_fine_tuned_model_runs_in_vllm(model, tmp_path):
    callback = QuantizationAwareTraining("W8A8", ignore=["lm_head"], observe="train", calibration_batches=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, callbacks=[callback], accelerator="cpu", enable_model_summary=False, **quiet)
    before = difference(log_probabilities(saved(model, tmp_path / "before"), "float32"), torch.zeros(()))
    data = DataLoader(torch.cat(blocks(1, 3) * 3), batch_size=1)
    trainer.fit(Module(model), data, data)
    callback.export(tmp_path / "checkpoint")
    here = log_probabilities(tmp_path / "checkpoint", "float32")
    assert difference(here, torch.zeros(())) < before - 0.3  # it has learned
    assert difference(in_engine(tmp_path / "checkpoint", "float32", tmp_path), here) < BOUND


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def test_one_wrong_scale_is_seen(model, tmp_path):
    with CalibrationSession(model, "W8A8", ignore=["lm_head"]):
        pass
    export_checkpoint(model, tmp_path / "checkpoint")
    here = log_probabilities(tmp_path / "checkpoint", "float32")
    file = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight_scale"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    assert difference(in_engine(tmp_path / "checkpoint", "float32", tmp_path), here) > 2 * BOUND
