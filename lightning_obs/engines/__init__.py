"""Inference engines, each an object that says what it takes of a checkpoint before the checkpoint is written.

Importing this package registers the built-in engines. Start reading in ``engine.py``, which holds the questions; each
further file is an engine's answers.
"""

from lightning_obs.engines.engine import Engine, Hardware, Verdict, ask_engines
from lightning_obs.engines.transformers import Dequantized, Transformers
from lightning_obs.engines.vllm import VLLM

__all__ = ["VLLM", "Dequantized", "Engine", "Hardware", "Transformers", "Verdict", "ask_engines"]
