"""Flatten a tensor to the values of each scale, and turn a range into quantization parameters.

Observers call :func:`flatten_for_calibration` for what they observe and :func:`compute_qparams` for their range; the
other functions answer questions about ``QuantizationArgs`` or serve everything that computes on tiles of a tensor.

For every strategy a tensor is flattened to ``(num_observations, *qparam_shape, group_size)``: reducing the first and
the last dimension leaves exactly one number per scale. ``qparam_shape`` is the shape of the scale that
compressed-tensors registers for the strategy, so the range of a flattened tensor needs no other reshape.

The arithmetic is that of compressed-tensors (`calculate_qparams`, `generate_gparam`), so a scale from here is bit for
bit the scale that other users of compressed-tensors compute from the same range.

A *base name* says which tensor of a module is quantized: weight, input, output, or the attention states q, k, v.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypedDict

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    calculate_range,
    generate_gparam,
    maybe_pad_tensor_for_block_quant,
)
from torch.overrides import TorchFunctionMode

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.kernels import launch
from lightning_obs.numerics.rounding_options import RoundingOptions

ATTENTION = ("q", "k", "v")
_OF_ACTIVATIONS = ("tensor", "token", "group", "tensor_group")
#: base name -> strategies that it can have
_STRATEGIES = {
    "weight": ("tensor", "channel", "group", "block", "tensor_group"),
    "input": _OF_ACTIVATIONS,
    "output": _OF_ACTIVATIONS,
    **dict.fromkeys(ATTENTION, ("tensor", "attn_head")),
}
BASE_NAMES = tuple(_STRATEGIES)
#: base name -> the field of a QuantizationScheme with its QuantizationArgs; q, k and v use ``input_activations``
SCHEME_FIELDS = {"weight": "weights", "input": "input_activations", "output": "output_activations"}
#: the key of ``observer_kwargs`` that says how a weight is rounded once the observer has chosen its scales
ROUNDING = "rounding"
#: float32 rows of at least this many values are read by torch's operations as fast as by a compiled loop
_FAST_ROW = 32


def flatten_for_calibration(
    value: torch.Tensor, base_name: str, args: QuantizationArgs, g_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """Reshape an observed tensor to ``(num_observations, *qparam_shape, group_size)``.

    Called by an observer for each tensor that it gets, before its statistics are measured, and by plans and reports for
    the shape of a module's scales.

    ==============  ====================  ===============================  ========================
    base name       strategy              result                           qparam_shape
    ==============  ====================  ===============================  ========================
    weight (R, C)   tensor                (1, 1, R*C)                      (1,)
    weight          channel               (1, R, 1, C)                     (R, 1)
    weight          group, tensor_group   (1, R, C/g, g)                   (R, C/g)
    weight          block (h, w)          (1, ceil(R/h), ceil(C/w), h*w)   (ceil(R/h), ceil(C/w))
    input, output   tensor, token         (N, 1, C)                        (1,)
    input, output   group, tensor_group   (N, C/g, g)                      (C/g,)
    q, k, v         tensor                (B*S, 1, H*D)                    (1,)
    q, k, v         attn_head             (B*S, H, 1, 1, D)                (H, 1, 1)
    ==============  ====================  ===============================  ========================

    N is the number of tokens. An observer of strategy token gets one range over all N tokens, as with tensor; the range
    of each token is computed as the model runs.

    Args:
        value: a weight ``(R, C)``, an activation ``(..., C)`` (a vector is one observation), or an attention state
            ``(B, H, S, D)``.
        base_name: one of weight, input, output, q, k, v.
        args: strategy, group size and block structure.
        g_idx: the group of each column of a weight in activation order, ``(C,)``; columns are sorted by group first.

    Returns:
        A view where possible. Where blocks do not divide the weight, it is padded with zeros, which widen no range,
        because every range contains zero.

    Raises:
        CalibrationError: an unknown base name, a strategy that this base name cannot have, a weight that is no matrix
            (unless the strategy is tensor), an attention state without four dimensions, or a number of columns that is
            no multiple of the group size.
    """
    if base_name not in BASE_NAMES:
        raise CalibrationError(f"unknown base name {base_name!r}", expected=f"one of {', '.join(BASE_NAMES)}")
    strategy = QuantizationStrategy(args.strategy)  # a string if it was given, an enum member if it was inferred
    strategies = _STRATEGIES[base_name]
    if strategy.value not in strategies:
        raise CalibrationError(
            f"strategy {strategy.value} cannot be applied to {base_name}", expected=f"one of {', '.join(strategies)}"
        )
    if base_name in ATTENTION:
        return _flatten_attention_state(value, base_name, strategy)
    if base_name != "weight":
        return _flatten_activation(value, args)
    if strategy == QuantizationStrategy.TENSOR:
        return value.reshape(1, 1, -1)
    _check_dimensions(value, f"a weight of strategy {strategy.value} is observed as a matrix", "(rows, columns)")
    if strategy == QuantizationStrategy.CHANNEL:
        return value.unsqueeze(-2).unsqueeze(0)
    if strategy == QuantizationStrategy.BLOCK:
        return split_blocks(value, args).flatten(-2).unsqueeze(0)
    if g_idx is not None:
        columns = torch.argsort(g_idx, stable=True)
        value = value.index_select(-1, columns)
    return _split_groups(value, args).unsqueeze(0)


def _flatten_attention_state(value: torch.Tensor, base_name: str, strategy: QuantizationStrategy) -> torch.Tensor:
    """The observations of a state ``(B, H, S, D)``: one for each token."""
    dimensions = "(batch, heads, sequence, head_dim)"
    _check_dimensions(value, f"an attention state {base_name} has four dimensions", dimensions)
    by_token = value.transpose(1, 2)
    tokens = by_token.flatten(0, 1)
    if strategy == QuantizationStrategy.TENSOR:
        return tokens.flatten(-2).unsqueeze(-2)
    return tokens.unsqueeze(-2).unsqueeze(-2)


def _flatten_activation(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The observations of an activation ``(..., C)``: one for each token."""
    if args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.TOKEN):
        columns = value.shape[-1] if value.ndim else 1
        if columns:
            return value.reshape(-1, 1, columns)
        return value.reshape(0, 1, 0)
    groups = _split_groups(value, args)
    return groups.reshape(-1, *groups.shape[-2:])


