"""Write the page of a run, and print its closing report: the last step of a task that calibrates, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_obs.app.from_config import plain
from lightning_obs.app.job import Job
from lightning_obs.app.models.pretrained import DEFAULT_MODEL
from lightning_obs.app.quality import Quality
from lightning_obs.app.step_commands import StepCommands, command_of_run
from lightning_obs.model.weight import model_bytes
from lightning_obs.onnx.onnx_file import bytes_of
from lightning_obs.report.facts import Report
from lightning_obs.report.judgement import judge
from lightning_obs.report.numbers import folder_size
from lightning_obs.report.page import write_report
from lightning_obs.report.summary import print_report, summary


def quality_facts(original: Quality | None, quantized: Quality | None) -> dict[str, Any]:
    """The quality before and after as fields of the report; empty if one of the two was not measured.

    ``Calibrate.report_facts`` calls it, at the end of a run.

    Args:
        original: the quality in full precision.
        quantized: the quality of the quantized model, as it is exported.
    """
    if original is None or quantized is None:
        return {}
    facts: dict[str, Any] = {
        "metrics": {original.name: (original.value, quantized.value)},
        "moved": quantized.moved,
    }
    if original.higher_is_better is not None:
        facts["higher_is_better"] = {original.name: original.higher_is_better}
    return facts


def run_provenance(config: DictConfig, has_data: bool = True) -> dict[str, str]:
    """Return where the results of a run come from, for its page: the command and its folder, the data, the seed.

    Every task that writes a report calls it.

    Args:
        config: the composed config of the run.
        has_data: whether the run's task reads data.
    """
    texts = {}
    command = command_of_run()
    if command is not None:
        texts["command"] = command
        texts["folder"] = str(Path.cwd())
    if has_data:
        entries = []
        for key, value in plain(config.data).items():
            if value is not None and key != "_target_":
                entries.append(f"{key}={value}")
        texts["data"] = ", ".join(entries)
    seed = config.task.get("seed")
    if seed is not None:
        texts["seed"] = str(seed)
    return texts


def gather_report(
    job: Job, label: str, facts: Mapping[str, Any], lines: Sequence[str], commands: StepCommands
) -> Report:
    """Make the report of a run from the facts of the calibration, which the callback knows, and those of the task.

    ``Calibrate.report`` calls this before :func:`publish_report`. The metrics are said to be of held-out data, since
    tasks measure on ``test_dataloader``. The report asks ``commands`` which next steps can run, and compares the run
    with the earlier run whose report the option ``against`` names, if it is set.

    Args:
        job: the job of the run.
        label: the name of the result.
        facts: facts of the task, by the names of the fields of ``Report``.
        lines: lines of the task, for the closing report.
        commands: says which next steps are possible.
    """
    model_name = Path(str(job.config.model.get("path") or DEFAULT_MODEL)).name
    sizes = None
    if job.folder is not None:
        sizes = (model_bytes(job.model), folder_size(job.folder))
    elif job.file is not None:
        sizes = (model_bytes(job.model), bytes_of(job.file))
    return job.callback.results.facts(
        title=f"{label} \N{MIDDLE DOT} {model_name}",
        lines=list(lines),
        are_held_out=True,
        can_run=commands.can_run,
        checkpoint=job.folder,
        files=[] if job.file is None else [job.file],
        sizes=sizes,
        provenance=run_provenance(job.config),
        against=job.config.against,
        **facts,
    )


def publish_report(job: Job, report: Report, row: Mapping[str, Any], commands: StepCommands) -> None:
    """Write ``report.html``, ``report.json`` and ``layers.csv``, and print the closing report.

    ``Calibrate.report`` calls this on rank 0, as the last step of a run.

    Args:
        job: the job of the run.
        report: the result of :func:`gather_report`; its last lines are added here.
        row: the run's row for a table that compares runs; ``report.json`` gets it, too.
        commands: makes the commands of the next steps.
    """
    config = job.config
    report.extra = {**row, "config": plain(config)}
    judgement = judge(report, config.output_dir)
    steps = [replace(step, command=commands.command(step)) for step in judgement.steps]
    path = write_report(config.output_dir, report, replace(judgement, steps=steps))
    advice = []
    for step in steps:
        if step.command:
            advice.append(f"{step.title}: {step.command}")
    hint = ""
    if report.poor_layers:
        hint = f"  (leave out: ignore_from={path.with_suffix('.json')})"
    report.lines = [*report.lines, judgement.headline, *advice, f"report {path}{hint}"]
    print()
    print_report(summary(report, worst=config.report.worst_layers))
