"""Write the checkpoint of a run, and load it again as its users will: transformers' models in a new process.

The tasks of ``tasks/calibrate.py`` call :func:`write_checkpoint` at the end of a run that sets ``export.folder``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors.torch import save_file
from torch import nn

from lightning_obs.app import reload_check
from lightning_obs.app.console import bytes_done, step
from lightning_obs.app.job import Job
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.engines import VLLM, Transformers, Verdict
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.streaming.other_files import copy_other_files

#: longest sample that the reloaded checkpoint is compared on
_CHECK_TOKENS = 128


@dataclass(frozen=True)
class _FilesBesideWeights:
    """Takes the place of the tokenizer in the export, to save further files of the source model (processor, licence).

    ``_export`` passes it to the callback's export, which calls ``save_pretrained``.

    Attributes:
        source: the folder of the source model.
        tokenizer: a tokenizer of transformers; None: the module has none.
    """

    source: Path
    tokenizer: Any

    def save_pretrained(self, folder: str) -> None:
        """Write tokenizer and files to the folder of the checkpoint; the export calls it."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        copy_other_files(self.source, Path(folder))


def write_checkpoint(job: Job, folder: Path, result: CalibrationResult) -> list[str]:
    """Export the model and, on rank 0, load the checkpoint again where transformers can. Every rank calls this.

    Args:
        job: the job of the run.
        folder: the folder of the checkpoint to write.
        result: the result of the calibration; it has the verdicts of the engines.

    Returns:
        Lines for the closing report; none on ranks other than 0.

    Raises:
        CalibrationError: a new process cannot load the checkpoint, or not within ``export.verify_timeout`` seconds;
            loaded again, it gives other outputs; the outputs have no tensor to compare.
    """
    _export(job, folder)
    if not job.trainer.is_global_zero:
        return []
    lines: list[str] = []
    if job.config.export.verify and _can_be_loaded_here(job, result.plan.engines):
        lines = _verify(job, folder)
    return [*lines, *closing_lines(folder, result.plan.engines)]


def _export(job: Job, folder: Path) -> None:
    """Write the checkpoint to ``folder``; :func:`write_checkpoint` calls this on every rank.

    If ``model.path`` is a folder with a model of transformers, the other files in it (processor, licence) are copied.
    In any case the export saves the tokenizer of the LightningModule, if it has one.
    """
    options = job.config.export
    source = Path(str(job.config.model.get("path")))
    files = None  # the callback then looks for the tokenizer itself
    if (source / "config.json").is_file():
        files = _FilesBesideWeights(source, getattr(job.module, "tokenizer", None))
    with bytes_done("writing the checkpoint") as progress:
        job.callback.export(
            folder,
            tokenizer=files,
            overwrite=options.overwrite,
            max_shard_size=options.max_shard_size,
            progress=progress,
        )


def _can_be_loaded_here(job: Job, engines: Mapping[str, Verdict]) -> bool:
    """Whether the checkpoint can be loaded and compared: by transformers, or by ``load_checkpoint`` for other models.

    Args:
        job: the job of the run.
        engines: verdicts by name; ``transformers`` has one only for its own models.
    """
    if _dequantizes(job) or "transformers" not in engines:
        return True
    return engines["transformers"].loads


def _dequantizes(job: Job) -> bool:
    """Whether the checkpoint is written to be loaded with ``CompressedTensorsConfig(dequantize=True)``.

    A checkpoint is written for the first of ``export.engines``. The other engines must only be able to load it.
    """
    return list(job.callback.options.engines[:1]) == ["dequantize"]


def _verify(job: Job, folder: Path) -> list[str]:
    """Load the checkpoint again and compare its output for one held-out sample with the calibrated model's.

    :func:`write_checkpoint` calls this on rank 0. A checkpoint that is loaded dequantized may differ by any amount,
    which its line reports: its activations are not quantized.

    Returns:
        Lines for the closing report.

    Raises:
        CalibrationError: the outputs differ, although the checkpoint is loaded without dequantizing; a new process
            cannot load it, or not in time; the outputs have no tensor to compare.
    """
    with quantized(job.model):
        inputs, expected = _answer(job, job.model)
    is_transformers = is_transformers_model(job.model)
    if is_transformers:
        difference, lines = _load_in_a_new_process(job, folder, {**inputs, "output": expected})
    else:
        difference, lines = _load_into_a_new_model(job, folder, expected)
    is_dequantized = is_transformers and _dequantizes(job)
    if difference != 0.0 and not is_dequantized:
        raise CalibrationError(
            "the checkpoint was written, but loaded again the model gives other outputs",
            where=[str(folder)],
            got=f"a difference of {difference}",
            expected="0.0",
        )
    return lines


