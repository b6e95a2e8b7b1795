"""Run a script or ``python -m lightning_obs`` inside of the test's own process.

Most of what such a command costs is importing torch, Lightning and transformers once more. Here it finds them imported,
and afterwards everything process-wide that it changed is as before. At least one command of each kind is still run by
its test as a process of its own.
"""

from __future__ import annotations

import copy
import logging
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from hydra.core.singleton import Singleton
from lightning_utilities.core import rank_zero

RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Done:
    """What `subprocess.run` returns, as far as the tests read it."""

    returncode: int
    stdout: str
    stderr: str


def run_command_line(*arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> Done:
    """``python -W ignore -m lightning_obs arguments`` in ``folder``, with further variables in the environment."""
    with _as_its_own_process([str(folder), *sys.path], ["lightning_obs", *arguments], folder) as done:
        os.environ.update(environment or {})
        runpy.run_module("lightning_obs", run_name="__main__", alter_sys=True)
    return done


def run_script(path: Path, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> Done:
    """``python -W ignore path arguments`` in ``folder``, with further variables in the environment."""
    with _as_its_own_process([str(path.parent), *sys.path], [str(path), *arguments], folder) as done:
        os.environ.update(environment or {})
        runpy.run_path(str(path), run_name="__main__")
    return done


@contextmanager
def _as_its_own_process(path: list[str], argv: list[str], folder: Path) -> Iterator[Done]:
    out, err, done = StringIO(), StringIO(), Done(0, "", "")
    with _process_wide_state(path, argv, folder), redirect_stdout(out), redirect_stderr(err):
        try:
            yield done
        except SystemExit as end:
            done.returncode = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except Exception:
            done.returncode = 1
            traceback.print_exc()
    done.stdout, done.stderr = out.getvalue(), err.getvalue()


@contextmanager
def _process_wide_state(path: list[str], argv: list[str], folder: Path) -> Iterator[None]:
    before = sys.argv, sys.path, os.getcwd(), dict(os.environ), set(sys.modules)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hydra = copy.copy(Singleton.get_state())
    levels = {logger: logger.level for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger)}
    rank, messages = getattr(rank_zero.rank_zero_only, "rank", 0), rank_zero.log
    sys.argv, sys.path = argv, path
    os.chdir(folder)
    for name in RANK:
        os.environ.pop(name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Singleton.set_state(hydra)
        root.handlers[:], root.level = handlers, level
        for logger, level_before in levels.items():
            if logger.level != level_before:  # each call makes all loggers ask anew which messages they let through
                logger.setLevel(level_before)
        # A package of Lightning, when it is imported, takes the messages of the other to its own logger.
        rank_zero.rank_zero_only.rank, rank_zero.log = rank, messages
        sys.argv, sys.path = before[:2]
        os.chdir(before[2])
        os.environ.clear()
        os.environ.update(before[3])
        for name in set(sys.modules) - before[4]:  # a module beside the command is another one in the next folder
            if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == folder:
                del sys.modules[name]
