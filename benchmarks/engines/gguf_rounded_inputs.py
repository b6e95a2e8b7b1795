"""How far perplexity is determined where llama.cpp multiplies quantized weights on a CPU: it rounds inputs to 8 bits.

python benchmarks/engines/gguf_rounded_inputs.py

The default model in ``--scheme`` on 2 chunks of 512 tokens of Python's documentation, in transformers. The inputs
of calibrated modules are rounded as llama.cpp does (Q8_0: 32 neighbours share a step, a 127th of the largest).
Before that they are multiplied by a number next to 1, as another order of a sum might. Without the rounding the
perplexity hardly moves.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.engines.gguf_quality import TOKENS, perplexity, token_ids
from lightning_obs import CalibrationSession
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.model.module_qparams import calibrated_modules

CHUNKS = 2
FACTORS = (1.0, 1.000001, 0.999999, 1.000003, 0.99999)


def in_q8_0(x: torch.Tensor) -> torch.Tensor:
    """A tensor ``(..., columns)`` after llama.cpp's rounding of the inputs of products with quantized weights."""
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = torch.round(blocks * torch.where(largest > 0, 127 / largest, 0))
    step = (largest / 127).half().float()
    return (codes * step).flatten(-2)


def perplexity_of(model: nn.Module, ids: list[int], factor: float, *, is_rounded: bool) -> float:
    """The perplexity under ``quantized()`` with other inputs of the calibrated modules.

    Args:
        model: calibrated.
        ids: tokens to measure on.
        factor: multiplies the inputs.
        is_rounded: whether they are rounded to 8 bits, too.
    """

    def change(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0] * factor
        return (in_q8_0(x) if is_rounded else x, *args[1:])

    with contextlib.ExitStack() as stack:
        for _, module in calibrated_modules(model):
            stack.callback(module.register_forward_pre_hook(change).remove)
        return perplexity(model, ids, CHUNKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scheme", default="Q4_0")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        model, tokenizer = load_pretrained(dtype="float32")
    text = "\n".join(topics[key] for key in sorted(topics))[: TOKENS * CHUNKS * 8]
    ids = token_ids(tokenizer, text)
    with CalibrationSession(model, options.scheme, ignore=["lm_head"], engines="unchecked"):
        pass
    print("| inputs times | perplexity | inputs rounded to 8 bits |")
    print("|---|---|---|")
    for factor in FACTORS:
        plain = perplexity_of(model, ids, factor, is_rounded=False)
        rounded = perplexity_of(model, ids, factor, is_rounded=True)
        print(f"| {factor:.6f} | {plain:.4f} | {rounded:.4f} |", flush=True)


if __name__ == "__main__":
    main()
