"""Fine-tune a calibrated model through fake quantization, and measure what it brought.

Its quality on held-out data is measured four times: full precision, calibrated only, fine-tuned, and of the checkpoint
loaded again. The last two are the same number, or something is wrong.
"""

from __future__ import annotations

import time
from pathlib import Path

from lightning.pytorch import seed_everything

from lightning_obs.app.console import say
from lightning_obs.app.job import Job, load_again, make_trainer
from lightning_obs.app.quality import Quality, measure_quality


def fine_tune(job: Job) -> float:
    """Train from the ranges that calibration chose; the last thing it does is a validation of the result.

    Returns:
        How long that took, in seconds.
    """
    config, module = job.config, job.module
    say(f"· fine-tuning {job.callback.label}")
    started = time.perf_counter()
    if config.task.seed is not None:
        seed_everything(config.task.seed, verbose=False)
    trainer = make_trainer(config, job.callback)
    module.train()
    trainer.fit(module, datamodule=job.data)
    module.eval()
    trainer.validate(module, datamodule=job.data, verbose=False)
    return time.perf_counter() - started


def quality_of_checkpoint(job: Job, folder: Path) -> Quality | None:
    """Quality of what is loaded from ``folder``, on the held-out data; None if a rank cannot read it.

    Every rank measures its share. Ranks that torchrun started may have composed another folder, so rank 0 says which.
    """
    strategy = job.trainer.strategy
    written = Path(strategy.broadcast(str(folder.resolve())))
    if not strategy.reduce_boolean_decision(written.is_dir()):
        return None
    say("· measuring the checkpoint, loaded again")
    return measure_quality(load_again(job, written), make_trainer(job.config), job.data)
