"""Run a function on several ranks: real processes, gloo over loopback, under a time limit.

Importing torch and Lightning takes longer than most tests. So one process imports them (multiprocessing's fork server,
which never runs a tensor operation), ranks are forks of it, and they stay; each call has a process group of its own.
After a time-out they are killed, and the next call forks new ones. Imports do not count towards the time limit.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

from torch import distributed as dist

from tests.support.compilation import compile_in_turn

_GRACE = 5.0  # seconds that the other ranks have to end after one has failed
_STARTING = 120.0  # seconds for new processes to import what they need; not part of a test's time limit
#: Lightning first, under the name that the tests run with; last what modules of tests import
_IMPORTED = [
    "tests.support.lightning_package", "lightning_obs.callbacks", "torch.distributed.fsdp", "transformers", "pytest",
    "hypothesis",
]  # fmt: skip

_UNCONNECTED = "Gloo connectFullMesh failed"
_ABORTED = f"died, exit code {-signal.SIGABRT}"

_ranks: list[tuple[Any, connection.Connection]] = []


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60, backend: str = "gloo"
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a new group, and return what each returned.

    Args:
        function: at the top level of an importable module; it and ``args`` and its result are pickled.
        ranks: how many processes.
        *args: the same for all.
        timeout: in seconds, for all ranks together.
        backend: of the group.

    Raises:
        RuntimeError: a rank raised (with the traceback of each that did), died, or did not end in time. A rank that
            aborts (SIGABRT, by C++ only) is given one more run: gloo does so now and then (pytorch #190489).
    """
    results = _run_connected(function, ranks, args, timeout, backend)
    if (False, _ABORTED) in results.values():
        print(f"{function.__name__}: a rank aborted; running once more", file=sys.stderr)
        results = _run_connected(function, ranks, args, timeout, backend)
    failed = [f"rank {rank}:\n{text}" for rank, (done, text) in sorted(results.items()) if not done]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [results[rank][1] for rank in range(ranks)]


def _run_connected(function: Callable[..., Any], *how: Any) -> dict[int, tuple[bool, Any]]:
    """As :func:`_run_once`, which is tried again if gloo loses a connection before the function is called."""
    results = _run_once(function, *how)
    if any(not done and _UNCONNECTED in text for done, text in results.values()):
        print(f"{function.__name__}: ranks did not connect; running once more", file=sys.stderr)
        stop_ranks()
        results = _run_once(function, *how)
    return results


def _run_once(
    function: Callable[..., Any], ranks: int, args: tuple[Any, ...], timeout: float, backend: str
) -> dict[int, tuple[bool, Any]]:
    """What each rank returned, ``(True, result)``, or how it failed, ``(False, text)``."""
    _start(ranks)
    members = _ranks[:ranks]
    # A file: a TCPStore asks the name server for the name of 127.0.0.1, and now and then waits five seconds for it.
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe) in enumerate(members):
            pipe.send_bytes(pickle.dumps((rank, ranks, f"{folder}/store", timeout, backend)))
            pipe.send_bytes(pickle.dumps((function, args)))
        _await_ready([pipe for _, pipe in members])
        for _, pipe in members:
            pipe.send_bytes(b"go")
        return _collect(members, timeout)


def stop_ranks() -> None:
    """Kill all processes."""
    while _ranks:
        process, pipe = _ranks.pop()
        pipe.close()
        process.kill()
        process.join()


def warm_context() -> Any:
    """multiprocessing's context whose processes are forks of one that has imported what most tests need.

    For a process that a test starts for itself, to be killed for example.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def run_apart(function: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
    """Call ``function(*args)`` in a new process of :func:`warm_context`, and return its result.

    For what a process does once, such as importing a package.

    Args:
        function: at the top level of an importable module, which imports only what the new process may import.
        *args: pickled, as the result is.
        timeout: in seconds.

    Raises:
        RuntimeError: it raised (with the traceback), died, or did not end in time.
    """
    context = warm_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise RuntimeError("did not end in time")
        is_done, result = pickle.loads(ours.recv_bytes())
    except EOFError:
        is_done, result = False, "died"
    finally:
        process.kill()
        process.join()
        ours.close()
    if not is_done:
        raise RuntimeError(result)
    return result


def _answer(pipe: connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    compile_in_turn()
    try:
        result = True, function(*args)
    except BaseException:
        result = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(result))


def _start(ranks: int) -> None:
    if not all(process.is_alive() for process, _ in _ranks):
        stop_ranks()
    context = warm_context()
    while len(_ranks) < ranks:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _ranks.append((process, ours))


def _await_ready(pipes: list[connection.Connection]) -> None:
    try:
        if all(pipe.poll(_STARTING) and pipe.recv_bytes() == b"ready" for pipe in pipes):
            return
    except EOFError:
        pass
    stop_ranks()
    raise RuntimeError("a process could not import the function to run")


def _collect(members: list[tuple[Any, connection.Connection]], timeout: float) -> dict[int, tuple[bool, Any]]:
    results: dict[int, tuple[bool, Any]] = {}
    died = False
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(members)}
    end = time.monotonic() + timeout
    while waiting and (left := end - time.monotonic()) > 0:
        # A child of a rank that died may hold its pipe open.
        connection.wait([*waiting, *(members[rank][0].sentinel for rank in waiting.values())], left)
        for pipe, rank in list(waiting.items()):
            process = members[rank][0]
            alive = process.is_alive()
            if not pipe.poll() and alive:
                continue
            del waiting[pipe]
            try:
                if not pipe.poll():
                    raise EOFError
                results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join(_GRACE)  # its pipe closes a moment before it has an exit code
                results[rank] = False, f"died, exit code {process.exitcode}"
                died = True
            except Exception:
                results[rank] = False, f"its result cannot be unpickled:\n{traceback.format_exc()}"
            if not results[rank][0]:
                end = min(end, time.monotonic() + _GRACE)
    if waiting or died:
        results.update(dict.fromkeys(waiting.values(), (False, "did not end in time")))
        stop_ranks()
    return results


def _serve(pipe: connection.Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    compile_in_turn()
    while True:
        try:
            rank, ranks, path, timeout, backend = pickle.loads(pipe.recv_bytes())
            function, args = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(b"ready")
            pipe.recv_bytes()
        except (EOFError, OSError):
            sys.exit()
        try:
            limit = timedelta(seconds=timeout)
            store = dist.FileStore(path, ranks)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
            torch.manual_seed(0)
            result = True, function(rank, *args)
        except BaseException:
            result = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        try:
            message = pickle.dumps(result)
        except Exception:
            message = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(message)


atexit.register(stop_ranks)
