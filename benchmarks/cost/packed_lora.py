"""Memory and time of LoRA on a packed checkpoint, and of fine-tuning a whole model, beside their plain counterparts.

    python benchmarks/cost/packed_lora.py                                  # LoRA on the default model, on a CPU
    python benchmarks/cost/packed_lora.py lora --device cuda --size 8b     # on a Llama of 8B parameters
    python benchmarks/cost/packed_lora.py qat --device cuda --size 8b      # W4A16 trained whole, beside plain training
    python benchmarks/cost/packed_lora.py lora qat --device cpu --size tiny   # shows that it runs

``lora`` trains adapters of rank 16 on all Linears of the blocks: on the float model, and on the model in packed int4
(groups of 64; on a device of 128). ``limit`` is the peak on the float model, less its float bytes, plus the packed
bytes and one layer, and 5 %. ``qat`` trains every weight in bfloat16, with AdamW whose states are in bfloat16.

Each row is a process of its own. On a CPU a peak is of resident memory above what is resident before the model is
loaded; ``loading`` is that peak while it is loaded. On a device it is what torch has allocated. With ``--size`` the
model has random weights, is made where it runs, one layer after the other, and is trained in bfloat16 with activation
checkpointing; a step is the median of all but the first.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from lightning.pytorch import Callback, LightningModule, Trainer
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lightning_obs import QuantizationAwareTraining, keep_packed, quantize_checkpoint
from lightning_obs.model.packed_weight import PackedWeight

ROWS = {"lora": ("float", "packed int4"), "qat": ("plain", "W4A16")}
SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1024},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
}
HEADS = {
    "tiny": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "1b": {"num_attention_heads": 32, "num_key_value_heads": 4},
    "8b": {"num_attention_heads": 32, "num_key_value_heads": 8},
}
#: groups of 64 divide the 576 columns of the default model
GROUPS_OF_64 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class FineTuning(LightningModule):
    """Next-token prediction of the parameters that require gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens = batch["input_ids"]
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=1e-5, fused=True)  # fused: no temporary in the size of the model


