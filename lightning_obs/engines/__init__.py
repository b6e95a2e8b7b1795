"""Inference engines, each an object that judges a checkpoint before the checkpoint is written.

Importing this package registers the built-in engines. Start reading in ``engine.py``, which holds the questions; each
further file is an engine's answers.
"""

from lightning_obs.engines.engine import Hardware, Verdict, ask_engines
from lightning_obs.engines.transformers_engine import Transformers
from lightning_obs.engines.vllm import VLLM

# In the order in which a run reports them.
from lightning_obs.engines import sglang, llama_cpp  # isort: skip

__all__ = ["VLLM", "Hardware", "Transformers", "Verdict", "ask_engines", "llama_cpp", "sglang"]
