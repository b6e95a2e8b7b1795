"""A tensor flattened to the values of each scale, and a range turned into quantization parameters.

Every strategy is flattened to ``(num_observations, *qparam_shape, group_size)``: reducing the first and the last
dimension leaves exactly one number per scale. ``qparam_shape`` is the shape of the scale that compressed-tensors
registers for the strategy, so a range found on the flattened tensor fits without another reshape.

The arithmetic is compressed-tensors' own (`calculate_qparams`, `generate_gparam`), so that a scale found here is
bit for bit the scale that its kernels and the rest of its ecosystem would have computed from the same range.
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
#: the field of a scheme that has the arguments of each tensor of a module; q, k and v of attention have
#: ``input_activations``
SCHEME_FIELDS = {"weight": "weights", "input": "input_activations", "output": "output_activations"}
#: the key of ``observer_kwargs`` that says how numbers are chosen after the observer's scales
ROUNDING = "rounding"
#: rows of this many values, in float32, are read by torch's operations as fast as by a compiled loop
_FAST_ROW = 32


def flatten_for_calibration(
    value: torch.Tensor, base_name: str, args: QuantizationArgs, g_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """Reshape an observed tensor to ``(num_observations, *qparam_shape, group_size)``.

    Called by an observer for each tensor that it gets, before its statistics are measured.

    ==============  ==============================  =====================================  =================
    base name       strategy                        result                                 qparam_shape
    ==============  ==============================  =====================================  =================
    weight (R, C)   tensor                          (1, 1, R*C)                            (1,)
    weight          channel                         (1, R, 1, C)                           (R, 1)
    weight          group, tensor_group             (1, R, C/g, g)                         (R, C/g)
    weight          block (h, w)                    (1, ceil(R/h), ceil(C/w), h*w)         (R/h, C/w) up
    input, output   tensor                          (N, 1, C)                              (1,)
    input, output   token                           (N, 1, C), the range of each token     (1,)
    input, output   group, tensor_group             (N, C/g, g)                            (C/g,)
    q, k, v         tensor                          (B*S, 1, H*D)                          (1,)
    q, k, v         attn_head                       (B*S, H, 1, 1, D)                      (H, 1, 1)
    ==============  ==============================  =====================================  =================

    Args:
        value: a weight ``(R, C)``, an activation ``(..., C)`` (a vector is one observation), an attention state.
        base_name: one of weight, input, output, q, k, v.
        args: gives strategy, group size and block structure.
        g_idx: group of each column ``(C,)`` of a weight in activation order: columns are sorted by group first.

    Returns:
        A view where possible. Blocks that do not divide the weight are padded with zeros, as every range has zero.

    Raises:
        CalibrationError: an unknown base name, a strategy that it cannot have, columns that groups do not divide.
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

    Called by :func:`observed_range`, and by the searches for the ranges of their rows.
    """
    if view.shape[:2].numel() == 1:
        low, high = torch.aminmax(view)  # at the speed of memory, by threads that torch keeps running
        low = low.reshape(1, 1)
        high = high.reshape(1, 1)
        return low, high
    if not _is_fast_in_torch(view) and launch.can_read(view):
        return launch.extremes(view)
    # With dimensions, aminmax is ten times slower than these two.
    low = view.amin((2, 3))
    high = view.amax((2, 3))
    return low, high


def _is_fast_in_torch(view: torch.Tensor) -> bool:
    """Whether torch finds the extremes of ``(A, B, N, G)`` in about the time of a compiled loop.

    Then numba, whose import takes a second and 140 MB, is not needed for them: most weights in training are such.
    """
    *_, observations, values = view.shape
    return view.dtype == torch.float32 and observations == 1 and values >= _FAST_ROW and view.stride(-1) == 1


def observed_range(observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value per scale, ``(*Q,)`` each, of ``(N, *Q, G)``.

    Called by the min-max observers and by range searches, for each observed tensor.
    """
    shape = observed.shape[1:-1]
    rows = observed.flatten(1, -2).transpose(0, 1)
    low, high = extremes(rows.unsqueeze(0))
    low = low.reshape(shape)
    high = high.reshape(shape)
    return low, high


def rows_per_scale(args: QuantizationArgs) -> int | None:
    """How many rows of a weight share a scale; None: all of them. Export cuts large weights between such rows.

    >>> rows_per_scale(QuantizationArgs(strategy="block", block_structure=[4, 8]))
    4
    """
    if args.strategy == QuantizationStrategy.TENSOR:
        return None
    if args.strategy == QuantizationStrategy.BLOCK and args.block_structure is not None:
        return int(args.block_structure[0])
    return 1


