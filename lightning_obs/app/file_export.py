"""Write the file of a run that sets ``export.file`` (``export=onnx``, ``program``, ``gguf``), for tasks that calibrate.

``export._target_`` names a class of destinations (``callbacks/destinations.py``: an ONNX file, a program, a GGUF file),
which writes the file. The other keys of ``export`` are its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from hydra.utils import get_class
from omegaconf import DictConfig

from lightning_obs.app.console import step
from lightning_obs.app.from_config import plain
from lightning_obs.app.job import Job
from lightning_obs.callbacks.destinations import Destination, GgufFile, OnnxFile
from lightning_obs.callbacks.observed_batches import label_names
from lightning_obs.errors import CalibrationError
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.onnx.measured_file import measure_onnx
from lightning_obs.onnx.onnx_file import bytes_of
from lightning_obs.report.numbers import human_size

#: by name of the class of a destination, who reads its files; classes of the user's own are not supported
_READERS = {"OnnxFile": "ONNX", "ProgramFile": "torch.export", "GgufFile": "llama.cpp"}


class FileExport:
    """Checks and writes the file of one run.

    ``Calibrate`` makes it in ``check`` if the config sets ``export.file``, and writes the file at the end of ``run``.

    Args:
        config: the composed config, which sets ``export.file``.

    Attributes:
        destination: the file with the options of its writer.

    Raises:
        CalibrationError: ``export.base`` is missing where it is needed.
    """

    def __init__(self, config: DictConfig) -> None:
        export = config.export
        destination_class: type[Destination] = get_class(export._target_)
        options = {}
        for name in destination_class.option_names():
            if name in export:
                options[name] = plain(export[name])
        if issubclass(destination_class, GgufFile) and export.base is None:
            _refuse_without_base()
        self.destination = destination_class(Path(export.file), options, export.overwrite)
        self._dynamic = list(export.get("dynamic") or ())

    def check_path(self) -> None:
        """Refuse a file that could not be written, and options of a wrong value.

        ``Calibrate.check`` calls it before the model is loaded.
        """
        if any(not isinstance(dimension, int) or dimension < 0 for dimension in self._dynamic):
            raise CalibrationError(
                "export.dynamic", got=str(self._dynamic), expected="numbers of dimensions, such as [0, 1]"
            )
        self.destination.check_path()

    def check_model(self, job: Job, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Refuse a model or a scheme that the file cannot hold.

        ``Calibrate.check`` calls it once the model is loaded; ``Plan.check_task`` calls it for each candidate.

        Args:
            job: the job of the run.
            schemes: schemes of the modules to calibrate; empty if the task has yet to choose them.
        """
        self.destination.check_model(job.model, schemes)

    def write(self, job: Job) -> list[str]:
        """Write the file at the end of a run, and on rank 0 run an ONNX file in onnxruntime, if that is installed.

        ``Calibrate.run`` calls this on every rank, and rank 0 writes. The options of ``destination`` change for
        good: for a file that is traced they get ``example`` (which :func:`_measurement` reads) and ``dynamic_shapes``,
        and for an ONNX file ``measure`` is turned off, because the measurement is made here and not by the writer.

        Returns:
            Lines for the closing report.
        """
        destination = self.destination
        if destination.is_traced:
            destination.options["example"] = example = self._example(job)
            destination.options["dynamic_shapes"] = self._dynamic_shapes(example)
        is_measured = isinstance(destination, OnnxFile) and destination.options.get("measure", True)
        if is_measured:
            destination.options["measure"] = False  # else the writer measures, and prints the measurement itself
        with step(f"writing {destination.path.name}"):
            destination.write(job.callback.results)
        if not job.trainer.is_global_zero:
            return []
        size = human_size(bytes_of(destination.path))
        lines = [f"wrote {destination.path}  ({_READERS[type(destination).__name__]}; {size})"]
        if is_measured:
            lines += _measurement(job, destination)
        return lines

    def _example(self, job: Job) -> dict[str, Any]:
        """The model's arguments for samples of the first validation batch, by name, without labels.

        A causal language model also gets a mask, so that the file takes batches with padding. torch.export fixes a
        size of 1; so there are two samples where their number may vary.
        """
        (inputs,) = job.first_inputs(job.data.val_dataloader(), 1)
        samples = 2 if 0 in self._dynamic else 1
        labels = label_names(job.model)
        example = {}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                value = value[torch.arange(samples) % len(value)]
            if name not in labels:
                example[name] = value
        if is_transformers_model(job.model) and "input_ids" in example and "attention_mask" not in example:
            example["attention_mask"] = torch.ones_like(example["input_ids"])
        return example

    def _dynamic_shapes(self, example: Mapping[str, Any]) -> dict[str, Any] | None:
        """The sizes that may vary, as torch.export takes them; a size that the model fixes is fixed in the file."""
        if not self._dynamic:
            return None
        shapes: dict[str, Any] = {}
        for name, value in example.items():
            shapes[name] = None
            if isinstance(value, torch.Tensor):
                varying = [dimension for dimension in self._dynamic if dimension < value.ndim]
                shapes[name] = dict.fromkeys(varying, torch.export.Dim.AUTO)
        return shapes


def _refuse_without_base() -> None:
    """Raise the error of ``export=gguf`` without ``export.base``."""
    raise CalibrationError(
        "export=gguf needs a GGUF file of the same model in float, whose weights it replaces",
        where=["export.base"],
        got="none",
        remedy="python convert_hf_to_gguf.py <the model's folder> --outtype f16 --outfile model-f16.gguf (of "
        "llama.cpp); then export.base=model-f16.gguf.",
    )


def _measurement(job: Job, destination: Destination) -> list[str]:
    """Time an ONNX file in the installed onnxruntime beside the same model in float, as lines for the closing report.

    :meth:`FileExport.write` calls this on rank 0. :func:`measure_onnx` also compares the file's outputs with those of
    the quantized model in torch; so the modules have the qparams of this run meanwhile (``session.in_force``).

    Args:
        job: the job of the run, whose model is calibrated.
        destination: the written file, with the example inputs in its options.

    Returns:
        The measurement, or the error of an onnxruntime that does not run the file; no lines without onnxruntime.
    """
    if find_spec("onnxruntime") is None:
        return []
    session = job.callback.session
    assert session is not None
    with step("running the file in onnxruntime beside float"), session.in_force():
        try:
            measurement = measure_onnx(job.model, destination.path, destination.options["example"])
        except Exception as error:  # onnxruntime's own classes derive from Exception alone
            return [f"the installed onnxruntime does not run it: {error}"]
    return [str(measurement)]
