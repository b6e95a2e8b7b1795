"""What tests ask of the releases that are installed: those of ``make oldest``, and the last ones for Python 3.10."""

import re
from importlib.metadata import version

import pytest
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

#: Models whose weights transformers converts while it loads them (all mixtures of experts) need a newer transformers
#: than others. Under an older one such a test has to end in the package's own words that say so, and counts as skipped
#: (``tests/conftest.py``).
converted_weights = pytest.mark.converted_weights

#: compressed-tensors 0.19 has none
HAS_FLOATS_OF_6_BITS = "MXFP6A16" in PRESET_SCHEMES


def checkpointing_of(model):
    """The method of a transformers model that switches activation checkpointing on, whatever its name there."""
    return getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable


def is_said_to_be_too_old(error: BaseException) -> bool:
    """Whether the error, of the package or of a test that expected something else, says that a release is too old.

    It is False where the installed release is as new as the error asks for.
    """
    words = re.search(r"needs (\S+)>=(\S+?)[.] Got (\S+) (\S+?)[.] Remedy: pip install -U", str(error))
    if words is None:
        return error.__context__ is not None and is_said_to_be_too_old(error.__context__)
    package, oldest = words[1], Version(words[2])
    return words[3] == package and Version(version(package)) < oldest


def needs_architectures(*names: str) -> pytest.MarkDecorator:
    """A test of architectures that older releases of transformers do not have."""
    missing = [name for name in names if name not in CONFIG_MAPPING_NAMES]
    return pytest.mark.skipif(bool(missing), reason=f"this transformers does not have {', '.join(missing)}")


def needs_release(package: str, oldest: str, reason: str) -> pytest.MarkDecorator:
    """A test of what older releases of a package do not do."""
    return pytest.mark.skipif(Version(version(package)) < Version(oldest), reason=f"{package}<{oldest}: {reason}")


dequantizes_activations_too = needs_release(
    "compressed-tensors", "0.20", "what is loaded with dequantize=True still quantizes activations"
)
