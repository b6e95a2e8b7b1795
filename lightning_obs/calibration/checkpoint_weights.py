"""Quantize the weights of a checkpoint's files, without a model in memory.

A scheme that needs no data looks at weights alone, a fused set at a time. So a set is read, observed, compressed,
written to its place and forgotten; all else is copied as bytes. Plan, observers, checks and compression are those of a
model in memory, laid over the model on the meta device, so the tensors are the same.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import closing
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.compress import module_entries, stored_layout
from lightning_obs.checkpoint.export import write_quantization_config
from lightning_obs.checkpoint.load import any_qparams
from lightning_obs.checkpoint.source import CheckpointSource
from lightning_obs.errors import refuse, warn
from lightning_obs.files.contents import CONTENTS_FILE
from lightning_obs.files.tensors import TensorWriter
from lightning_obs.files.write import require_free, require_room, whole_folder
from lightning_obs.model.qparams import clear_qparams, scheme_args, write_qparams
from lightning_obs.moe.experts import linear_experts
from lightning_obs.schemes.config import SchemeLike, config_groups, make_observer

#: told of what was written: name of the module or tensor, bytes so far, bytes in all
Progress: TypeAlias = Callable[[str, int, int], None]

#: files that hold weights, of which the safetensors files alone are read
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
        max_shard_size: of one file of weights [bytes], or ``"5GB"``.
        progress: called with the name of what was written, the bytes written so far, and those in all.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`: ``ignore``, ``observers``...

    Returns:
        What was done, without quantization parameters.

    Raises:
        CalibrationError: before it writes: the scheme needs data or is wrong; ``folder`` is damaged, quantized
            already, or has other tensors than its config says; ``out`` cannot be written, or has no room.
    """
    started, folder, out = time.perf_counter(), Path(folder), Path(out)
    chosen = CalibrationOptions.of(scheme, **options)
    _require_no_data(chosen)
    require_free(out, overwrite)
    source = CheckpointSource(folder)
    with closing(source.reader), torch.inference_mode(False), torch.no_grad():
        session = CalibrationSession(source.model, chosen)
        with whole_folder(out, overwrite) as partial:
            job = Streaming(source, session, progress)
            require_room(partial, job.total)
            copy_others(folder, partial)
            write_quantization_config(source.model, partial, job.of_model, job.unknown)
            with closing(TensorWriter(partial, job.layout, max_shard_size)) as writer:
                job.run(writer)
                writer.require_complete()
    return CalibrationResult(
        scheme=session.label,
        modules=[target.name for target in session.plan.targets],
        observers=len(session.observers),
        batches=0,
        measurements=0,
        seconds=time.perf_counter() - started,
        qparams={},
        fused=session.together,
        engines=session.engines,
    )


def _require_no_data(options: CalibrationOptions) -> None:
    """Refuse what the weights alone do not say."""
    args = [each for group in config_groups(options.config) for each in scheme_args(group)]
    needs = [f"static {base} activations" for base, each in args if base != "weight" and each.dynamic is not True]
    needs += [f"{each.observer} on the inputs" for base, each in args if base == "weight" and _observes_data(each)]
    needs += ["the kv cache"] if options.config.kv_cache_scheme is not None else []
    needs += ["rounding"] if options.rounding is not None else []
    refuse(
        list(dict.fromkeys(needs)),
        f"{options.label} needs data, and quantize_checkpoint reads weights alone",
        expected="weight-only or dynamic schemes (W4A16, NVFP4A16, FP8_DYNAMIC, W8A8)",
        remedy="calibrate the model on data: CalibrationCallback or CalibrationSession (task=calibrate); where it does "
        "not fit into memory, load it with a device_map that offloads it.",
    )


def _observes_data(args: Any) -> bool:
    return make_observer("weight", args).observes_data


