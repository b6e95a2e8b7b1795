"""Calibrate a real model in less memory than its weights take, as the system enforces it.

    python benchmarks/cost/within_limit.py              # 300 MB above imports, for 538 MB of weights
    python benchmarks/cost/within_limit.py --limit 200
    python benchmarks/cost/within_limit.py --limit 4000 --model <folder>

The default model (SmolLM2-135M-Instruct, float32) is calibrated to FP8 on 8 x 256 tokens of Python's documentation, in
a process of its own whose data segment cannot grow beyond the limit (RLIMIT_DATA: private memory, not mapped files).
This is done layer by layer from its files. To see that the limit holds, another process only reads all weights into
memory. Both are forks of this one, which has imported everything and computed nothing. Perplexity on other pages,
before and after, is measured without a limit.
"""

from __future__ import annotations

import argparse
import math
import re
import resource
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from lightning_obs import calibrate_layerwise
from lightning_obs.app.models.pretrained import default_model_folder
from lightning_obs.files.tensors import TensorReader
from lightning_obs.numerics.kernels import launch  # noqa: F401  (numba counts as an import)


def tokens(folder: Path, count: int, width: int, first: int) -> list[torch.Tensor]:
    """Rows of the documentation's tokens, from row ``first`` on."""
    text = "\n".join(topics[name] for name in sorted(topics))[: 8 * width * (first + count)]
    rows = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"][0].split(width)
    return [row[None] for row in rows[first : first + count]]


def perplexity(folder: Path, batches: list[torch.Tensor]) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return math.exp(sum(model(batch, labels=batch).loss.item() for batch in batches) / len(batches))


def attempt(*arguments: Any) -> str:
    """What :func:`limited` comes to in a process of its own: "done", or its error."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
        error = process.submit(limited, *arguments).exception()
    return "done" if error is None else f"{type(error).__name__}: {error}"


def limited(limit: int, folder: Path, out: Path, blocks: int, whole: bool) -> None:
    """Calibrate within ``limit`` MB above what is taken now, or only bring the weights into memory."""
    batches = tokens(folder, blocks, 256, 0)
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None
    allowed = int(found[1]) * 1024 + limit * 10**6
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    if whole:
        reader = TensorReader(folder)
        weights = [reader.read(name) for name in reader]
        print(len(weights), "tensors in memory")
    else:
        calibrate_layerwise(folder, batches, "FP8", out, ignore=["lm_head"])


def main() -> int:
    """Return 0 if the model is calibrated within the limit, in which its weights have no room."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, default=300, help="MB above imports")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint in full precision")
    parser.add_argument("--blocks", type=int, default=8, help="of 256 tokens, to calibrate on and to measure on")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before anything is computed: threads would be missing in a fork
    folder = options.model or default_model_folder()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        whole = attempt(options.limit, folder, out, options.blocks, True)
        refused = "allocate memory" in whole
        print(f"all weights within {options.limit} MB: {'no room' if refused else whole}")
        by_layers = attempt(options.limit, folder, out, options.blocks, False)
        print(f"layer by layer within {options.limit} MB: {by_layers}")
        if by_layers != "done" or not refused:
            return 1
        held_out = tokens(folder, options.blocks, 256, 64)
        before, after = perplexity(folder, held_out), perplexity(out, held_out)
        print(f"perplexity on {options.blocks * 256:,} held-out tokens: {before:.3f} before, {after:.3f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
