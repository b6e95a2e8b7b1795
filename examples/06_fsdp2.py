"""Calibrate weights that are sharded over two processes (FSDP2): each observes its own rows.

python examples/06_fsdp2.py --model <folder or hub name> --out fp8
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
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

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):  # Lightning may call this twice
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.model(input_ids=batch)


def main() -> None:
    module = LanguageModel()
    text = "Lightning already runs the user's data through the user's model. Calibration only has to watch. " * 20
    ids = torch.tensor(module.tokenizer(text).input_ids)[: 8 * 32].view(8, 32)

    calibration = CalibrationCallback("FP8", observers={"weight": "memoryless_mse"})
    trainer = L.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=2,
        accelerator="cpu",
        callbacks=[calibration],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.validate(module, DataLoader(ids, batch_size=2))
    calibration.export(options.out)  # on every rank: weights are gathered one module at a time, rank 0 writes
    if trainer.is_global_zero:
        print(f"{len(calibration.result.modules)} modules on {calibration.result.ranks} ranks")
    torch.distributed.destroy_process_group()  # gloo may abort a process that ends without (pytorch #190489)


if __name__ == "__main__":  # the other ranks run this file too
    main()
