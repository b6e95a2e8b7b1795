"""The Lightning that the program runs, under either of its names; imported only here and by the command line.

``lightning.pytorch`` and ``pytorch_lightning`` are two packages with the same classes. The objects of a run (Trainer,
strategy, loops, loggers, callbacks) come from one of them, and an ``isinstance`` with the other's class is False. So:

- Users' objects are recognized by :func:`class_of`, which compares the names of their classes.
- Where one of Lightning's private classes is needed (the second pass of a validation), it is the class that the Trainer
  itself uses.
- Functions come from the package that is imported already. Importing the other one would take a second, and would
  redirect the messages of the first: ``lightning_utilities`` has one logger for both, set by the last one imported.
- :class:`Callback` derives from the ``Callback`` of each package that is imported, as LightningCLI and a Trainer that
  takes a callback outside of a list check for their own class.
"""

from __future__ import annotations

import operator
import sys
from importlib import import_module
from typing import Any

from lightning_utilities.core.imports import compare_version

#: each package of Lightning, and its subpackage without a Trainer
_PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
#: the packages that are imported already; lightning where neither is
_IMPORTED = [name for name in _PACKAGES if name in sys.modules] or ["lightning.pytorch"]
_PYTORCH = _IMPORTED[0]
_FABRIC = _PACKAGES[_PYTORCH]
#: the first part of the names of Lightning's modules
_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")

#: the ``Callback`` of each of these packages
_callback_classes: list[Any] = [import_module(f"{name}.callbacks").Callback for name in _IMPORTED]


class Callback(*_callback_classes):  # type: ignore[misc]
    """Lightning's callback, for a Trainer of either package; the base class of all callbacks of this package."""


#: True under Lightning 2.4, whose ``validate``, ``test`` and ``predict`` with ``ckpt_path`` restore no callback
RESTORES_IN_FIT_ONLY = compare_version(_PYTORCH.partition(".")[0], operator.lt, "2.5.0")
TrainerFn: Any = import_module(f"{_PYTORCH}.trainer.states").TrainerFn  # equal to the other package's
isolate_rng: Any = import_module(f"{_PYTORCH}.utilities.seed").isolate_rng
LightningDataModule: Any = import_module(_PYTORCH).LightningDataModule
is_param_in_hook_signature: Any = import_module(f"{_PYTORCH}.utilities.signature_utils").is_param_in_hook_signature
collect_rng_states: Any = import_module(f"{_FABRIC}.utilities.seed")._collect_rng_states
set_rng_states: Any = import_module(f"{_FABRIC}.utilities.seed")._set_rng_states
rank_zero_only: Any = import_module(f"{_FABRIC}.utilities.rank_zero").rank_zero_only
move_data_to_device: Any = import_module(f"{_FABRIC}.utilities").move_data_to_device


def class_of(value: object, *names: str) -> type[Any] | None:
    """Return which of some classes of Lightning a value is an instance of, in either package.

    Asked wherever an ``isinstance`` would depend on the package: about strategies, loggers, loops and modules.

    Classes of other packages (lightning_colossalai) are not found, whatever their name.

    Args:
        value: a Trainer's strategy, logger or callback, a LightningModule...
        *names: of the classes to look for.

    Returns:
        The first class of these names in the order of inheritance, also for an instance of a user's subclass; None if
        there is none.
    """
    for cls in type(value).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls.__name__ in names and package in _ROOTS:
            return cls
    return None


def ends_a_trial() -> bool:
    """Whether the run that ends now is a search of Lightning's Tuner for a learning rate or a batch size.

    ``teardown`` of both callbacks asks it, because a trial leaves no result. The Tuner ends its trial by an exception
    of its own, and Lightning calls ``teardown`` while it handles that exception.
    """
    return class_of(sys.exc_info()[1], "_TunerExitException") is not None


def package_of(cls: type[Any]) -> str | None:
    """Return which package of Lightning a class derives from: ``lightning.pytorch``, ``pytorch_lightning`` or None.

    The command line asks it about the classes that a config names: the Trainer and the LightningModule have to come
    from the same package.
    """
    for base in cls.__mro__:
        for package in _PACKAGES:
            if base.__module__.startswith(f"{package}."):
                return package
    return None
