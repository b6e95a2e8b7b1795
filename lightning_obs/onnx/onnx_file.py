"""Write a calibrated model as one ONNX file in QDQ form, for onnxruntime and other engines of ONNX.

torch's exporter traces the model while its modules run the quantized forward, in which a weight is ``DequantizeLinear``
of stored integers, and an input ``DequantizeLinear(QuantizeLinear(input))``. Engines look for these pairs around a
convolution or matrix product and compute with integers where they can.

Batch norms that read a convolution are folded away afterwards, for engines find no integer convolution where a batch
norm stands between it and the next ``QuantizeLinear``. The integers stay what they are: the factor of each channel goes
to the weight's scale, so nothing is rounded again. (A negative factor makes a negative scale.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, quantize
from torch import nn

from lightning_obs.errors import CalibrationError, refuse, require_bool
from lightning_obs.files.write import whole_file
from lightning_obs.forward.extra_runs import left_as_it_was
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.model.checksums import require_ready
from lightning_obs.model.kinds import from_matrix, kind_of
from lightning_obs.model.module_qparams import (
    ROUNDED,
    args_of,
    calibrated_modules,
    get_scheme,
    quantized_states,
    read_qparams,
    scheme_args,
)
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.weight import in_shards, whole_matrix, whole_shape
from lightning_obs.packages import import_package

#: the first with integers of 4 bits and scales of groups
_OPSET = 21
_SUPPORTED = "integers of at most 8 bits for weights, of 8 bits with one calibrated range per tensor for activations"
_REMEDY = "use INT8_STATIC or a weight-only integer scheme (W8A16, W4A16), or list them in `ignore`."


def export_onnx(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: torch.Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a calibrated model, or one that :func:`~lightning_obs.load_checkpoint` loaded, as a QDQ ONNX file.

    Weights are stored as the checkpoint's integers (int8; int4 at 4 bits and less), so the file has about a quarter of
    the float one's bytes at 8 bits. What it computes is what :func:`~lightning_obs.quantized` does, up to the order of
    floating point operations. Needs the packages of the extra ``onnx``; opset 21.

    Args:
        model: in float32. It is traced in evaluation mode, and not changed.
        file: written whole or not at all.
        example: inputs to trace the model with: one tensor, positional arguments, or keyword arguments.
        dynamic_shapes: which dimensions may vary, as :func:`torch.export.export` takes it; none by default. A batch of
            any size: ``({0: torch.export.Dim.DYNAMIC},)``.
        overwrite: replace ``file``.

    Returns:
        The file.

    Raises:
        CalibrationError: the model was not calibrated, or has changed since; a scheme that QDQ cannot
            express (floating point formats, dynamic ranges, groups of a convolution's weight, attention states);
            torch's exporter cannot trace the model; the file is there, or cannot be written.

    Reference:
        ONNX operators QuantizeLinear and DequantizeLinear, version 21.
    """
    require_bool(overwrite=overwrite)
    file = Path(file)
    for package in ("onnx", "onnxscript"):
        import_package(package, "export_onnx")
    _check_model(model)
    if file.exists() and not (overwrite and file.is_file()):
        raise CalibrationError(f"{file} is already there", remedy="choose another name, or set overwrite=True.")
    with left_as_it_was(model):
        program = _traced(model, example, dynamic_shapes)
    from lightning_obs.onnx.graph import finish

    bits = {name: args.num_bits for name, module in calibrated_modules(model) if (args := args_of(module, "weight"))}
    finish(program.model, {f"{name}.weight_codes".lstrip(".") for name, number in bits.items() if number <= 4})
    _save(program, file, overwrite)
    return file


def _check_model(model: nn.Module) -> None:
    require_ready(model, merged_for="an ONNX file")
    calibrated = dict(calibrated_modules(model))
    refuse(
        [name for name, module in model.named_modules() if in_shards(module) or is_offloaded(module)],
        "weights are sharded over ranks, or offloaded",
        remedy="export_checkpoint, then load_checkpoint in one process and export_onnx there.",
    )
    refuse(
        [name for name, module in calibrated.items() if quantized_states(module)],
        "ONNX has no quantized attention states",
        remedy="leave the kv cache in full precision.",
    )
    refuse(
        sorted({f"{n} ({p.dtype})" for n, p in model.named_parameters() if p.dtype != torch.float32}),
        "the model is not in float32, which onnxruntime's integer kernels expect",
        remedy="calibrate it in float32.",
    )
    reasons: dict[str, list[str]] = {}
    for name, module in calibrated.items():
        for base, args in scheme_args(get_scheme(module)):
            if (reason := _unsupported(module, base, args)) is not None:
                reasons.setdefault(reason, []).append(f"{name} ({base})")
    for reason, names in reasons.items():
        refuse(names, f"QDQ ONNX cannot hold {reason}", expected=_SUPPORTED, remedy=_REMEDY)