def extremes(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each row of ``(A, B, N, G)``, ``(A, B)`` each.

    Called by :func:`observed_range`, and by range searches (``search/rows.py``) for the ranges that they shrink.
    """
    if view.shape[:2].numel() == 1:
        low, high = torch.aminmax(view)  # limited by memory bandwidth, in torch's own threads
        low = low.reshape(1, 1)
        high = high.reshape(1, 1)
        return low, high
    if not _is_fast_in_torch(view) and launch.can_read(view):
        return launch.extremes(view)
    # aminmax over given dimensions is ten times slower than these two calls.
    low = view.amin((2, 3))
    high = view.amax((2, 3))
    return low, high


def _is_fast_in_torch(view: torch.Tensor) -> bool:
    """Whether torch finds the extremes of ``(A, B, N, G)`` in about the time of a compiled loop.

    True for most weights in training, for which numba then need not be imported: that takes a second and 140 MB.
    """
    *_, observations, values = view.shape
    return view.dtype == torch.float32 and observations == 1 and values >= _FAST_ROW and view.stride(-1) == 1


def observed_range(observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value per scale, ``(*Q,)`` each, of ``(N, *Q, G)``.

    Called by the min-max observers for each observed tensor, and by ``histogram.py`` for the exact ends of a histogram.
    """
    shape = observed.shape[1:-1]
    rows = observed.flatten(1, -2).transpose(0, 1)
    low, high = extremes(rows.unsqueeze(0))
    low = low.reshape(shape)
    high = high.reshape(shape)
    return low, high


def rows_per_scale(args: QuantizationArgs) -> int | None:
    """How many rows of a weight share a scale; None: all rows share one.

    Export (``checkpoint/entries.py``) and packed weights call it before they process a large weight in parts, which
    must not divide such rows.

    >>> rows_per_scale(QuantizationArgs(strategy="block", block_structure=[4, 8]))
    4
    """
    if args.strategy == QuantizationStrategy.TENSOR:
        return None
    if args.strategy == QuantizationStrategy.BLOCK and args.block_structure is not None:
        return int(args.block_structure[0])
    return 1


def covered_by_scale(args: QuantizationArgs, shape: Sequence[int]) -> tuple[int, int]:
    """The number of rows and of columns of a weight that one scale covers.

    Called by observers before they search a weight: by those that weigh columns by inputs, and to find out whether
    blocks divide the weight (``observers/search_options.py``).

    Args:
        args: strategy, group size and block structure.
        shape: the weight's shape, ``(R, C)``.
    """
    columns = shape[1]
    rows = rows_per_scale(args) or shape[0]
    if args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL):
        return rows, columns
    if args.block_structure:
        _, width = args.block_structure
        return rows, int(width)
    group_size = args.group_size or 1
    return rows, int(group_size)


