"""Calibrate a checkpoint layer by layer: one block of the decoder in memory at a time, for any number of batches.

A block is loaded, run on all batches, calibrated, compressed to a file of its own, and freed; its outputs are the
inputs of the next. A killed run goes on from these files and the outputs of the last block. A part is a block, or all
modules outside of blocks (embeddings, norms, the head), which share the last file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from typing_extensions import Unpack

from lightning_obs.calibration.blocks import Blocks, find_blocks
from lightning_obs.calibration.fit_errors import warn_of_fit
from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.random_tokens import RandomTokens
from lightning_obs.calibration.result import ADDED, CalibrationResult, result_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.stepwise import StepwiseCalibration, require_steps_possible
from lightning_obs.checkpoint.entries import stored_layout
from lightning_obs.errors import refuse, require_choice
from lightning_obs.files.tensors import Progress, TensorWriter, give_back_freed, write_index
from lightning_obs.files.unfinished import Unfinished
from lightning_obs.files.write import require_room, whole_folder
from lightning_obs.forward.quantized_forward import quantized, weights_kept
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.module_qparams import clear_qparams
from lightning_obs.ranks.collectives import Collectives, on_all_ranks
from lightning_obs.schemes.config import SchemeLike
from lightning_obs.schemes.planned_modules import shares_in_float
from lightning_obs.schemes.recipes import Recipe
from lightning_obs.streaming.blocks import BlockRunner, FileBatches
from lightning_obs.streaming.finished_blocks import FinishedBlocks, facts_of_run
from lightning_obs.streaming.outside_blocks import calibrated_outside, dump_outside, load_outside
from lightning_obs.streaming.parts import calibrated
from lightning_obs.streaming.quantized_files import QuantizedFiles, require_apart
from lightning_obs.streaming.source import CheckpointSource

Inputs = Literal["full_precision", "quantized"]


@dataclass(frozen=True)
class BlockRuns:
    """How :func:`calibrate_layerwise` runs the blocks; the user or the command line makes one.

    Args:
        inputs: a block's inputs: ``"full_precision"``, the outputs of the source's blocks, or ``"quantized"``, the
            outputs of the quantized blocks, which the quantized model will compute. The latter runs each block twice.
            A rounding with ``"inputs": "quantized"`` makes no use of this: it runs the modules of a block one after the
            other, each on quantized inputs.
        token_mask: name of the model's argument that is nonzero for tokens that count, ``(batch, tokens)``, usually
            ``"attention_mask"``; the other tokens reach no observer.
        device: where blocks are run, observed and compressed.
        progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.
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
    """Calibrate a checkpoint of a transformers decoder from its files to new files, one block in memory at a time.

    With inputs in full precision the tensors of ``out`` are byte for byte the tensors that
    :func:`~lightning_obs.export_checkpoint` writes for the model in memory, calibrated on the same batches. Each block
    has a file, and all other modules share one; everything else in ``folder`` is copied as by
    :func:`quantize_checkpoint`. A killed run that is called again with the same arguments goes on after the last block
    in the folder ``<out>.unfinished``.

    Args:
        folder: a checkpoint of transformers, in full precision: ``config.json`` and safetensors files.
        batches: this rank's calibration data. Each is the argument of the model's forward: a dict of keyword
            arguments, or a tensor.
        scheme: any, weight-only schemes included.
        out: the new folder, which appears complete or not at all.
        overwrite: replace the checkpoint in ``out``; files that no export wrote are never deleted.
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
    calibration_options = CalibrationOptions.of(scheme, **options).with_recipe(Recipe.without_token_weights)
    require_apart(folder, out)
    collectives = collectives or Collectives()
    with ExitStack() as stack, ExitStack() as unnamed, torch.inference_mode(False), torch.no_grad():
        with on_all_ranks(collectives):
            source = CheckpointSource(folder)
            stack.callback(source.reader.close)
            session = CalibrationSession(
                source.model, calibration_options, token_mask=runs.token_mask, collectives=collectives
            )
            new_folder = unnamed.enter_context(whole_folder(out, overwrite)) if collectives.rank == 0 else None
            unfinished = Unfinished(out, collectives.rank, collectives.size)
            stack.callback(unfinished.close)
            run = _LayerwiseRun(source, session, list(batches), runs, unfinished)
        finished_steps = collectives.gather_object(unfinished.steps)
        with on_all_ranks(collectives):
            common_steps = set(finished_steps[0]).intersection(*finished_steps)
            if common_steps:
                run.go_on_after(max(common_steps))
        with ExitStack() as of_run:
            run.run(of_run)
        with on_all_ranks(collectives):
            if new_folder is not None:
                run.complete(new_folder)
                unnamed.close()  # the folder takes its name
                unfinished.remove()
    warn_of_fit(run.result.fit_errors)
    return run.result


def _stepwise_of(
    observation: Observation, blocks: Blocks, batches: list[Any], runs: BlockRuns
) -> StepwiseCalibration | None:
    """What runs the blocks step by step where weights are rounded on quantized inputs; None: no weight is.

    A :class:`_LayerwiseRun` makes it when it begins.

    Args:
        observation: of the checkpoint's model.
        blocks: of that model.
        batches: this rank's calibration data.
        runs: how the blocks are run.

    Raises:
        CalibrationError: steps are not possible with these options.
    """
    if not observation.rounds_on_quantized_inputs:
        return None
    require_steps_possible(observation)
    device = torch.device(runs.device)
    random_tokens = RandomTokens.of(observation)
    file_batches = FileBatches(observation.model, batches, device, runs.token_mask, random_tokens)
    return StepwiseCalibration(observation, blocks, file_batches, device)


class _LayerwiseRun:
    """A run of :func:`calibrate_layerwise` on one rank.

    That function calls :meth:`go_on_after` if an earlier run was killed, then :meth:`run`, and :meth:`complete` on
    rank 0.

    Args:
        source: the checkpoint that is read.
        session: over ``source.model``.
        batches: this rank's calibration data.
        runs: how the blocks are run.
        unfinished: the folder of finished blocks.

    Attributes:
        result: of all blocks finished so far.
    """

    def __init__(
        self,
        source: CheckpointSource,
        session: CalibrationSession,
        batches: list[Any],
        runs: BlockRuns,
        unfinished: Unfinished,
    ) -> None:
        self._started = time.perf_counter()
        self._source = source
        self._session = session
        self._unfinished = unfinished
        self._device = torch.device(runs.device)
        self._inputs_are_quantized = runs.inputs == "quantized"
        weighed_modules = session.observation.weighed_modules
        refuse(weighed_modules, "weigh_tokens runs the whole model backward", remedy="calibrate it in memory.")
        blocks_name, blocks = find_blocks(source.model)
        self._files = QuantizedFiles(source, session.observation, runs.progress)
        # To lay out the files, QuantizedFiles has given each planned module meta tensors of its later qparams. They are
        # removed, because from now on a module with qparams counts as calibrated.
        for target in session.plan.targets:
            clear_qparams(target.module)
        self._parts = _module_names_of_parts(source.model, blocks_name, len(blocks))
        self._runner = BlockRunner(session, list(blocks), batches, self._device)
        #: None: ``_runner`` runs the blocks
        self._stepwise = _stepwise_of(session.observation, Blocks(blocks_name, list(blocks)), batches, runs)
        for config in (source.model.config, source.model.config.get_text_config()):
            config.use_cache = False  # it would grow from block to block
        run_facts = {"token_mask": runs.token_mask, "device": self._device.type}
        if self._stepwise is None:
            run_facts["inputs"] = runs.inputs  # steps make no use of it
        self._finished = FinishedBlocks(
            unfinished, source, facts_of_run(source, session.observation, batches, run_facts)
        )
        #: how many blocks are finished
        self._step = 0
        #: by name of a tensor that was written, its file
        self._file_of_tensor: dict[str, str] = {}
        self.result = result_of(session.observation)
        self.result.batches = len(batches) if session.needs_data else 0
        if self._stepwise is not None:
            self._stepwise.result = self.result
        #: the number of measurements of activations in the blocks that an earlier run finished
        self._earlier_measurements = 0
        #: what a killed run knew of the modules outside of blocks; None: none was killed
        self._outside: Mapping[str, Any] | None = None

    def go_on_after(self, step: int) -> None:
        """Take over the first ``step`` blocks from a killed run. Called on all ranks, before :meth:`run`."""
        state = self._finished.load(step)
        self._step = step
        if self._stepwise is None:
            self._runner.go_on_after(state["outputs"])
        else:
            self._stepwise.go_on_after(step, *state["outputs"])
        self._outside = state["outside"]
        self._file_of_tensor = state["files"]
        self._files.tally.done = state["size"]
        for name, value in state["result"].items():
            setattr(self.result, name, value)
        self._earlier_measurements = self.result.measurements

    def run(self, stack: ExitStack) -> None:
        """Finish every unfinished block, then the modules outside of blocks.

        Args:
            stack: collects the clean-up, and is closed after the calibration, before :meth:`complete`: then the session
                is detached, and modules outside of blocks are freed.
        """
        session = self._session
        outside = set(self._parts[-1])
        if session.needs_data:
            if self._stepwise is None:
                stack.callback(session.detach)
                session.attach(count_calls=False)
                self._runner.attach(stack)
            else:
                stack.enter_context(self._stepwise.attached())
            session.count_batches(len(self._runner.batches))
            self._source.make_buffers(self._device)
            self._restore_outside(stack)
            for name in self._parts[-1]:
                if name not in calibrated_outside(self._outside):
                    self._load_at_first_call(name, stack)
        for block in range(self._step, len(self._runner.blocks)):
            with self._source.loaded(self._parts[block], self._device):
                self._finish_block(block)
            give_back_freed()
        quantized_outside = [name for name in self._files.quantized if name in outside]
        with self._source.loaded(quantized_outside, self._device):
            self._finish_modules_outside()
        skipped = set(self.result.skipped)
        self.result.modules = [target.name for target in session.plan.targets if target.name not in skipped]
        self.result.seconds = time.perf_counter() - self._started

    def _restore_outside(self, stack: ExitStack) -> None:
        """Give the modules outside of blocks what a killed run knew of them, if one was killed.

        Modules that have their qparams are loaded at once, and kept until ``stack`` closes: they run quantized.
        """
        if self._outside is None:
            return
        with on_all_ranks(self._session.collectives):
            load_outside(self._session.observation, self._parts[-1], self._outside)
            if self._stepwise is not None:
                qparams = calibrated_outside(self._outside)
                stack.enter_context(self._source.loaded(qparams, self._device))
                self._stepwise.take_over(qparams)

    def _load_at_first_call(self, name: str, stack: ExitStack) -> None:
        """Let a module outside of blocks be loaded at its first call, and be kept until ``stack`` closes.

        An embedding that is not quantized loads, in each call, only the rows that tokens look up; its weight stays on
        the meta device for good.
        """
        module = self._source.model.get_submodule(name)
        if isinstance(module, torch.nn.Embedding) and name not in self._files.quantized:
            self._source.look_up(name, self._device)
            return

        def load(*_: Any) -> None:
            """The hook before the module's first call."""
            remove_hook()
            stack.enter_context(self._source.loaded([name], self._device))

        remove_hook = keep_hook_out(module, module.register_forward_pre_hook(load, prepend=True))

    def _finish_block(self, block: int) -> None:
        """Run a loaded block on all batches, calibrate it, and save its file and its outputs.

        If inputs are quantized, the block runs a second time with its quantized weights, for the inputs of the next.
        """
        session = self._session
        module_names = set(self._parts[block])
        if self._stepwise is not None:
            self._finish_steps(self._stepwise, block)
            with on_all_ranks(session.collectives):
                self._write_part(block)
                self._save(block + 1)
            self._release(module_names)
            return
        is_planned = any(target.name in module_names for target in session.plan.targets)
        runs_quantized = session.needs_data and self._inputs_are_quantized and is_planned
        if session.needs_data:
            with on_all_ranks(session.collectives):
                self._runner.run(block, keep=not runs_quantized)
        with calibrated(session.observation, module_names, _after_each_weight) as part_result:
            self._add(part_result)
            with on_all_ranks(session.collectives):
                if runs_quantized:
                    with quantized(session.model), weights_kept(session.model):
                        self._runner.run(block, observe=False)
                self._write_part(block)
                self._save(block + 1)

    def _finish_modules_outside(self) -> None:
        """Calibrate the modules outside of blocks and write their file; the quantized ones are loaded.

        They were observed while blocks ran; the modules after the last block run now, if any of them is observed.
        """
        session = self._session
        last = len(self._runner.blocks)
        module_names = set(self._parts[last])
        if self._stepwise is not None:
            self._finish_steps(self._stepwise, last)
            with on_all_ranks(session.collectives):
                self._write_part(last)
            self._release(module_names)
            return
        if any(name in module_names for name, _ in session.data_observers):
            with on_all_ranks(session.collectives):
                self._runner.run(last)
        with calibrated(session.observation, module_names, _after_each_weight) as part_result:
            self._add(part_result)
            with on_all_ranks(session.collectives):
                self._write_part(last)

    def _finish_steps(self, stepwise: StepwiseCalibration, position: int) -> None:
        """Calibrate the steps of a block, or of the modules after the last one; the modules keep their qparams.

        Args:
            stepwise: runs the steps.
            position: the block's number; the number of blocks for the modules after the last one.
        """
        stepwise.calibrate_position(position)
        stepwise.calibrate_rest(self._parts[position])
        self.result.qparams = {}  # the modules hold them; from there the caller writes them to the part's file
        self._count_measurements()

    def _release(self, module_names: Collection[str]) -> None:
        """Remove the qparams and statistics of a part that was written."""
        part = self._session.observation.of(module_names)
        for module in part.model.modules():
            clear_qparams(module)
        for observer in part.all_observers:
            observer.reset()

    def _count_measurements(self) -> None:
        """Set the result's number of measurements: those of earlier runs and of this one."""
        measurements = self._session.observation.calls.measurements
        self.result.measurements = self._earlier_measurements + measurements

    def _add(self, part_result: CalibrationResult | None) -> None:
        """Add the result of a part, if it has planned modules, to the result of the run."""
        self._count_measurements()
        if part_result is not None:
            self.result.add(part_result)

    def _save(self, step: int) -> None:
        """Save everything that a run needs to go on after ``step`` blocks."""
        result = {name: getattr(self.result, name) for name in (*ADDED, "measurements")}
        state = {
            "files": self._file_of_tensor,
            "size": self._files.tally.done,
            "result": result,
            "outputs": self._kept_outputs,
            "outside": dump_outside(self._session.observation, self._parts[-1]),
        }
        self._finished.save(step, state)

    @property
    def _kept_outputs(self) -> list[Any]:
        """The outputs of the last block for each batch, which :meth:`_save` saves and :meth:`go_on_after` takes over.

        If blocks run step by step, a list of two lists: the outputs in full precision, and those of quantized blocks.
        """
        if self._stepwise is None:
            return self._runner.outputs
        return [self._stepwise.exact_outputs, self._stepwise.quantized_outputs]

    def _write_part(self, index: int) -> None:
        """Write the file of a part on rank 0; every rank keeps the names of the tensors in it.

        Args:
            index: of the part: the block's number, or the number of blocks for the modules outside of blocks.
        """
        module_names = set(self._parts[index])
        quantized_modules = [name for name in self._files.quantized if name in module_names]
        copied = self._files.copied_of(module_names)
        layout = self._layout(quantized_modules, copied)
        file = f"model-{index + 1:05d}-of-{len(self._parts):05d}.safetensors"
        self._file_of_tensor |= dict.fromkeys(layout, file)
        if self._unfinished.rank != 0:
            return
        folder = self._unfinished.folder
        path = folder / file
        path.unlink(missing_ok=True)  # a killed run may have left a part of it
        tally = self._files.tally
        require_room(folder, tally.total - tally.done)
        # sys.maxsize, the most bytes of one file: a part is one file, however large
        with closing(TensorWriter(folder, layout, sys.maxsize, file, tally=tally)) as writer:
            for name in quantized_modules:
                self._files.write_module(writer, name)
            for name in copied:
                self._files.copy(writer, name)
            writer.require_complete()
        with path.open("rb") as written_file:
            os.fsync(written_file.fileno())
        self._finished.add(file)

    def _layout(self, quantized_modules: Iterable[str], copied: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """A meta tensor of each tensor of a part's file, by its name there.

        Args:
            quantized_modules: of the part; a module that holds no qparams is laid out in full precision.
            copied: names in the source's files of the tensors that are stored as they are.
        """
        files = self._files
        layout = {}
        for name in copied:
            layout[files.copied[name].stored_as] = self._source.reader.meta(name)
        for module_name in quantized_modules:
            for key, meta in stored_layout(self._source.model.get_submodule(module_name)).items():
                if "." not in key:  # else an entry of a module inside it
                    layout[files.stored_as[f"{module_name}.{key}"]] = meta
        return layout

    def complete(self, new_folder: Path) -> None:
        """Put the files of all parts into the folder of the new checkpoint, and write its other files.

        :func:`calibrate_layerwise` calls this on rank 0 once all parts are finished. It also sets the shares of the
        model that stay in float in the result. One of the other files is the config, which describes the modules that
        have qparams. Each module has lost its qparams when its part was written; so all planned modules that were not
        skipped get meta tensors of their qparams again, and keep them.
        """
        self._finished.require_whole()
        self._source.end_look_ups()
        self.result.plan.in_float = shares_in_float(self._source.model, self._session.plan.targets, self.result.skipped)
        for file in sorted(set(self._file_of_tensor.values())):
            os.link(self._unfinished.folder / file, new_folder / file)
        write_index(new_folder, self._file_of_tensor, self._files.tally.done)
        self._files.put_later_qparams(self.result.skipped)
        self._files.write_other_files(new_folder, self._file_of_tensor.keys())


def _module_names_of_parts(model: torch.nn.Module, blocks_name: str, count: int) -> list[list[str]]:
    """The names of the modules of each part.

    Args:
        model: all of it.
        blocks_name: the name of the list of blocks.
        count: how many blocks there are.

    Returns:
        For each block, itself and the modules inside it; last, the modules outside of blocks.
    """
    inside: list[list[str]] = [[] for _ in range(count)]
    outside = []
    prefix = f"{blocks_name}."
    for name, _ in model.named_modules():
        if name.startswith(prefix):
            block, _, _ = name.removeprefix(prefix).partition(".")
            inside[int(block)].append(name)
        else:
            outside.append(name)
    return [*inside, outside]


def _after_each_weight(*_: Any) -> None:
    """Give freed memory back to the system: searching a weight leaves holes, inverting a Hessian most of all.

    :func:`calibrated` gets this as its progress function, so it is called after each weight; its arguments are unused.
    """
    give_back_freed()
