"""transformers' models and tokenizers from a folder or the hub, with errors that name the option."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer

from lightning_obs.checkpoint.patterns import refuse_slow_patterns
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.contents import refuse_damage
from lightning_obs.files.read import naming
from lightning_obs.files.staging import settle_dead

_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_pretrained(
    source: str | os.PathLike[str],
    auto_class: Any = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
) -> tuple[Any, Any]:
    """Load model and tokenizer.

    Args:
        source: a folder or a hub name.
        auto_class: ``AutoModelForCausalLM``...; None: the class that wrote the checkpoint, with its head if it has one.
        dtype: auto (as it was saved), float32, bfloat16 or float16.
        attn_implementation: as in transformers (``sdpa``, ``eager``...); None lets transformers choose.

    Raises:
        CalibrationError: an unknown dtype; no such folder or name; files that have changed since they were exported, or
            that transformers cannot load; a pattern that takes too long; a model without tokenizer.
    """
    if dtype not in _DTYPES:
        raise CalibrationError("model.dtype", got=repr(dtype), expected=f"one of {', '.join(_DTYPES)}")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    folder = Path(source)
    if not folder.exists():
        settle_dead(Path(os.path.abspath(folder)).parent)
    if folder.is_dir():
        refuse_damage(folder)
    expected = "a folder with config.json and weights, or a name on the hub"
    with naming(f"model.path={source}", expected=expected):
        config = AutoConfig.from_pretrained(str(source))
        loader = _class_of(config) if auto_class is None else auto_class
        _refuse_slow_patterns(config, loader, folder)
        model = loader.from_pretrained(str(source), dtype=_DTYPES[dtype], **options).eval()
    _refuse_bad_scales(model, source)
    with naming(f"the tokenizer of model.path={source}", remedy="save one beside the model."):
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    return model, tokenizer


def _class_of(config: Any) -> Any:
    names = config.architectures or ()
    return next((found for name in names if (found := getattr(transformers, name, None)) is not None), AutoModel)


def _refuse_slow_patterns(config: Any, loader: Any, folder: Path) -> None:
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and "re:" in str(quantization):
        with torch.device("meta"):
            model = getattr(loader, "from_config", None) or loader._from_config
            names = [name for name, _ in model(config).named_modules()]
        refuse_slow_patterns(quantization, names, folder / "config.json")


def _refuse_bad_scales(model: Any, source: str | os.PathLike[str]) -> None:
    """Scales of a checkpoint that carries no checksums, damaged beyond doubt."""
    refuse(
        [
            name
            for name, value in model.state_dict().items()
            if name.endswith("scale")
            and value.is_floating_point()
            and not ((value.float() >= 0) & value.float().isfinite()).all()
        ],
        f"model.path={source} has scales that are negative or not finite",
        remedy="copy or export the checkpoint again.",
    )
