"""Let a reader of checkpoints other than vLLM read some, in the environment of `make engines`, and write what it read.

    .venv-engines/bin/python benchmarks/engines/in_readers.py READER CHECKPOINTS

``READER``: llama.cpp or sglang. ``CHECKPOINTS``: a folder of checkpoints. For each checkpoint the reader's own code
gives either a reason to refuse it or tensors, which are written into the checkpoint as ``READER.safetensors``:
llama.cpp's converter makes a GGUF file, whose weights are dequantized here under their names in transformers; SGLang
gives the tensors of its Linear layers after loading. ``READER.json`` has the reasons by checkpoint, empty where there
is none. llama.cpp's converter is looked for in the folder that the variable LLAMA_CPP names, or where `make engines`
puts it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file

LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", Path(sys.prefix) / "llama.cpp"))
Read = Callable[[Path], dict[str, torch.Tensor]]


class RefusedError(Exception):
    """What a reader would refuse, or leave out, only as it runs."""


def main(reader: str, checkpoints: Path) -> None:
    answer = checkpoints / f"{reader}.json"
    try:
        read = READERS[reader]()
    except ModuleNotFoundError as error:
        answer.write_text(json.dumps({"missing": str(error)}))
        return
    answers: dict[str, str] = {}
    for folder in sorted(path for path in checkpoints.iterdir() if path.is_dir()):
        try:
            found = read(folder)
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / f"{reader}.safetensors")
            answers[folder.name] = ""
        except Exception as error:
            own = Path(traceback.extract_tb(error.__traceback__)[-1].filename) == Path(__file__)
            if own and not isinstance(error, RefusedError):
                raise  # a fault of this file; the reader's reason is an answer
            answers[folder.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    answer.write_text(json.dumps({"refused": answers}))


# ---------------------------------------------------------------------- llama.cpp's converter


def llama_cpp() -> Read:
    """``convert_hf_to_gguf.py`` without its vocabulary: the tokenizer of a tiny model is none that it knows."""
    sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]
    import conversion
    import gguf
    import numpy

    def read(folder: Path) -> dict[str, torch.Tensor]:
        config = json.loads((folder / "config.json").read_text())
        kind = conversion.get_model_class(config["architectures"][0])
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.gguf"
            model = kind(folder, gguf.LlamaFileType.ALL_F32, file, eager=True)
            model.set_vocab = lambda: None
            model.write()
            tensors = {each.name: each for each in gguf.GGUFReader(file).tensors}
            found = {}
            for name in [name for name in tensors if name.startswith("blk.") and tensors[name].data.ndim == 2]:
                numbers = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
                if (scale := tensors.get(name.replace(".weight", ".scale"))) is not None:  # NVFP4's global scale
                    numbers = numbers * scale.data
                found[in_transformers(name)] = in_order(torch.tensor(numpy.array(numbers)), name, config)
        return found

    return read


def in_transformers(name: str) -> str:
    """``blk.0.attn_q.weight`` as transformers names it in a Llama."""
    _, layer, module, _ = name.split(".")
    parts = {"attn": "self_attn.{}_proj", "ffn": "mlp.{}_proj"}
    kind, which = module.split("_")
    return f"model.layers.{layer}.{parts[kind].format({'output': 'o'}.get(which, which))}.weight"


def in_order(weight: torch.Tensor, name: str, config: dict[str, Any]) -> torch.Tensor:
    """The rows of q and k, which a GGUF file has in the order of its rotary embedding."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[2])
    if heads is None:
        return weight
    return weight.unflatten(0, (config[heads], -1, 2)).transpose(1, 2).flatten(0, 2)


# ---------------------------------------------------------------------- SGLang


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that SGLang imports and that are not installed: kernels, a notebook's display, and the like."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        outside = "sglang" not in Path(frame.f_code.co_filename).parts or name.startswith("sglang.")
        return None if outside else importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class Stub(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return self.__dict__.setdefault(name, MagicMock())

        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


#: parts of SGLang's fused Linear layers, by attribute, with the name of the part for its weight loader
FUSED = {
    "self_attn.qkv_proj": {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"},
    "mlp.gate_up_proj": {"mlp.gate_proj": 0, "mlp.up_proj": 1},
    "self_attn.o_proj": {"self_attn.o_proj": None},
    "mlp.down_proj": {"mlp.down_proj": None},
}
CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))


def sglang() -> Read:
    """SGLang's Linear layers of a Llama with its compressed-tensors config, on no GPU: its kernels are not there.

    SGLang chooses a class by the compute capability, for which this says what it is told; ``capability`` is the least
    that loads the checkpoint.
    """
    from transformers import AutoProcessor  # noqa: F401, transformers looks for packages before stubs are there

    sys.meta_path.append(Absent())
    from sglang.srt.layers import linear
    from sglang.srt.layers.quantization import marlin_utils
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    def layers(config: dict[str, Any], prefix: str) -> dict[str, torch.nn.Module]:
        read = CompressedTensorsConfig.from_config(config["quantization_config"])
        read.packed_modules_mapping = {
            fused.split(".")[1]: [part.split(".")[1] for part in parts] for fused, parts in FUSED.items()
        }
        if read.kv_cache_scheme is not None and read.kv_cache_quant_algo is None:
            raise RefusedError("the kv cache's scheme is ignored")
        wide, inner = config["hidden_size"], config["intermediate_size"]
        heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        sizes = {
            "self_attn.qkv_proj": (linear.QKVParallelLinear, (wide, wide // heads, heads, key_heads)),
            "mlp.gate_up_proj": (linear.MergedColumnParallelLinear, (wide, [inner, inner])),
            "self_attn.o_proj": (linear.RowParallelLinear, (wide, wide)),
            "mlp.down_proj": (linear.RowParallelLinear, (inner, wide)),
        }
        common = {"bias": False, "quant_config": read, "params_dtype": torch.bfloat16, "parallel_group": "replicated"}
        return {name: kind(*size, prefix=f"{prefix}.{name}", **common) for name, (kind, size) in sizes.items()}

    def load(folder: Path, prefix: str = "model.layers.0") -> dict[str, torch.Tensor]:
        stored = load_file(folder / "model.safetensors")
        made = layers(json.loads((folder / "config.json").read_text()), prefix)
        for layer in made.values():  # what Marlin's kernel takes; asked of it as it runs
            group = getattr(getattr(layer.scheme, "kernel_config", None), "group_size", -1)
            if group not in marlin_utils.MARLIN_SUPPORTED_GROUP_SIZES:
                raise RefusedError(f"Marlin does not take groups of {group}")
        for name, parts in FUSED.items():
            parameters = dict(made[name].named_parameters())
            for part, shard in parts.items():
                for key in [key for key in stored if key.startswith(f"{prefix}.{part}.")]:
                    parameter = parameters[key.rpartition(".")[2]]
                    parameter.weight_loader(parameter, stored[key], *([] if shard is None else [shard]))
        return {
            f"{prefix}.{name}.{key}": tensor.detach()
            for name, layer in made.items()
            for key, tensor in layer.named_parameters()
        }

    def read(folder: Path) -> dict[str, torch.Tensor]:
        for capability in CAPABILITIES:
            torch.cuda.get_device_capability = lambda *_, has=capability: has
            try:
                found = load(folder)
                break
            except Exception:
                if capability == CAPABILITIES[-1]:
                    raise
        return {**found, "capability": torch.tensor(capability)}

    return read


READERS: dict[str, Callable[[], Read]] = {
    "llama.cpp": llama_cpp,
    "sglang": sglang,
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
