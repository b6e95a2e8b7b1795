"""LoRA adapters of peft on the command line's causal models (``model.lora``, ``model.adapters``).

``CausalLM`` (``language.py``) calls these functions in its constructor. ``task=lora`` trains adapters and writes them,
``task=finetune`` trains them through the quantization of the merged weights, ``task=calibrate`` merges them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from lightning_obs.app.from_config import plain
from lightning_obs.errors import CalibrationError, refuse, refuse_unknown
from lightning_obs.files.read import naming
from lightning_obs.model.module_qparams import calibrated_modules
from lightning_obs.model.packed_weight import has_packed
from lightning_obs.packages import import_package

#: the file by which peft knows a folder of adapters
_CONFIG = "adapter_config.json"


def refuse_both(lora: Mapping[str, Any] | None, folder: str | os.PathLike[str] | None) -> None:
    """Refuse new adapters beside saved ones, and a folder without adapters; called before the model is loaded.

    Args:
        lora: arguments for new adapters; None: none are made.
        folder: the folder of saved adapters; None: none are loaded.

    Raises:
        CalibrationError: both are given; ``folder`` is not one that peft has saved.
    """
    if lora is not None and folder is not None:
        raise CalibrationError(
            "model.adapters loads adapters, and model.lora makes new ones",
            got="both",
            remedy="leave one of them out: model.lora=null goes on from the adapters of model.adapters.",
        )
    if folder is not None and not (Path(folder) / _CONFIG).is_file():
        raise CalibrationError(f"model.adapters={folder} has no {_CONFIG}", expected="a folder that peft has saved")


def add_adapters(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    """Give a model new adapters, which are the only parameters that are trained.

    ``CausalLM`` calls it for ``model.lora``, after the weights are loaded.

    Args:
        model: a model of transformers; its weights may be packed.
        lora: the arguments of peft's ``LoraConfig``.

    Returns:
        peft's wrapper around ``model``.

    Raises:
        CalibrationError: peft is not installed; an argument that it does not know or take; a quantized model whose
            weights are not packed.
    """
    peft = import_package("peft", "model.lora")
    _refuse_unpacked(model, "model.lora")
    known = [field.name for field in fields(peft.LoraConfig) if field.init]
    refuse_unknown(lora, known, "model.lora has an argument that peft's LoraConfig does not know")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(**plain(lora)))
    except (TypeError, ValueError) as error:
        raise CalibrationError(
            "peft does not take model.lora", got=str(error).splitlines()[0], expected="arguments of its LoraConfig"
        ) from error


def load_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Give a model the adapters that peft has saved in ``folder``; they are the only parameters that are trained.

    ``CausalLM`` calls it for ``model.adapters``, after the weights are loaded.

    Returns:
        peft's wrapper around ``model``.

    Raises:
        CalibrationError: peft is not installed; the folder cannot be read, or is of another model; a quantized model
            whose weights are not packed.
    """
    peft = import_package("peft", "model.adapters")
    _refuse_unpacked(model, "model.adapters")
    with naming(f"model.adapters={folder}", expected="adapters that peft has saved of the model at model.path"):
        return peft.PeftModel.from_pretrained(model, os.fspath(folder), is_trainable=True)


def _refuse_unpacked(model: nn.Module, key: str) -> None:
    """Refuse a quantized model that will be decompressed when it runs, which replaces weights that adapters read."""
    names = [name for name, _ in calibrated_modules(model)]
    refuse(
        [] if has_packed(model) else names,
        f"{key} on a quantized checkpoint whose weights do not stay packed",
        remedy="model.keep_packed=true.",
    )
