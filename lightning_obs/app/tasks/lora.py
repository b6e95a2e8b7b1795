"""Train LoRA adapters on a model, whose weights may stay packed, and write them to be served beside it."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from typing_extensions import override

from lightning_obs.app.console import say
from lightning_obs.app.from_config import (
    check_data,
    facts_for_data,
    load_module,
    make_data,
    make_module,
    make_trainer,
    plain,
    require_training,
)
from lightning_obs.app.models.language import CausalLM
from lightning_obs.app.quality import Quality, measure_quality
from lightning_obs.app.run_report import run_provenance
from lightning_obs.app.tasks.compare import compared
from lightning_obs.app.tasks.task import Task
from lightning_obs.callbacks.trainable import require_precision
from lightning_obs.errors import CalibrationError
from lightning_obs.files.write import require_free, whole_folder
from lightning_obs.report.facts import Report
from lightning_obs.report.numbers import folder_size, human_size
from lightning_obs.report.page import write_report


class Lora(Task):
    """``task=lora``: train the adapters of ``model.lora`` or ``model.adapters``, and write them to ``export.folder``.

    Nothing is calibrated: the adapters are trained on the model as it runs, and belong to it. The quality on held-out
    data is measured before, after, and with the adapters loaded again.

    Attributes:
        folder: the folder to write the adapters to.
        module: the LightningModule around the model.
        trainer: the Trainer of the fit.
        data: the data to train on and to measure on.
        qualities: the quality by stage (without training, with adapters...); empty with ``evaluate=false``.
        seconds_trained: wall time of the fit.
        report_row: the numbers of the run, for its report and for a comparison.
    """

    module: LightningModule
    trainer: Trainer

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        if not config.export.folder:
            raise CalibrationError("task=lora writes adapters", where=["export.folder"], got="none", remedy="name one.")
        self.folder = Path(config.export.folder)
        self.qualities: dict[str, Quality] = {}
        self.seconds_trained = 0.0
        self.report_row: dict[str, Any] = {"run": "LoRA"}

    @override
    def check(self) -> None:
        """Refuse a folder that exists, a Trainer that does not train, a module without adapters; load model and data.

        ``main.run`` calls it first.
        """
        config = self.config
        require_free(self.folder, config.export.overwrite)
        self.trainer = make_trainer(config)
        require_precision(self.trainer)
        require_training(self.trainer)
        check_data(config)
        if config.task.seed is not None:
            seed_everything(config.task.seed, verbose=False)
        self.module = load_module(config)
        _require_adapters(self.module)
        self.data = make_data(config, facts_for_data(self.module))
        train_batches = config.data.get("train_batches")
        if train_batches is not None and train_batches < 1:
            raise CalibrationError("data.train_batches", got=train_batches, expected="one or more")

    @override
    def run(self) -> None:
        """Measure the model, train the adapters, measure, write the adapters, load them again and measure, report.

        ``main.run`` calls it on every rank, after :meth:`check`; rank 0 writes. With ``evaluate=false`` nothing is
        measured. The adapters are loaded again only if ``model`` has the key ``adapters``: a module of the user's need
        not take such an argument.
        """
        module = self.module
        self._measure(module, "without training")
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        count = sum(parameter.numel() for parameter in parameters)
        say(f"· training {count:,} parameters of adapters")
        started = time.perf_counter()
        module.train()
        self.trainer.fit(module, self.data.train_dataloader())
        module.eval()
        self.seconds_trained = time.perf_counter() - started
        self._measure(module, "with adapters")
        if self.trainer.is_global_zero:
            with whole_folder(self.folder, self.config.export.overwrite) as partial:
                module.model.save_pretrained(partial)
        self.trainer.strategy.barrier("adapters are written")
        if self.qualities and "adapters" in self.config.model:
            arguments: dict[str, str | None] = {"adapters": str(self.folder)}
            if "lora" in self.config.model:
                arguments["lora"] = None  # no new adapters beside the loaded ones
            self._measure(make_module(self.config, **arguments), "with adapters loaded again")
        if self.trainer.is_global_zero:
            self._report()

    @override
    def row(self) -> dict[str, Any]:
        """The quality before and after training, the adapters' size, and the duration of the fit.

        ``main.run`` calls it last, for the table of a ``--multirun``.
        """
        return self.report_row

    def _measure(self, module: LightningModule, stage: str) -> None:
        """Measure the quality of ``module`` on held-out data and keep it by ``stage``, unless ``evaluate`` is off."""
        if not self.config.evaluate:
            return
        say(f"· measuring {stage}")
        quality = measure_quality(module, make_trainer(self.config), self.data)
        if quality is not None:
            self.qualities[stage] = quality

    def _report(self) -> None:
        """Print the qualities, where the adapters are and how they are used, and write the report."""
        path = self.config.model.get("path")
        size = folder_size(self.folder)
        label = f"LoRA · {Path(str(path or 'default model')).name}"
        self.report_row = {"run": label, "size": size, "seconds_trained": self.seconds_trained}
        stages = [f"{stage} {quality.value:.3f}" for stage, quality in self.qualities.items()]
        if self.qualities:
            first, tuned, *_ = self.qualities.values()
            self.report_row |= {
                "metric": first.name,
                first.name: (first.value, tuned.value),
                "higher_is_better": first.higher_is_better,
            }
            say(f"{first.name} on held-out data: {', '.join(stages)}")
        say(f"training took {self.seconds_trained / 60:.1f} minutes")
        say(f"wrote {self.folder}  ({human_size(size)})")
        base = shlex.quote(str(path or "<folder of the model>"))
        adapters = shlex.quote(str(self.folder))
        say(f"serve both: vllm serve {base} --enable-lora --lora-modules mine={adapters}")
        say(f"one checkpoint of both: python -m lightning_obs {' '.join(self._words_to_merge(adapters))}")
        report = Report.of(label, runs=[compared(self.report_row)], provenance=run_provenance(self.config))
        report.extra = {**self.report_row, "config": plain(self.config)}
        say(f"report {write_report(self.config.output_dir, report)}")

    def _words_to_merge(self, adapters: str) -> list[str]:
        """The words of the command that merges the adapters and quantizes the sum; the scheme is left to the user."""
        words = []
        if self.config.model.get("path"):
            words.append(f"model.path={shlex.quote(str(self.config.model.path))}")
        if self.config.model.get("keep_packed"):
            words.append("model.keep_packed=true")
        return [*words, f"model.adapters={adapters}", "scheme=..."]


def _require_adapters(module: LightningModule) -> None:
    """Refuse a module whose model has no adapters of peft."""
    model = getattr(module, "model", None)
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        return
    remedy = "give its `model` adapters (peft.get_peft_model)."
    if isinstance(module, CausalLM):
        remedy = "model=lora, or model.adapters=<folder>."
    raise CalibrationError("task=lora trains adapters", got=f"a {type(module).__name__} without any", remedy=remedy)
