"""Write the checkpoint, and load it in a new process as its users will."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from lightning_obs.app import reload_check
from lightning_obs.app.console import step
from lightning_obs.app.job import Job
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.errors import CalibrationError
from lightning_obs.model.quantized_forward import quantized

_CHECK_TOKENS = 128


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
    lines = _verify(job, folder) if job.config.export.verify and loads else []
    lines += [f"not loaded by {name}: {verdict.text}" for name, verdict in engines.items() if not verdict.loads]
    taken = [
        f"{name} on {verdict.text}" if verdict.text else name for name, verdict in engines.items() if verdict.loads
    ]
    return [*lines, f"wrote {folder}  ({'; '.join(taken) or 'load_checkpoint'})"]


def _verify(job: Job, folder: Path) -> list[str]:
    """Reload in a new process with plain transformers and compare the logits."""
    wanted, model = job.config.export, job.model
    reference = Path(job.config.output_dir) / "reference.safetensors"
    input_ids = next(iter(job.data.test_dataloader()))["input_ids"][:1, :_CHECK_TOKENS].contiguous()
    with torch.inference_mode(), quantized(model):
        logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    save_file({"input_ids": input_ids, "logits": logits.cpu().contiguous()}, reference)
    command = [sys.executable, reload_check.__file__, str(folder), str(reference)]
    if wanted.prompt:
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
        raise CalibrationError(
            "the checkpoint was written, but loaded in a new process it gives other logits",
            where=[str(folder)],
            got=f"a difference of {answer['difference']}",
            expected="0.0",
        )
    lines = [
        f"loaded in a new process (transformers {answer['transformers']}, lightning_obs not imported): "
        f"largest difference of logits {answer['difference']}"
    ]
    return [*lines, f"it says: {answer['text']!r}"] if answer["text"] else lines
