"""Calibrate on two processes: each sees half of the data, both end with the same scales, rank 0 writes.

python examples/05_ddp.py --model <folder or hub name> --out int8
torchrun --standalone --nproc_per_node=2 examples/05_ddp.py --model <folder or hub name> --out int8
"""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback
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
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)


def main() -> None:
    module = LanguageModel()
    text = "Lightning already runs the user's data through the user's model. Calibration only has to watch. " * 20
    ids = torch.tensor(module.tokenizer(text).input_ids)[: 7 * 32].view(7, 32)  # 2 does not divide 7: told, and exact

    calibration = CalibrationCallback("INT8_STATIC", observers={"input": "histogram"})
    trainer = L.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", callbacks=[calibration], logger=False, enable_checkpointing=False
    )
    trainer.validate(module, DataLoader(ids, batch_size=2))
    calibration.export(options.out)  # on every rank; rank 0 writes
    result = calibration.result
    if trainer.is_global_zero:
        print(f"{len(result.modules)} modules on {result.ranks} ranks in {result.collectives} collectives")
    torch.distributed.destroy_process_group()  # gloo may abort a process that ends without (pytorch #190489)


if __name__ == "__main__":  # the other ranks run this file too
    main()
