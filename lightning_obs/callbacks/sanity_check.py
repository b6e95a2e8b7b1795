"""What a fit's sanity check tells of the calibration to come: which layers a validation does not call."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.errors import name_list, warn
from lightning_obs.forward.shared_blocks import run_eagerly
from lightning_obs.model.additions import keep_hook_out


class SanityWatch:
    """Sees which of a session's modules the batches of a sanity check call; nothing is observed.

    Experts are not watched: few batches do not reach all of them.
    """

    def __init__(self, session: CalibrationSession) -> None:
        self._label = session.label
        inside_experts = tuple(f"{name}." for name in session.observation.experts.containers)
        needing_data = {name for name, _ in session.data_observers}
        self._uncalled: dict[nn.Module, str] = {}
        self._hooks = ExitStack()
        self._hooks.enter_context(run_eagerly())
        for target in session.plan.targets:
            if target.name in needing_data and not target.name.startswith(inside_experts):
                self._uncalled[target.module] = target.name
                handle = target.module.register_forward_pre_hook(self._see)
                self._hooks.callback(keep_hook_out(target.module, handle))
        self._watched = len(self._uncalled)

    def _see(self, module: nn.Module, _: Any) -> None:
        self._uncalled.pop(module, None)

    def close(self) -> None:
        """Take the hooks out."""
        self._hooks.close()

    def tell(self) -> None:
        """Warn of the modules that were not called."""
        names = list(self._uncalled.values())
        if names:
            warn(
                f"{self._label}: the sanity check's validation batches called {self._watched - len(names)} of "
                f"{self._watched} modules, and not: {name_list(names)}. Those that a whole validation does not call "
                "either will stay in float. Call them in validation_step, or list them in `ignore` to leave them "
                "on purpose."
            )
