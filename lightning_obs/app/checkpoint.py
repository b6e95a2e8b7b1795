"""Write the checkpoint, and load it in a new process as its users will."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors.torch import save_file
from torch import nn

from lightning_obs.app import reload_check
from lightning_obs.app.console import step
from lightning_obs.app.job import Job, load_again
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.callbacks.which_module import find_module
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.model.kinds import is_transformers_model

_CHECK_TOKENS = 128
#: in front of the names of inputs in the file that the new process reads
_INPUT = "input."


def write_checkpoint(job: Job, folder: Path, result: CalibrationResult) -> list[str]:
    """Export, and on rank 0 verify where transformers loads it; every rank calls it.

    Returns:
        Lines for the report; none on other ranks.

    Raises:
        CalibrationError: the checkpoint cannot be loaded, or gives other logits than the calibrated model.
    """
    with step("writing the checkpoint"):
        job.callback.export(folder, overwrite=job.config.export.overwrite)
    if not job.trainer.is_global_zero:
        return []
    engines = result.engines
    loads = "transformers" not in engines or engines["transformers"].loads or job.config.export.reload == "dequantize"
    lines: list[str] = []
    if job.config.export.verify and loads:
        lines = _verify(job, folder) if is_transformers_model(job.model) else _verify_here(job, folder)
    lines += [f"not loaded by {name}: {verdict.text}" for name, verdict in engines.items() if not verdict.loads]
    taken = [
        f"{name} on {verdict.text}" if verdict.text else name for name, verdict in engines.items() if verdict.loads
    ]
    return [*lines, f"wrote {folder}  ({'; '.join(taken) or 'load_checkpoint'})"]


def _verify(job: Job, folder: Path) -> list[str]:
    """Reload in a new process with plain transformers and compare the logits."""
    wanted, model = job.config.export, job.model
    reference = Path(job.config.output_dir) / "reference.safetensors"
    with quantized(model):
        inputs, output = _answer(job, model)
    tensors = {f"{_INPUT}{name}": value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    save_file({name: value.cpu().contiguous() for name, value in {**tensors, "output": output}.items()}, reference)
    command = [sys.executable, reload_check.__file__, str(folder), str(reference)]
    if wanted.prompt and model.can_generate():  # type: ignore[operator]
        command += ["--prompt", wanted.prompt]
    if wanted.reload == "dequantize":
        command.append("--dequantize")
    with step("loading the checkpoint in a new process"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=wanted.verify_timeout, check=False)
    if not done.stdout.strip():
        raise CalibrationError(
            "the checkpoint was written, but a new process cannot load it",
            where=[str(folder)],
            got=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}",
        )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if answer["difference"] != 0.0 and wanted.reload != "dequantize":
        raise _differs(folder, answer["difference"])
    lines = [
        f"loaded in a new process (transformers {answer['transformers']}, lightning_obs not imported): "
        f"largest difference of {answer['what']} {answer['difference']}"
    ]
    return [*lines, f"it says: {answer['text']!r}"] if answer["text"] else lines


def _verify_here(job: Job, folder: Path) -> list[str]:
    """Load into a new module, as :func:`~lightning_obs.load_checkpoint` does, and compare the output."""
    with quantized(job.model):
        _, expected = _answer(job, job.model)
    with step("loading the checkpoint into a new model"):
        loaded = find_module(load_again(job, folder), job.config.module)[1].eval()
        loaded.to(expected.device)
        _, output = _answer(job, loaded)
    difference = (output.double() - expected.double()).abs().max().item()
    if difference != 0.0:
        raise _differs(folder, difference)
    return [f"loaded by load_checkpoint into a new model: largest difference of outputs {difference}"]


def _answer(job: Job, model: nn.Module) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of one held-out sample, and the model's output for them."""

    def shorten(value: torch.Tensor) -> torch.Tensor:
        return value[:1, :_CHECK_TOKENS] if value.ndim == 2 and not value.is_floating_point() else value[:1]

    reload_check.align(model)
    batch = next(iter(job.data.test_dataloader()))
    inputs = dict(job.inputs(apply_to_collection(batch, torch.Tensor, shorten)))
    with torch.inference_mode():
        return inputs, reload_check.first_tensor(model(**inputs))[1]


def _differs(folder: Path, difference: float) -> CalibrationError:
    return CalibrationError(
        "the checkpoint was written, but loaded again it gives other outputs",
        where=[str(folder)],
        got=f"a difference of {difference}",
        expected="0.0",
    )
