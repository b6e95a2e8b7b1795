"""The Lightning that the program runs, under either of its names; this package imports it here only (and in ``app``).

``lightning.pytorch`` and ``pytorch_lightning`` are two packages with the same classes twice. A Trainer, its strategy,
loops, loggers and callbacks are of one of them, and an ``isinstance`` with the other's class is always false. So:

- Users' objects are recognized by :func:`class_of`, which compares the names of their classes.
- Where one of Lightning's private classes is needed (the second pass of a validation), it is derived from the class
  that the given Trainer itself uses.
- Functions are taken from the package that is imported already. To import the other one would take a second, and
  redirect the messages of the first: ``lightning_utilities`` keeps one logger for both, that of the last one imported.
- :class:`Callback` derives from the class of each package that is imported: a Trainer that is given a callback outside
  of a list, and LightningCLI, ask for their own.
"""

from __future__ import annotations

import operator
import sys
from importlib import import_module
from typing import Any

from lightning_utilities.core.imports import compare_version

#: the name of each package of Lightning, and of its part without a Trainer
_PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_IMPORTED = [name for name in _PACKAGES if name in sys.modules] or ["lightning.pytorch"]
_PYTORCH = _IMPORTED[0]
_FABRIC = _PACKAGES[_PYTORCH]
#: the first part of the names of Lightning's modules
_ROOTS = {name.partition(".")[0] for name in [*_PACKAGES, *_PACKAGES.values()]}

_callbacks: tuple[Any, ...] = tuple(import_module(f"{name}.callbacks").Callback for name in _IMPORTED)


class Callback(*_callbacks):  # type: ignore[misc]
    """Lightning's callback, for a Trainer of either package."""


#: Lightning 2.4: ``validate``, ``test`` and ``predict`` with ``ckpt_path`` restore no callback
RESTORES_IN_FIT_ONLY = compare_version(_PYTORCH.partition(".")[0], operator.lt, "2.5.0")
TrainerFn: Any = import_module(f"{_PYTORCH}.trainer.states").TrainerFn  # equal to the other package's
isolate_rng: Any = import_module(f"{_PYTORCH}.utilities.seed").isolate_rng
is_param_in_hook_signature: Any = import_module(f"{_PYTORCH}.utilities.signature_utils").is_param_in_hook_signature
collect_rng_states: Any = import_module(f"{_FABRIC}.utilities.seed")._collect_rng_states
set_rng_states: Any = import_module(f"{_FABRIC}.utilities.seed")._set_rng_states
move_data_to_device: Any = import_module(f"{_FABRIC}.utilities").move_data_to_device


def class_of(value: object, *names: str) -> type[Any] | None:
    """The class of Lightning, in either package, of which a value is an instance; None if it is of none.

    Args:
        value: a Trainer's strategy, logger or callback, a LightningModule...
        *names: of the classes to look for.

    Returns:
        The first of these classes in the order of inheritance, so that it is also found for a user's subclass.
    """
    for one in type(value).__mro__:
        if one.__name__ in names and one.__module__.partition(".")[0] in _ROOTS:
            return one
    return None
