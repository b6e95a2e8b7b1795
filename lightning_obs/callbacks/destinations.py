"""What ``export_to`` names: the folder of a checkpoint, or a file of another format, which its suffix chooses.

A destination is asked three times before a run calls its model on data: when the callback is made, whether its options
are known; when the run starts, whether the path can be written; and once the model is known, whether the format can
hold the model and the scheme.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from inspect import signature
from itertools import permutations
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from typing_extensions import override

from lightning_obs.callbacks.measured_export import export_and_measure
from lightning_obs.callbacks.results import Results
from lightning_obs.checkpoint.export import export_checkpoint
from lightning_obs.errors import CalibrationError, refuse_unknown, require_bool
from lightning_obs.files.write import MODEL_FILES, require_free
from lightning_obs.gguf.gguf_file import check_files, export_gguf, require_gguf
from lightning_obs.model.module_qparams import refuse_unmerged
from lightning_obs.model.weight import in_shards
from lightning_obs.onnx.onnx_file import check_onnx_file, export_onnx, require_onnx
from lightning_obs.program.program_file import check_program_file, export_program, require_program

#: a path, several paths, or paths with the options of their writers
ExportTo: TypeAlias = (
    str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Mapping[str, Any] | None] | None
)


class Destination:
    """The folder of a checkpoint; a subclass is a file of another format.

    :func:`destinations_of` makes the destinations of a callback; `ExportAtEnd` checks and writes them. The command line
    makes and checks a file in the same way.

    Args:
        path: the path to write to.
        options: keyword arguments of the writer, but for ``overwrite``.
        overwrite: replace what is there.

    Attributes:
        writer: the public function that writes it.
        is_traced: whether the writer traces the model, for which it needs an example of its inputs.
        replaces_weights: whether it is written into a file that holds the weights as they were before a fit.

    Raises:
        CalibrationError: an option that the writer does not have.
    """

    writer: Callable[..., Path] = staticmethod(export_checkpoint)
    is_traced = False
    replaces_weights = False

    def __init__(self, path: Path, options: Mapping[str, Any], overwrite: bool) -> None:
        refuse_unknown(options, self.option_names(), f"unknown option of {path} in export_to")
        self.path = path
        self.options = dict(options)
        self.overwrite = overwrite

    @classmethod
    def option_names(cls) -> list[str]:
        """The options that ``export_to`` takes: the writer's parameters but model, path, ``overwrite``.

        Asked when the destination is made, and by the command line for its config files.
        """
        names = list(signature(cls.writer).parameters)[2:]
        names.remove("overwrite")
        return names

    def check_path(self) -> None:
        """When a run starts, refuse a path that is taken or cannot be written.

        A subclass also refuses options of a wrong value, and a package that is missing.
        """
        require_free(self.path, self.overwrite)

    def check_model(self, model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Refuse a model, or a scheme, that the format cannot hold.

        Called when the session is prepared, before data run. Here, for the folder of a checkpoint, only sharded weights
        with adapters that are not merged are refused.

        Args:
            model: calibrated, or to be calibrated.
            schemes: the schemes of the modules that are calibrated, or will be, by module name.
        """
        if any(in_shards(module) for module in model.modules()):
            refuse_unmerged(model, "export_to, of sharded weights,")

    def write(self, results: Results) -> None:
        """Write the calibrated model of the callback that holds ``results``.

        Called in ``teardown`` at a run's end, and by the command line (``FileExport.write``).
        """
        results.export(self.path, overwrite=self.overwrite, **self.options)


