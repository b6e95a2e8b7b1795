"""Calibrate: measure, calibrate, measure again, export, load the checkpoint in a new process, report.

The other tasks that calibrate add one step each: a choice before, training after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from lightning_obs.app.checkpoint import write_checkpoint
from lightning_obs.app.console import bytes_done, say, step
from lightning_obs.app.data.module import TextData
from lightning_obs.app.job import Job, Quality, make_options, plain, typed_words
from lightning_obs.app.models.language import LanguageModel, TaskModule
from lightning_obs.app.models.pretrained import DEFAULT_MODEL
from lightning_obs.app.next_steps import is_possible, step_command
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.token_mask import find_mask
from lightning_obs.callbacks.calibration import CalibrationCallback
from lightning_obs.callbacks.possible_steps import can_choose_observers
from lightning_obs.callbacks.session_callback import SessionCallback
from lightning_obs.callbacks.trainable import can_train
from lightning_obs.callbacks.which_module import describe
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.model.weight import model_bytes
from lightning_obs.numerics.histogram import Support
from lightning_obs.report.judgement import judge
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.numbers import folder_size
from lightning_obs.report.page import write_report
from lightning_obs.report.step import Step
from lightning_obs.report.summary import print_report, summary

#: from this many forward passes on, the run says how long they take
_WORTH_SAYING = 20


class Calibrate(Job):
    """Find the ranges in one pass over the data; no weight changes."""

    result: CalibrationResult
    full: Quality | None = None  # on held-out data, in full precision; None: not measured
    quantized: Quality | None = None  # of the exported model
    errors: Sequence[LayerError] = ()
    lines: Sequence[str] = ()
    #: the report's facts for a comparison; empty on ranks that write no report
    found: Mapping[str, Any] = MappingProxyType({})

    @override
    def check(self) -> None:
        """Load everything; refuse scheme, targets, groups, devices, precision, data; name the calibrated module."""
        self.run_with(self.make_callback(make_options(self.config)))
        self.load()
        if self.config.token_mask is not None:
            find_mask(next(iter(self.data.val_dataloader())), self.config.token_mask)
        self.check_task()
        self.check_scheme()

    @override
    def run(self) -> None:
        counts = dict[str, Support]()
        self.say_duration()
        self.full = self.quality("in full precision", as_quantized=False)
        parts = self.choose()  # it may replace the callback
        self.result = self.calibrate()
        self.train()
        self.errors = self.layer_errors(counts)
        self.quantized = self.quality("quantized")
        if self.folder is not None:
            self.lines = write_checkpoint(self, self.folder, self.result)
            self.after_export(self.folder)
        if self.trainer.is_global_zero:
            self.report(counts, parts)

    def make_callback(self, options: CalibrationOptions) -> SessionCallback:
        """The callback that this task runs."""
        of_callback = {"module": self.config.module, "token_mask": self.config.token_mask}
        return CalibrationCallback(options, show=False, **of_callback)  # the run's own report shows more

    def check_task(self) -> None:
        """Refuse configs that this task in particular cannot run."""

    def check_scheme(self) -> None:
        """Check the scheme against the model, and say which module is calibrated."""
        session = self.callback.prepare(self.trainer, self.module)  # it is used again: the model is the same
        say(f"· {describe(self.module, self.config.module, session)}")

    def choose(self) -> Mapping[str, Any]:
        """Choose the schemes or observers to calibrate; returns fields of the report."""
        return {}

    def calibrate(self) -> CalibrationResult:
        """Calibrate in Lightning's validation loop, or without a single batch where the scheme needs none."""
        say(f"· calibrating {self.callback.label}")
        session = self.callback.prepare(self.trainer, self.module)
        with bytes_done("searching the weights", at_once=False) as progress:
            session.show_progress(progress)
            if session.needs_data:
                self.trainer.validate(self.module, datamodule=self.data, verbose=False)
            else:
                say(f"{self.callback.label} needs no data: no batch is run, data.batches is not used")
                say("(static activations use it: int8_static, fp8, nvfp4; weight_observer=imatrix_mse; rounding=gptq)")
                self.to_device()
                with session:
                    pass
        session.show_progress(None)
        assert self.callback.result is not None  # it raised otherwise
        return self.callback.result

    def train(self) -> None:
        """Train the calibrated model."""

    def layer_errors(self, counts: dict[str, Support]) -> Sequence[LayerError]:
        """Each layer's error on ``report.layer_error_batches`` held-out batches, worst first.

        Args:
            counts: filled with how often each input value was seen there, by module name; inputs that an observer
                counted while it calibrated are in it as they were then.
        """
        batches = self.config.report.layer_error_batches
        if batches < 1:
            return ()
        held_out = self.first_inputs(self.data.test_dataloader(), batches)
        with step("measuring each layer's error"):
            return self.callback.layer_errors(held_out, counts)

    def after_export(self, folder: Path) -> None:
        """Measure the exported model."""

    def say_duration(self) -> None:
        """Time the second of two forward passes, and estimate the time of the whole run's, unless they are few."""
        session = self.callback.session
        passes = self.passes(session is None or session.needs_data)
        if passes < _WORTH_SAYING:
            return
        [batch] = self.first_inputs(self.data.test_dataloader(), 1)
        with left_as_it_was(self.model), torch.inference_mode():
            self.model(**batch)
            started = time.perf_counter()
            self.model(**batch)
            seconds = time.perf_counter() - started
        say(
            f"· about {passes * seconds / 60:.1f} minutes for {passes} forward passes of {seconds:.2g} s on each of "
            f"{self.trainer.world_size} device(s), plus the weights and files  (speed=quick: only a few batches)"
        )

    def passes(self, needs_data: bool) -> int:
        """About how many batches the whole run forwards; ``needs_data``: whether calibration runs any."""
        calibrated = self.batches("batches") if needs_data else 0
        return 2 * self.measured + calibrated + int(self.config.report.layer_error_batches)

    def batches(self, name: str) -> int:
        """A number of batches that ``data`` sets; 0 where it has no such key."""
        return int(self.config.data.get(name) or 0)

    @property
    def measured(self) -> int:
        """Batches of one measurement of the model's quality."""
        return self.batches("eval_batches") if self.config.evaluate else 0

    @property
    def label(self) -> str:
        """The run's result, as its page and a comparison name it."""
        return self.callback.label

    @override
    def row(self) -> dict[str, Any]:
        return {**self.found, "run": self.label}

    def report(self, counts: Mapping[str, Support], parts: Mapping[str, Any]) -> None:
        """Write ``report.html``, ``report.json`` and ``layers.csv``, and print the closing report."""
        config = self.config
        known: dict[str, Any] = {"are_held_out": True, "can_run": self.can_run, **parts}
        if self.full is not None and self.quantized is not None:
            known["metrics"] = {self.full.name: (self.full.value, self.quantized.value)}
            known["moved"] = self.quantized.moved
            if self.full.higher_is_better is not None:
                known["higher_is_better"] = {self.full.name: self.full.higher_is_better}
        known |= {"errors": self.errors, "counts": counts, "checkpoint": self.folder}
        known["sizes"] = None if self.folder is None else (model_bytes(self.model), folder_size(self.folder))
        title = f"{self.label} \N{MIDDLE DOT} {Path(str(config.model.get('path') or DEFAULT_MODEL)).name}"
        report = self.callback.results.facts(title=title, lines=[*self.lines, *self.closing_lines()], **known)
        self.found = report.row
        report.extra = {**self.row(), "config": plain(config)}
        judgement = judge(report, config.output_dir)
        steps = [replace(proposed, command=self.command_of(proposed)) for proposed in judgement.steps]
        path = write_report(config.output_dir, report, replace(judgement, steps=steps))
        advice = [f"{proposed.title}: {proposed.command}" for proposed in steps if proposed.command]
        hint = "" if not report.poor_layers else f"  (leave out: ignore_from={path.with_suffix('.json')})"
        report.lines = [*report.lines, judgement.headline, *advice, f"report {path}{hint}"]
        print()
        print_report(summary(report, worst=config.report.worst_layers))

    def can_run(self, proposed: Step) -> bool:
        """Whether a next step can run on this model, as Python and as a command."""
        session = self.callback.session
        assert session is not None
        if proposed.name == "measure":
            possible = not self.config.evaluate and isinstance(self.module, TaskModule)
        elif proposed.name == "observers":
            has_logits = self.quantized is not None and self.quantized.moved is not None
            possible = has_logits and can_choose_observers(session)
        elif proposed.name == "fine_tune":
            is_trainable = isinstance(self.module, LanguageModel) and isinstance(self.data, TextData)
            possible = is_trainable and type(self) is Calibrate and can_train(session, self.module)
        else:
            possible = self.callback.results.can_run(proposed)
        words = typed_words()
        if not possible or words is None:
            return possible
        return is_possible(proposed, words, Path(self.config.output_dir), self.module, self.model)

    def command_of(self, proposed: Step) -> str | None:
        """The command of a next step; None for a run that was composed in Python, and where no command does it."""
        words = typed_words()
        return None if words is None else step_command(proposed, words, Path(self.config.output_dir))

    def closing_lines(self) -> list[str]:
        """Further lines of the closing report."""
        return []
