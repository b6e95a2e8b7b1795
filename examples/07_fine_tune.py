"""Fine-tune your own module through 3-bit weights and 4-bit inputs, where calibration alone is not enough.

python examples/07_fine_tune.py --out stripes_w3a4
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import QuantizationAwareTraining, load_checkpoint, quantized

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
options = parser.parse_args()

SCHEME = {
    "targets": ["Linear", "Conv2d"],
    "weights": {"num_bits": 3, "strategy": "channel"},
    "input_activations": {"num_bits": 4, "strategy": "tensor"},
}


class Stripes(L.LightningModule):
    """Says whether the stripes of a 16x16 picture are horizontal or vertical; knows nothing of quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
            nn.Linear(32, 2),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def pictures(count: int, seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    lines = (torch.rand(count, 1, 16, 1, generator=generator) > 0.5).float().expand(-1, -1, -1, 16)
    vertical = torch.rand(count, generator=generator) > 0.5
    images = torch.where(vertical.view(-1, 1, 1, 1), lines.transpose(-1, -2), lines)
    noisy = images + 0.3 * torch.randn(images.shape, generator=generator)
    return DataLoader(TensorDataset(noisy, vertical.long()), batch_size=64)


def trainer(*callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        max_epochs=3, callbacks=list(callbacks), logger=False, enable_checkpointing=False, accelerator="cpu"
    )


L.seed_everything(0)
module = Stripes()
training = pictures(512, seed=0)
held_out = pictures(256, seed=1)
trainer().fit(module, training, held_out)
(full,) = trainer().validate(module, held_out, verbose=False)

callback = QuantizationAwareTraining(SCHEME, module="net", train="all")
trainer(callback).validate(module, training, verbose=False)  # the first validation calibrates, ...
(calibrated,) = trainer(callback).validate(module, held_out, verbose=False)  # ... later ones measure
trainer(callback).fit(module, training, held_out)
(tuned,) = trainer(callback).validate(module, held_out, verbose=False)
callback.export(options.out)

images = held_out.dataset.tensors[0]
with torch.no_grad(), quantized(module.net):
    trained = module.net(images)
with torch.no_grad():
    loaded = load_checkpoint(Stripes().net, options.out)(images)
print(f"held-out loss: full precision {full['loss']:.4f}", end=", ")
print(f"calibrated {calibrated['loss']:.4f}, fine-tuned {tuned['loss']:.4f}")
print("largest difference after loading:", (loaded - trained).abs().max().item())
