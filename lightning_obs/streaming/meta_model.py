"""Build the model of a checkpoint without data: every tensor that its files may hold is on the meta device.

``source.py`` does this for every checkpoint that is quantized from its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_obs.errors import CalibrationError
from lightning_obs.files.tensors import TensorReader
from lightning_obs.model.kinds import require_transformers


def build_on_meta(folder: Path, reader: TensorReader) -> Any:
    """Return the model that wrote a checkpoint, in evaluation mode; all tensors of its state dict are meta tensors.

    Called by the constructor of `CheckpointSource`.

    Args:
        folder: the checkpoint, with transformers' ``config.json``.
        reader: its tensors; where the config names no dtype, the model has the dtype of the first floating tensor.

    Returns:
        A ``PreTrainedModel``, in the dtype that ``from_pretrained`` gives it.

    Raises:
        CalibrationError: transformers does not know the architecture, or is too old.
    """
    require_transformers()
    import transformers

    with custom_code_named(str(folder), "load the model with its own code, and calibrate it in memory."):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class = _class_of_transformers(config.architectures or ())
    if model_class is None:
        raise CalibrationError(
            f"transformers {transformers.__version__} does not know the architecture of {folder}",
            got=", ".join(config.architectures or ()) or "no architectures",
            remedy="load the model with its own code, and calibrate it in memory (CalibrationSession).",
        )
    dtype = config.dtype or _first_floating_dtype(reader)
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    _move_constants_to_meta(model)
    model.tie_weights()
    return model.eval()


def _class_of_transformers(names: Any) -> Any:
    """The first class among ``names`` that transformers has; None without one."""
    import transformers

    for name in names:
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    return None


def _first_floating_dtype(reader: TensorReader) -> torch.dtype | None:
    """The dtype of the first tensor in floating point; None without one."""
    for name in reader:
        dtype = reader.meta(name).dtype
        if dtype.is_floating_point:
            return dtype
    return None


def _move_constants_to_meta(model: Any) -> None:
    """Replace tensors of the state dict that a constructor has made on a device of its own choice by meta tensors.

    The constructor's values are initial values; those of the checkpoint are read from the files later. Buffers that no
    file holds (``persistent=False``) stay: ``CheckpointSource.make_buffers`` computes them anew before the model runs.
    :func:`build_on_meta` calls this once the model is built.
    """
    meta_tensors = {}
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta:
            meta_tensors[name] = tensor.to("meta")
    model.load_state_dict(meta_tensors, strict=False, assign=True)


@contextmanager
def custom_code_named(name: str, remedy: str) -> Iterator[None]:
    """Turn transformers' error about ``trust_remote_code`` into a CalibrationError inside a ``with`` block.

    :func:`build_on_meta` reads the config in such a block, and the command line loads models and tokenizers in one.

    Args:
        name: of the loaded thing, for the error: a folder, or the tokenizer of a folder.
        remedy: how the user can go on.
    """
    try:
        yield
    except ValueError as error:
        if isinstance(error, CalibrationError) or "trust_remote_code" not in str(error):
            raise
        raise CalibrationError(
            f"{name} comes with code of its own, which is not run unasked",
            expected="a model whose class is in transformers",
            remedy=remedy,
        ) from error