class Clock(Callback):
    """Takes the time of each step."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        synchronize(self._device)
        self._started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._started)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", default=["lora"], help="lora, qat")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, help="a Llama of random weights; default: the default model")
    parser.add_argument("--model", help="a folder; default: the default model")
    parser.add_argument("--tokens", type=int, default=None, help="of a step; default: 256, with --size 1024")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", help="measure this row in this process")
    parser.add_argument("--folder", help="the packed checkpoint of --row")
    options = parser.parse_args()
    if options.tokens is None:
        options.tokens = {None: 256, "tiny": 64}.get(options.size, 1024)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no CUDA device here; --size tiny --device cpu shows that this runs.", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    if options.row is not None:
        print(json.dumps(measured(options.tables[0], options.row, options)))
        return 0
    for table in options.tables:
        print_table(table, options)
    return 0


def print_table(table: str, options: argparse.Namespace) -> None:
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    model_name = options.size or options.model or "the default model"
    print(f"\n{table}: {model_name}, 1 x {options.tokens} tokens, {where}, torch {torch.__version__}")
    print(f"{'':14s}{'peak [MB]':>12s}{'loading [MB]':>14s}{'model [MB]':>12s}{'step [s]':>10s}")
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "packed"
        if table == "lora" and options.size is None:
            quantize_checkpoint(model_folder(options), folder, GROUPS_OF_64, ignore=["lm_head"])
        for row in ROWS[table]:
            result = in_a_process(table, row, folder, options)
            results[row] = result
            cells = f"{result['peak'] / 1e6:12,.0f}{result['loading'] / 1e6:14,.0f}{result['model'] / 1e6:12,.0f}"
            print(f"{row:14s}{cells}{result['step']:10.3f}", flush=True)
    plain, other = (results[row] for row in ROWS[table])
    if table == "qat":
        peak = other["peak"] / plain["peak"]
        print(f"W4A16 beside plain: peak {peak:.3f}, step {other['step'] / plain['step']:.3f}")
        return
    limit = 1.05 * (plain["peak"] - plain["model"] + other["model"] + plain["layer"])
    print(f"limit {limit / 1e6:,.0f} MB: peak / limit {other['peak'] / limit:.3f}; step / step on the float model "
          f"{other['step'] / plain['step']:.2f}")  # fmt: skip


def in_a_process(table: str, row: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """What this script measures in a process of its own."""
    command = [sys.executable, __file__, table, "--row", row, "--folder", str(folder), "--device", options.device]
    command += ["--tokens", str(options.tokens), "--steps", str(options.steps), "--threads", str(options.threads)]
    if options.size is not None:
        command += ["--size", options.size]
    if options.model is not None:
        command += ["--model", options.model]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measured(table: str, row: str, options: argparse.Namespace) -> dict[str, float]:
    """Peak, peak of loading, bytes of the model and of its largest quantized layer, and seconds a step."""
    device = torch.device(options.device)
    warm_up(device)
    memory = Memory(device)
    model = load(row, options, device)
    loading = memory.peak()
    model_bytes = sum(tensor.nbytes for parameter in model.parameters() for tensor in stored_tensors(parameter))
    layer_bytes = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            layer_bytes = max(layer_bytes, module.weight.numel() * module.weight.element_size())
    memory.restart_peak()
    seconds = fit(model, table, row, options, device)
    step = statistics.median(seconds[1:])
    return {"peak": memory.peak(), "loading": loading, "model": model_bytes, "layer": layer_bytes, "step": step}


class Memory:
    """The memory of this process above what it is when this is made: resident, or allocated on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart_peak()
        self._before = self._now()

    def restart_peak(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """The peak since the last restart [bytes]."""
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else resident("VmHWM")
        return peak - self._before

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else resident("VmRSS")


def resident(key: str) -> int:
    """``VmRSS``, the resident memory, or ``VmHWM``, its peak [bytes]."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(rf"{key}:\s+(\d+)", status)
    assert kilobytes is not None
    return int(kilobytes[1]) * 1024


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def warm_up(device: torch.device) -> None:
    """Import and allocate what every process does once."""
    model = get_peft_model(make_llama("tiny", torch.device("cpu"), packed=True), LoraConfig(target_modules=TARGETS))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    if device.type == "cuda":
        torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)


# ---------------------------------------------------------------------- models


def model_folder(options: argparse.Namespace) -> Path:
    if options.model is not None:
        return Path(options.model)
    from lightning_obs.app.models.pretrained import default_model_folder

    return default_model_folder()


def load(row: str, options: argparse.Namespace, device: torch.device) -> nn.Module:
    if options.size is not None:
        return make_llama(options.size, device, packed=row.startswith("packed"))
    if row.startswith("packed"):
        model = keep_packed(AutoModelForCausalLM.from_pretrained(options.folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(model_folder(options))
    for parameter in model.parameters():
        for tensor in stored_tensors(parameter):
            tensor.data = tensor.data.clone()  # else it would be a mapped file, resident or not
    return model


def stored_tensors(parameter: nn.Parameter) -> list[torch.Tensor]:
    if isinstance(parameter, PackedWeight):
        return list(parameter.tensors.values())
    return [parameter]


def make_llama(size: str, device: torch.device, packed: bool) -> nn.Module:
    """A Llama of random weights in bfloat16, made one layer after the other where it runs."""
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, **SIZES[size], **HEADS[size])
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    for name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            if weight.ndim == 1:
                weight.fill_(1)
            else:
                weight.normal_(std=0.02)
            if packed and isinstance(module, nn.Linear) and name != "lm_head":
                weight = pack(weight, scheme)
            setattr(module, key, nn.Parameter(weight, requires_grad=not packed))
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model


@torch.no_grad()
def pack(weight: torch.Tensor, scheme: QuantizationScheme) -> PackedWeight:
    """A weight in int4, with the scale of each group from its largest value."""
    args = scheme.weights
    groups = weight.unflatten(1, (-1, args.group_size))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scheme.format = "pack-quantized"
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    entries = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
    tensors = compressor.compress(entries, scheme)
    del tensors["weight_shape"]
    return PackedWeight(tensors, scheme, weight.shape, weight.dtype)


# ---------------------------------------------------------------------- training


def fit(model: nn.Module, table: str, row: str, options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train a few steps; their times [s]."""
    if options.size is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    clock = Clock(device)
    callbacks: list[Callback] = [clock]
    if table == "lora":
        model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.0, target_modules=TARGETS))
    elif row == "W4A16":
        callbacks.append(QuantizationAwareTraining("W4A16", ignore=["lm_head"]))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    batches = []
    for _ in range(options.steps):
        batches.append({"input_ids": torch.randint(0, vocabulary, (1, options.tokens), generator=generator)})
    trainer = Trainer(
        max_steps=options.steps,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(FineTuning(model.train()), DataLoader(batches, batch_size=None))
    return clock.seconds


if __name__ == "__main__":
    sys.exit(main())
