"""One model in memory, and dispatched in each way that leaves its weights on the CPU or on disk until a module runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import cpu_offload, disk_offload
from compressed_tensors.offload import load_offloaded_model, set_onload_device
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM

#: norm and the first block on disk, the other block and the embedding on the CPU
_SPLIT = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
_SPLIT |= {"model.norm": "disk", "model.rotary_emb": "cpu"}


def in_memory(source: Path, folder: Path, **options) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(source, **options).eval()


def device_map_disk(source: Path, folder: Path) -> nn.Module:
    return in_memory(source, folder, device_map={"": "disk"}, offload_folder=str(folder / "disk"))


def device_map_split(source: Path, folder: Path) -> nn.Module:
    return in_memory(source, folder, device_map=_SPLIT, offload_folder=str(folder / "split"))


def on_cpu(source: Path, folder: Path) -> nn.Module:
    return cpu_offload(in_memory(source, folder), execution_device="cpu")


def blocks_on_cpu(source: Path, folder: Path) -> nn.Module:
    """A block's hook brings in all that is below it (``place_submodules``), buffers too."""
    model = in_memory(source, folder)
    return cpu_offload(model, "cpu", offload_buffers=True, preload_module_classes=["LlamaDecoderLayer"])


def on_disk(source: Path, folder: Path) -> nn.Module:
    return disk_offload(in_memory(source, folder), folder / "dat", execution_device="cpu")


def compressed_tensors_disk(source: Path, folder: Path) -> nn.Module:
    # compressed-tensors 0.19 does not take the word; 0.20 looks for an accelerator unless it is the word.
    device_map = "disk" if Version(version("compressed-tensors")) >= Version("0.20") else {"": "disk"}
    with load_offloaded_model(AutoModelForCausalLM):
        model = AutoModelForCausalLM.from_pretrained(source, device_map=device_map, offload_folder=str(folder / "ct"))
    return model.eval()


def compressed_tensors_cpu(source: Path, folder: Path) -> nn.Module:
    model = in_memory(source, folder)
    set_onload_device(model, "cpu")
    return model


Way = Callable[[Path, Path], nn.Module]
WAYS: list[Way] = [
    device_map_disk,
    device_map_split,
    on_cpu,
    blocks_on_cpu,
    on_disk,
    compressed_tensors_disk,
    compressed_tensors_cpu,
]


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 200, (2, 16), generator=torch.Generator().manual_seed(seed))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
