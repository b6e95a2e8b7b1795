"""Export a calibrated model as a program of torch.export, with quantization as separate operations of the graph.

torch.export traces the model while its modules run the quantized forward. There a weight is a ``dequantize`` of stored
integers, and an activation passes ``quantize`` and ``dequantize``, all of torch's library ``quantized_decomposed``. It
is the form that ``convert_pt2e`` produces: backends of ExecuTorch and torch's Inductor look for these operations around
a convolution or matrix product, and compute with integers where they can.

Between tracing and saving, batch norms are folded and weights in float are dropped (:mod:`.graph`). For that the
program becomes a module and is exported once more, as ``convert_pt2e``'s users do.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_obs.errors import CalibrationError, require_bool, require_choice
from lightning_obs.files.write import require_new_file, whole_file
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.tracing import (
    Example,
    exporter_error,
    reason_against_weight,
    refuse_tensors,
    require_traceable,
    written_by,
)
from lightning_obs.model.kinds import kind_of
from lightning_obs.model.module_qparams import calibrated_schemes, get_scheme, require_ready
from lightning_obs.model.stored import stored_codes, stored_range
from lightning_obs.numerics.qparams import scheme_args
from lightning_obs.program.graph import finish
from lightning_obs.program.xnnpack import write_for_xnnpack

#: registers the operations of ``torch.ops.quantized_decomposed``; who loads a program needs them, too
_OPERATIONS = "torch.ao.quantization.fx._decomposed"
_FILE_KIND = "a program"
_SUPPORTED = "integers of at most 8 bits, for activations with one calibrated range per tensor"
_REMEDY = "use INT8_STATIC or a weight-only integer scheme (W8A16, W4A16), or list them in `ignore`."


def export_program(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: torch.Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    backend: Literal["xnnpack", "inductor"] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a calibrated model, or one from :func:`~lightning_obs.load_checkpoint`, as a program of torch.export.

    The program has ``torch.ops.quantized_decomposed`` quantize and dequantize operations, as after ``convert_pt2e``.
    Weights are stored as int8: at 8 bits the file has about a quarter of the bytes of a float32 file. The program's
    ``example_inputs``, which torch.export saves with it, are zeros in the shapes of ``example``, so that no data is in
    the file. The program computes what the model does under :func:`~lightning_obs.quantized`, up to the order of
    floating point operations. (A value halfway between two integers may go to the other one, because the operations
    multiply by the inverse of a scale. In symmetric 8-bit schemes the largest value that was observed is such a value:
    255 steps span twice that value, so it lies at 127.5.) The user calls this function, and a callback or the command
    line at the end of a run that exports. The program is loaded without this package::

        import torch.ao.quantization.fx._decomposed  # registers the operations
        program = torch.export.load("model.pt2")

    Args:
        model: a model in float32. It is traced in evaluation mode, and not changed.
        file: path of the new file, which appears complete or not at all; its name ends in ``.pt2``.
        example: inputs to trace the model with: one tensor, a tuple of positional arguments, or a dict of keyword
            arguments. A model that takes one dict gets it in a tuple: ``(batch,)``.
        dynamic_shapes: which dimensions may vary, as :func:`torch.export.export` takes it; none by default. A batch of
            any size: ``({0: torch.export.Dim.DYNAMIC},)``.
        backend: ``"xnnpack"``: layer norms, means and attention whose sizes do not vary are written as products, which
            XNNPACK takes, so that ExecuTorch gives it the whole net at once. ``"inductor"``: activations are unsigned,
            the same numbers with codes and zero points 128 higher, which torch.compile multiplies as integers on x86.
            None: neither.
        overwrite: replace an existing ``file``.

    Returns:
        The path of the file.

    Raises:
        CalibrationError: the model was not calibrated, has changed since, or has adapters (LoRA) that are not merged
            into its weights; the operations cannot express the scheme (floating point formats, dynamic ranges, groups
            of a convolution's weight, attention states); torch.export cannot trace the model; ``backend`` or
            ``overwrite`` has another value than those above; the file exists, has another suffix than ``.pt2``, or
            cannot be written.
    """
    file = Path(file)
    check_program_file(file, overwrite, backend)
    require_ready(model, merged_for=_FILE_KIND)
    require_program(model, calibrated_schemes(model), file, overwrite=overwrite)
    import_module(_OPERATIONS)
    with left_as_it_was(model):
        program = _trace(model, Example.of(model, example, dynamic_shapes), backend)
    content = io.BytesIO()  # torch may abort the process if a write fails in the middle of a file, as on a full disk
    try:
        torch.export.save(program, content)
    except NotImplementedError as error:  # a class of the outputs that it cannot name in a file
        remedy = "let the model return tensors in tuples, lists or dicts."
        raise exporter_error("torch.export", model, error, remedy) from error
    with whole_file(file, overwrite) as partial_file:
        partial_file.write_bytes(content.getbuffer())
    return file


