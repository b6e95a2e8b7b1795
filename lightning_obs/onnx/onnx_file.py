"""Export a calibrated model as one ONNX file in QDQ form, for onnxruntime and other ONNX engines.

torch's exporter traces the model while its modules run the quantized forward. There a weight is ``DequantizeLinear`` of
stored integers, and an input is ``DequantizeLinear(QuantizeLinear(input))``. Engines look for these pairs around a
convolution or matrix product, and compute with integers where they can.

Afterwards batch norms that follow a convolution are folded into it (:mod:`.graph`): an engine finds no integer
convolution if a batch norm separates it from the next ``QuantizeLinear``. The factor of each channel is multiplied into
the weight's scale, so nothing is rounded again. If a factor is negative, the channel's integers change their signs, so
that the scale stays positive; the scale becomes negative only if the lowest integer is among them, which has no
counterpart.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from torch import nn
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree as pytree

from lightning_obs.errors import refuse, require_bool
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
from lightning_obs.model.module_qparams import (
    args_of,
    calibrated_modules,
    calibrated_schemes,
    get_scheme,
    require_ready,
)
from lightning_obs.model.stored import StoredRange, stored_codes, stored_range
from lightning_obs.model.weight import whole_shape
from lightning_obs.numerics.qparams import scheme_args
from lightning_obs.packages import import_package, require_release

#: the first opset with 4-bit integers and scales per group
_OPSET = 21
#: bytes of weights that one file holds, 1.5 GiB; protobuf ends at 2 GiB, and the graph needs room beside the weights
_LARGEST_FILE = 3 << 29
#: the first release under which the graph has the names of the model's buffers; before it 4-bit integers took 8 bits
_OLDEST_ONNXSCRIPT = "0.6"
_FILE_KIND = "an ONNX file"
_SUPPORTED = "integers of at most 8 bits for weights, of 8 bits with one range per tensor for activations"
_REMEDY = "use INT8_ONNX, INT8_DYNAMIC or a weight-only integer scheme (W8A16, W4A16), or list them in `ignore`."


def export_onnx(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: torch.Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    signed: bool | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a calibrated model, or a model that :func:`~lightning_obs.load_checkpoint` loaded, as a QDQ ONNX file.

    Weights are stored as the integers that a checkpoint holds (int8; int4 at 4 bits and less): at 8 bits the file has
    about a quarter of the bytes of a float32 file. It computes what the model does under
    :func:`~lightning_obs.quantized`, up to the order of floating point operations. Needs the packages of the extra
    ``onnx``; writes opset 21. The user calls it, and a callback or the command line at the end of a run that exports.

    Args:
        model: a model in float32. It is traced in evaluation mode, and not changed.
        file: path of the new file, which appears complete or not at all. More than 1.5 GiB of weights are written to a
            second file beside it.
        example: inputs to trace the model with: one tensor, a tuple of positional arguments, or a dict of keyword
            arguments. A model that takes one dict gets it in a tuple: ``(batch,)``.
        dynamic_shapes: which dimensions may vary, as :func:`torch.export.export` takes it; none by default. A batch of
            any size: ``({0: torch.export.Dim.DYNAMIC},)``.
        signed: store symmetric activations as signed integers with zero point 0; TensorRT takes no others. False: as
            unsigned integers with zero point 128, which are the same numbers. None: signed if the installed
            onnxruntime loads them; up to the release 1.32 it does not where a Linear has more than two dimensions.
        overwrite: replace an existing ``file``.

    Returns:
        The path of the file.

    Raises:
        CalibrationError: onnx or onnxscript is missing or too old; ``signed`` or ``overwrite`` is no bool; the model
            was not calibrated, has changed since, or has adapters (LoRA) that are not merged into its weights; QDQ
            cannot express the scheme (floating point formats, dynamic ranges per token, groups of a convolution's
            weight, attention states); torch's exporter cannot trace the model; the file exists, or cannot be written.

    Reference:
        ONNX operators QuantizeLinear and DequantizeLinear, version 21.
    """
    file = Path(file)
    check_onnx_file(file, overwrite, signed)
    require_ready(model, merged_for=_FILE_KIND)
    require_onnx(model, calibrated_schemes(model), file, overwrite=overwrite)
    from lightning_obs.onnx.graph import finish
    from lightning_obs.onnx.installed_runtime import takes_signed_activations

    if signed is None:
        signed = takes_signed_activations()
    arguments = Example.of(model, example, dynamic_shapes)
    with left_as_it_was(model), written_by(model, partial(_QdqWriter, signed=signed)):
        program = trace_onnx(model, arguments)

    finish(program.model, _names_of_4_bit_codes(model), _output_names(program.exported_program))
    _save(program, file, overwrite)
    return file


