"""Translate errors for the command line: the package's errors name arguments in Python, the user typed config keys."""

from __future__ import annotations

import re


def _unquoted(names: str) -> str:
    """A list in Python as Hydra's grammar takes it: ``[Linear,Conv1D]``."""
    return re.sub(r"[\"' ]", "", names)


#: regular expressions of Python's options in errors, and their replacements
_REPLACEMENTS = (
    (r"dtype=torch\.bfloat16", "model.dtype=bfloat16"),
    (r"dtype=torch\.float32, or call model\.float\(\) before it is calibrated", "model.dtype=float32"),
    (r"device_map='auto'", "model.device_map=auto"),
    (r"\btargets=(\[[^\]]*\])", lambda match: f"scheme.targets={_unquoted(match[1])}"),
    (r"engines=[\"'](\S+?)[\"']", r"export.engines=\1"),
    (r"overwrite=True(.*?) \(a callback's export_overwrite=True\)", r"export.overwrite=true\1"),
    (r"overwrite=True would delete", "export.overwrite=true would delete"),
    (r"kv_cache=[\"']FP8[\"']", "kv_cache=fp8"),
    (r"scheme=[\"'](\w+)[\"']", lambda match: f"scheme={match[1].lower()}"),
    (r"rounding=[\"']gptq[\"']", "rounding=gptq"),
    (r"observers=\{[\"']weight[\"']: [\"'](\w+)[\"']\}", r"weight_observer=\1"),
    (r"CalibrationCallback\(observers='auto'\) and choose_observers\([\w, ]+\) choose", "task=observers chooses"),
    (r"CalibrationCallback or CalibrationSession", "task=calibrate"),
    (r"do not call linearize_experts", "set model.linearize_experts=false"),
    (r"(does not fit into memory, )calibrate_layerwise", r"\1model.layerwise=true"),
)


def in_words(text: str) -> str:
    """The text of an error, with Python's options replaced by keys of the command line; for ``overrides.explained``.

    >>> in_words("load the model in bfloat16 (dtype=torch.bfloat16), or set engines='unchecked'.")
    'load the model in bfloat16 (model.dtype=bfloat16), or set export.engines=unchecked.'
    >>> in_words("set overwrite=True, which replaces a checkpoint (a callback's export_overwrite=True).")
    'set export.overwrite=true, which replaces a checkpoint.'
    >>> in_words("set targets=['Linear', 'Conv1D'].")
    'set scheme.targets=[Linear,Conv1D].'
    """
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    return text
