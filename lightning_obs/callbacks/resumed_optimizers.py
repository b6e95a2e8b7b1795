"""Say why the optimizers of a checkpoint do not fit a quantized fit that resumes from it.

Learned scales are parameters of an optimizer, and which scales are learned follows from the scheme and from ``train``.
If a fit resumes with others, torch finds a parameter group of another size, and knows nothing of scales.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from lightning_obs.errors import CalibrationError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def check_resumed_optimizers(trainer: Trainer, class_name: str, scheme: str, train: str) -> Callable[[], None]:
    """Let optimizers refuse a checkpoint of another scheme, or of another ``train``, in words of these options.

    ``QuantizationAwareTraining`` calls it in ``on_fit_start``, before Lightning restores the optimizers. The checkpoint
    is read again only if the number of its parameters differs.

    Args:
        trainer: runs the fit.
        class_name: of the callback, with which the keys of its states begin.
        scheme: the label of the callback's scheme.
        train: the callback's option.

    Returns:
        A function that takes the checks off the optimizers.
    """

    def check(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Called by ``optimizer.load_state_dict`` before it compares the groups itself."""
        saved_sizes = [len(group["params"]) for group in state["param_groups"]]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if saved_sizes != sizes:
            _refuse_other_training(callback_states(trainer), class_name, scheme, train)

    stack = ExitStack()
    if trainer.ckpt_path is not None:
        for optimizer in trainer.optimizers:
            stack.callback(optimizer.register_load_state_dict_pre_hook(check).remove)
    return stack.close


def callback_states(trainer: Trainer) -> dict[str, Any]:
    """Read the states of all callbacks, by their keys, in the checkpoint of the present run; empty if it has none."""
    path = trainer.ckpt_path
    if path is None:
        return {}
    if os.path.isdir(path):  # a checkpoint of shards has the callbacks in a file of their own
        path = os.path.join(path, "meta.pt")
    states: dict[str, Any] = trainer.strategy.checkpoint_io.load_checkpoint(path).get("callbacks", {})
    return states


def _refuse_other_training(states: dict[str, Any], class_name: str, scheme: str, train: str) -> None:
    """Raise a CalibrationError if a checkpoint is of another scheme or ``train``; else torch's own error follows.

    Args:
        states: of the checkpoint's callbacks, by their keys: ``QuantizationAwareTraining{'scheme': 'FP8', ...}``.
        class_name, scheme, train: of the present callback.
    """
    saved = []
    learns_scales = train != "weights"
    for key, state in states.items():
        name, brace, options = str(key).partition("{")
        if name == class_name and brace:
            saved_scheme = ast.literal_eval(brace + options).get("scheme")
            saved_train = state.get("train")
            saved.append(f"scheme {saved_scheme} with train={saved_train!r}")
            learns_scales = learns_scales or saved_train != "weights"
    present = f"scheme {scheme} with train={train!r}"
    if learns_scales and present not in saved:
        raise CalibrationError(
            "the checkpoint's optimizer trains other parameters than this fit: learned scales are among them, and "
            "which these are follows from scheme and `train`",
            got=f"a checkpoint of {' and '.join(saved) or 'a fit without QuantizationAwareTraining'}",
            expected=present,
            remedy="resume with scheme and `train` of the checkpoint; or begin a new fit from its weights: "
            "module.load_state_dict(torch.load(path)['state_dict']), then fit without ckpt_path.",
        )
