"""Calibrate FP8 while Lightning validates, ship the checkpoint, load it back with plain transformers.

python examples/02_fp8_in_validate.py --model <folder or hub name> --out fp8
"""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationCallback, quantized
from lightning_obs.app.models.pretrained import load_pretrained

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=None, help="folder or hub name; default: SmolLM2-135M-Instruct")
parser.add_argument("--out", required=True)
options = parser.parse_args()


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.tokenizer = load_pretrained(options.model)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)


module = LanguageModel()
text = "Lightning already runs the user's data through the user's model. Calibration only has to watch. " * 20
ids = torch.tensor(module.tokenizer(text).input_ids)[: 8 * 32].view(8, 32)

calibration = CalibrationCallback("FP8")
trainer = L.Trainer(callbacks=[calibration], logger=False, enable_checkpointing=False, accelerator="cpu")
trainer.validate(module, DataLoader(ids, batch_size=2))
calibration.export(options.out)

with torch.no_grad(), quantized(module.model):
    calibrated = module.model(input_ids=ids[:1]).logits
with torch.no_grad():
    reloaded = AutoModelForCausalLM.from_pretrained(options.out)(input_ids=ids[:1]).logits
print("largest difference of logits after reloading:", (reloaded - calibrated).abs().max().item())