def closing_lines(folder: Path | str, engines: Mapping[str, Verdict]) -> list[str]:
    """Return lines that say which engines load a checkpoint, for the end of a run.

    :func:`write_checkpoint` puts them into the closing report, and ``tasks/weights.py`` prints them.

    Args:
        folder: the folder of the checkpoint.
        engines: the verdict of each engine on the checkpoint, by the engine's name. The text of one that loads the
            checkpoint is the hardware on which it does (may be empty).

    Returns:
        The engines that refuse the checkpoint (transformers and vLLM with the reason), then its path and the engines
        that load it.
    """
    reasons = {name: verdict.what for name, verdict in engines.items() if not verdict.loads}
    lines = []
    for name in (Transformers.name, VLLM.name):
        if name in reasons:
            lines.append(f"not loaded by {name}: {reasons.pop(name)}")
    if reasons:
        lines.append(f"not loaded by {', '.join(reasons)}: docs/reference/engines.md says what they take")
    loaders = []
    for name, verdict in engines.items():
        if verdict.loads:
            loaders.append(f"{name} on {verdict.text}" if verdict.text else name)
    return [*lines, f"wrote {folder}  ({'; '.join(loaders) or 'load_checkpoint'})"]


def _load_in_a_new_process(job: Job, folder: Path, reference: dict[str, Any]) -> tuple[float, list[str]]:
    """Load the checkpoint with transformers alone, by running ``reload_check.py``, and compare outputs.

    Args:
        job: the job of the run.
        folder: the folder of the checkpoint.
        reference: the inputs by their names, and the calibrated model's ``output`` for them.

    Returns:
        The largest absolute difference of the outputs, and a line for the closing report.

    Raises:
        CalibrationError: the new process cannot load the checkpoint, or not within ``export.verify_timeout`` seconds.
    """
    file = Path(job.config.output_dir) / "reference.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in reference.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value.cpu().contiguous()
    save_file(tensors, file)
    command = [sys.executable, reload_check.__file__, str(folder), str(file)]
    if _dequantizes(job):
        command.append("--dequantize")
    if job.config.model.get("trust_remote_code"):
        command.append("--trust-remote-code")
    with step("loading the checkpoint in a new process"):
        answer = _answer_of_process(command, folder, job.config.export.verify_timeout)
    line = (
        f"loaded in a new process (transformers {answer['transformers']}, lightning_obs not imported): "
        f"largest difference of {answer['kind']} {answer['difference']}"
    )
    return answer["difference"], [line]


def _answer_of_process(command: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Run ``reload_check.py`` in a process, and return the JSON object in the last line that it prints.

    Code that comes with a model may print lines before.

    Args:
        command: the program and its arguments.
        folder: the folder of the checkpoint, for errors.
        seconds: the longest time that the process may take.

    Raises:
        CalibrationError: the process fails, or takes longer.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise CalibrationError(
            "the checkpoint was written, but a new process has not loaded it in time",
            where=[str(folder)],
            got=f"more than {seconds} s",
            remedy="raise export.verify_timeout, or set export.verify=false.",
        ) from None
    output = done.stdout.strip()
    errors = done.stderr.strip()
    if done.returncode or not output:
        raise CalibrationError(
            "the checkpoint was written, but a new process cannot load it",
            where=[str(folder)],
            got=errors.splitlines()[-1] if errors else f"exit code {done.returncode}",
        )
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _load_into_a_new_model(job: Job, folder: Path, expected: torch.Tensor) -> tuple[float, list[str]]:
    """Load the checkpoint of any other module with ``load_checkpoint``, and compare its output with ``expected``.

    Returns:
        The largest absolute difference of the outputs, and a line for the closing report.
    """
    with step("loading the checkpoint into a new model"):
        _, model = job.load_again(folder)
        model = model.eval().to(expected.device)
        _, output = _answer(job, model)
    difference = (output.double() - expected.double()).abs().max().item()
    return difference, [f"loaded by load_checkpoint into a new model: largest difference of outputs {difference}"]


def _answer(job: Job, model: nn.Module) -> tuple[dict[str, Any], torch.Tensor]:
    """The inputs of one held-out sample by their names, and the model's output for them (:func:`first_tensor`).

    Called with the calibrated model, and with a new model into which ``load_checkpoint`` has loaded the checkpoint.

    Before the model runs, :func:`align` changes it for good: its experts run one by one, and the memory of its tensors
    begins at multiples of 64 bytes. Values do not change, but sums are added up in one order for all models.

    Raises:
        CalibrationError: the output has no tensor.
    """
    reload_check.align(model)
    batch = next(iter(job.data.test_dataloader()))
    inputs = job.inputs(apply_to_collection(batch, torch.Tensor, _first_sample))
    with left_as_it_was(model), torch.inference_mode():
        output = model(**inputs)
    try:
        _, compared = reload_check.first_tensor(output)
    except ValueError as error:
        raise CalibrationError(
            "the checkpoint was written, but its outputs cannot be compared",
            got=str(error),
            expected="an output with tensors",
            remedy="export.verify=false.",
        ) from error
    return inputs, compared


def _first_sample(values: torch.Tensor) -> torch.Tensor:
    """The first row of a batch; of token ids and masks ``(batch, tokens)``, its first 128 tokens.

    :func:`_answer` applies it to each tensor of a batch. A tensor without dimensions (a loss weight) has no rows and is
    returned as it is.
    """
    if not values.ndim:
        return values
    if values.ndim == 2 and not values.is_floating_point():
        return values[:1, :_CHECK_TOKENS]
    return values[:1]
