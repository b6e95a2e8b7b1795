"""One run: load, measure, calibrate, measure again, export, load back in a new process, report.

On several ranks all of them run this; only rank 0 prints and writes.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

from lightning_obs.app import reload_check
from lightning_obs.app.finetune import fine_tune, perplexity_of_checkpoint, share_recovered
from lightning_obs.callbacks.calibration import CalibrationCallback, find_module
from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining
from lightning_obs.errors import CalibrationError
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.quantized_forward import quantized
from lightning_obs.report.layer_errors import LayerError, measure_layer_errors
from lightning_obs.report.summary import folder_size, poor_layers, print_report, summary
from lightning_obs.schemes.options import CalibrationOptions

_CHECK_TOKENS = 128


def run(config: DictConfig) -> dict[str, Any]:
    """Run the composed config and return what a comparison shows.

    Raises:
        CalibrationError: whatever is wrong with scheme, model or data; the exported checkpoint does not give the
            calibrated model's logits.
    """
    _quiet_lightning()
    for name in config.imports:
        _import(name)
    callback = make_callback(config)
    output = Path(config.output_dir)
    folder = Path(config.export.folder) if config.export.folder else None
    if folder is not None and folder.exists() and not config.export.overwrite:
        raise CalibrationError(f"{folder} is already there", remedy="another export.folder, or export.overwrite=true.")
    with _step("loading the model"):
        module: LightningModule = instantiate(config.model)
    with _step("reading the text"):
        data: LightningDataModule = instantiate(config.data, tokenizer=getattr(module, "tokenizer", None))
    model = find_module(module, config.module)
    trainer: Trainer = instantiate(config.trainer, callbacks=[callback])
    plain: Trainer = instantiate(config.trainer)

    before = _evaluate(plain, module, data, config.evaluate, "perplexity in full precision")
    _say(f"· calibrating {callback.label}")
    calibrate(trainer, module, data, callback)
    result = callback.result
    assert result is not None  # calibrate raised otherwise
    calibrated, seconds_trained = None, None
    if isinstance(callback, QuantizationAwareTraining):
        with quantized(model):
            calibrated = _evaluate(plain, module, data, config.evaluate, "perplexity calibrated")
        _say(f"· fine-tuning {callback.label}")
        seconds_trained = fine_tune(config, callback, module, data)
        result = callback.result or result
    errors = _layer_errors(model, data, config.report.layer_error_batches)
    with quantized(model):
        after = _evaluate(plain, module, data, config.evaluate, "perplexity quantized")

    lines, sizes, reloaded = [], None, None
    if folder is not None:
        with _step("writing the checkpoint"):
            callback.export(folder, overwrite=config.export.overwrite)
    if folder is not None and trainer.is_global_zero:
        sizes = (_model_bytes(model), folder_size(folder))
        if config.export.verify:
            lines += _verify(model, data, folder, output, config)
        lines.append(f"wrote {folder}  (transformers, vLLM)")
    if folder is not None and calibrated is not None:
        # Every rank measures its share, as before. Ranks that torchrun started may have composed another folder.
        written = Path(trainer.strategy.broadcast(str(folder.resolve())))
        if trainer.strategy.reduce_boolean_decision(written.is_dir()):
            _say("· perplexity of the checkpoint, loaded again")
            reloaded = perplexity_of_checkpoint(config, written, data)
        else:
            lines.append("not loaded again: some ranks cannot read that folder")
    if calibrated is not None:
        found = {"full precision": before, "calibrated": calibrated, "fine-tuned": after, "reloaded": reloaded}
        shown = (f"{name} {value:.3f}" for name, value in found.items() if value is not None)
        lines.append("perplexity on held-out text: " + ", ".join(shown))
    recovered = None
    if before is not None and calibrated is not None and after is not None:
        recovered = share_recovered(before, calibrated, after)
    if seconds_trained is not None:
        brought = "" if recovered is None else f", and brought back {recovered:.0%} of what calibration lost"
        lines.append(f"fine-tuning took {seconds_trained / 60:.1f} minutes{brought}")
    perplexity = None if before is None or after is None else (before, after)
    report = output / "report.json"
    row = {
        "run": callback.label,
        "perplexity": perplexity,
        "perplexity_calibrated": calibrated,
        "perplexity_reloaded": reloaded,
        "recovered": recovered,
        "seconds_trained": seconds_trained,
        "size": sizes[1] if sizes else None,
        "seconds": result.seconds,
        "worst_sqnr": errors[0].sqnr if errors else None,
        "ignore": [*callback.ignore, *poor_layers(errors, fused=result.fused)],
    }
    if trainer.is_global_zero:
        _write_report(report, row, errors, config)
        hint = "" if not poor_layers(errors) else f"  (leave those layers out with ignore_from={report})"
        lines.append(f"report {report}{hint}")
        print()
        print_report(
            summary(result, errors, perplexity=perplexity, sizes=sizes, lines=lines, worst=config.report.worst_layers)
        )
    if dist.is_initialized():  # gloo's threads may abort a process that ends in a group (pytorch #190489)
        dist.destroy_process_group()
    return row


def make_callback(config: DictConfig) -> CalibrationCallback:
    """The callback that ``scheme``, ``kv_cache``, ``observer``, ``weight_observer`` and ``ignore`` describe."""
    scheme = _plain(config.scheme)
    targets = scheme.pop("targets", None)
    options = CalibrationOptions(
        scheme.pop("preset", None) or scheme or None,
        targets=targets,
        ignore=[*_plain(config.ignore), *_ignored_by_report(config.ignore_from)],
        observers={"input": _plain(config.observer), "weight": _plain(config.weight_observer)},
        kv_cache=_plain(config.kv_cache) or None,
        on_missing=config.on_missing,
        reload=config.export.reload,
        calibrate_all_experts=config.calibrate_all_experts,
        fused_groups=_plain(config.fused_groups),
    )
    of_callback = {"module": config.module, "token_mask": config.token_mask}
    if config.task.name == "finetune":
        return QuantizationAwareTraining(options, **_plain(config.task.callback), **of_callback)
    return CalibrationCallback(options, **of_callback)


def _plain(node: Any) -> Any:
    """Hydra's containers as dict and list; the rest of the package knows nothing of Hydra."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise CalibrationError(
            f"imports: cannot import {name!r}",
            got=str(error),
            remedy="run from the folder that holds it, or set PYTHONPATH.",
        ) from error


