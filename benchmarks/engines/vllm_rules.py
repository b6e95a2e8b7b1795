"""Ask vLLM's own compressed-tensors code which schemes it takes, without a model, in vLLM's environment.

    .venv-engines/bin/python benchmarks/engines/vllm_rules.py QUESTIONS.json ANSWERS.json

``QUESTIONS.json``: ``[{"config": quantization config of a checkpoint, "experts": bool}, ...]``. Answers: per question
the name of the class that vLLM chooses, or ``"refused: ..."``. No kernel is looked for, and every capability is there.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe

EXPERTS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"


def main(questions: Path, answers: Path) -> None:
    no_kernels()
    config = VllmConfig()
    config.model_config = MagicMock(spec=ModelConfig, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        found = [ask(each["config"], each["experts"]) for each in json.loads(questions.read_text())]
    answers.write_text(json.dumps(found))


def ask(config: dict[str, Any], experts: bool) -> str:
    try:
        read = CompressedTensorsConfig.from_config(config)
        read.packed_modules_mapping = {}
        if experts:
            method = compressed_tensors_moe.CompressedTensorsMoEMethod.get_moe_method(read, RoutedExperts(), "experts")
            return type(method).__name__
        parts = read.target_scheme_map["Linear"]
        chosen = read._get_scheme_from_parts(
            parts["weights"], parts["input_activations"], parts["output_activations"], parts["format"], "layer"
        )
        return type(chosen).__name__
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"


class RoutedExperts:
    """As much of vLLM's class of this name as is asked."""

    moe_config = MagicMock(hidden_dim=256, intermediate_size_per_partition=256, moe_backend="auto")
    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"


def no_kernels() -> None:
    for name, module in vars(schemes).items():
        if name.startswith("compressed_tensors_"):
            for each in [n for n in vars(module) if re.fullmatch(r"init_\w+_kernel", n)]:
                setattr(module, each, MagicMock())
    for file in Path(compressed_tensors_moe.__file__).parent.glob("compressed_tensors_moe_*.py"):
        if "flydsl" in file.stem:  # of AMD's cards
            continue
        module = importlib.import_module(f"{EXPERTS}.{file.stem}")
        for each in [n for n in vars(module) if re.fullmatch(r"select_\w+_moe_backend", n)]:
            setattr(module, each, lambda *_, **__: (None, None))
    CompressedTensorsConfig._check_scheme_supported = staticmethod(lambda *_, **__: True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
