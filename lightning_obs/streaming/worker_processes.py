"""Share the work of :func:`~lightning_obs.quantize_checkpoint` out to processes that this one starts.

Each process opens the same source and writes to its places in the same new files. It is given one fused set, or one
tensor to copy, at a time.
"""

from __future__ import annotations

import atexit
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import torch

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.errors import CalibrationError
from lightning_obs.files.tensors import TensorWriter
from lightning_obs.observers.lattice import GridShares
from lightning_obs.streaming.quantized_files import QuantizedFiles


@dataclass(frozen=True)
class _Setup:
    """The arguments that every started process gets, to open the source and the new files.

    :func:`quantize_in_processes` makes it, and :func:`_start` reads it.
    """

    folder: str | os.PathLike[str]
    options: CalibrationOptions
    new_folder: Path
    max_shard_size: int | str
    #: how many threads of torch the process may use
    threads: int
    #: modules of Python that define the run's engines and observers; importing a user's module registers its classes
    imports: list[str]


@dataclass(frozen=True)
class _Worker:
    """The files that a started process keeps open until it ends: the source, and its writer of the new files.

    :func:`_start` makes it; :func:`_quantize` and :func:`_copy` use it.
    """

    files: QuantizedFiles
    writer: TensorWriter


#: in a process that :func:`quantize_in_processes` has started, its only worker
_workers: list[_Worker] = []


def quantize_in_processes(
    files: QuantizedFiles,
    folder: str | os.PathLike[str],
    new_folder: Path,
    max_shard_size: int | str,
    workers: int,
) -> None:
    """Start processes that write all tensors of the new files, and wait until they have ended.

    Called by :func:`~lightning_obs.quantize_checkpoint` if ``workers`` is more than one. The first error of a process
    is raised here; work that has not begun is then not done.

    Args:
        files: the quantized files as opened in this process; their tally counts the bytes that all processes write.
        folder: the checkpoint that is read.
        new_folder: where the files are written.
        max_shard_size: bytes of one file of weights.
        workers: how many processes.
    """
    options = files.observation.options
    # A process must know the user's engines and observers; importing the module of such a class registers it there.
    classes: set[type] = {type(engine) for engine in (options.engine, *options.further_engines)}
    for observer in files.observation.observers.values():
        classes.add(type(observer))
    imports = sorted({cls.__module__ for cls in classes})
    threads = max(1, torch.get_num_threads() // workers)
    setup = _Setup(folder, options, new_folder, max_shard_size, threads, imports)
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, (setup,)) as pool:
        try:
            futures = [pool.submit(_quantize, module_names) for module_names in files.fused_sets()]
            futures += [pool.submit(_copy, name) for name in files.copied]
            for future in as_completed(futures):
                name, size, grids = future.result()
                files.tally.add(name, size)
                files.grids |= grids
        except BrokenProcessPool as error:
            raise CalibrationError(
                "a worker ended before its work was done",
                got=str(error),
                remedy="look for its error above; a script needs `if __name__ == '__main__':`. A worker that was "
                "killed may have had too little memory: try fewer.",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start(setup: _Setup) -> None:
    """Called once in each process, before its work: open the source and the new files until the process ends.

    At the process's end the source is closed. The writer needs no closing: it writes without buffers, each tensor to
    its place in the file (``os.pwrite``), and the system closes the files.
    """
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(setup.threads)
    for name in setup.imports:
        import_module(name)
    opened = ExitStack()
    atexit.register(opened.close)
    files = opened.enter_context(QuantizedFiles.opened(setup.folder, setup.options))
    writer = TensorWriter(setup.new_folder, files.layout, setup.max_shard_size, tally=files.tally)
    _workers.append(_Worker(files, writer))


def _end_with_parent() -> None:
    """Wait until the process that started this one has ended, and end this one; a thread of each process runs it.

    A parent that is killed cannot stop its processes, which would wait for work without end.
    """
    parent = parent_process()
    assert parent is not None  # this process was started by quantize_in_processes
    parent.join()
    os._exit(1)


def _quantize(module_names: tuple[str, ...]) -> tuple[str, int, dict[str, GridShares]]:
    """Runs in a started process: quantize a fused set and write its entries.

    Returns:
        The name of its last module, how many bytes were written, and how much of its weights lies on a grid.
    """
    worker = _workers[0]
    written_before = worker.files.tally.done
    worker.files.quantize(worker.writer, module_names)
    grids = {name: worker.files.grids[name] for name in module_names if name in worker.files.grids}
    return module_names[-1], worker.files.tally.done - written_before, grids


def _copy(name: str) -> tuple[str, int, dict[str, GridShares]]:
    """Runs in a started process: copy a tensor of the source.

    Returns:
        Its name, how many bytes were written, and no grids.
    """
    worker = _workers[0]
    written_before = worker.files.tally.done
    worker.files.copy(worker.writer, name)
    return name, worker.files.tally.done - written_before, {}