def _ignored_by_report(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        return [str(name) for name in json.loads(Path(path).read_text())["ignore"]]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"ignore_from={path} is not the report.json of an earlier run", got=f"{type(error).__name__}: {error}"
        ) from error


def calibrate(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, callback: CalibrationCallback
) -> None:
    """Calibrate in Lightning's validation loop, or without a single batch where the scheme needs none."""
    session = callback.prepare(trainer, module)
    if session.needs_data:
        trainer.validate(module, datamodule=data, verbose=False)
    else:
        _say(f"{callback.label} needs no data: no batch is run, data.batches is not used")
        with session:
            pass


def _evaluate(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, wanted: bool, what: str
) -> float | None:
    if not wanted:
        return None
    _say(f"· {what}")
    metrics = trainer.test(module, datamodule=data, verbose=False)[0]
    value = metrics.get("perplexity")
    return None if value is None else float(value)


def _layer_errors(model: nn.Module, data: LightningDataModule, batches: int) -> list[LayerError]:
    if batches < 1:
        return []
    device = next(model.parameters()).device
    chosen = [batch for batch, _ in zip(data.test_dataloader(), range(batches), strict=False)]
    moved = [{key: value.to(device) for key, value in batch.items()} for batch in chosen]
    extra = {"use_cache": False} if is_transformers_model(model) else {}
    with _step("measuring each layer's error"):
        return measure_layer_errors(model, [{**batch, **extra} for batch in moved])


def _verify(model: Any, data: LightningDataModule, folder: Path, output: Path, config: DictConfig) -> list[str]:
    """Reload in a new process with plain transformers and compare the logits."""
    reference = output / "reference.safetensors"
    input_ids = next(iter(data.test_dataloader()))["input_ids"][:1, :_CHECK_TOKENS].contiguous()
    with torch.inference_mode(), quantized(model):
        logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    save_file({"input_ids": input_ids, "logits": logits.cpu().contiguous()}, reference)
    command = [sys.executable, reload_check.__file__, str(folder), str(reference)]
    if config.export.prompt:
        command += ["--prompt", config.export.prompt]
    if config.export.reload == "dequantize":
        command.append("--dequantize")
    with _step("loading the checkpoint in a new process"):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=config.export.verify_timeout, check=False
        )
    if not done.stdout.strip():
        raise CalibrationError(
            "the checkpoint was written, but a new process cannot load it",
            where=[str(folder)],
            got=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}",
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["difference"] != 0.0 and config.export.reload == "default":
        raise CalibrationError(
            "the checkpoint was written, but loaded in a new process it gives other logits",
            where=[str(folder)],
            got=f"a difference of {found['difference']}",
            expected="0.0",
        )
    lines = [
        f"loaded in a new process (transformers {found['transformers']}, lightning_obs not imported): "
        f"largest difference of logits {found['difference']}"
    ]
    if found["text"]:
        lines.append(f"it says: {found['text']!r}")
    return lines


def _model_bytes(model: nn.Module) -> int:
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


def _write_report(path: Path, row: dict[str, Any], errors: list[LayerError], config: DictConfig) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [vars(error) for error in errors]
    composed = OmegaConf.to_container(config, resolve=True)
    path.write_text(json.dumps({**row, "layers": layers, "config": composed}, indent=1) + "\n")


def _say(text: str) -> None:
    if rank_zero_only.rank == 0:
        print(text, flush=True)


@contextmanager
def _step(text: str) -> Iterator[None]:
    """Show what is going on, with a bar that moves and the time it takes."""
    if rank_zero_only.rank != 0:
        yield
        return
    with Progress(TextColumn("· {task.description}"), BarColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(text, total=None)
        yield
        progress.update(task, total=1, completed=1)


def _quiet_lightning() -> None:
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