def split_blocks(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Cut a weight ``(R, C)`` into blocks ``(R/h, C/w, h, w)``: a view, or padded with zeros if they do not divide it.

    Called wherever values are laid out by scale: by observers, range searches and fake quantization.
    """
    assert args.block_structure is not None  # QuantizationArgs validated it
    height, width = args.block_structure
    weight = maybe_pad_tensor_for_block_quant(weight, (height, width))
    columns_split = weight.unflatten(1, (-1, width))
    rows_split = columns_split.unflatten(0, (-1, height))
    return rows_split.transpose(1, 2)


def _check_dimensions(value: torch.Tensor, rule: str, dimensions: str) -> None:
    """Raise a CalibrationError that says ``rule`` unless ``value`` has as many dimensions as ``dimensions`` names."""
    if value.ndim != dimensions.count(",") + 1:
        raise CalibrationError(rule, got=f"shape {tuple(value.shape)}", expected=dimensions)


def _split_groups(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """A view of ``(..., C)`` as groups ``(..., C/g, g)``; a CalibrationError if groups do not divide the columns."""
    assert args.group_size is not None  # QuantizationArgs validated it
    columns = value.shape[-1]
    if columns % args.group_size:
        raise CalibrationError(
            f"group size {args.group_size} does not divide the columns",
            got=f"{columns} columns",
            expected=f"a multiple of {args.group_size}",
            remedy="choose a group size that divides them, or list the module in `ignore`.",
        )
    return value.unflatten(-1, (-1, args.group_size))


def tile_size(device: torch.device, on_cpu: int) -> int:
    """How many elements an operation processes at once: ``on_cpu`` on a CPU, 16 million on an accelerator.

    Called by everything that visits a tensor in tiles. ``on_cpu`` is chosen by the caller to fit the cache. On an
    accelerator each launch costs time, so tiles are large.
    """
    if device.type == "cpu":
        return on_cpu
    return 1 << 24


def no_upload(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which ``torch.tensor(number, device=device)`` does not make the host wait for an accelerator.

    compressed-tensors' functions for scales and zero points make such tensors, so they are called in this context.
    """
    if device.type == "cpu" or torch.compiler.is_compiling():
        return nullcontext()
    return _Filled()


class _Filled(TorchFunctionMode):
    """Replace ``torch.tensor`` of a number by ``torch.full``: an upload would wait for all queued work of a device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if function is torch.tensor and isinstance(args[0], (int, float)):
            return torch.full((), *args, **keywords)
        return function(*args, **keywords)


def keep_range_readable(args: QuantizationArgs, device: torch.device) -> None:
    """Make compressed-tensors create its cached tensors for the ends of a format's range outside of inference mode.

    compressed-tensors keeps these two tensors for the process. A validation runs in inference mode; if they were
    created there, a later forward of compressed-tensors that computes gradients could not use them. Called before each
    call of compressed-tensors that reads them.
    """
    if torch.compiler.is_compiling():  # asked first: the compiler knows no inference mode
        return
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            calculate_range(args, device)


@contextmanager
def exact_products() -> Iterator[None]:
    """A context in which float32 matrices are multiplied in float32.

    It overrides ``torch.set_float32_matmul_precision``. Hessians are summed (``moments.py``), ranges searched by
    Hessians (``search/``), weights rounded (``rounding.py``) and their errors estimated (``calibration/fit_errors.py``)
    in it, because with TF32's ten bits of mantissa a sum of ``x x^T`` may become singular.
    """
    usual_values = []
    for settings, name, exact_value in _product_settings():
        usual_values.append((settings, name, getattr(settings, name)))
        setattr(settings, name, exact_value)
    try:
        yield
    finally:
        for settings, name, usual_value in usual_values:
            setattr(settings, name, usual_value)


@functools.cache
def _product_settings() -> list[tuple[Any, str, Any]]:
    """torch's settings for products of float32 matrices: the object, its attribute, its value for full precision."""
    settings: list[tuple[Any, str, Any]] = []
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        matmul = getattr(backend, "matmul", None)
        if hasattr(matmul, "fp32_precision"):
            settings.append((matmul, "fp32_precision", "ieee"))
    if not settings:  # before torch 2.9
        settings.append((torch.backends.cuda.matmul, "allow_tf32", False))
    return settings


class QParamsDict(TypedDict, total=False):
    """Quantization parameters of one observed tensor: the result of :func:`compute_qparams` and of an observer.

    ``scale`` and ``zero_point`` have the shape that the strategy gives (see :func:`flatten_for_calibration`);
    ``global_scale`` is ``(1,)`` in float32 for tensor_group and None otherwise.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


def compute_global_scale(
    ranges: Iterable[tuple[torch.Tensor, torch.Tensor]], args: QuantizationArgs
) -> torch.Tensor | None:
    """The global scale ``(1,)`` of a fused set, from the largest magnitude in the ranges of all its members.

    A fused set (q, k and v, or gate and up) shares one global scale. Called by an observer when qparams are computed,
    with the ranges of its fused set, and by the ``local_hessian`` observer before its search.

    Args:
        ranges: ``(min, max)`` of every member of the set, of any shapes.
        args: the strategy; unless it is tensor_group, the result is None.
    """
    if args.strategy != QuantizationStrategy.TENSOR_GROUP:
        return None
    magnitudes = []
    for low, high in ranges:
        magnitude = torch.maximum(-low.min(), high.max())
        magnitudes.append(magnitude)
    absmax = torch.stack(magnitudes).max()
    absmax = absmax.reshape(1)
    return generate_gparam(-absmax, absmax)


def power_of_two(global_scale: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not larger than the global scale.

    Called by ``local_hessian`` observers before their search, and by observers' ``get_global_scale`` for fused sets
    with such a member, which use the result as their global scale. A group scale times any power of two is rounded to
    float8 alike, so a search need not know which power the fused set ends with.
    """
    return torch.exp2(torch.log2(global_scale).floor())


def compute_qparams(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    signed: bool = False,
) -> QParamsDict:
    """The scale and zero point of each range.

    Called by every observer's ``get_qparams`` once its range is chosen, by ``calibration/quantized_outputs.py`` for
    outputs that only a ReLU reads, and by the entropy criterion (``histogram.py``) for candidate ranges.

    Args:
        min_vals: smallest values ``(*qparam_shape,)``; the range is widened to contain zero.
        max_vals: largest values ``(*qparam_shape,)``.
        args: bits, type, symmetry, scale dtype.
        global_scale: ``(1,)``, only for tensor_group.
        signed: whether scales may be negative; see :func:`signed_scale`.

    Returns:
        ``scale`` in the dtype of the range, with values rounded to ``args.scale_dtype`` if that is set; ``zero_point``
        in ``args.zp_dtype``; ``global_scale`` as given. A scale that would be 0, as of an all-zero range, is the eps of
        ``args.scale_dtype``, or of the range's dtype if that is not set.
    """
    with no_upload(min_vals.device):
        keep_range_readable(args, min_vals.device)
        scale, zero_point = calculate_qparams(min_vals, max_vals, args, global_scale=global_scale)
    if signed:
        scale = signed_scale(min_vals, max_vals, args)
    return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}


