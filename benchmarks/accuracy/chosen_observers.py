"""Static INT8 of the default model: observers chosen by measurement beside each observer alone, on held-out text.

    python benchmarks/accuracy/chosen_observers.py --tokens 256 --batches 8
    python benchmarks/accuracy/chosen_observers.py --tokens 64 --batches 8 --candidates clipping

Prints the table of the choice, its CPU time, and perplexity and KL divergence of the quantized model for the choice and
for each candidate as the observer of all inputs. All of them calibrate on the same batches. The candidates ``clipping``
are those of docs/evidence/int8.md of which some clip rare, large values that matter.
"""

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich import print as print_table
from torch import nn
from torch.nn import functional as F

from lightning_obs import CalibrationOptions, CalibrationSession, choose_observers, quantized
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.choice.observer_choice import fitting_candidates
from lightning_obs.model.module_qparams import calibration_of, put_back
from lightning_obs.numerics.divergence import compare

CANDIDATES = {
    "default": None,
    "clipping": {
        "input": [
            "minmax",
            "histogram",
            {"name": "histogram", "criterion": "entropy"},
            {"name": "histogram", "norm": 1.0, "maxshrink": 0.99},
            {"name": "histogram", "norm": 1.5, "maxshrink": 0.99},
            {"name": "percentile", "percentile": 99.999},
        ]
    },
}


@contextmanager
def calibrated(model: nn.Module, scheme: Any, batches: list[Any], **options: Any) -> Iterator[None]:
    before = calibration_of(model)
    try:
        with CalibrationSession(model, scheme, **options), torch.no_grad():
            for batch in batches:
                model(**batch)
        with quantized(model):
            yield
    finally:
        put_back(before)


@torch.inference_mode()
def quality(model: nn.Module, batches: list[Any], originals: list[torch.Tensor]) -> tuple[float, float]:
    """Perplexity, and divergence from the original logits; the first call makes these."""
    is_first = not originals
    loss = divergence = 0.0
    for number, batch in enumerate(batches):
        logits = model(**batch).logits[0]
        if is_first:
            originals.append(logits)
        loss += float(F.cross_entropy(logits[:-1], batch["input_ids"][0, 1:]))
        divergence += float(compare(logits, originals[number])[0]) / len(logits)
    return math.exp(loss / len(batches)), divergence / len(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="of a batch")
    parser.add_argument("--batches", type=int, default=16, help="to choose and to calibrate on")
    parser.add_argument("--eval-batches", type=int, default=16)
    parser.add_argument("--candidates", choices=list(CANDIDATES), default="default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model, tokenizer = load_pretrained(None)
    data = TextData(tokenizer, batches=options.batches, eval_batches=options.eval_batches, tokens=options.tokens)
    batches = [{**batch, "use_cache": False} for batch in data.val_dataloader()]
    held_out = [{**batch, "use_cache": False} for batch in data.test_dataloader()]
    candidates = CANDIDATES[options.candidates]
    start = time.process_time()
    choice = choose_observers(model, batches, "INT8_STATIC", candidates, ignore="lm_head")
    seconds = time.process_time() - start
    print_table(choice.table())
    print(*choice.lines, f"chosen in {seconds:.0f} CPU seconds", sep="\n", flush=True)
    originals: list[torch.Tensor] = []
    perplexity, _ = quality(model, held_out, originals)
    print("\n| inputs by | perplexity | KL [nats] |\n|---|---|---|")
    print(f"| (unquantized) | {perplexity:.2f} | |", flush=True)
    requested = CalibrationOptions("INT8_STATIC", ignore="lm_head")
    schemes: dict[str, dict[str, Any]] = {"**chosen**": {"scheme": choice.config}}
    for label, spec in fitting_candidates(model, requested, candidates)["input"].items():
        schemes[f"`{label}`"] = {"scheme": "INT8_STATIC", "ignore": "lm_head", "observers": {"input": spec}}
    for name, scheme in schemes.items():
        with calibrated(model, batches=batches, **scheme):
            perplexity, divergence = quality(model, held_out, originals)
        print(f"| {name} | {perplexity:.2f} | {divergence:.4f} |", flush=True)


if __name__ == "__main__":
    main()
