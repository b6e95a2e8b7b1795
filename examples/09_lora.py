"""Train LoRA adapters (peft) through 4-bit weights; merge, export, load with plain transformers.

python examples/09_lora.py --model <folder or hub name> --out w4a16_lora

The base model is frozen. What is quantized is weight plus adapters, because that is what is shipped.
"""

import argparse
import math

import lightning as L
import peft
import torch
from transformers import AutoModelForCausalLM

from lightning_obs import QuantizationAwareTraining
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import load_pretrained

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=None, help="folder or hub name; default: SmolLM2-135M-Instruct")
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--tokens", type=int, default=256, help="of a step")
parser.add_argument("--learning-rate", type=float, default=1e-3)
options = parser.parse_args()

# Groups of 64: they divide the 576 columns of the default model, the preset's 128 do not.
W4A16 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}}


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
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=options.learning_rate)


def trainer(*callbacks: L.Callback, **more: object) -> L.Trainer:
    return L.Trainer(callbacks=list(callbacks), accelerator="cpu", logger=False, enable_checkpointing=False, **more)


def perplexity(module: L.LightningModule, *callbacks: L.Callback) -> float:
    (logged,) = trainer(*callbacks).validate(module, data.test_dataloader(), verbose=False)
    return math.exp(logged["loss"])


L.seed_everything(0)
model, tokenizer = load_pretrained(options.model)
data = TextData(tokenizer, tokens=options.tokens, batches=1, train_batches=options.steps, eval_batches=12)
adapters = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
module = LanguageModel(peft.get_peft_model(model, adapters).train())
trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
full = perplexity(module)

# Names are those of the merged model. 4-bit weights need no data: the first validation measures already.
callback = QuantizationAwareTraining(W4A16, distill=1.0)
calibrated = perplexity(module, callback)

trainer(callback, max_steps=options.steps, gradient_clip_val=1.0).fit(module, data.train_dataloader())
tuned = perplexity(module, callback)
module.model.merge_and_unload()
callback.export(options.out, tokenizer=tokenizer)

reloaded = perplexity(LanguageModel(AutoModelForCausalLM.from_pretrained(options.out)))
print(f"{trained:,} parameters trained")
print(f"perplexity on held-out text: full precision {full:.3f}, calibrated only {calibrated:.3f}", end=", ")
print(f"fine-tuned {tuned:.3f}, merged, exported and loaded again {reloaded:.3f}")
print("difference after loading:", abs(reloaded - tuned))