class OnnxFile(Destination):
    """An ONNX file. The installed onnxruntime runs it once it is written, unless ``measure`` is off.

    `destinations_of` makes it for a path that ends in ``.onnx``.
    """

    writer = staticmethod(export_onnx)
    is_traced = True

    @override
    @classmethod
    def option_names(cls) -> list[str]:
        """The options that ``export_to`` takes for a file: the parameters of ``export_onnx``, and ``measure``.

        Asked when the destination is made, and by the command line for its config files.
        """
        return [*super().option_names(), "measure"]

    @override
    def check_path(self) -> None:
        """When a run starts, refuse a taken path, wrong values of options, and a missing package."""
        require_bool(measure=self._is_measured)
        check_onnx_file(self.path, self.overwrite, self.options.get("signed"))

    @override
    def check_model(self, model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Before data run, refuse a model or a scheme that ONNX cannot hold."""
        require_onnx(model, schemes, self.path, overwrite=self.overwrite)

    @override
    def write(self, results: Results) -> None:
        """At a run's end, write the file and, unless ``measure`` is off, run it in onnxruntime."""
        write = export_and_measure if self._is_measured else export_onnx
        options = self.options.copy()
        options.pop("measure", None)
        example = options.pop("example", None)
        results.export_traced(write, self.path, example, overwrite=self.overwrite, **options)

    @property
    def _is_measured(self) -> Any:
        """Whether onnxruntime runs the file; a value of another type than bool is refused by :meth:`check_path`."""
        return self.options.get("measure", True)


class ProgramFile(Destination):
    """A program of torch.export. `destinations_of` makes it for a path that ends in ``.pt2``."""

    writer = staticmethod(export_program)
    is_traced = True

    @override
    def check_path(self) -> None:
        """When a run starts, refuse a taken path, and a backend that is unknown or missing."""
        check_program_file(self.path, self.overwrite, self.options.get("backend"))

    @override
    def check_model(self, model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Before data run, refuse a model or a scheme that a program cannot hold."""
        require_program(model, schemes, self.path, overwrite=self.overwrite)

    @override
    def write(self, results: Results) -> None:
        """At a run's end, trace the model and write its program."""
        options = self.options.copy()
        example = options.pop("example", None)
        results.export_traced(export_program, self.path, example, overwrite=self.overwrite, **options)


class GgufFile(Destination):
    """A GGUF file for llama.cpp, written into a copy of ``base``, a GGUF file of the model in float.

    `destinations_of` makes it for a path that ends in ``.gguf``.
    """

    writer = staticmethod(export_gguf)
    replaces_weights = True

    def __init__(self, path: Path, options: Mapping[str, Any], overwrite: bool) -> None:
        super().__init__(path, options, overwrite)
        self.base: Any = options.get("base")
        if self.base is None:
            raise CalibrationError(
                "a GGUF file is written into a copy of one of the same model in float",
                where=[str(path)],
                got="no base",
                remedy=f'export_to={{"{path}": {{"base": "model-f16.gguf"}}}}.',
            )

    @override
    def check_path(self) -> None:
        """When a run starts, refuse a taken path, and a ``base`` that is no GGUF file."""
        check_files(self.path, self.base, self.overwrite)

    @override
    def check_model(self, model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Before data run, refuse a model or a scheme that the base file cannot hold."""
        require_gguf(model, schemes, self.path, self.base, overwrite=self.overwrite)

    @override
    def write(self, results: Results) -> None:
        """At a run's end, write a copy of ``base`` with the quantized weights.

        ``base`` and ``overwrite`` are all that :func:`~lightning_obs.export_gguf` takes beside model and path.
        """
        results.export_gguf(self.path, self.base, self.overwrite)


#: by suffix, the kinds of files; any other path is the folder of a checkpoint
_FILES: dict[str, type[Destination]] = {".onnx": OnnxFile, ".pt2": ProgramFile, ".gguf": GgufFile}


def destinations_of(export_to: ExportTo, overwrite: bool) -> list[Destination]:
    """The destinations that a callback's ``export_to`` names.

    Called when a callback is made.

    Args:
        export_to: a path, several paths, or a dict of paths and the options of their writers.
        overwrite: replace what is there.

    Raises:
        CalibrationError: an argument of another type, an unknown option, a suffix that is no destination's, or a path
            that is another one or lies in it.

    >>> [type(destination).__name__ for destination in destinations_of(["model-int8", "model.onnx"], False)]
    ['Destination', 'OnnxFile']
    """
    destinations = []
    for path, options in _options_by_path(export_to).items():
        destinations.append(_destination(Path(path), options or {}, overwrite))
    _refuse_overlap([destination.path.absolute() for destination in destinations])
    return destinations


def _options_by_path(export_to: Any) -> dict[Any, Any]:
    """The paths of ``export_to``, each with its options or None; a CalibrationError for a value of another type."""
    options_by_path: dict[Any, Any] = {}
    if isinstance(export_to, Mapping):
        options_by_path.update(export_to)
    else:
        is_list = isinstance(export_to, Sequence) and not isinstance(export_to, str)
        for path in export_to if is_list else [export_to]:
            options_by_path[path if isinstance(path, Hashable) else None] = None  # None is no path
    are_paths = [isinstance(path, (str, os.PathLike)) for path in options_by_path]
    are_options = [isinstance(options, (Mapping, NoneType)) for options in options_by_path.values()]
    if not options_by_path or not all(are_paths) or not all(are_options):
        raise CalibrationError(
            "export_to",
            got=repr(export_to),
            expected="a path, a list of paths, or a dict of paths and the options of their writers",
        )
    return options_by_path


def _destination(path: Path, options: Mapping[str, Any], overwrite: bool) -> Destination:
    """Make the destination at a path, of the class that its suffix chooses, with the writer's ``options``."""
    suffix = path.suffix.lower()
    if suffix in _FILES:
        return _FILES[suffix](path, options, overwrite)
    if suffix in MODEL_FILES:
        raise CalibrationError(
            f"export_to writes no {suffix} file",
            where=[str(path)],
            expected=f"a folder for a checkpoint, or a file that ends in {', '.join(_FILES)}",
        )
    return Destination(path, options, overwrite)


def _refuse_overlap(paths: Sequence[Path]) -> None:
    """Refuse equal paths, and a path inside another: one would be written into the other."""
    for inner, outer in permutations(paths, 2):
        if inner.is_relative_to(outer):
            raise CalibrationError(
                "two paths of export_to are the same, or one lies inside the other",
                where=[str(inner), str(outer)],
                remedy="give each a path of its own.",
            )