def covered_by_scale(args: QuantizationArgs, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a weight ``(R, C)`` that a scale covers; asked by observers that weigh columns by inputs."""
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
    """``(R, C)`` to ``(R/h, C/w, h, w)``, padded with zeros where blocks do not divide it; a view where they do."""
    assert args.block_structure is not None  # QuantizationArgs validated it
    height, width = args.block_structure
    weight = maybe_pad_tensor_for_block_quant(weight, (height, width))
    columns_split = weight.unflatten(1, (-1, width))
    rows_split = columns_split.unflatten(0, (-1, height))
    return rows_split.transpose(1, 2)


def _check_dimensions(value: torch.Tensor, rule: str, dimensions: str) -> None:
    """Raise an error that states the rule unless ``value`` has as many dimensions as ``dimensions`` names."""
    if value.ndim != dimensions.count(",") + 1:
        raise CalibrationError(rule, got=f"shape {tuple(value.shape)}", expected=dimensions)


def _split_groups(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """``(..., C)`` to ``(..., C/g, g)``, a view."""
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
    """How many elements an operation takes at once: ``on_cpu``, which fits its cache; on an accelerator 16 million.

    Asked by everything that visits a tensor in tiles. On an accelerator each launch costs time, so tiles are large.
    """
    if device.type == "cpu":
        return on_cpu
    return 1 << 24


def no_upload(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which ``torch.tensor`` of a number does not make an accelerator's host wait.

    compressed-tensors makes such tensors; its functions for scales and zero points are called in this block.
    """
    if device.type == "cpu" or torch.compiler.is_compiling():
        return nullcontext()
    return _Filled()


class _Filled(TorchFunctionMode):
    """``torch.tensor`` of a number fills a tensor on its device: an upload would wait for all work before it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if function is torch.tensor and isinstance(args[0], (int, float)):
            return torch.full((), *args, **keywords)
        return function(*args, **keywords)


def keep_range_readable(args: QuantizationArgs, device: torch.device) -> None:
    """Let compressed-tensors make the ends of a format's range outside of inference mode, in which a validation runs.

    It keeps these two tensors for the process. Made in inference mode, no forward of its own that computes gradients
    could read them. Called before each call of compressed-tensors that reads them.
    """
    if torch.compiler.is_compiling():  # asked first: the compiler knows no inference mode
        return
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            calculate_range(args, device)


@contextmanager
def exact_products() -> Iterator[None]:
    """A block in which products of float32 matrices are float32, for any ``torch.set_float32_matmul_precision``.

    Hessians are summed and searched, and weights rounded, in it. TF32 has ten bits, in which sums of ``x x^T`` may
    become singular.
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
    """The settings of torch for products of float32 matrices: the object, the attribute, and its exact value."""
    settings: list[tuple[Any, str, Any]] = []
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        matmul = getattr(backend, "matmul", None)
        if hasattr(matmul, "fp32_precision"):
            settings.append((matmul, "fp32_precision", "ieee"))
    if not settings:  # before torch 2.9
        settings.append((torch.backends.cuda.matmul, "allow_tf32", False))
    return settings


class QParamsDict(TypedDict, total=False):
    """Quantization parameters of one observed tensor.

    ``scale`` and ``zero_point`` have the shape that the strategy gives (see :func:`flatten_for_calibration`);
    ``global_scale`` is ``(1,)`` in float32 for tensor_group and None otherwise.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


def compute_global_scale(
    ranges: Iterable[tuple[torch.Tensor, torch.Tensor]], args: QuantizationArgs
) -> torch.Tensor | None:
    """Global scale of a fused set: from the largest magnitude among all members' ranges.

    Called for an observer's own set (``observers/observer.py``), and by the Hessian observers for the widest range.

    Args:
        ranges: (min, max) of every member of the group, any shapes.
        args: None is returned unless its strategy is tensor_group.
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
    """The largest power of two that is not larger.

    The Hessian observers, and the sets that they are members of, replace their global scale by it: group scales are
    then rounded alike for any global scale.
    """
    return torch.exp2(torch.log2(global_scale).floor())


def compute_qparams(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    signed: bool = False,
) -> QParamsDict:
    """Scale and zero point of a range.

    Called by every observer's ``get_qparams``, once its range is decided.

    Args:
        min_vals: smallest values ``(*qparam_shape,)``; zero is included if it was outside.
        max_vals: largest values ``(*qparam_shape,)``.
        args: bits, type, symmetry, scale dtype.
        global_scale: ``(1,)``, only for tensor_group.
        signed: see :func:`signed_scale`.

    Returns:
        ``scale`` in the dtype of the range (an all-zero range gives that dtype's eps, never 0), ``zero_point`` in
        ``args.zp_dtype``, ``global_scale`` as given.
    """
    with no_upload(min_vals.device):
        keep_range_readable(args, min_vals.device)
        scale, zero_point = calculate_qparams(min_vals, max_vals, args, global_scale=global_scale)
    if signed:
        scale = signed_scale(min_vals, max_vals, args)
    return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}


def signed_scale(low: torch.Tensor, high: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The scale of a symmetric integer format whose sign gives the lowest code to the end that is farther from zero.

    The lowest code ``-2 ** (bits - 1)`` has no counterpart, so a positive scale leaves the largest positive value half
    a step beyond the last code. A negative scale turns the codes around. Where both ends have one magnitude, the scale
    is positive; an all-zero range gives the eps of the scale's dtype.

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
    """The tensors that a scheme quantizes: ``(base name, args)`` of weight, input, output."""
    for base_name, field in SCHEME_FIELDS.items():
        args = getattr(scheme, field)
        if args is not None:
            yield base_name, args


def can_be_signed(base_name: str, args: QuantizationArgs) -> bool:
    """Whether scales of a tensor may be negative: for weights in symmetric integer formats.

    Not where scales are rounded to a dtype of one byte, which is meant for magnitudes.

    Asked by an observer's constructor, and where the scales of a checkpoint are checked.
    """
    if base_name != "weight" or args.type != QuantizationType.INT:
        return False
    has_wide_scales = args.scale_dtype is None or args.scale_dtype.itemsize > 1
    return bool(args.symmetric) and has_wide_scales


def rounding_of(args: QuantizationArgs) -> RoundingOptions | None:
    """How a weight is rounded once it has scales; None: to nearest.

    Called by every observer's constructor, so that a wrong option is refused before data.

    Raises:
        CalibrationError: another name than ``gptq``, an unknown option, or a value of the wrong kind.

    >>> rounding_of(QuantizationArgs(num_bits=4, observer_kwargs={"rounding": "gptq"})).damping
    0.1
    """
    option = args.observer_kwargs.get(ROUNDING)
    return None if option is None else RoundingOptions.of(option)
