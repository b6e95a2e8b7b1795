"""nn.TransformerEncoder with and without linearize_attention: bytes of its checkpoint, time of a float forward.

python benchmarks/cost/linear_attention.py

Six layers of width 256; one thread, medians in turns, batches of 8 x 64 tokens. "fused": torch's own operation for a
whole layer, in evaluation without gradients, which calls no module.
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from lightning_obs import CalibrationSession, export_checkpoint, linearize_attention

CALLS = 30


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()


def folder_bytes(model: nn.Module, x: torch.Tensor) -> tuple[int, str]:
    with CalibrationSession(model, "INT8_STATIC") as session:
        model(x)
    with tempfile.TemporaryDirectory() as parent:
        folder = export_checkpoint(model, Path(parent) / "folder")
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size, session.result.line(", ").partition("left in float: ")[2]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(8, 64, 256)
    model = encoder()
    linear = copy.deepcopy(model)
    linearize_attention(linear)
    models = {"as it is, fused": model, "as it is, not fused": model, "linearize_attention": linear}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(CALLS):
        for name, net in models.items():
            torch.backends.mha.set_fastpath_enabled(name != "as it is, not fused")
            start = time.perf_counter()
            net(x)
            times[name].append(1000 * (time.perf_counter() - start))
    torch.backends.mha.set_fastpath_enabled(True)
    difference = float((model(x) - linear(x)).abs().max())
    in_float = sum(parameter.nbytes for parameter in model.parameters())
    sizes = {"as it is, fused": folder_bytes(model, x), "linearize_attention": folder_bytes(linear, x)}
    print(f"largest difference of outputs {difference:.1e}\n")
    print("| encoder | left in float | checkpoint, beside float | float forward |")
    print("|---|---|---|---|")
    for name in models:
        size, left = sizes.get(name, (0, ""))
        share = f"{size / in_float:.0%}" if size else ""
        print(f"| {name} | {left} | {share} | {median(times[name]):.1f} ms |")


if __name__ == "__main__":
    main()