class Streaming:
    """From the files of a source to those of its quantized checkpoint.

    Attributes:
        taken: names of the modules that are stored otherwise than in the source: planned ones, and experts beside them.
        copied: what is stored as it is: by its name in the source its new name, and that of the model's tensor.
        layout: a meta tensor of each stored tensor, by its name in the new files.
        of_model: the stored names of what the model has; ``unknown``: of what it does not know.
    """

    def __init__(self, source: CheckpointSource, session: CalibrationSession, progress: Progress | None) -> None:
        self.source, self.session, self._progress = source, session, progress
        self.write_any_qparams()  # with them the model is laid out as it will be stored
        planned = {target.name for target in session.plan.targets}
        # The experts of a stack that is not copied as it is are stored one by one, like those that are quantized.
        split = [name for name in linear_experts(source.model) if any(p.startswith(f"{name}.") for p in planned)]
        self.taken = [
            name
            for name, module in source.model.named_modules()
            if name in planned or (isinstance(module, nn.Linear) and name.startswith(tuple(f"{s}." for s in split)))
        ]
        stored, names = stored_layout(source.model), dict.fromkeys(self.taken)
        of_taken = {name: tensor for name, tensor in stored.items() if name.rpartition(".")[0] in names}
        own = {name: s for name, s in source.sources.items() if name.rpartition(".")[0] not in names}
        consumed = {source.sources[n].name for n in source.sources.keys() - own.keys()}
        whole, stacks = ({n: s for n, s in own.items() if (s.index is None) is one} for one in (True, False))
        self.copied = {s.name: (source.stored_as.get(n, s.name), n) for n, s in whole.items()}
        self.copied |= {s.name: (s.name, n) for n, s in stacks.items()}
        self.unknown = {name for name in source.reader if name not in consumed and name not in self.copied}
        self.layout = {self.stored_name(name): tensor for name, tensor in of_taken.items()}
        self.of_model = {*self.layout, *(stored for stored, _ in self.copied.values())}
        self.copied |= {name: (name, "") for name in self.unknown}
        self.layout |= {stored: source.reader.meta(name) for name, (stored, _) in self.copied.items()}
        self.total, self._done = sum(tensor.nbytes for tensor in self.layout.values()), 0

    def write_any_qparams(self, skipped: Container[str] = ()) -> None:
        """Give all planned modules, but those that are left in full precision, qparams as they will have them."""
        for target in self.session.plan.targets:
            if target.name not in skipped:
                write_qparams(target.module, target.scheme, any_qparams(target))

    def stored_name(self, name: str) -> str:
        """The name in files of a module's entry, beside that of the module's weight, or of what is below it."""
        module, _, key = name.rpartition(".")
        stored_as, beside = self.source.stored_as, f"{module}.weight"
        if beside not in stored_as:
            beside = next(other for other in stored_as if other.startswith(f"{module}."))
        stored = stored_as[beside]
        return f"{stored.removesuffix(beside.removeprefix(f'{module}.'))}{key}"

    def run(self, writer: TensorWriter) -> None:
        """Write every tensor."""
        for names in self._units():
            with self.source.loaded(names):
                part = part_of(self.session, names)
                if part.plan.targets:
                    part.finalize()
                for name in names:
                    self.write_module(writer, name)
                forget(part)
        for name in self.copied:
            self.copy(writer, name)

    def write_module(self, writer: TensorWriter, name: str) -> None:
        """Write the entries of a module that is taken, and loaded."""
        for key, rows, first in module_entries(self.source.model.get_submodule(name)):
            writer.write(self.stored_name(f"{name}.{key}"), rows, first)
            self._done += rows.nbytes
        self._say(name)

    def copy(self, writer: TensorWriter, name: str) -> None:
        """Write what is copied: from memory if it is loaded as the files hold it, else from file to file."""
        stored, known_as = self.copied[name]
        value, layout = self.source.meta(known_as) if known_as else None, self.layout[stored]
        if value is None or value.is_meta or (value.dtype, value.shape) != (layout.dtype, layout.shape):
            self._done += writer.copy(stored, self.source.reader, name)
        else:
            writer.write(stored, value)
            self._done += value.nbytes
        self._say(stored)

    def _say(self, name: str) -> None:
        if self._progress is not None:
            self._progress(name, self._done, self.total)

    def _units(self) -> Iterator[list[str]]:
        """Modules that are observed together: fused sets, and single ones."""
        group_of = {name: group for group in self.session.plan.fused for name in group}
        seen = set[str]()
        for name in self.taken:
            if name not in seen:
                unit = group_of.get(name, [name])
                seen.update(unit)
                yield unit


def part_of(session: CalibrationSession, names: Collection[str]) -> CalibrationSession:
    """The session of these modules alone, with what they have observed."""
    part, plan, kept = copy(session), session.plan, set(names)
    part.plan = replace(
        plan,
        targets=[target for target in plan.targets if target.name in kept],
        fused=[group for group in plan.fused if group[0] in kept],
    )
    part.observers = {key: observer for key, observer in session.observers.items() if key[0] in kept}
    part.second = {key: observer for key, observer in session.second.items() if key[0] in kept}
    part.experts = copy(session.experts)
    part.experts.tokens = {name: counts for name, counts in session.experts.tokens.items() if name in kept}
    part.model = nn.ModuleList(target.module for target in part.plan.targets)
    return part


def forget(part: CalibrationSession) -> None:
    """Remove what was observed of a part, and what calibration has put on its modules."""
    for module in part.model.modules():
        clear_qparams(module)
    for observer in (*part.observers.values(), *part.second.values()):
        observer.reset()


def copy_others(folder: Path, partial: Path) -> None:
    """Copy all but weights; a warning names weights that are not the checkpoint's."""
    left_out = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file() or name.as_posix() == CONTENTS_FILE:
            continue
        if name.name.removesuffix(".index.json").endswith(_WEIGHTS):
            if not re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", name.as_posix()):
                left_out.append(name.as_posix())
            continue
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, partial / name)
    if left_out:
        warn(f"weights beside those of {folder} that transformers reads were left out: {', '.join(left_out)}")
