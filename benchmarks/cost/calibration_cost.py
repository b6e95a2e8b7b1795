"""What calibration adds to the time of a validation that runs anyway.

    python benchmarks/cost/calibration_cost.py                 # SmolLM2-135M
    python benchmarks/cost/calibration_cost.py --model tiny    # a tiny Llama made on the fly, in seconds
    python benchmarks/cost/calibration_cost.py --model FOLDER
    python benchmarks/cost/calibration_cost.py --observer histogram
    python benchmarks/cost/calibration_cost.py --observer histogram --report --batches 16 --cpu  # all layers' metrics

Validates the same batches without and with ``CalibrationCallback("INT8_STATIC")``, with an observer (``static_minmax``
by default) on the input of every Linear but lm_head, in one process. Machines drift, so each pair of neighbours gives
one ratio (the order within a pair alternates), and the median of the ratios counts.

``batches`` is the time from each batch's start to its end, summed: what the hooks cost. ``whole validation`` is
``trainer.validate``: also attaching, observing every weight once, and writing the qparams. The tokens are random (the
time does not depend on them). No loss is computed: it would only make the share of calibration smaller.

With ``--report`` the validation ends with the error of every weight and of every input that was counted.

Both cores must be free: a thread that waits for another process makes every small reduction look expensive.

Exit code 1 if the whole validation takes more than ``--limit`` (1.10) times as long.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging
from typing_extensions import override

from lightning_obs import CalibrationCallback
from lightning_obs.app.models.pretrained import load_pretrained


class Validation(LightningModule):
    """Run the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.model(input_ids=batch, use_cache=False)


class Clock(Callback):
    """Sum the time that batches take."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.batches, self.now = 0.0, now

    @override
    def on_validation_batch_start(self, *_: Any) -> None:
        self.batches -= self.now()

    @override
    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches += self.now()


def main() -> int:
    """Time validations in turn, print one table, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="default", help="default (SmolLM2), tiny (made on the fly), or a folder")
    parser.add_argument("--observer", default="static_minmax", help="of the inputs")
    parser.add_argument("--limit", type=float, default=1.10, help="ratio above which the exit code is 1")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="per batch")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of validations")
    parser.add_argument("--report", action="store_true", help="measure and show the layers' errors too")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the process instead of wall time")
    options = parser.parse_args()
    _quiet()
    clock = time.process_time if options.cpu else time.perf_counter

    model = make_tiny() if options.model == "tiny" else load_pretrained(_path(options.model), dtype="float32")[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (options.batches, options.tokens), generator=generator)
    loader = DataLoader(ids)
    module = Validation(model)

    def make_callback() -> CalibrationCallback:
        observers = {"input": options.observer}
        return CalibrationCallback("INT8_STATIC", ignore=["lm_head"], observers=observers, show=options.report)

    for calibration in ([], [make_callback()]):  # warm up
        validate(module, loader, calibration, clock)
    without, with_calibration = [], []
    for i in track(range(options.repeats), description="validating"):
        callback = make_callback()
        turn = [(without, []), (with_calibration, [callback])]
        for times, calibration in turn if i % 2 else reversed(turn):
            times.append(validate(module, loader, calibration, clock))

    title = (
        f"{options.observer}, {options.model}, {options.batches} batches of {options.tokens} tokens, "
        f"threads: {torch.get_num_threads()}"
        + (", CPU time" if options.cpu else "")
        + (", with metrics" if options.report else "")
    )
    columns = (f"median of {options.repeats} pairs", "without (s)", "with (s)", "ratio", "all ratios")
    table = Table(*columns, title=title)
    ratio = 0.0
    for name, before, after in zip(
        ("batches", "whole validation"), zip(*without, strict=True), zip(*with_calibration, strict=True), strict=True
    ):
        ratios = sorted(b / a for a, b in zip(before, after, strict=True))
        ratio = median(ratios)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        table.add_row(name, f"{median(before):.3f}", f"{median(after):.3f}", f"{ratio:.3f}", spread)
    console = Console(width=120)
    console.print(table)
    result = callback.result
    assert result is not None  # validate finished
    calls = result.batches * len(result.modules)
    console.print(
        f"{len(result.modules)} modules, {calls} observer calls, {result.measurements} measurements: "
        f"modules that read one tensor share it"
    )
    return int(ratio > options.limit)


def validate(
    module: Validation, loader: DataLoader[torch.Tensor], calibration: list[Callback], now: Callable[[], float]
) -> tuple[float, float]:
    """Seconds in the batches, and in the whole validation."""
    clock = Clock(now)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[clock, *calibration],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = now()
    with redirect_stdout(StringIO()):  # the table of layers
        trainer.validate(module, loader, verbose=False)
    return clock.batches, now() - start


def make_tiny() -> LlamaForCausalLM:
    """A Llama of two layers, 128 wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


def _path(model: str) -> str | None:
    return None if model == "default" else model


def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec).*")


if __name__ == "__main__":
    sys.exit(main())
