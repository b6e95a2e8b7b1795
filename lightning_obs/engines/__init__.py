"""Inference engines, each an object that judges a checkpoint before the checkpoint is written.

Importing this package registers the built-in engines. Start reading in ``engine.py``, which holds the questions; each
further file is an engine's answers.
"""

from lightning_obs.engines.engine import Engine, Hardware, Verdict, ask_engines
from lightning_obs.engines.transformers import Dequantized, Transformers

# In the order in which a run reports them.
from lightning_obs.engines.vllm import VLLM  # isort: skip
from lightning_obs.engines.sglang import SGLang  # isort: skip
from lightning_obs.engines.llama_cpp import LlamaCpp  # isort: skip
from lightning_obs.engines.mlx import MLX  # isort: skip
from lightning_obs.engines.openvino import OpenVINO  # isort: skip

__all__ = [
    "MLX",
    "VLLM",
    "Dequantized",
    "Engine",
    "Hardware",
    "LlamaCpp",
    "OpenVINO",
    "SGLang",
    "Transformers",
    "Verdict",
    "ask_engines",
]
