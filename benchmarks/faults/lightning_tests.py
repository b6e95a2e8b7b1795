"""Run Lightning's own tests with a callback of this package in every Trainer, and tell what changes.

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning lightning-source
    python benchmarks/faults/lightning_tests.py lightning-source [--tests loops callbacks]

Each variant is a process of pytest, of which this file is also the plugin: it appends a callback to the list of every
Trainer, and keeps, for each test, its outcome and what was seen of each run: the LightningModule's hooks in order,
random numbers, metrics and weights. The first variant, ``nothing``, appends a callback that does nothing, so that a
test that counts callbacks fails there already, and is left out. Of the tests that pass with it:

- `same`: they pass, and nothing of what was seen differs. (Fine-tuning is to change weights and metrics; there only
  outcomes count.)
- `refused`: a CalibrationError, which names what does not go together.
- `differs`: they pass, and something that was seen differs. `failed`: anything else.

A test that draws other numbers each time differs by itself; ``--variants again`` runs ``nothing`` once more. Tests that
assert all that is logged fail by what the callback logs: ``silent`` logs nothing. Weight averaging has to be listed
behind the callback: ``first`` lists it before all others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector

#: seconds that a test may take for each second of CPU that it may take
WAIT = 10
VARIANT, OUT, LIMIT = "LIGHTNING_TESTS_VARIANT", "LIGHTNING_TESTS_OUT", "LIGHTNING_TESTS_LIMIT"


class Nothing(Callback):
    """Has a state and hooks, as the package's callbacks have, which do nothing."""

    def setup(self, *_: Any, **__: Any) -> None: ...

    def on_validation_batch_start(self, *_: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def make_callback(variant: str) -> Callback:
    from lightning_obs import CalibrationCallback, QuantizationAwareTraining

    if variant in ("calibrate", "first"):
        return CalibrationCallback("INT8_STATIC")
    if variant == "silent":
        return CalibrationCallback("INT8_STATIC", log=False)
    if variant == "evaluate":
        return CalibrationCallback("INT8_STATIC", evaluate=True)
    if variant == "train":
        return QuantizationAwareTraining("W8A8")
    return Nothing()


# ---------------------------------------------------------------------- the plugin


class Watch:
    """What one process of pytest sees; its hooks are pytest's."""

    def __init__(self, variant: str, out: Path, limit: int) -> None:
        self._variant = variant
        self._out = out
        self._limit = limit  # of one test [s of CPU]
        self._runs: list[dict[str, Any]] = []
        self._began = 0.0  # of the test [s of CPU]
        self._hooks: list[str] = []
        self._is_running = False

    def add_to_every_trainer(self) -> None:
        """Append the callback, and watch the calls of hooks and of entry points."""
        on_trainer_init = _CallbackConnector.on_trainer_init
        call_hook = call._call_lightning_module_hook
        call_entry = call._call_and_handle_interrupt

        def with_callback(connector: Any, callbacks: Any, *rest: Any, **options: Any) -> None:
            callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
            place = 0 if self._variant == "first" else len(callbacks)
            callbacks.insert(place, make_callback(self._variant))
            on_trainer_init(connector, callbacks, *rest, **options)

        def with_hook(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
            self._hooks.append(hook_name)
            return call_hook(trainer, hook_name, *args, **options)

        def with_entry(trainer: Any, entry: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return self._watched(trainer, lambda: call_entry(trainer, entry, *args, **options))

        _CallbackConnector.on_trainer_init = with_callback
        call._call_lightning_module_hook = with_hook
        call._call_and_handle_interrupt = with_entry

    def _watched(self, trainer: Any, run: Callable[[], Any]) -> Any:
        if self._is_running:  # a Trainer inside of a Trainer's run
            return run()
        self._is_running = True
        self._hooks.clear()
        try:
            return run()
        finally:
            self._is_running = False
            self._runs.append(self._seen(trainer))

    def _seen(self, trainer: Any) -> dict[str, Any]:
        metrics = {name: repr(value) for name, value in trainer.callback_metrics.items() if not is_ours(name)}
        module = trainer.lightning_module
        weights = {} if module is None else module.state_dict()
        return {
            "hooks": list(self._hooks),
            "random": digest([torch.get_rng_state(), np.random.get_state(), random.getstate()]),
            "metrics": metrics,
            "weights": digest([[name, value] for name, value in weights.items()]),
            "step": [trainer.global_step, trainer.current_epoch],
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Begin each test with the same random numbers, and end it after a while."""
        self._runs = []
        self._began = cpu_seconds()
        torch.manual_seed(1234)
        np.random.seed(1234)
        random.seed(1234)
        # A busy machine stops no test; one that waits for nothing is stopped all the same.
        signal.signal(signal.SIGPROF, too_long)
        signal.signal(signal.SIGALRM, too_long)
        signal.setitimer(signal.ITIMER_PROF, self._limit)
        signal.alarm(WAIT * self._limit)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Write down how a test ended."""
        report = yield
        if report.when == "call" or report.outcome == "failed":
            error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
            seconds = cpu_seconds() - self._began
            test = {
                "id": item.nodeid,
                "outcome": report.outcome,
                "error": error[:500],
                "refused": call.excinfo is not None and is_refusal(call.excinfo.value),
                "runs": self._runs,
                "seconds": round(seconds, 2),
            }
            with self._out.open("a") as file:
                file.write(json.dumps(test, default=repr) + "\n")
        return report


def is_refusal(error: BaseException | None) -> bool:
    """Whether an error is a CalibrationError, tells one of another process, or was raised while one was handled."""
    if error is None:
        return False
    return "CalibrationError" in f"{type(error).__name__}: {error}" or is_refusal(error.__context__)


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def too_long(*_: Any) -> None:
    raise TimeoutError("the test took too long")


def is_ours(name: str) -> bool:
    return name.startswith("quant/") or "_quantized" in name


def digest(value: Any) -> str:
    """The same text for the same numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().tolist() if value.layout == torch.strided else str(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        value = "".join(digest(part) for part in value)
    return hashlib.sha1(repr(value).encode()).hexdigest()[:12]


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest where this file is its plugin."""
    for marker in ("flaky", "random_order"):
        config.addinivalue_line("markers", f"{marker}: of plugins that are not installed")
    watch = Watch(os.environ[VARIANT], Path(os.environ[OUT]), int(os.environ[LIMIT]))
    watch.add_to_every_trainer()
    config.pluginmanager.register(watch)


# ---------------------------------------------------------------------- the script


def run_tests(variant: str, folder: Path, tests: list[str], limit: int, files: int) -> dict[str, dict[str, Any]]:
    """Run Lightning's tests with a callback in every Trainer.

    Args:
        variant: the callback (:func:`make_callback`).
        folder: Lightning's ``tests``.
        tests: pytest's names of files or tests, relative to ``folder``.
        limit: of one test [s of CPU]; a file may take as long as 20 tests that wait, then its process is killed.
        files: in one process. With 1 no test sees what another file left behind, but each file imports everything.

    Returns:
        By a test's id, its outcome and what was seen of its runs. Tests of a killed process are absent.
    """
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    by_process: list[list[str]] = []
    for number, names in enumerate(by_file.values()):
        if number % files == 0:
            by_process.append([])
        by_process[-1] += names
    results: dict[str, dict[str, Any]] = {}
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as scratch:
        for number, names in enumerate(by_process):
            out = Path(scratch) / f"{number}.jsonl"
            out.touch()
            environment = {**os.environ, "PYTHONPATH": path, VARIANT: variant, OUT: str(out), LIMIT: str(limit)}
            command = [sys.executable, "-m", "pytest", "-p", "lightning_tests", "-q", "-p", "no:cacheprovider", *names]
            run_within(20 * WAIT * limit * files, command, folder, environment)
            for line in out.read_text().splitlines():
                test = json.loads(line)
                results[test["id"]] = test
    return results


def run_within(seconds: float, command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a command without its output; kill it and all processes that it started when the time is over."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"  {command[-1]} and before: killed after {seconds:.0f} s", flush=True)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def judged(before: dict[str, Any], after: dict[str, Any] | None, *, trains: bool) -> tuple[str, str]:
    """What a callback did to a test that passes without it, and the difference in words."""
    if after is None:
        return "failed", "did not run"
    if after["outcome"] != "passed":
        return ("refused" if after["refused"] else "failed"), after["error"]
    if trains:
        return "same", ""
    if len(before["runs"]) != len(after["runs"]):
        return "differs", "number of runs"
    for old, new in zip(before["runs"], after["runs"], strict=True):
        names = [name for name in old if old[name] != new[name]]
        if names:
            return "differs", ", ".join(f"{name}: {str(old[name])[:200]} -> {str(new[name])[:200]}" for name in names)
    return "same", ""


def without_second_pass(test: dict[str, Any]) -> dict[str, Any]:
    """The test without the hooks that a second pass calls once more: of each batch, and of the epoch's end."""
    runs = []
    for run in test["runs"]:
        hooks = [name for name in run["hooks"] if "_batch_" not in name and not name.endswith("_epoch_end")]
        runs.append({**run, "hooks": hooks})
    return {**test, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Lightning's repository")
    parser.add_argument("--tests", nargs="+", default=["loops", "callbacks", "core", "models", "trainer"])
    parser.add_argument("--variants", nargs="+", default=["calibrate", "evaluate", "train"])
    parser.add_argument("--before", type=Path, help="a file that keeps the first variant's outcomes for further calls")
    parser.add_argument("--limit", type=int, default=60, help="of one test [s of CPU]")
    parser.add_argument(
        "--longest", type=float, default=60, help="longer tests are left out of the variants [s of CPU]"
    )
    parser.add_argument("--files", type=int, default=1, help="whose tests run in one process")
    options = parser.parse_args()
    folder = options.source / "tests"
    tests = []
    for name in options.tests:
        place = folder / "tests_pytorch" / name
        files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
        tests += [file.relative_to(folder).as_posix() for file in files]
    if options.before is not None and options.before.exists():
        before = json.loads(options.before.read_text())
    else:
        before = run_tests("nothing", folder, tests, options.limit, options.files)
        if options.before is not None:
            options.before.write_text(json.dumps(before))
    wanted = tuple(test.removesuffix(".py") for test in tests)
    passed: dict[str, dict[str, Any]] = {}
    too_slow = 0
    for name, test in before.items():
        if not name.removeprefix("tests/").startswith(wanted):
            continue
        is_passed = test["outcome"] == "passed" and test["runs"]
        is_stopped = test["error"].startswith("TimeoutError: the test took")
        if is_stopped or (is_passed and test["seconds"] > options.longest):
            too_slow += 1
        elif is_passed:
            passed[name] = test
    print(
        f"{len(passed)} tests run a Trainer and pass with a callback that does nothing; {too_slow} are too slow",
        flush=True,
    )
    failures = 0
    for variant in options.variants:
        names = [name.removeprefix("tests/") for name in passed]  # pytest's root is the repository
        after = run_tests(variant, folder, names, options.limit, options.files)
        counts: Counter[str] = Counter()
        for name, test in passed.items():
            result = after.get(name)
            if variant == "evaluate" and result is not None:
                verdict, why = judged(without_second_pass(test), without_second_pass(result), trains=False)
            else:
                verdict, why = judged(test, result, trains=variant == "train")
            counts[verdict] += 1
            if verdict != "same":
                print(f"  {variant}: {verdict}: {name}: {why}")
        print(f"{variant}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
        failures += counts["failed"] + counts["differs"]
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