def require_onnx(
    model: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    file: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Refuse what :func:`export_onnx` could not write.

    A run that exports at its end calls it before its model sees data (``OnnxFile.check_model`` in
    ``callbacks/destinations.py``), and :func:`export_onnx` calls it before it traces.

    Args:
        model: a model that is calibrated, or will be.
        schemes: schemes of the modules that are calibrated, or will be, by module name.
        file, overwrite: as for :func:`export_onnx`.

    Raises:
        CalibrationError: all that :func:`export_onnx` raises, except what the calibration or the tracing causes.
    """
    check_onnx_file(file, overwrite)
    require_traceable(model, schemes, file_kind=_FILE_KIND, writer_name="export_onnx")
    refuse_tensors(model, schemes, _reason_against, file_kind="QDQ ONNX", expected=_SUPPORTED, remedy=_REMEDY)


def check_onnx_file(file: str | os.PathLike[str], overwrite: bool, signed: bool | None = None) -> None:
    """Refuse a file that could not be written, whatever the model: packages are missing, the name is taken.

    ``callbacks/destinations.py`` calls it when a run starts. :func:`export_onnx` and :func:`require_onnx` call it
    first.

    Args:
        file, overwrite, signed: as for :func:`export_onnx`.

    Raises:
        CalibrationError: ``overwrite`` or ``signed`` is no bool; onnx or onnxscript is missing; onnxscript is older
            than 0.6; ``file`` is a folder, or exists and is not to be replaced.
    """
    require_bool(overwrite=overwrite)
    if signed is not None:
        require_bool(signed=signed)
    for package in ("onnx", "onnxscript"):
        import_package(package, "export_onnx")
    require_release("onnxscript", _OLDEST_ONNXSCRIPT, "export_onnx")
    require_new_file(Path(file), overwrite)


def _names_of_4_bit_codes(model: nn.Module) -> set[str]:
    """The names of the graph's constants that hold weights of 4 bits or less, for :func:`.graph.finish`."""
    names = set()
    for module_name, module in calibrated_modules(model):
        args = args_of(module, "weight")
        if args is not None and args.num_bits <= 4:
            names.add(f"{module_name}.weight_codes".lstrip("."))
    return names


def _output_names(program: torch.export.ExportedProgram) -> list[str]:
    """The names of the graph's outputs, by what the model returns: keys and fields, and places behind ``output``.

    A tensor alone is ``output``, items of a tuple are ``output_0`` and ``output_1``, the field of a transformers model
    is ``logits``. Parts that are no tensors, such as None, are no outputs of the graph.
    """
    specs = []
    for spec in program.graph_signature.output_specs:
        if spec.kind == OutputKind.USER_OUTPUT:
            specs.append(spec)
    places = range(len(specs))
    returned = pytree.tree_unflatten(places, program.call_spec.out_spec)
    try:
        paths = [path for path, _ in pytree.tree_flatten_with_path(returned)[0]]
    except ValueError:  # a class of the user's that was registered with torch without its keys
        paths = [(pytree.SequenceKey(place),) for place in places]
    names = []
    for path, spec in zip(paths, specs, strict=True):
        if not isinstance(spec.arg, ConstantArgument):
            names.append(_name_of(path))
    return names


def _name_of(path: Sequence[Any]) -> str:
    """The name of an output at a path in what the model returns: its keys, fields and places, joined by ``_``."""
    parts = []
    if not path or isinstance(path[0], pytree.SequenceKey):
        parts.append("output")
    for entry in path:
        if isinstance(entry, pytree.GetAttrKey):
            parts.append(entry.name)
        elif isinstance(entry, pytree.MappingKey):
            parts.append(str(entry.key))
        else:
            parts.append(str(entry.idx))
    return "_".join(parts)


# ---------------------------------------------------------------------- what ONNX cannot hold


def _reason_against(module: nn.Module, base_name: str, scheme: QuantizationScheme) -> str | None:
    """Why an ONNX file cannot hold one quantized tensor of a module; None if it can; see :func:`.refuse_tensors`."""
    args = dict(scheme_args(scheme))[base_name]
    if args.type != "int":
        return f"{args.num_bits}-bit floating point"
    if base_name == "weight":
        return reason_against_weight(module, args)
    if args.dynamic is not False:
        return _reason_against_dynamic(module, args, scheme.weights)
    if args.strategy != QuantizationStrategy.TENSOR or args.num_bits != 8:
        return f"{args.num_bits}-bit activations per {QuantizationStrategy(args.strategy).value}"
    return None


def _reason_against_dynamic(module: nn.Module, args: QuantizationArgs, weight: QuantizationArgs | None) -> str | None:
    """Why an ONNX file cannot hold an activation whose range is found at run time; None if it can.

    ONNX finds ranges by one operation, ``DynamicQuantizeLinear``: one range for the whole tensor, in 8-bit integers
    with a zero point. Its integers are multiplied by one operation, ``MatMulInteger`` (:mod:`.graph`): it takes
    matrices of 8-bit integers, and its result can be scaled for each column, but not for groups inside a column.
    :func:`_reason_against` calls this for inputs and outputs.

    Args:
        module: the module that the activation enters or leaves.
        args: how the activation is quantized.
        weight: how the module's weight is quantized; None: it is not.
    """
    if args.strategy != QuantizationStrategy.TENSOR:
        return f"ranges per {QuantizationStrategy(args.strategy).value} that are found at run time"
    if args.symmetric:
        return "symmetric ranges that are found at run time"
    if args.num_bits != 8:
        return f"{args.num_bits}-bit activations whose ranges are found at run time"
    is_product = len(whole_shape(module) or ()) == 2
    if is_product and weight is not None and weight.num_bits == 8 and weight.strategy != QuantizationStrategy.GROUP:
        return None
    return "ranges that are found at run time, but for matrix products with 8-bit weights"


# ---------------------------------------------------------------------- tracing


class _QdqWriter:
    """Adds QuantizeLinear and DequantizeLinear to the graph for the tensors of one module, while the model is traced.

    The nodes read ``buffers``, which :func:`.written_by` registers on the module for the length of the trace; the
    initializers of the graph take the names of these buffers. Unsigned activations have codes and zero point both 128
    higher than the calibrated ones: the numbers are the same, and engines on x86 multiply unsigned by signed integers.

    Args:
        module: a calibrated module.
        signed: whether symmetric activations are stored as signed integers.
    """

    def __init__(self, module: nn.Module, signed: bool) -> None:
        self.module = module
        #: by base name (weight, input, output), the attributes of the DequantizeLinear node
        self.attributes: dict[str, dict[str, Any]] = {}
        #: integers, scales and zero points, by the names of their buffers
        self.buffers: dict[str, torch.Tensor] = {}
        for base, args in scheme_args(get_scheme(module)):
            if args.dynamic is True:
                continue
            stored = stored_range(module, base)
            assert stored is not None
            zero_point = stored.zero_point
            if base == "weight":
                self.attributes[base] = self._weight_attributes(stored.args)
                self.buffers["weight_codes"] = stored_codes(module)
            else:
                self.attributes[base] = {}
                if not (stored.args.symmetric and signed):
                    zero_point = (zero_point.short() + 128).to(torch.uint8)
            shape = _onnx_shape(stored)
            self.buffers[f"{base}_step"] = stored.scale.float().reshape(shape)
            self.buffers[f"{base}_zero"] = zero_point.reshape(shape)

    def _weight_attributes(self, args: QuantizationArgs) -> dict[str, Any]:
        """The attributes of the weight's DequantizeLinear: the axis of the scales, and how many values share one.

        The constructor calls it. ONNX does not read the axis of a weight with one scale.
        """
        if args.strategy == QuantizationStrategy.GROUP:
            assert args.group_size is not None  # QuantizationArgs requires it
            return {"axis": 1, "block_size": args.group_size}
        return {"axis": kind_of(self.module).rows}

    def __call__(self, value: torch.Tensor, base: str) -> torch.Tensor:
        """Add the nodes for one tensor of the module to the graph, and return their output.

        The quantized forward calls it instead of quantizing and dequantizing. For a weight the stored integers are
        read, and ``value`` gives only shape and dtype.
        """
        add_node = partial(torch.onnx.ops.symbolic, shape=value.shape, version=_OPSET)
        if base not in self.attributes:
            codes, scale, zero_point = torch.onnx.ops.symbolic_multi_out(
                "DynamicQuantizeLinear",
                (value,),
                dtypes=(torch.uint8, torch.float32, torch.uint8),
                shapes=(value.shape, (), ()),
                version=_OPSET,
            )
            return add_node("DequantizeLinear", (codes, scale, zero_point), {}, dtype=value.dtype)
        scale = getattr(self.module, f"{base}_step")
        zero_point = getattr(self.module, f"{base}_zero")
        if base == "weight":
            codes = self.module.get_buffer("weight_codes")
        else:
            codes = add_node("QuantizeLinear", (value, scale, zero_point), {}, dtype=zero_point.dtype)
        return add_node("DequantizeLinear", (codes, scale, zero_point), self.attributes[base], dtype=value.dtype)


def _onnx_shape(stored: StoredRange) -> tuple[int, ...]:
    """The shape in which ONNX takes scales: a matrix per group, a vector per channel, a scalar per tensor."""
    if stored.args.strategy == QuantizationStrategy.GROUP:
        return tuple(stored.scale.shape)
    if stored.args.strategy == QuantizationStrategy.CHANNEL:
        return (-1,)
    return ()


def trace_onnx(model: nn.Module, arguments: Example) -> Any:
    """The model as a ``torch.onnx.ONNXProgram``.

    :func:`export_onnx` calls it in a block of :func:`.written_by`, :func:`.measure_onnx` outside of one, for a file in
    float.

    Args:
        model: the model, in evaluation mode.
        arguments: the arguments to trace it with.

    Raises:
        CalibrationError: torch's exporter failed, with an error of any class; or it loses that a batch norm takes the
            statistics of its batch.
    """
    positional = arguments.positional
    if not arguments.by_name and positional and isinstance(positional[-1], dict):
        # torch's exporter takes a last positional argument that is a dict for the keyword arguments.
        positional = (*positional, {})
    try:
        program: Any = torch.onnx.export(
            model,
            positional,
            kwargs=arguments.by_name,
            dynamic_shapes=arguments.dynamic_shapes,
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    except Exception as error:
        remedy = "see torch.onnx.export(model, example, dynamo=True); the model has to be traceable."
        raise exporter_error("torch's ONNX exporter", model, error, remedy) from error
    _refuse_statistics_of_batches(model, program.exported_program)
    return program


def _refuse_statistics_of_batches(model: nn.Module, program: torch.export.ExportedProgram) -> None:
    """Refuse a batch norm that takes the statistics of its batch although it has running ones.

    torch's exporter (onnxscript 0.7) writes it as a batch norm with the running statistics. Without running statistics
    it writes the mean and variance of the batch as operations. :func:`trace_onnx` calls this once a model is traced.

    Args:
        model: that was traced.
        program: its operations, as torch's exporter has translated them.
    """
    names = []
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        arguments = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False))
        arguments |= node.kwargs
        if arguments.get("training") is True and arguments.get("running_mean") is not None:
            surroundings = list(node.meta.get("nn_module_stack", {}).values())
            name = surroundings[-1][0] if surroundings else ""
            names.append(name or type(model).__name__)
    refuse(
        names,
        "torch's ONNX exporter cannot write a batch norm that takes the statistics of its batch and has running ones",
        expected="batch norms in evaluation mode",
        remedy="call F.batch_norm with training=False, or with None for running_mean and running_var.",
    )