def require_program(
    model: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    file: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Refuse what :func:`export_program` could not write.

    A run that exports at its end calls it before its model sees data (``ProgramFile.check_model`` in
    ``callbacks/destinations.py``), and :func:`export_program` calls it before it traces.

    Args:
        model: a model that is calibrated, or will be.
        schemes: schemes of the modules that are calibrated, or will be, by module name.
        file, overwrite: as for :func:`export_program`.

    Raises:
        CalibrationError: all that :func:`export_program` raises, except what the calibration or the tracing causes.
    """
    check_program_file(file, overwrite)
    require_traceable(model, schemes, file_kind=_FILE_KIND, writer_name="export_program")
    refuse_tensors(model, schemes, _reason_against, file_kind=_FILE_KIND, expected=_SUPPORTED, remedy=_REMEDY)


def check_program_file(file: str | os.PathLike[str], overwrite: bool, backend: str | None = None) -> None:
    """Refuse a file that could not be written, whatever the model: the name is taken, or has another suffix.

    ``callbacks/destinations.py`` calls it when a run starts. :func:`export_program` and :func:`require_program` call it
    first.

    Args:
        file, overwrite, backend: as for :func:`export_program`.
    """
    require_bool(overwrite=overwrite)
    if backend is not None:
        require_choice("backend", backend, ["xnnpack", "inductor"])
    file = Path(file)
    require_new_file(file, overwrite)
    if file.suffix != ".pt2":
        raise CalibrationError("the name of a program", got=file.name, expected="a name that ends in .pt2")


def _reason_against(module: nn.Module, base_name: str, scheme: QuantizationScheme) -> str | None:
    """Why a program cannot hold one quantized tensor of a module; None if it can; see :func:`.refuse_tensors`."""
    args = dict(scheme_args(scheme))[base_name]
    if args.type != "int":
        return f"{args.num_bits}-bit floating point"
    if base_name == "weight":
        return reason_against_weight(module, args)
    if args.dynamic is not False:
        return "activations whose range is found at run time"
    if args.strategy != QuantizationStrategy.TENSOR or args.num_bits > 8:
        return f"{args.num_bits}-bit activations per {QuantizationStrategy(args.strategy).value}"
    return None


# ---------------------------------------------------------------------- tracing


def _trace(model: nn.Module, example: Example, backend: str | None) -> torch.export.ExportedProgram:
    """The finished program of a model, traced under the quantized forward; called by :func:`export_program`.

    The model is traced, the graph is changed as a module, and that module is traced. Both traces run inside
    ``written_by``: the first needs its writers; the second has their operations in its graph, and needs that gradients
    and inference mode are off, as they were in the first.

    Args:
        model: a calibrated model in evaluation mode.
        example: the arguments to trace it with.
        backend: as for :func:`export_program`.

    Raises:
        CalibrationError: torch.export failed, with an error of any class.
    """
    with written_by(model, partial(_DecomposedWriter, offset=128 if backend == "inductor" else 0)):
        graph_module = _export(model, example).module()
        if backend == "xnnpack":
            write_for_xnnpack(graph_module)
        finish(graph_module)
        program = _export(graph_module, example)
    program.example_inputs = tree_map_only(torch.Tensor, torch.zeros_like, program.example_inputs)
    return program


def _export(module: nn.Module, example: Example) -> torch.export.ExportedProgram:
    """The program of a module: of the model with its writers, then of the graph that was made of it.

    Raises:
        CalibrationError: torch.export failed, with an error of any class.
    """
    try:
        return torch.export.export(
            module, example.positional, example.by_name, dynamic_shapes=example.dynamic_shapes, strict=False
        )
    except Exception as error:
        remedy = "see torch.export.export(model, example); the model has to be traceable."
        raise exporter_error("torch.export", module, error, remedy) from error


class _DecomposedWriter:
    """Adds quantize and dequantize operations for the tensors of one module, while the model is traced.

    The operations of its weight read ``buffers``, which :func:`.written_by` registers on the module for the length of
    the trace. Scale and zero point of an activation are numbers in the graph, as backends expect them.

    Args:
        module: a calibrated module.
        offset: what is added to codes and zero points of activations: 0 for signed ones, 128 for unsigned ones.
    """

    def __init__(self, module: nn.Module, offset: int) -> None:
        self.module = module
        self._offset = offset
        #: codes, scales and zero points of the weight, by the names of their buffers
        self.buffers: dict[str, torch.Tensor] = {}
        #: by base name (weight, input, output), how the scheme quantizes the tensor
        self._args: dict[str, QuantizationArgs] = {}
        #: by base name, the scale and the zero point of a tensor that has one of each
        self._numbers: dict[str, tuple[float, int]] = {}
        for base_name, args in scheme_args(get_scheme(module)):
            stored = stored_range(module, base_name)
            assert stored is not None  # dynamic ranges are refused
            self._args[base_name] = args
            if args.strategy == QuantizationStrategy.TENSOR:
                self._numbers[base_name] = (float(stored.scale), int(stored.zero_point))
            else:
                self._add_scales(stored.scale, stored.zero_point, args)
            if base_name == "weight":
                self.buffers["weight_codes"] = stored_codes(module)

    def _add_scales(self, scale: torch.Tensor, zero_point: torch.Tensor, args: QuantizationArgs) -> None:
        """Add the scales and zero points of a weight as buffers: a matrix per group, a vector per channel."""
        shape = tuple(scale.shape) if args.strategy == QuantizationStrategy.GROUP else (-1,)
        self.buffers["weight_step"] = scale.float().reshape(shape)
        self.buffers["weight_zero"] = zero_point.long().reshape(shape)

    def __call__(self, value: torch.Tensor, base_name: str) -> torch.Tensor:
        """Add the operations for one tensor of the module to the graph, and return the dequantized tensor.

        The quantized forward calls it instead of quantizing and dequantizing. For a weight the stored integers are
        read, and ``value`` is not.
        """
        operations = torch.ops.quantized_decomposed
        args = self._args[base_name]
        lowest = -(1 << (args.num_bits - 1))
        highest = -1 - lowest
        if base_name != "weight":
            scale, zero_point = self._numbers[base_name]
            dtype = torch.uint8 if self._offset else torch.int8
            numbers = (scale, zero_point + self._offset, lowest + self._offset, highest + self._offset, dtype)
            return operations.dequantize_per_tensor(operations.quantize_per_tensor(value, *numbers), *numbers)
        codes: Any = self.module.weight_codes
        if base_name in self._numbers:
            return operations.dequantize_per_tensor(codes, *self._numbers[base_name], lowest, highest, torch.int8)
        scales = self.module.weight_step
        zero_points = self.module.weight_zero
        if args.strategy == QuantizationStrategy.GROUP:
            return operations.dequantize_per_channel_group(
                codes, scales, zero_points, lowest, highest, torch.int8, args.group_size, torch.float32
            )
        axis = kind_of(self.module).rows
        return operations.dequantize_per_channel(codes, scales, zero_points, axis, lowest, highest, torch.int8)