def _unsupported(module: nn.Module, base: str, args: QuantizationArgs) -> str | None:
    """Why an ONNX file cannot hold it, or None."""
    if args.type != "int":
        return f"{args.num_bits}-bit floating point"
    if base != "weight":
        if args.dynamic is not False:
            return "activations whose range is found at run time"
        whole = args.strategy == QuantizationStrategy.TENSOR and args.num_bits == 8
        return None if whole else f"{args.num_bits}-bit activations per {args.strategy.value}"
    if args.num_bits > 8:
        return f"{args.num_bits}-bit weights"
    if args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL):
        return None
    dimensions = len(whole_shape(module) or ())
    if args.strategy == QuantizationStrategy.GROUP and dimensions == 2 and not kind_of(module).rows:
        return "weights in activation order" if hasattr(module, "weight_g_idx") else None
    return f"weights of {dimensions} dimensions per {args.strategy.value}"


# ---------------------------------------------------------------------- tracing


class _Linear:
    """QuantizeLinear and DequantizeLinear of one module's tensors, as torch's exporter writes them.

    The tensors that they read are buffers of the module meanwhile, from which the initializers have their names.
    Activations are written unsigned, 128 higher and with a zero point that is: the same numbers, and what
    onnxruntime's kernels for x86 take (1.30 turns signed ones around itself, and fails where a matrix product has three
    dimensions).
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes: dict[str, dict[str, Any]] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        qparams = read_qparams(module)
        for base, args in scheme_args(get_scheme(module)):
            scale = qparams[f"{base}_scale"]
            zero = qparams.get(f"{base}_zero_point", torch.zeros_like(scale)).to(torch.int8)
            grouped, self.attributes[base] = args.strategy == QuantizationStrategy.GROUP, {}
            if base == "weight":
                matrix, whole = whole_matrix(module), whole_shape(module)
                assert matrix is not None
                assert whole is not None
                codes = qparams.get(ROUNDED)
                codes = quantize(matrix, scale, zero, args, dtype=torch.int8) if codes is None else codes
                self.buffers["weight_codes"] = from_matrix(module, codes, whole).contiguous()
                self.attributes[base]["axis"] = 1 if grouped else kind_of(module).rows
                if grouped:
                    self.attributes[base]["block_size"] = int(args.group_size or 1)
            else:
                zero = (zero.short() + 128).to(torch.uint8)
            shape = scale.shape if grouped else (-1,) if args.strategy == QuantizationStrategy.CHANNEL else ()
            self.buffers |= {f"{base}_step": scale.float().reshape(shape), f"{base}_zero": zero.reshape(shape)}

    def __call__(self, value: torch.Tensor, base: str) -> torch.Tensor:
        """The nodes for one tensor; of a weight, the codes stand for ``value``."""
        step, zero = getattr(self.module, f"{base}_step"), getattr(self.module, f"{base}_zero")
        node = partial(torch.onnx.ops.symbolic, shape=value.shape, version=_OPSET)
        codes: Any = self.module.weight_codes if base == "weight" else None
        if codes is None:
            codes = node("QuantizeLinear", (value, step, zero), {}, dtype=torch.uint8)
        return node("DequantizeLinear", (codes, step, zero), self.attributes[base], dtype=value.dtype)


def _traced(model: nn.Module, example: Any, dynamic_shapes: Any) -> Any:
    keyword = dict(example) if isinstance(example, Mapping) else {}
    positional = () if keyword else (example,) if isinstance(example, torch.Tensor) else tuple(example)
    options = {"dynamo": True, "opset_version": _OPSET, "dynamic_shapes": dynamic_shapes, "verbose": False}
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        for _, module in list(calibrated_modules(model)):
            linear = _Linear(module)
            for name, value in linear.buffers.items():
                module.register_buffer(name, value, persistent=False)
                stack.callback(delattr, module, name)
            stack.callback(quantize_forward(module, writer=linear))
        try:
            return torch.onnx.export(model, positional, kwargs=keyword, **options)
        except Exception as error:  # the exporter's own, of many kinds
            raise CalibrationError(
                f"torch's ONNX exporter cannot export {type(model).__name__}",
                got=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                remedy="see torch.onnx.export(model, example, dynamo=True); the model has to be traceable.",
            ) from error


def _save(program: Any, file: Path, overwrite: bool) -> None:
    with whole_file(file, overwrite) as partial:
        program.save(partial)
        beside = [path for path in partial.parent.iterdir() if path != partial]
        if beside:  # torch's way with a model that is too large for protobuf
            raise CalibrationError(
                f"{file} would be more than one ONNX file holds",
                got=f"{sum(path.stat().st_size for path in beside):,} bytes of weights beside it",
                remedy="use fewer bits (W4A16), export parts of the model, or export_checkpoint, which has no limit.",
            )
