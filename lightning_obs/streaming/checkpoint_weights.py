"""Quantize the weights of a checkpoint's files, without a model in memory.

A scheme that needs no data needs one fused set of weights at a time. Each set is read, observed, compressed, written to
its place and forgotten; other tensors are copied as bytes. The rest is as for a model in memory, with the model on the
meta device. Places in the new files are known beforehand, so several processes can share the work.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import time
from collections.abc import Collection, Container, Iterator, Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.finalize import result_of
from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.compress import StoredTensors, module_entries
from lightning_obs.checkpoint.export import write_quantization_config
from lightning_obs.checkpoint.load import any_qparams
from lightning_obs.errors import CalibrationError, refuse, warn
from lightning_obs.files.tensors import Progress, Tally, TensorWriter
from lightning_obs.files.write import CONTENTS_FILE, require_room, whole_folder
from lightning_obs.model.module_qparams import clear_qparams, scheme_args, write_qparams
from lightning_obs.moe.experts import linear_experts
from lightning_obs.ranks.collectives import Collectives, on_all_ranks
from lightning_obs.ranks.sync import partition
from lightning_obs.schemes.config import SchemeLike, config_groups, make_observer
from lightning_obs.streaming.source import CheckpointSource

#: files that hold weights; only safetensors files are read
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@takes_keywords_of(CalibrationOptions)
def quantize_checkpoint(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    scheme: SchemeLike | CalibrationOptions,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = "50GB",
    progress: Progress | None = None,
    workers: int | Collectives = 1,
    **options: Unpack[OptionKeywords],
) -> CalibrationResult:
    """Quantize the weights of a checkpoint, from its files to new ones, in the memory of one fused set of weights.

    The tensors of ``out`` are byte for byte those of :func:`~lightning_obs.export_checkpoint` of the model in memory.
    All else in ``folder`` is carried over: tokenizer, code, licence; tensors that the model's class does not know
    (multi-token prediction...) in full precision, their modules in ``ignore``.

    Args:
        folder: a checkpoint of transformers, in full precision: ``config.json`` and safetensors files.
        out: written whole or not at all.
        scheme: weight-only or dynamic activations.
        overwrite: replace the checkpoint in ``out``; files that no export wrote are never deleted.
        max_shard_size: bytes of one file of weights, or ``"5GB"``.
        progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.
        workers: how many processes share the work. They are started, so a script needs ``if __name__ == "__main__":``;
            each imports torch, and has one set of weights at a time. Or ``Collectives.of_group()``: the ranks of
            torchrun share it; every rank must call this, and is told the progress of its own share.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`: ``ignore``, ``observers``...

    Returns:
        The result, without quantization parameters.

    Raises:
        CalibrationError: the scheme needs data or is wrong; ``folder`` is damaged, quantized already, or has other
            tensors than its config says; ``out`` cannot be written, or has no room; the failure of any process.
    """
    started, out = time.perf_counter(), Path(out)
    ranks = workers if isinstance(workers, Collectives) else Collectives()
    is_number = isinstance(workers, int) and not isinstance(workers, bool)
    if not isinstance(workers, Collectives) and (not is_number or workers < 1):
        raise CalibrationError("workers", got=repr(workers), expected="a whole number, one or more, or Collectives")
    chosen = CalibrationOptions.of(scheme, **options)
    require_apart(folder, out)
    _require_no_data(chosen)
    with ExitStack() as opened, ExitStack() as stack:
        with on_all_ranks(ranks):
            begun = stack.enter_context(whole_folder(out, overwrite)) if ranks.rank == 0 else None
            job = opened.enter_context(Streaming.of(folder, chosen, progress))
            if begun is not None:
                require_room(begun, job.tally.total)
                job.write_others(begun, job.layout.keys())
        partial = ranks.gather_object(begun)[0]
        with on_all_ranks(ranks):
            if isinstance(workers, int) and workers > 1:
                _run_in_processes(job, (folder, chosen, partial, max_shard_size), workers)
            else:
                job.run(partial, max_shard_size, ranks)
        with on_all_ranks(ranks):
            if (done := sum(ranks.gather_object(job.tally.done))) != (total := job.tally.total):
                raise CalibrationError("tensors were not written", got=f"{done:,} bytes", expected=f"{total:,}")
            stack.close()  # the folder takes its name
    return result_of(job.session, seconds=time.perf_counter() - started)


def require_apart(folder: str | os.PathLike[str], out: Path) -> None:
    """Refuse to write into the folder that is read: its files would be carried over into themselves."""
    if not isinstance(folder, nn.Module) and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder)):
        raise CalibrationError(
            f"{out} is inside the checkpoint that is read, {os.fspath(folder)}",
            expected="another folder",
            remedy="write beside it.",
        )


def _require_no_data(options: CalibrationOptions) -> None:
    """Refuse schemes that need more than the weights."""
    args = [each for group in config_groups(options.config) for each in scheme_args(group)]
    needs = [f"static {base} activations" for base, each in args if base != "weight" and each.dynamic is not True]
    weights = [each for base, each in args if base == "weight"]
    needs += [f"{each.observer} on the inputs" for each in weights if make_observer("weight", each).observes_data]
    needs += ["the kv cache"] if options.config.kv_cache_scheme is not None else []
    needs += ["rounding"] if options.rounding is not None else []
    refuse(
        list(dict.fromkeys(needs)),
        f"{options.label} needs data, and quantize_checkpoint reads weights alone",
        expected="weight-only or dynamic schemes (W4A16, NVFP4A16, FP8_DYNAMIC, W8A8)",
        remedy="calibrate the model on data: CalibrationCallback or CalibrationSession; where it does not fit into "
        "memory, calibrate_layerwise.",
    )


class Streaming:
    """Converts the files of a source to the files of its quantized checkpoint; ``tally`` counts the bytes written."""

    def __init__(self, source: CheckpointSource, session: CalibrationSession, progress: Progress | None) -> None:
        self.source, self.session = source, session
        self.write_any_qparams()  # with them the model is laid out as it will be stored
        planned = {target.name for target in session.plan.targets}
        # Where some experts of a stack are quantized, all of them are stored one by one.
        split = [name for name in linear_experts(source.model) if any(p.startswith(f"{name}.") for p in planned)]
        #: names of the modules that are stored otherwise than in the source: planned ones, and experts beside them
        self.taken = [
            name
            for name, module in source.model.named_modules()
            if name in planned or (isinstance(module, nn.Linear) and name.startswith(tuple(f"{s}." for s in split)))
        ]
        names = set(self.taken)
        own = {name: s for name, s in source.sources.items() if name.rpartition(".")[0] not in names}
        consumed = {source.sources[n].name for n in source.sources.keys() - own.keys()}
        renamed = {n: source.stored_as.get(n, s.name) for n, s in own.items() if s.item is None}
        #: tensors stored as they are: by name in the source the new name, and the name in the model
        self.copied = {s.name: (renamed.get(n, s.name), n) for n, s in own.items()}
        unknown = [name for name in source.reader if name not in consumed and name not in self.copied]
        #: names of tensors that the model does not know, in one order in every process, unlike a set
        self.unknown = dict.fromkeys(unknown).keys()
        self.copied |= {name: (name, "") for name in self.unknown}
        stored = StoredTensors(source.model)
        #: the names in the new files of a module's entries, also where it is left in full precision
        self.stored_as = source.stored_as | stored.renamed
        #: a meta tensor of each stored tensor, by its name in the new files
        self.layout = {self.stored_as[n]: x for n, x in stored.entries.items() if n.rpartition(".")[0] in names}
        self._refuse_strays()
        self.layout |= {stored_as: source.reader.meta(name) for name, (stored_as, _) in self.copied.items()}
        self.tally = Tally(sum(tensor.nbytes for tensor in self.layout.values()), progress)

    def _refuse_strays(self) -> None:
        """Refuse tensors beside those of a quantized module: a reader could take them for the module's own."""
        prefixes = {name.rpartition(".")[0] for name in self.layout}
        refuse(
            [name for name in self.unknown if name in self.layout or _is_stray(name, prefixes)],
            f"the files of {self.source.folder} hold tensors in quantized modules that the model does not know",
            expected="a checkpoint in full precision, with the tensors of its model",
            remedy="delete them from the files, or list their modules in `ignore`.",
        )

    @classmethod
    @contextmanager
    def of(
        cls, folder: str | os.PathLike[str], options: CalibrationOptions, progress: Progress | None = None
    ) -> Iterator[Streaming]:
        """Of a folder, whose files are open inside the ``with`` block."""
        source = CheckpointSource(folder)
        with closing(source.reader), torch.inference_mode(False), torch.no_grad():
            yield cls(source, CalibrationSession(source.model, options), progress)

    def write_any_qparams(self, skipped: Container[str] = ()) -> None:
        """Give all planned modules, except the ``skipped`` ones, qparams of their later shapes."""
        for target in self.session.plan.targets:
            if target.name not in skipped:
                write_qparams(target.module, target.scheme, any_qparams(target))

    def write_others(self, partial: Path, stored: Set[str]) -> None:
        """Write the source's other files and the quantization config; ``stored`` are the names of the weights."""
        copy_others(self.source.folder, partial)
        write_quantization_config(self.source.model, partial, stored - self.unknown, self.unknown)

    def run(self, partial: Path, max_shard_size: int | str, ranks: Collectives) -> None:
        """Write this rank's share of all items."""
        items, meta = self.items(), self.source.meta
        sizes = [sum(meta(f"{name}.weight").numel() for name in item) for item in items if isinstance(item, list)]
        owners = partition(sizes, ranks.size) + [number % ranks.size for number in range(len(self.copied))]
        with closing(TensorWriter(partial, self.layout, max_shard_size, tally=self.tally)) as writer:
            for item, owner in zip(items, owners, strict=True):
                if owner == ranks.rank:
                    self.write(writer, item)

    def items(self) -> list[list[str] | str]:
        """The items of work: sets of modules that are observed together, and names of copied tensors."""
        group_of = {name: group for group in self.session.plan.fused for name in group}
        return [*map(list, dict.fromkeys(tuple(group_of.get(name, [name])) for name in self.taken)), *self.copied]

    def write(self, writer: TensorWriter, item: list[str] | str) -> None:
        """Observe and compress modules, or copy a tensor."""
        if isinstance(item, str):
            self.copy(writer, item)
            return
        with self.source.loaded(item), part_of(self.session, item) as part:
            if part.plan.targets:
                part.finalize()
            for name in item:
                self.write_module(writer, name)

    def write_module(self, writer: TensorWriter, name: str) -> None:
        """Write the entries of a loaded module."""
        for key, rows, first in module_entries(self.source.model.get_submodule(name)):
            writer.write(self.stored_as[f"{name}.{key}"], rows, first)

    def copy(self, writer: TensorWriter, name: str) -> None:
        """Write a copied tensor: from memory if it is loaded as the file holds it, else from file to file."""
        stored, known_as = self.copied[name]
        value, layout = self.source.meta(known_as) if known_as else None, self.layout[stored]
        if value is None or value.is_meta or (value.dtype, value.shape) != (layout.dtype, layout.shape):
            writer.copy(stored, self.source.reader, name)
        else:
            writer.write(stored, value)


def _is_stray(name: str, prefixes: Container[str]) -> bool:
    """Whether a tensor would stand among the entries of a quantized module; a bias that the config leaves out may."""
    prefix, _, key = name.rpartition(".")
    return prefix in prefixes and key != "bias"


#: the job of a process that :func:`_run_in_processes` has started, and its files
_job_here: list[tuple[Streaming, TensorWriter]] = []


def _run_in_processes(job: Streaming, setup: tuple[Any, ...], workers: int) -> None:
    """Write all items in processes of their own. The first error is raised; items not yet begun are then left."""
    kinds = {type(one) for one in (*job.session.observers.values(), job.session.options.engine)}
    threads, modules = max(1, torch.get_num_threads() // workers), sorted({kind.__module__ for kind in kinds})
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin_here, (*setup, threads, modules)) as pool:
        try:
            for done in as_completed([pool.submit(_write_here, item) for item in job.items()]):
                job.tally.add(*done.result())
        except BrokenProcessPool as error:
            raise CalibrationError(
                "a worker ended before its work was done",
                got=str(error),
                remedy="look for its error above; a script needs `if __name__ == '__main__':`. A worker that was "
                "killed may have had too little memory: try fewer.",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_here(
    folder: Path, options: CalibrationOptions, partial: Path, size: int | str, threads: int, modules: list[str]
) -> None:
    torch.set_num_threads(threads)
    for module in modules:  # the user's, which register observers and engines
        import_module(module)
    opened = ExitStack()
    job = opened.enter_context(Streaming.of(folder, options))
    _job_here.append((job, TensorWriter(partial, job.layout, size, tally=job.tally)))
    atexit.register(opened.close)


def _write_here(item: list[str] | str) -> tuple[str, int]:
    job, writer = _job_here[0]
    before = job.tally.done
    job.write(writer, item)
    return item if isinstance(item, str) else item[-1], job.tally.done - before


@contextmanager
def part_of(session: CalibrationSession, names: Collection[str]) -> Iterator[CalibrationSession]:
    """The session of these modules alone; their statistics and qparams are removed at the end of the ``with`` block."""
    part, plan, kept = copy(session), session.plan, set(names)
    part.plan = replace(
        plan,
        targets=[target for target in plan.targets if target.name in kept],
        fused=[group for group in plan.fused if group[0] in kept],
    )
    part.observers = {key: observer for key, observer in session.observers.items() if key[0] in kept}
    part.fed = {key: observer for key, observer in session.fed.items() if key[0] in kept}
    part.experts = copy(session.experts)
    part.experts.tokens = {name: counts for name, counts in session.experts.tokens.items() if name in kept}
    part.model = nn.ModuleList(target.module for target in part.plan.targets)
    yield part
    for module in part.model.modules():
        clear_qparams(module)
    for observer in (part.observers | part.fed).values():
        observer.reset()


def copy_others(folder: Path, partial: Path) -> None:
    """Copy all files but weights, unless they exist; warn of weights that transformers does not read."""
    left_out = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file() or name.as_posix() == CONTENTS_FILE:
            continue
        if name.name.removesuffix(".index.json").endswith(_WEIGHTS):
            if not re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", name.as_posix()):
                left_out.append(name.as_posix())
            continue
        if not (partial / name).exists():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, partial / name)
    if left_out:
        warn(f"weights beside those of {folder} that transformers reads were left out: {', '.join(left_out)}")
