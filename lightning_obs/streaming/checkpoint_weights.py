"""Quantize the weights of a checkpoint from files to files, without a model in memory.

A scheme that needs no data looks at one fused set of weights at a time. Each set is read, observed, compressed, written
to its place and forgotten; all other tensors are copied as bytes. Plan, observers and compression are the same as for a
model in memory; here the model has meta tensors only. The places of all tensors in the new files are known beforehand,
so several processes can write them.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.result import CalibrationResult, result_of
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.tensors import Progress, TensorWriter
from lightning_obs.files.write import require_room, whole_folder
from lightning_obs.numerics.qparams import scheme_args
from lightning_obs.observers.statistic import observes_data
from lightning_obs.ranks.collectives import Collectives, on_all_ranks
from lightning_obs.ranks.sync import partition
from lightning_obs.schemes.config import SchemeLike, config_groups, has_rounding, make_observer
from lightning_obs.streaming.quantized_files import QuantizedFiles, require_apart
from lightning_obs.streaming.worker_processes import quantize_in_processes


@takes_keywords_of(CalibrationOptions)  # the signature then shows the names and defaults behind ``**options``
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
    """Quantize the weights of a checkpoint from its files to new files, in the memory of one fused set of weights.

    The tensors of ``out`` are byte for byte the tensors that :func:`~lightning_obs.export_checkpoint` writes for the
    model in memory. Everything else in ``folder`` is copied: tokenizer, code, licence. Tensors that the model's class
    does not know (multi-token prediction, say) stay in full precision, with their modules in ``ignore``.

    Args:
        folder: a checkpoint of transformers, in full precision: ``config.json`` and safetensors files.
        out: the new folder, which appears complete or not at all.
        scheme: weight-only, or with dynamic activations.
        overwrite: replace the checkpoint in ``out``; files that no export wrote are never deleted.
        max_shard_size: bytes of one file of weights, or ``"5GB"``.
        progress: called with the name of each tensor written, the bytes written so far, and the bytes in all.
        workers: how many processes share the work. They are started, so a script needs ``if __name__ == "__main__":``;
            each imports torch, and has one set of weights at a time. Or ``Collectives.of_group()``: the ranks of
            torchrun share the work; every rank must call this, and its ``progress`` counts its own share.
        **options: the fields of :class:`~lightning_obs.CalibrationOptions`: ``ignore``, ``observers``...

    Returns:
        The result, without quantization parameters.

    Raises:
        CalibrationError: the scheme needs data or is wrong; ``folder`` is damaged, quantized already, or has other
            tensors than its config says; ``out`` cannot be written, or has no room; the failure of any process.
    """
    started = time.perf_counter()
    out = Path(out)
    _require_workers(workers)
    ranks = workers if isinstance(workers, Collectives) else Collectives()
    calibration_options = CalibrationOptions.of(scheme, **options)
    require_apart(folder, out)
    _require_no_data(calibration_options)
    with ExitStack() as opened, ExitStack() as unnamed:
        with on_all_ranks(ranks):
            new_folder = unnamed.enter_context(whole_folder(out, overwrite)) if ranks.rank == 0 else None
            files = opened.enter_context(QuantizedFiles.opened(folder, calibration_options, progress))
            if new_folder is not None:
                require_room(new_folder, files.tally.total)
                files.write_other_files(new_folder, files.layout.keys())
        new_folder = ranks.gather_object(new_folder)[0]
        with on_all_ranks(ranks):
            if isinstance(workers, int) and workers > 1:
                quantize_in_processes(files, folder, new_folder, max_shard_size, workers)
            else:
                _quantize_share(files, new_folder, max_shard_size, ranks)
        with on_all_ranks(ranks):
            _require_all_written(files, ranks)
            unnamed.close()  # the folder takes its name
        grids = ranks.gather_object(files.grids)  # what the observer ``lattice`` found in the weights of each rank
    result = result_of(files.observation)
    for grids_of_rank in grids:
        result.grids |= grids_of_rank
    result.seconds = time.perf_counter() - started
    return result


def _require_workers(workers: int | Collectives) -> None:
    """Raise a CalibrationError for ``workers`` that are neither a number of processes nor ranks."""
    if isinstance(workers, Collectives):
        return
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise CalibrationError("workers", got=repr(workers), expected="a whole number, one or more, or Collectives")


def _require_all_written(files: QuantizedFiles, ranks: Collectives) -> None:
    """Raise a CalibrationError unless all ranks together have written every byte. Every rank must call this."""
    written = sum(ranks.gather_object(files.tally.done))
    if written != files.tally.total:
        expected = f"{files.tally.total:,}"
        raise CalibrationError("tensors were not written", got=f"{written:,} bytes", expected=expected)


def _require_no_data(options: CalibrationOptions) -> None:
    """Raise a CalibrationError for options that need calibration data; it names everything that needs them.

    :func:`quantize_checkpoint` calls it before it reads a file. A rounding counts whether the option ``rounding``, the
    scheme, ``observers`` or a recipe names it: ``options.config`` holds all of them.
    """
    static_activations = []
    observers_of_inputs = []
    for group in config_groups(options.config):
        for base, args in scheme_args(group):
            if base != "weight" and args.dynamic is not True:
                static_activations.append(f"static {base} activations")
            if base == "weight" and observes_data(make_observer("weight", args)):
                observers_of_inputs.append(f"{args.observer} on the inputs")
    reasons = static_activations + observers_of_inputs
    if options.config.kv_cache_scheme is not None:
        reasons.append("the kv cache")
    if has_rounding(options.config):
        reasons.append("rounding")
    refuse(
        list(dict.fromkeys(reasons)),
        f"{options.label} needs data, and quantize_checkpoint reads weights alone",
        expected="weight-only or dynamic schemes (W4A16, NVFP4A16, FP8_DYNAMIC, W8A8)",
        remedy="calibrate the model on data: CalibrationCallback or CalibrationSession; where it does not fit into "
        "memory, calibrate_layerwise.",
    )


def _quantize_share(files: QuantizedFiles, new_folder: Path, max_shard_size: int | str, ranks: Collectives) -> None:
    """Write this rank's share of all tensors: fused sets of about equal size, and copied tensors in turn.

    Called by :func:`quantize_checkpoint`, unless it starts processes for the work.

    Args:
        files: the quantized files, open.
        new_folder: where they are written.
        max_shard_size: bytes of one file of weights.
        ranks: share the work; every rank computes the same shares. A single process writes everything.
    """
    fused_sets = files.fused_sets()
    sizes = []
    for module_names in fused_sets:
        sizes.append(sum(files.source.meta(f"{name}.weight").numel() for name in module_names))
    owners = partition(sizes, ranks.size)
    with closing(TensorWriter(new_folder, files.layout, max_shard_size, tally=files.tally)) as writer:
        for module_names, owner in zip(fused_sets, owners, strict=True):
            if owner == ranks.rank:
                files.quantize(writer, module_names)
        for number, name in enumerate(files.copied):
            if number % ranks.size == ranks.rank:
                files.copy(writer, name)
