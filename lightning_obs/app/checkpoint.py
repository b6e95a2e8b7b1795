"""Write the checkpoint, and load it in a new process as its users will."""

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
from lightning_obs.callbacks.which_module import find_module
from lightning_obs.engines import VLLM, Transformers, Verdict
from lightning_obs.errors import CalibrationError
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.streaming.checkpoint_weights import copy_others

_CHECK_TOKENS = 128


@dataclass(frozen=True)
class _Carried:
    """A tokenizer, and the other files beside the weights of the model: processor, code, licence."""

    source: Path
    tokenizer: Any

    def save_pretrained(self, folder: str) -> None:
        """Save it as a tokenizer is saved."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        copy_others(self.source, Path(folder))


def write_checkpoint(job: Job, folder: Path, result: CalibrationResult) -> list[str]:
    """Export, and on rank 0 verify where transformers loads it; every rank calls it. Returns lines for the report."""
    wanted, engines = job.config.export, result.engines
    with bytes_done("writing the checkpoint") as progress:
        source, tokenizer = Path(str(job.config.model.get("path"))), getattr(job.module, "tokenizer", None)
        carried = _Carried(source, tokenizer) if (source / "config.json").is_file() else None
        how = {"overwrite": wanted.overwrite, "max_shard_size": wanted.max_shard_size, "progress": progress}
        job.callback.export(folder, tokenizer=carried, **how)
    if not job.trainer.is_global_zero:
        return []
    lines: list[str] = []
    if wanted.verify and (
        "transformers" not in engines or engines["transformers"].loads or wanted.reload == "dequantize"
    ):
        with quantized(job.model):
            inputs, expected = _answer(job, job.model)
        if is_transformers_model(job.model):
            difference, lines = _load_in_a_new_process(job, folder, {**inputs, "output": expected})
        else:
            difference, lines = _load_into_a_new_model(job, folder, expected)
        if difference != 0.0 and not (wanted.reload == "dequantize" and is_transformers_model(job.model)):
            raise CalibrationError(
                "the checkpoint was written, but loaded again the model gives other outputs",
                where=[str(folder)],
                got=f"a difference of {difference}",
                expected="0.0",
            )
    return [*lines, *closing_lines(folder, engines)]


def closing_lines(folder: Path | str, engines: Mapping[str, Verdict]) -> list[str]:
    """The engines that refuse the checkpoint (for transformers and vLLM: why), its path, the engines that load it."""
    refused = {name: verdict.text for name, verdict in engines.items() if not verdict.loads}
    lines = [f"not loaded by {n}: {refused.pop(n)}" for n in (Transformers.name, VLLM.name) if n in refused]
    if refused:
        lines.append(f"not loaded by {', '.join(refused)}: docs/engines.md says what they take")
    loads = [" on ".join(filter(None, (name, verdict.text))) for name, verdict in engines.items() if verdict.loads]
    return [*lines, f"wrote {folder}  ({'; '.join(loads) or 'load_checkpoint'})"]


def _load_in_a_new_process(job: Job, folder: Path, reference: dict[str, Any]) -> tuple[float, list[str]]:
    """The largest difference of the outputs of plain transformers, and lines for the report."""
    wanted, file = job.config.export, Path(job.config.output_dir) / "reference.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value for name, value in reference.items() if isinstance(value, torch.Tensor)}
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, file)
    command = [sys.executable, reload_check.__file__, str(folder), str(file)]
    if wanted.reload == "dequantize":
        command.append("--dequantize")
    if job.config.model.get("trust_remote_code"):
        command.append("--trust-remote-code")
    with step("loading the checkpoint in a new process"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=wanted.verify_timeout, check=False)
    if not done.stdout.strip():
        raise CalibrationError(
            "the checkpoint was written, but a new process cannot load it",
            where=[str(folder)],
            got=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}",
        )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    lines = [
        f"loaded in a new process (transformers {answer['transformers']}, lightning_obs not imported): "
        f"largest difference of {answer['what']} {answer['difference']}"
    ]
    return answer["difference"], lines


def _load_into_a_new_model(job: Job, folder: Path, expected: torch.Tensor) -> tuple[float, list[str]]:
    """As :func:`~lightning_obs.load_checkpoint` does: the largest difference of the outputs, and a line."""
    with step("loading the checkpoint into a new model"):
        loaded = find_module(job.load_again(folder), job.config.module)[1].eval()
        _, output = _answer(job, loaded.to(expected.device))
    difference = (output.double() - expected.double()).abs().max().item()
    return difference, [f"loaded by load_checkpoint into a new model: largest difference of outputs {difference}"]


def _answer(job: Job, model: nn.Module) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of one held-out sample, and the model's output for them."""

    def shorten(value: torch.Tensor) -> torch.Tensor:
        return value[:1, :_CHECK_TOKENS] if value.ndim == 2 and not value.is_floating_point() else value[:1]

    reload_check.align(model)
    batch = next(iter(job.data.test_dataloader()))
    inputs = job.inputs(apply_to_collection(batch, torch.Tensor, shorten))
    with left_as_it_was(model), torch.inference_mode():
        return inputs, reload_check.first_tensor(model(**inputs))[1]
