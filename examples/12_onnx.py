"""Images from training to an int8 ONNX file: a residual network on scikit-learn's digits, run by onnxruntime.

python examples/12_onnx.py --out digits.onnx
"""

import argparse
import os

import lightning as L
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationCallback, quantized

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=8)
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU()  # as a module its output is quantized, so the sum is computed with integers

    def forward(self, x):
        y = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(y)) + x)


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), *[Block(32) for _ in range(3)],
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, _):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


L.seed_everything(0, verbose=False)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=64, shuffle=True)
validation = DataLoader(TensorDataset(images[1200:1400], labels[1200:1400]), batch_size=50)
held_out = images[1400:]

# Calibrates in each validation; the last one is exported.
callback = CalibrationCallback("INT8_ONNX")
trainer = L.Trainer(max_epochs=options.epochs, callbacks=[callback], accelerator="cpu", logger=False,
                    enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
module = Digits()
trainer.fit(module, train, validation)

# Also says how much of it onnxruntime computes with integers, and how fast that is.
file = callback.export_onnx(options.out, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), overwrite=True)

session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
[output] = session.run(None, {session.get_inputs()[0].name: held_out.numpy()})
answers = torch.from_numpy(output).argmax(1)
module.eval()
with torch.no_grad():
    in_float = module(held_out).argmax(1)
    with quantized(module):
        expected = module(held_out).argmax(1)
accuracies = [(predicted == labels[1400:]).float().mean() for predicted in (in_float, answers)]
print(f"accuracy {accuracies[0]:.3f} in float, {accuracies[1]:.3f} in onnxruntime")
print(f"the same answers as quantized(): {(answers == expected).float().mean():.0%}")
weights = sum(value.nbytes for value in module.state_dict().values())
print(f"{os.path.getsize(file):,} bytes; the weights alone have {weights:,} in float32")
