"""Warn, in the sanity check of a fit, of layers that a validation does not call."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.errors import name_list, warn
from lightning_obs.forward.eager import run_eagerly
from lightning_obs.model.mark import keep_hook_out


class SanityWatch:
    """Records which of a session's modules the batches of a sanity check call; nothing is observed.

    `ValidationSchedule` makes one when a sanity check starts that does not calibrate, and holds it until the validation
    or the run ends. Watched are modules whose calibration needs data, except

    - experts, since a few batches do not reach all of them;
    - blocks and followers (``is_block``, ``is_follower``), of which only the output is quantized. A follower that is
      not called, or a block whose output is no sum, loses this output from the plan without an error.

    No graph of ``torch.compile`` runs meanwhile, because a compiled graph may leave out the hooks that note calls.

    Args:
        session: the session whose modules are watched, as far as their calibration needs data.
    """

    def __init__(self, session: CalibrationSession) -> None:
        self._label = session.label
        experts = session.observation.experts
        inside_experts = () if experts is None else tuple(f"{name}." for name in experts.containers)
        needing_data = {name for name, _ in session.data_observers}
        self._uncalled: dict[nn.Module, str] = {}
        self._hooks = ExitStack()
        self._hooks.enter_context(run_eagerly())
        for target in session.plan.targets:
            is_needed = target.name in needing_data and not (target.is_block or target.is_follower)
            if is_needed and not target.name.startswith(inside_experts):
                self._uncalled[target.module] = target.name
                handle = target.module.register_forward_pre_hook(self._record_call)
                self._hooks.callback(keep_hook_out(target.module, handle))
        self._watched_count = len(self._uncalled)

    def _record_call(self, module: nn.Module, args: Any) -> None:
        """The hook before a call of a watched module: the module counts as called from now on."""
        self._uncalled.pop(module, None)

    def close(self) -> None:
        """Remove the hooks; `ValidationSchedule` calls it when the sanity check ends."""
        self._hooks.close()

    def tell(self) -> None:
        """Warn of the modules that were not called, if there are any.

        `ValidationSchedule` calls it on rank 0 at the end of the sanity check.
        """
        names = list(self._uncalled.values())
        if names:
            called_count = self._watched_count - len(names)
            warn(
                f"{self._label}: the sanity check's validation batches called {called_count} of "
                f"{self._watched_count} modules, and not: {name_list(names)}. Modules that a whole validation does not "
                "call either will stay in float. Call them in validation_step, or list them in `ignore` to leave them "
                "on purpose."
            )
