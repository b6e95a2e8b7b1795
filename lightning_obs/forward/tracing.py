"""Trace a calibrated model for a file: a graph whose quantized tensors a writer has put in the format's own terms.

``onnx/`` and ``program/`` write such files. What a format cannot hold is refused before anything is traced. While the
model is traced, its modules run the quantized forward, which calls a :class:`TensorWriter` in place of fake
quantization. The model stays as it is.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    is_cached_attention_module,
)
from torch import nn

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.forward.eager import unfused
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.forward.quantized_module import ROUNDED_BIAS
from lightning_obs.model.kinds import kind_of
from lightning_obs.model.module_qparams import calibrated_modules, refuse_unmerged
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.stored import bias_step, round_bias
from lightning_obs.model.weight import in_shards, whole_shape
from lightning_obs.numerics.qparams import scheme_args

# ---------------------------------------------------------------------- refusals before tracing


def require_traceable(
    model: nn.Module, schemes: Mapping[str, QuantizationScheme], *, file_kind: str, writer_name: str
) -> None:
    """Raise a CalibrationError for a model that cannot be traced into a file whole, in float32.

    ``require_onnx`` and ``require_program`` call it before calibration and before the export.

    Args:
        model: calibrated, or to be calibrated.
        schemes: schemes of the modules that are calibrated, or will be, by module name.
        file_kind: what is written, with its article: ``"an ONNX file"``.
        writer_name: name of the public function that writes the file.
    """
    refuse_unmerged(model, file_kind)
    refuse(
        [name for name, module in model.named_modules() if in_shards(module) or is_offloaded(module)],
        f"weights are sharded over ranks, or offloaded, and {file_kind} is traced from the whole model",
        remedy=f"export_checkpoint, then load_checkpoint in one process and {writer_name} there.",
    )
    refuse(
        [name for name in schemes if is_cached_attention_module(model.get_submodule(name))],
        f"{file_kind} has no quantized attention states",
        remedy="leave the kv cache in full precision.",
    )
    other_dtypes = []
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            other_dtypes.append(f"{name} ({parameter.dtype})")
    refuse(
        sorted(other_dtypes),
        "the model is not in float32, which integer kernels expect",
        remedy="load it with dtype=torch.float32, or call model.float() before it is calibrated.",
    )


def refuse_tensors(
    model: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    reason_against: Callable[[nn.Module, str, QuantizationScheme], str | None],
    *,
    file_kind: str,
    expected: str,
    remedy: str,
) -> None:
    """Raise a CalibrationError that names the quantized tensors which a format cannot hold.

    ``require_onnx`` and ``require_program`` call it before calibration and before the export.

    Args:
        model: calibrated, or to be calibrated.
        schemes: schemes of the modules that are calibrated, or will be, by module name.
        reason_against: takes a module, the base name of one of its tensors (weight, input, output) and the module's
            scheme; gives why the format cannot hold that tensor, or None.
        file_kind: what is written, without its article.
        expected: what the format holds.
        remedy: a sentence that names the schemes which the format takes.
    """
    tensors_by_reason: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        for base_name, _ in scheme_args(scheme):
            reason = reason_against(model.get_submodule(name), base_name, scheme)
            if reason is not None:
                tensors_by_reason.setdefault(reason, []).append(f"{name} ({base_name})")
    for reason, tensors in tensors_by_reason.items():
        refuse(tensors, f"{file_kind} cannot hold {reason}", expected=expected, remedy=remedy)


def reason_against_weight(module: nn.Module, args: QuantizationArgs) -> str | None:
    """Why a graph of integers cannot hold a module's integer weight; None if it can.

    The checks of ONNX files and programs call it for each quantized weight, before calibration and before the export.

    Args:
        module: has the weight.
        args: how the scheme quantizes the weight.
    """
    if args.num_bits > 8:
        return f"{args.num_bits}-bit weights"
    if args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL):
        return None
    dimensions = len(whole_shape(module) or ())
    has_outputs_first = kind_of(module).rows == 0  # transformers' Conv1D has its input channels first
    is_plain_matrix = dimensions == 2 and has_outputs_first
    if args.strategy != QuantizationStrategy.GROUP or not is_plain_matrix:
        return f"weights of {dimensions} dimensions per {args.strategy.value}"
    if hasattr(module, "weight_g_idx"):
        return "weights in activation order"
    return None


# ---------------------------------------------------------------------- tracing


class TensorWriter(Protocol):
    """Writes the quantized tensors of one module into the graph, while the model is traced.

    :func:`written_by` makes one for each calibrated module; the module's quantized forward calls it. ``onnx/`` and
    ``program/`` each have a class of this kind.
    """

    #: codes, scales and zero points by the names under which the module has them as buffers meanwhile
    buffers: dict[str, torch.Tensor]

    def __call__(self, value: torch.Tensor, base_name: str, /) -> torch.Tensor:
        """Quantize and dequantize one tensor of the module, in operations of the format.

        Args:
            value: the weight, the input or the output.
            base_name: says which of them: ``"weight"``, ``"input"`` or ``"output"``.
        """
        ...


@contextmanager
def written_by(model: nn.Module, make_writer: Callable[[nn.Module], TensorWriter]) -> Iterator[None]:
    """For a ``with`` block in which a calibrated model is traced, and writers write its quantized tensors.

    ``export_onnx`` and ``program/program_file.py`` trace the model in it. Each calibrated module has one
    :class:`TensorWriter`, and as temporary buffers that writer's tensors. A module whose bias engines add as integers
    also has the rounded bias: :func:`.bias_step` is None for all others, such as those whose output is in float.

    Args:
        model: calibrated, in evaluation mode.
        make_writer: takes a calibrated module, and makes its writer.
    """
    with ExitStack() as stack, unfused(model), torch.inference_mode(False), torch.no_grad():
        for _, module in list(calibrated_modules(model)):
            writer = make_writer(module)
            buffers = dict(writer.buffers)
            step = bias_step(module)
            if step is not None:
                buffers[ROUNDED_BIAS] = round_bias(cast(torch.Tensor, module.bias), step)
            for name, value in buffers.items():
                module.register_buffer(name, value, persistent=False)
                stack.callback(delattr, module, name)
            stack.callback(quantize_forward(module, writer=writer))
        yield


class Example(NamedTuple):
    """The arguments to trace a model with, as :func:`torch.export.export` takes them.

    ``export_onnx``, ``measure_onnx`` and ``export_program`` read their user's arguments into an object of this class
    (:meth:`of`). A callback makes one of a call that has arguments without names beside keyword arguments
    (``FirstCall.example``).

    Attributes:
        positional: the positional arguments.
        by_name: the keyword arguments.
        dynamic_shapes: the sizes that may vary, as :func:`torch.export.export` takes them; None: no size varies.
    """

    positional: tuple[Any, ...]
    by_name: dict[str, Any]
    dynamic_shapes: Any

    @classmethod
    def of(cls, model: nn.Module, example: Any, dynamic_shapes: Any) -> Example:
        """Read the arguments ``example`` and ``dynamic_shapes`` of a function that writes or measures a file.

        Positional arguments that end with a dict are passed by the names that the model's forward has for them, since
        torch's ONNX exporter takes a last positional dict for keyword arguments. Arguments without names (``*inputs``)
        stay positional.

        Args:
            model: the model to trace.
            example: a mapping of keyword arguments, one tensor as the only argument, a sequence of positional
                arguments, or an Example of a callback, with both kinds of arguments.
            dynamic_shapes: kept as it is, or by name like the arguments.
        """
        if isinstance(example, Example):
            return example._replace(dynamic_shapes=dynamic_shapes)
        if isinstance(example, Mapping):
            return cls((), dict(example), dynamic_shapes)
        if isinstance(example, torch.Tensor):
            return cls((example,), {}, dynamic_shapes)
        positional = tuple(example)
        if not positional or not isinstance(positional[-1], dict):
            return cls(positional, {}, dynamic_shapes)
        signature = inspect.signature(model.forward)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return cls(positional, {}, dynamic_shapes)
        by_name = signature.bind(*positional).arguments
        if isinstance(dynamic_shapes, (tuple, list)):
            dynamic_shapes = dict(zip(by_name, dynamic_shapes, strict=True))
        return cls((), dict(by_name), dynamic_shapes)


def exporter_error(exporter: str, model: nn.Module, error: Exception, remedy: str) -> CalibrationError:
    """Return the error to raise for an error of torch's exporters: its first cause, and the user's line that raised it.

    ``trace_onnx`` and ``program/program_file.py`` call it for any exception of the exporter.

    Args:
        exporter: its name, which begins the message.
        model: the model that could not be traced.
        error: the exporter's exception, of any class.
        remedy: how to go on.
    """
    cause = _first_cause(error)
    return CalibrationError(
        f"{exporter} cannot export {type(model).__name__}",
        where=_user_lines(cause),
        got=f"{type(cause).__name__}: {_first_paragraph(str(cause))}",
        remedy=remedy,
    )


def _first_paragraph(text: str) -> str:
    """The first paragraph of an error's text in one line, and the next if it ends with a colon; up to 500 characters.

    torch's exporter says only behind the first line which size it could not leave open, and why.
    """
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    count = 2 if paragraphs[0].endswith(":") else 1
    beginning = " ".join(paragraphs[:count])
    return beginning if len(beginning) <= 500 else f"{beginning[:500]}..."


def _first_cause(error: BaseException) -> BaseException:
    """The error from which all others were raised; the exporter's own error says only in which step it occurred."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _user_lines(error: BaseException) -> list[str]:
    """The innermost line outside torch and this package that raised the error, as ``["file:line"]``; ``[]`` if none.

    It is a line of the user's model, or of a package that the model is from (transformers, say). :func:`exporter_error`
    names it in its message.
    """
    packages = (Path(torch.__file__).parent, Path(__file__).parents[1])
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        is_file = not frame.filename.startswith("<")
        if is_file and not any(Path(frame.filename).is_relative_to(folder) for folder in packages):
            lines.append(f"{frame.filename}:{frame.lineno}")
    return lines[-1:]
