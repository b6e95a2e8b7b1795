"""Your own convolutions in int8 as an ONNX file, run by onnxruntime.

python examples/12_onnx.py --out digits.onnx
"""

import argparse
import os

import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

from lightning_obs import CalibrationSession, export_onnx, measure_onnx, quantized

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(options.epochs):
    for rows in torch.randperm(1400).split(128):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
model.eval()

held_out = images[1400:]
held_out_labels = labels[1400:]
with torch.no_grad():
    with CalibrationSession(model, "INT8_ONNX"):
        model(images[:512])
    with quantized(model):
        expected = model(held_out)

file = export_onnx(model, options.out, held_out, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), overwrite=True)
session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
input_name = session.get_inputs()[0].name
[output] = session.run(None, {input_name: held_out.numpy()})
logits = torch.from_numpy(output)

floats = sum(value.nbytes for value in model.state_dict().values())
answers = logits.argmax(1)
accuracy = (answers == held_out_labels).float().mean()
are_same = torch.equal(answers, expected.argmax(1))
print(f"accuracy {accuracy:.3f} in onnxruntime, the same answers: {are_same}")
print(f"largest difference of logits {(logits - expected).abs().max():.2g} of {expected.abs().max():.1f}")
print(f"{os.path.getsize(file):,} bytes; the weights alone have {floats:,} in float32")
print(measure_onnx(model, file, held_out))
