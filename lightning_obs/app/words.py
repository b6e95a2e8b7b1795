"""What the remedies of errors, which are in words of Python, are called on the command line."""

from __future__ import annotations

#: words of Python in an error, and what to type instead
_TYPED = {
    "export_overwrite=True": "export.overwrite=true",
    "CalibrationCallback(observers='auto')": "task=observers",
    "does not fit into memory, calibrate_layerwise": "model.layerwise=true",
    "a device_map that offloads it": "model.device_map=auto",
    "do not call linearize_experts": "model.linearize_experts=false",
}


def typed_remedy(error: str) -> str:
    """What to type for the remedies of an error; empty where nothing is known.

    >>> typed_remedy("out is already there. Remedy: set export_overwrite=True.")
    'On the command line: export.overwrite=true'
    """
    typed = [words for python, words in _TYPED.items() if python in error]
    return f"On the command line: {', '.join(typed)}" if typed else ""
