"""Perplexity of the default model with each observer, beside llm-compressor's observer of the same name.

    python benchmarks/accuracy/quality.py                       # weights (W4A16, groups of 64) and inputs (static INT8)
    python benchmarks/accuracy/quality.py --only weights --case memoryless_mse imatrix_mse

Runs in the venv of ``make parity``, which holds both packages. Both calibrate a fresh copy of the model on the same
batches of English text (``TextData``) with eager attention, in whole forwards (``pipeline="basic"``), and are measured
on the same text that neither saw. One line per observer; an observer that llm-compressor has not, has no second figure.
Exit code 1 if one of ours is worse than its namesake by more than 0.01.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import sys
import time
import warnings
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity
from transformers.utils import logging as transformers_logging

from lightning_obs import CalibrationSession, quantized
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import load_pretrained

IGNORE = ["lm_head"]
#: (observer, hyperparameters, whether llm-compressor has it)
WEIGHTS = {
    "memoryless_minmax": ("memoryless_minmax", {}, True),
    "memoryless_mse": ("memoryless_mse", {}, True),
    "mse": ("mse", {}, True),
    "imatrix_mse": ("imatrix_mse", {}, True),
    "normal_observer k=3": ("normal_observer", {"k": 3.0}, False),
}
INPUTS = {
    "static_minmax": ("static_minmax", {}, True),
    "minmax": ("minmax", {}, True),
    "memoryless_mse": ("memoryless_mse", {}, True),
    "mse": ("mse", {}, True),
    "histogram mse": ("histogram", {}, False),
    "histogram entropy": ("histogram", {"criterion": "entropy"}, False),
    "percentile 99.999": ("percentile", {"percentile": 99.999}, False),
    "percentile 99.99": ("percentile", {"percentile": 99.99}, False),
    "normal_observer k=6": ("normal_observer", {"k": 6.0}, False),
}
TOLERANCE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["weights", "inputs"], default=None)
    parser.add_argument("--case", nargs="+", default=None, help="observers as the table names them")
    parser.add_argument("--batches", type=int, default=16, help="calibration batches of 512 tokens")
    parser.add_argument("--eval-batches", type=int, default=16)
    options = parser.parse_args()
    _quiet()

    model, tokenizer = load_pretrained(dtype="float32", attn_implementation="eager")
    data = TextData(tokenizer, batches=options.batches, eval_batches=options.eval_batches)
    full = perplexity(model, data)
    title = f"{full:.2f} in full precision, {options.eval_batches * 512:,} held-out tokens"
    table = Table("scheme", "observer", "lightning_obs", "llm-compressor", "seconds: ours, peer", title=title)
    worse = False
    for kind, cases in (("weights", WEIGHTS), ("inputs", INPUTS)):
        for case, (observer, kwargs, has_peer) in cases.items():
            if options.only not in (None, kind) or (options.case and case not in options.case):
                continue
            scheme = make_scheme(kind, observer, kwargs)
            own, own_seconds = ours(scheme, data)
            peer, peer_seconds = theirs(scheme, tokenizer, data) if has_peer else (None, None)
            worse |= peer is not None and own > peer + TOLERANCE
            columns = (f"{own:.2f}", "" if peer is None else f"{peer:.2f}")
            seconds = f"{own_seconds:.0f}" + ("" if peer_seconds is None else f", {peer_seconds:.0f}")
            label = "W4A16, groups of 64" if kind == "weights" else "static INT8"
            table.add_row(label, case, *columns, seconds)
            print(f"{label}: {case}: {columns}", file=sys.stderr, flush=True)
    Console(width=120).print(table)
    return int(worse)


def make_scheme(kind: str, observer: str, kwargs: dict[str, Any]) -> QuantizationScheme:
    chosen = {"observer": observer, "observer_kwargs": kwargs}
    if kind == "weights":
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, group_size=64, **chosen))
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=8, strategy="channel"),
        input_activations=QuantizationArgs(num_bits=8, strategy="tensor", **chosen),
    )


def ours(scheme: QuantizationScheme, data: TextData) -> tuple[float, float]:
    model, _ = load_pretrained(dtype="float32", attn_implementation="eager")
    start = time.perf_counter()
    with CalibrationSession(model, scheme, ignore=IGNORE) as session, torch.no_grad():
        for batch in data.val_dataloader() if session.needs_data else ():
            model(**batch, use_cache=False)
    seconds = time.perf_counter() - start
    with quantized(model):
        return perplexity(model, data), seconds


def theirs(scheme: QuantizationScheme, tokenizer: Any, data: TextData) -> tuple[float, float]:
    model, _ = load_pretrained(dtype="float32", attn_implementation="eager")
    recipe = QuantizationModifier(ignore=IGNORE, config_groups={"group_0": scheme.model_copy(deep=True)})
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        oneshot(
            model=model,
            dataset=DataLoader(list(data.val_dataloader()), batch_size=None),
            recipe=recipe,
            pipeline="basic",
            processor=tokenizer,  # required, and not used with a DataLoader
        )
    seconds = time.perf_counter() - start
    return perplexity(model, data), seconds


@torch.inference_mode()
def perplexity(model: Any, data: TextData) -> float:
    """Of every token but the first of each block."""
    metric = Perplexity()
    for batch in data.test_dataloader():
        logits = model(**batch, use_cache=False).logits
        metric.update(logits[:, :-1].float(), batch["input_ids"][:, 1:])
    gc.collect()
    return float(metric.compute())


def _quiet() -> None:
    logger.remove()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    sys.exit(main())
