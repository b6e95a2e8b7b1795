"""Tell the user before a long run how long it will take."""

from __future__ import annotations

import time

import torch

from lightning_obs.app.console import say
from lightning_obs.app.job import Job
from lightning_obs.forward.extra_runs import left_as_it_was

#: from this many forward passes on, the run says how long they take
_WORTH_SAYING = 20


def say_duration(job: Job, passes: int) -> None:
    """Time the second of two forward passes on a held-out batch, and print an estimate for the whole run.

    The estimate is of the forward passes alone, without the time to search weights and to write files. A run of fewer
    than 20 passes prints nothing. ``Calibrate.run`` calls this first.

    Args:
        job: the job of the run; its model and data are loaded.
        passes: about how many batches each device forwards in the whole run.
    """
    if passes < _WORTH_SAYING:
        return
    [inputs] = job.first_inputs(job.data.test_dataloader(), 1)
    with left_as_it_was(job.model), torch.inference_mode():
        job.model(**inputs)  # not timed: the first pass also allocates memory and chooses kernels
        _wait_for(job.trainer.strategy.root_device)
        started = time.perf_counter()
        job.model(**inputs)
        _wait_for(job.trainer.strategy.root_device)
        seconds = time.perf_counter() - started
    minutes = passes * seconds / 60
    say(
        f"· about {minutes:.1f} minutes for {passes} forward passes of {seconds:.2g} s on each of "
        f"{job.trainer.world_size} device(s); searching weights and writing files comes on top "
        "(speed=quick takes only a few batches)"
    )


def _wait_for(device: torch.device) -> None:
    """Wait until an accelerator has finished: a forward pass there returns before its kernels have run."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