def signed_scale(low: torch.Tensor, high: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The scale of a symmetric integer format, with the sign that maps the end farther from zero to the lowest code.

    The lowest code ``-2 ** (bits - 1)`` has no positive counterpart, so with a positive scale the largest positive
    value lies half a step beyond the highest code. A negative scale maps positive values to negative codes. Where both
    ends have the same magnitude, the scale is positive; an all-zero range gives the eps of the scale's dtype. Called
    by :func:`compute_qparams` and by range searches for observers with signed scales.

    >>> signed_scale(torch.tensor([-1.0, -2.0]), torch.tensor([2.0, 1.0]), QuantizationArgs(num_bits=4))
    tensor([-0.2500,  0.2500])
    """
    below = -low.clamp(max=0)
    above = high.clamp(min=0)
    farther = torch.where(above > below, -above, below)
    scale = farther / 2 ** (args.num_bits - 1)
    stored_dtype = args.scale_dtype or scale.dtype
    scale = scale.to(stored_dtype).to(scale.dtype)
    eps = torch.finfo(stored_dtype).eps
    return torch.where(scale == 0, eps, scale)


def scheme_args(scheme: QuantizationScheme) -> Iterator[tuple[str, QuantizationArgs]]:
    """``(base name, args)`` for each tensor that a scheme quantizes, of weight, input and output.

    Called wherever a plan, a check or a report goes through the tensors of a scheme.
    """
    for base_name, field in SCHEME_FIELDS.items():
        args = getattr(scheme, field)
        if args is not None:
            yield base_name, args


def can_be_signed(base_name: str, args: QuantizationArgs) -> bool:
    """Whether scales of a tensor may be negative: only for weights in symmetric integer formats.

    False where scales are rounded to a dtype of one byte, because such dtypes are meant for magnitudes. Called by an
    observer's constructor, and by ``schemes/planned_modules.py`` and ``app/models/pretrained.py`` when the scales of a
    checkpoint are checked.
    """
    if base_name != "weight" or args.type != QuantizationType.INT:
        return False
    has_wide_scales = args.scale_dtype is None or args.scale_dtype.itemsize > 1
    return bool(args.symmetric) and has_wide_scales


def rounding_of(args: QuantizationArgs) -> RoundingOptions | None:
    """The options of the rounding in ``observer_kwargs``; None: a weight is rounded to nearest.

    Called by every observer's constructor, so that a wrong option is refused before any data is read, and by
    ``schemes/config.py`` to find out whether a scheme rounds weights, and on which inputs.

    Raises:
        CalibrationError: an unknown name or option, or a value that is not allowed.

    >>> rounding_of(QuantizationArgs(num_bits=4, observer_kwargs={"rounding": "gptq"})).damping
    0.1
    """
    option = args.observer_kwargs.get(ROUNDING)  # compressed-tensors accepts only a dict there
    return None if option is None else RoundingOptions.of(option)
