"""What tests ask of the versions that are installed: Python 3.10 has older releases than the others."""

from importlib.metadata import version

import pytest
from packaging.version import Version

dequantizes_activations_too = pytest.mark.skipif(
    Version(version("compressed-tensors")) < Version("0.20"),
    reason="up to compressed-tensors 0.19, what is loaded with dequantize=True still quantizes activations",
)


def checkpointing_of(model):
    """The method of a transformers model that switches activation checkpointing on, whatever its name there."""
    return getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
