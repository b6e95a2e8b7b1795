"""Before the first batch: everything that can be known to be wrong, and how long the run will take.

A full-precision evaluation of a large model takes minutes; nobody should wait for it to read that groups do not divide.
"""

from __future__ import annotations

import time

import torch
from omegaconf import DictConfig

from lightning_obs.app.console import say
from lightning_obs.app.job import Job
from lightning_obs.app.plan import check_candidates
from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining
from lightning_obs.callbacks.which_module import describe, find_module
from lightning_obs.errors import CalibrationError

#: a step of training in forward passes: one there, about two back
_PASSES_OF_A_STEP = 3
#: forward passes from which on it is said how long they take
_WORTH_SAYING = 20
#: what the package's own data are told; data of one's own may count in another way
_BATCHES = ("batches", "eval_batches", "train_batches")


def preflight(job: Job) -> None:
    """Refuse what cannot work, and say which module is calibrated.

    Raises:
        CalibrationError: scheme, targets, groups, observers, candidates, devices, precision or data, with the model as
            it was loaded. Nothing was run.
    """
    callback, config = job.callback, job.config
    if config.task.name in ("plan", "observers"):
        check_candidates(job)
    if isinstance(callback, QuantizationAwareTraining):
        callback.require_precision(job.trainer)
        if not config.data.get("train_batches"):
            raise CalibrationError("data.train_batches", got=config.data.get("train_batches"), expected="one or more")
    if config.task.name != "plan":  # whose scheme is not known yet
        session = callback.prepare(job.trainer, job.module)  # it is used again: the model is the same
        say(f"· {describe(job.module, find_module(job.module, config.module)[0], session)}")


def say_duration(job: Job) -> None:
    """Run one held-out batch, twice, and say from the second how long all forward passes of the run take.

    Of a few passes nothing is said, and nothing is run.
    """
    session = job.callback.session
    passes = forward_passes(job.config, session is None or session.needs_data)
    if passes < _WORTH_SAYING:
        return
    device = job.trainer.strategy.root_device
    batch = job.inputs(next(iter(job.data.test_dataloader())), device)
    job.module.to(device)
    with torch.inference_mode():
        job.model(**batch)
        started = time.perf_counter()
        job.model(**batch)
        seconds = time.perf_counter() - started
    say(
        f"· about {passes * seconds / 60:.1f} minutes for {passes} forward passes of {seconds:.2g} s on each of "
        f"{job.trainer.world_size} device(s), beside weights and files  (speed=quick: a few batches only)"
    )


def forward_passes(config: DictConfig, needs_data: bool) -> int:
    """Of the whole run, about: batches that are measured, calibrated and trained on.

    Args:
        config: of the run.
        needs_data: whether calibration runs any batches.
    """
    data, task = {key: int(config.data.get(key) or 0) for key in _BATCHES}, config.task
    measured = data["eval_batches"] if config.evaluate else 0
    calibrated = data["batches"] if needs_data else 0
    passes = 2 * measured + calibrated + int(config.report.layer_error_batches)
    if task.name == "finetune":
        steps = int(config.trainer.get("max_steps", -1))
        of_a_step = _PASSES_OF_A_STEP + (1 if task.callback.distill else 0)
        passes += (data["train_batches"] if steps < 0 else steps) * of_a_step + data["batches"] + 2 * measured
    elif task.name == "plan":
        passes += data["batches"] + int(task.batches) * _PASSES_OF_A_STEP
    elif task.name == "observers":
        passes += 2 * data["batches"]
    return passes
