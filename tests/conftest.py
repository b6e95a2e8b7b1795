"""Which tests run, and in which order; their fixtures are in ``tests/support/fixtures.py``.

With ``-n`` this is also read by the process that gives tests to workers. It imports neither torch nor the package, for
which it would take some seconds before the first worker starts.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module
from itertools import groupby, islice
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch's stores ask the name server for the name of 127.0.0.1; a lost answer costs one second in place of five.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that a test starts

import pytest

from tests.compatibility import write_result

VOCAB = 128
#: They register a device for their whole process; the search for doctests would import them in every one.
collect_ignore = ["support/pretend_device.py", "support/pretend_loops.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--lightning",
        choices=("lightning", "pytorch_lightning"),
        default=os.environ.get("LIGHTNING_OBS_TESTS_LIGHTNING", "lightning"),
        help="the name under which tests of the callbacks, and of the tutorial, import Lightning",
    )
    parser.addoption("--result", help="a JSON file for versions and outcomes; tests/compatibility.py reads it")


def pytest_configure(config):
    """Tests, and ranks and scripts that they start, import Lightning under one name."""
    os.environ["LIGHTNING_OBS_TESTS_LIGHTNING"] = config.getoption("--lightning")


def pytest_terminal_summary(terminalreporter, config):
    """At the end of all tests, in the process that gave them to workers."""
    if config.getoption("--result"):
        path = Path(config.getoption("--result"))
        arguments = [] if config.args == config.getini("testpaths") else config.args
        write_result(path, terminalreporter.stats, config.getoption("--lightning"), arguments)


def pytest_itemcollected(item):
    if item.get_closest_marker("slow_but_first") and any(item.callspec.indices.values()):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # behind -m, which takes tests out
def pytest_collection_modifyitems(items):
    """Slow tests first in the share that each worker begins with, so that none is left alone with them at the end.

    Shares are equal parts of the list (xdist's worksteal); files of slow tests go to the shortest. Tests of ranks
    are in the first: the process that ranks are forks of takes 7 s of CPU for its imports, once in each worker.
    """
    items.sort(key=lambda item: not starts_processes(item))
    slow = [list(tests) for _, tests in groupby((i for i in items if i.get_closest_marker("slow")), lambda i: i.path)]
    fast = iter([item for item in items if not item.get_closest_marker("slow")])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    shares = [[] for _ in range(workers)]
    for tests in slow:
        share = shares[0] if starts_processes(tests[0]) else min(shares, key=len)
        share.extend(tests)
    size = len(items) // workers
    items[:] = [item for share in shares for item in (*share, *islice(fast, max(0, size - len(share))))] + list(fast)


def starts_processes(item):
    """Whether a test, or another one of its module, takes processes from tests/support/rank_processes.py."""
    module = getattr(item, "module", None)
    takes = ("run_ranks", "run_apart", "run_command_line_on_ranks", "run_script_on_ranks", "warm_context")
    return any(hasattr(module, name) for name in takes) or "warm_workers" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test of ``converted_weights`` where the package says that transformers is too old for them."""
    try:
        return (yield)
    except (AssertionError, pytest.fail.Exception, RuntimeError, ValueError) as error:
        from tests.support.versions import is_said_to_be_too_old

        if item.get_closest_marker("converted_weights") and is_said_to_be_too_old(error):
            pytest.skip(str(error).partition("needs ")[2].partition(". Remedy")[0])
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Where tests run, import their fixtures before the tests, and Lightning before all that may import it.

    Garbage is looked for among what tests make, not among the millions of objects of imports and collection, and a
    seventh as often as by default, which takes a twentieth of the time of tests.
    """
    gc.disable()
    try:
        if not session.config.pluginmanager.has_plugin("dsession"):  # xdist's, which gives tests to workers
            import_module("tests.support.lightning_package")
            session.config.pluginmanager.register(import_module("tests.support.fixtures"))
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(5000)
        gc.enable()
