"""transformers' models and tokenizers from a folder or the hub, with errors that name the option."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer

from lightning_obs.errors import CalibrationError

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
        CalibrationError: an unknown dtype; no such folder or name; a model without tokenizer.
    """
    if dtype not in _DTYPES:
        raise CalibrationError("model.dtype", got=repr(dtype), expected=f"one of {', '.join(_DTYPES)}")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        loader = _class_of(str(source)) if auto_class is None else auto_class
        model = loader.from_pretrained(str(source), dtype=_DTYPES[dtype], **options).eval()
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"transformers cannot load model.path={source}",
            got=str(error).splitlines()[0],
            expected="a folder with config.json and weights, or a name on the hub",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"model.path={source} has no tokenizer", got=str(error).splitlines()[0], remedy="save one beside the model."
        ) from error
    return model, tokenizer


def _class_of(source: str) -> Any:
    names = AutoConfig.from_pretrained(source).architectures or ()
    return next((found for name in names if (found := getattr(transformers, name, None)) is not None), AutoModel)
