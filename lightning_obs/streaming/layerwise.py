"""Calibrate a checkpoint layer by layer: one block of the decoder in memory at a time, for any number of batches.

A block is loaded, run on all batches, calibrated, compressed to a file of its own, and freed; its outputs are the
inputs of the next. A killed run goes on from these files and the outputs of the last block.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from typing_extensions import Unpack

from lightning_obs.calibration.finalize import result_of
from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.compress import stored_layout
from lightning_obs.errors import refuse, require_choice
from lightning_obs.files.tensors import Progress, TensorWriter, give_back_freed, write_index
from lightning_obs.files.unfinished import Unfinished
from lightning_obs.files.write import require_room, whole_folder
from lightning_obs.forward.quantized_forward import quantized, weights_kept
from lightning_obs.model.additions import keep_hook_out
from lightning_obs.model.module_qparams import clear_qparams
from lightning_obs.ranks.collectives import Collectives, on_all_ranks
from lightning_obs.schemes.config import SchemeLike
from lightning_obs.schemes.left_in_float import shares_in_float
from lightning_obs.streaming.blocks import Relay, find_blocks
from lightning_obs.streaming.checkpoint_weights import Streaming, part_of, require_apart
from lightning_obs.streaming.finished_blocks import FinishedBlocks, facts_of_run
from lightning_obs.streaming.source import CheckpointSource

Inputs = Literal["full_precision", "quantized"]


@dataclass(frozen=True)
class BlockRuns:
    """How :func:`calibrate_layerwise` runs the blocks.

    Args:
        inputs: a block's inputs: ``"full_precision"``, the outputs of the source's blocks, or ``"quantized"``, the
            outputs of the quantized blocks, which the quantized model will compute. It runs each block twice.
        token_mask: as of :class:`~lightning_obs.CalibrationSession`.
        device: where blocks are run, observed and compressed.
        progress: as of :func:`~lightning_obs.export_checkpoint`.
    """

    inputs: Inputs = "full_precision"
    token_mask: str | None = None
    device: str | torch.device = "cpu"
    progress: Progress | None = None

    def __post_init__(self) -> None:
        require_choice("inputs", self.inputs, get_args(Inputs))


@takes_keywords_of(CalibrationOptions)
def calibrate_layerwise(
    folder: str | os.PathLike[str],
    batches: Iterable[Any],
    scheme: SchemeLike | CalibrationOptions,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    collectives: Collectives | None = None,
    runs: BlockRuns = BlockRuns(),
    **options: Unpack[OptionKeywords],
) -> CalibrationResult:
    """Calibrate a checkpoint of a transformers decoder from its files to new ones, one block in memory at a time.

    With inputs in full precision the tensors of ``out`` are byte for byte those of
    :func:`~lightning_obs.export_checkpoint` of the model in memory, calibrated on the same batches. There is a file for
    each block and one for all else; the rest of ``folder`` is carried over as by :func:`quantize_checkpoint`. Called
    again with the same arguments, a killed run goes on after the last block that is in the folder ``<out>.unfinished``.

    Args:
        folder: a checkpoint of transformers, in full precision: ``config.json`` and safetensors files.
        batches: arguments of the model's forward: keyword arguments each, or a tensor. This rank's own.
        scheme: any, weight-only ones included.
        out: written whole or not at all.
        overwrite: as of :func:`~lightning_obs.export_checkpoint`.
        collectives: how to talk to the other ranks; each must call this, and reach the same file system.
        runs: how the blocks are run.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`: ``ignore``, ``observers``...

    Returns:
        The result, without quantization parameters.

    Raises:
        CalibrationError: as :func:`quantize_checkpoint` and :class:`~lightning_obs.CalibrationSession`; the blocks are
            not found, or not called one after the other; an unfinished run was begun with other arguments.
    """
    out = Path(out)
    chosen = CalibrationOptions.of(scheme, **options)
    require_apart(folder, out)
    collectives = collectives or Collectives()
    with ExitStack() as stack, ExitStack() as written, torch.inference_mode(False), torch.no_grad():
        with on_all_ranks(collectives):
            source = CheckpointSource(folder)
            stack.callback(source.reader.close)
            session = CalibrationSession(source.model, chosen, token_mask=runs.token_mask, collectives=collectives)
            partial = written.enter_context(whole_folder(out, overwrite)) if collectives.rank == 0 else None
            unfinished = Unfinished(out, collectives.rank, collectives.size)
            stack.callback(unfinished.close)
            job = _LayerByLayer(source, session, list(batches), runs, unfinished)
        finished = set.intersection(*map(set, collectives.gather_object(unfinished.steps)))
        with on_all_ranks(collectives):
            if finished:
                job.go_on_after(max(finished))
        job.run(stack)
        with on_all_ranks(collectives):
            if partial is not None:
                job.complete(partial)
                written.close()  # the folder takes its name
                unfinished.remove()
    return job.result


#: the fields of a result that add up, block by block
_ADDED = ("skipped", "fallback", "collectives", "input_ranges", "chosen_input_ranges", "expert_tokens")


class _LayerByLayer:
    """Converts the files of a source to the files of its quantized checkpoint, block by block."""

    def __init__(
        self,
        source: CheckpointSource,
        session: CalibrationSession,
        batches: list[Any],
        runs: BlockRuns,
        unfinished: Unfinished,
    ) -> None:
        self.source, self.session, self.unfinished = source, session, unfinished
        self._runs, self._device, self._started = runs, torch.device(runs.device), time.perf_counter()
        refuse(session.weighed, "weigh_tokens runs the whole model backward", remedy="calibrate it in memory.")
        name, blocks = find_blocks(source.model)
        self._streaming = Streaming(source, session, runs.progress)
        for target in session.plan.targets:
            clear_qparams(target.module)
        names = dict(source.model.named_modules())
        inside = [[n for n in names if f"{n}.".startswith(f"{name}.{index}.")] for index in range(len(blocks))]
        #: the modules of each block; last, the modules outside of blocks
        self._parts = [*inside, [n for n in names if not n.startswith(f"{name}.")]]
        self._relay = Relay(session, list(blocks), batches, self._device)
        for config in (source.model.config, source.model.config.get_text_config()):
            config.use_cache = False  # it would grow from block to block
        self._first = 0
        ways = {"inputs": runs.inputs, "token_mask": runs.token_mask, "device": self._device.type}
        self._finished = FinishedBlocks(unfinished, source, facts_of_run(source, session, batches, ways))
        self._files = dict[str, str]()  # the file of each tensor that is written
        self.result = result_of(session, batches=len(batches) if session.needs_data else 0)

    def go_on_after(self, step: int) -> None:
        """Take over the finished blocks of an earlier run, on all ranks."""
        state = self._finished.load(step)
        self._first, self._relay.outputs = step, state["outputs"]
        self._files, self._streaming.tally.done = state["files"], state["size"]
        vars(self.result).update(state["result"])

    def run(self, stack: ExitStack) -> None:
        """Finish every unfinished block, then the modules outside of blocks."""
        needs_rest = any(name in self._parts[-1] for name, _ in self.session.fed)
        if self.session.needs_data:
            stack.callback(self.session.detach)
            self.session.attach(count_calls=False)
            self.session.batches, self.session.measurements = len(self._relay.batches), self.result.measurements
            self._relay.attach(stack)
            self.source.make_buffers(self._device)
            for name in self._parts[-1]:
                self._load_when_called(name, stack)
        last = len(self._parts) - 1
        for index in range(self._first, last):
            with self.source.loaded(self._parts[index], self._device):
                self._finish(index, self.session.needs_data)
            give_back_freed()
        planned = [name for name in self._streaming.taken if name in set(self._parts[last])]
        with self.source.loaded(planned, self._device):
            self._finish(last, needs_rest)
        self.result.modules = [t.name for t in self.session.plan.targets if t.name not in set(self.result.skipped)]
        self.result.seconds = time.perf_counter() - self._started

    def _load_when_called(self, name: str, stack: ExitStack) -> None:
        """Load a module outside the blocks when it first runs, for all batches; of an embedding the rows in use."""
        module = self.source.model.get_submodule(name)
        if isinstance(module, torch.nn.Embedding) and name not in self._streaming.taken:
            self.source.look_up(name, self._device)
            return

        def load(*_: Any) -> None:
            remove()
            stack.enter_context(self.source.loaded([name], self._device))

        remove = keep_hook_out(module, module.register_forward_pre_hook(load, prepend=True))

    def _finish(self, index: int, needs_data: bool) -> None:
        """Run a loaded block on all batches, observe its weights, write it and the inputs of the next."""
        session, is_block = self.session, index < len(self._relay.blocks)
        here = set(self._parts[index])
        as_quantized = needs_data and is_block and self._runs.inputs == "quantized"
        as_quantized &= any(target.name in here for target in session.plan.targets)
        if needs_data:
            with on_all_ranks(session.collectives):
                self._relay.run(index, keep=not as_quantized)
        with part_of(session, self._parts[index]) as part:
            part.progress = lambda *_: give_back_freed()  # after each weight: a Hessian's inverse leaves holes
            if part.plan.targets:
                found = vars(part.finalize())
                for name in _ADDED:
                    known = vars(self.result)[name]
                    vars(self.result)[name] = known | found[name] if isinstance(known, dict) else known + found[name]
            self.result.measurements = session.measurements
            with on_all_ranks(session.collectives):
                if as_quantized:
                    with quantized(session.model), weights_kept(session.model):
                        self._relay.run(index, observe=False)
                self._write(index, here)
                if is_block:
                    facts = {name: vars(self.result)[name] for name in (*_ADDED, "measurements")}
                    state = {"files": self._files, "size": self._streaming.tally.done}
                    self._finished.save(index + 1, {**state, "result": facts, "outputs": self._relay.outputs})

    def _write(self, index: int, modules: set[str]) -> None:
        """Write the file of a block, on rank 0."""
        streaming, reader = self._streaming, self.source.reader
        file = f"model-{index + 1:05d}-of-{len(self._parts):05d}.safetensors"
        taken = [name for name in streaming.taken if name in modules]
        copied = [name for name, (_, of) in streaming.copied.items() if of.rpartition(".")[0] in modules]
        layout = {streaming.copied[name][0]: reader.meta(name) for name in copied}
        for name in taken:
            for key, meta in stored_layout(self.source.model.get_submodule(name)).items():
                if "." not in key:
                    layout[streaming.stored_as[f"{name}.{key}"]] = meta
        self._files |= dict.fromkeys(layout, file)
        if self.unfinished.rank != 0:
            return
        path = self.unfinished.folder / file
        path.unlink(missing_ok=True)  # of a run that was killed
        require_room(self.unfinished.folder, streaming.tally.total - streaming.tally.done)
        with closing(TensorWriter(self.unfinished.folder, layout, sys.maxsize, file, tally=streaming.tally)) as writer:
            for name in taken:
                streaming.write_module(writer, name)
            for name in copied:
                streaming.copy(writer, name)
            writer.require_complete()
        with path.open("rb") as written:
            os.fsync(written.fileno())
        self._finished.add(file)

    def complete(self, partial: Path) -> None:
        """Put together the checkpoint."""
        self._finished.require_whole()
        self.result.in_float = shares_in_float(self.source.model, self.session.plan.targets, self.result.skipped)
        for file in sorted(set(self._files.values())):
            os.link(self.unfinished.folder / file, partial / file)
        write_index(partial, self._files, self._streaming.tally.done)
        self._streaming.write_any_qparams(self.result.skipped)
        self._streaming.write_others(partial, self._files.keys())
