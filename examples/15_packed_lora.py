"""Train LoRA adapters (peft) on an int4 checkpoint whose weights stay packed; save them, then merge and quantize again.

python examples/15_packed_lora.py --model <folder or hub name> --out packed_lora

``--out`` gets three folders: ``base``, the quantized checkpoint; ``adapters``, to be served beside it
(``vllm serve base --enable-lora --lora-modules mine=adapters``); and ``merged``, one checkpoint of both.
"""

import argparse
import math
from pathlib import Path

import lightning as L
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_obs import CalibrationCallback, keep_packed, quantize_checkpoint
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import default_model_folder

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=None, help="folder or hub name; default: SmolLM2-135M-Instruct")
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--tokens", type=int, default=256, help="of a step")
options = parser.parse_args()

# Groups of 64: they divide the 576 columns of the default model, the preset's 128 do not.
W4A16 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}}


class LanguageModel(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch, labels=batch["input_ids"], use_cache=False).loss

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self.loss(batch), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def trainer(*callbacks: L.Callback, **more: object) -> L.Trainer:
    return L.Trainer(callbacks=list(callbacks), accelerator="cpu", logger=False, enable_checkpointing=False, **more)


def validated(module: L.LightningModule, *callbacks: L.Callback) -> dict[str, float]:
    (logged,) = trainer(*callbacks).validate(module, data.test_dataloader(), verbose=False)
    return logged


L.seed_everything(0)
out = Path(options.out)
source = options.model or default_model_folder()
data = TextData(
    AutoTokenizer.from_pretrained(source),
    tokens=options.tokens,
    batches=1,
    train_batches=options.steps,
    eval_batches=12,
)
quantize_checkpoint(source, out / "base", W4A16, ignore=["lm_head"])

# int4 weights stay packed: each is decompressed while its Linear runs, and once more in the backward.
model = keep_packed(AutoModelForCausalLM.from_pretrained(out / "base"))
adapters = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
module = LanguageModel(peft.get_peft_model(model, adapters).train())
base = validated(module)["loss"]
trainer(max_steps=options.steps, gradient_clip_val=1.0).fit(module, data.train_dataloader())
tuned = validated(module)["loss"]
module.model.save_pretrained(out / "adapters")

# One checkpoint of both: calibration adds the adapters to each weight, and quantizes the sum.
weights = {"weight": "imatrix_mse"}
callback = CalibrationCallback(W4A16, ignore=["lm_head"], observers=weights, evaluate=True, log=True)
merged = validated(module, callback)
callback.export(out / "merged")

again = validated(LanguageModel(AutoModelForCausalLM.from_pretrained(out / "merged")))["loss"]
print(f"perplexity on held-out text: packed {math.exp(base):.3f}, with adapters {math.exp(tuned):.3f}", end=", ")
print(f"merged and quantized again {math.exp(merged['loss_quantized']):.3f}, loaded again {math.exp(again):.3f}")
print(f"divergence that quantizing again costs: {merged['quant/divergence']:.4f} nats")
print("difference after loading:", abs(again - merged["loss_quantized"]))
