"""An observer that works where it was imported by a test, not in other processes."""

import multiprocessing
import os
import signal

from torch import distributed as dist

from lightning_obs.observers import Observer
from lightning_obs.observers.min_max import MemorylessMinMaxObserver


@Observer.register("fails_elsewhere")
class FailsElsewhere(MemorylessMinMaxObserver):
    """Raises on rank 1, and kills a process that was started for it."""

    def measure(self, observed):
        if dist.is_initialized():
            if dist.get_rank() == 1:
                raise RuntimeError("no memory")
        elif multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(observed)