# ---------------------------------------------------------------------- writing


def _save(program: Any, file: Path, overwrite: bool) -> None:
    """Write a traced program; called by :func:`export_onnx`, last. Weights that are too large lie beside the file.

    They have a name of their own for each content, ``model.onnx.<checksum>.data``. So they can be there before the
    model takes its name, and a model that is replaced keeps its weights until the new one is complete.
    """
    import onnx_ir as ir

    model = program.model
    stored = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    earlier_weights = _weight_files_of(file)
    weights = None
    if sum(tensor.nbytes for tensor in stored) > _LARGEST_FILE:
        checksum = 0
        for tensor in stored:
            checksum = zlib.crc32(tensor.tobytes(), checksum)
        weights = file.with_name(f"{file.name}.{checksum:08x}.data")
    try:
        with whole_file(file, overwrite) as partial_file:
            if weights is None:
                ir.save(model, partial_file)
            else:
                # whole_file's temporary path is in a hidden folder of its own; onnx_ir writes the weights beside it.
                ir.save(model, partial_file, external_data=weights.name)
                os.replace(partial_file.with_name(weights.name), weights)
    except BaseException:
        if weights is not None and weights not in earlier_weights:
            weights.unlink(missing_ok=True)
        raise
    for old_file in earlier_weights:
        if old_file != weights:
            old_file.unlink(missing_ok=True)


def bytes_of(file: Path) -> int:
    """Return the bytes of an exported file and of the weight files beside it, which only an ONNX file has.

    The command line calls it at the end of a run, for the printed line and the report, for files of every format.
    """
    return sum(path.stat().st_size for path in (file, *_weight_files_of(file)))


def _weight_files_of(file: Path) -> list[Path]:
    """The weight files beside ``file``, by their names: those that exports of a large model have written there."""
    pattern = re.compile(re.escape(file.name) + r"\.[0-9a-f]{8}\.data")
    if not file.parent.is_dir():
        return []
    return [path for path in file.parent.iterdir() if pattern.fullmatch(path.name)]
