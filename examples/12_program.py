"""A Lightning module in int8 as a program of torch.export, which ExecuTorch and torch.compile take.

python examples/12_program.py --out digits.pt2
"""

import argparse
import os

import lightning as L
import torch
import torch.ao.quantization.fx._decomposed  # registers the operations of programs
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationCallback, quantized

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()
file = options.out if options.out.endswith(".pt2") else f"{options.out}.pt2"

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(),
            nn.Linear(1024, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


module = Digits()
calibration = CalibrationCallback("INT8_ONNX", module="net", show=False)
trainer = L.Trainer(
    max_epochs=options.epochs, callbacks=[calibration], accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
train = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=128, shuffle=True)
held_out = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=397)
trainer.fit(module, train, held_out)

# For one image; the example is the validation's first. backend="xnnpack" for ExecuTorch, "inductor" for torch.compile.
calibration.export_program(file, overwrite=True)
program = torch.export.load(file).module()
net = module.net.eval()
with torch.no_grad():
    logits = torch.cat([program(image) for image in images[1400:].split(1)])
    with quantized(net):
        expected = net(images[1400:])

floats = sum(value.nbytes for value in net.state_dict().values())
accuracy = (logits.argmax(1) == labels[1400:]).float().mean()
are_same = torch.equal(logits.argmax(1), expected.argmax(1))
print(f"accuracy {accuracy:.3f} of the program, the same answers: {are_same}")
print(f"{os.path.getsize(file):,} bytes; the weights alone have {floats:,} in float32")
