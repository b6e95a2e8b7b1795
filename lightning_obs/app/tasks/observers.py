"""Choose the observer of each weight and input by measurement, then calibrate with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typing_extensions import override

from lightning_obs.app.console import say, step
from lightning_obs.app.tasks.choosing import ChoosingTask
from lightning_obs.choice.observer_choice import choose_for
from lightning_obs.report.summary import print_report


class Observers(ChoosingTask):
    """Every second calibration batch is observed, the others score the observers."""

    @override
    def check_task(self) -> None:
        """Refuse observers that do not exist."""
        super().check_task()
        for base_name, observers in self.candidates.items():
            for observer in [observers] if isinstance(observers, (str, dict)) else observers:
                replace(self.job.callback.options, observers={base_name: observer})

    @override
    def choose(self) -> dict[str, Any]:
        """Score the candidates, print the table, write the choice."""
        with step("scoring observers"):
            choice, options = choose_for(
                self.job.model, self.calibration_batches(), self.job.callback.options, self.candidates or None
            )
        print_report(choice.table())
        say(f"wrote {self.write_scheme(choice.config, 'Observers chosen by task=observers.')}  (scheme=plan)")
        self.calibrate_with(options)
        return {}

    @override
    def passes(self, needs_data: bool) -> int:
        """Observing and scoring, too."""
        return super().passes(needs_data) + 2 * self.batches("batches")
