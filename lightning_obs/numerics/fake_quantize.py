"""Differentiable fake quantization: compressed-tensors' forward, and a gradient that is defined here.

The quantized forward calls it in calibration, validation and training; export takes its codes from
:func:`quantize`. A *level* is a number of the format, before the zero point is subtracted and the scale is multiplied.
A *step* is the distance between neighbouring integer levels in the units of the value: the scale, or the scale over
the global scale.

The forward has the bits of compressed-tensors' ``fake_quantize``, so training sees what the exported checkpoint gives.
float8, and any value or scale in float64, calls that function. Everything else is computed here, because it is too
slow for each weight in each training step: integers in place take a quarter of its time, and its cast to fp4 makes
eight masked passes (on an accelerator the host waits for each). That function's result has no graph, so the gradient is
defined here:

* **value**: the gradient passes unchanged where the value lies on the grid, and is zero where the value was clipped.
  The grid ends half a step beyond its last level, as values there still round to that level: compressed-tensors maps
  the absmax of a symmetric int range to ``qmax + 0.5``, and a power-of-two scale (MX) maps it up to half a step above
  the end. The rounding error of the value's or the scale's dtype is added: in bfloat16, two steps of int8.
* **scale**, if it requires a gradient: learned step size (LSQ). The derivative of the result by the scale is
  ``(quantized - value) / scale`` where the value lies on the grid, and ``quantized / scale`` where it was clipped.

The backward keeps one byte per value (inside or not); for a learned scale also the value and the result, which the
parameter and the next matmul keep alive anyway. A dynamic range clips nothing, so nothing is kept for it.

The clip test compares the value with ``(bound - zero_point) * scale``, not ``value / scale + zero_point`` with the
bound: this computes two small tensors, with a number for each scale, and saves another division of the whole value.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization import fake_quantize as exact_fake_quantize
from compressed_tensors.quantization.quant_args import round_to_quantized_type_dtype
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.formats import NumberGrid, format_of
from lightning_obs.numerics.qparams import keep_range_readable, no_upload, split_blocks

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
#: scale, zero point, args, global scale
_QParams: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, QuantizationArgs, torch.Tensor | None]


def fake_quantize(
    value: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    *,
    global_scale: torch.Tensor | None = None,
    observations: int = 1,
) -> torch.Tensor:
    """Quantize and dequantize with given parameters, so that gradients pass.

    The quantizers of ``forward/recomputed_product.py`` call it in each call of a module for its weight, inputs
    and outputs with calibrated scales, and packed weights (``model/packed_weight.py``) for the inputs and outputs of
    their modules; export (``checkpoint/entries.py``) calls it for weights on an accelerator.

    Args:
        value: a weight ``(R, C)``, an activation ``(..., C)`` or an attention state ``(B, H, S, D)``.
        scale: not zero, in the shape that compressed-tensors registers for the strategy. If it requires a gradient, it
            gets one, multiplied by ``1 / sqrt(N * qmax)`` with N values per scale; see :func:`learned_scale`.
        zero_point: integers in ``scale``'s shape, or None for zero; never learned.
        args: bits, type, strategy.
        global_scale: ``(1,)``, only for tensor_group.
        observations: how many observations ``value`` stacks (1 for a weight, tokens for an activation). N is the number
            of values per scale and observation, as in the paper.

    Returns:
        The result of compressed-tensors, in its dtype. An empty value is returned as it is. With a learned scale the
        backward needs the result, so the caller must not change it in place.

    Raises:
        CalibrationError: a parameter requires a gradient although the checkpoint stores it rounded: a zero point, a
            global scale, or the scale of a tensor_group or of an MX format.

    Reference:
        Esser et al., Learned Step Size Quantization, 2020, arXiv:1902.08153, equations 1 to 3 and section 2.2.

    >>> x = torch.tensor([0.2, 1.0, 9.0], requires_grad=True)
    >>> y = fake_quantize(x, torch.tensor([0.5]), None, QuantizationArgs(num_bits=4))
    >>> y.tolist()
    [0.0, 1.0, 3.5]
    >>> y.sum().backward()
    >>> x.grad.tolist()
    [1.0, 1.0, 0.0]
    """
    if value.numel() == 0:  # a learned scale stays in the graph: DDP waits for every parameter
        if scale.requires_grad:
            return value + 0 * scale.sum()
        return value
    qparams = scale, zero_point, args, global_scale
    quantized = _forward(value, qparams)
    if not torch.is_grad_enabled():
        return quantized
    _refuse_learned(qparams)
    if not (value.requires_grad or scale.requires_grad):
        return quantized
    inside = _on_grid(value, qparams)
    if not scale.requires_grad:
        inside = _ungroup(inside, value.shape, args)
        return _with_gradient(value, quantized, inside)
    values_per_scale = value.numel() / observations / scale.numel()
    highest = NumberGrid.of(args).high
    factor = (values_per_scale * highest) ** -0.5
    grouped_value = _group(value, args)
    grouped_result = _group(quantized, args).detach()
    step = _broadcastable(scale, args)
    learned = _StraightThrough.apply(grouped_value, grouped_result, inside, step, factor)
    return _ungroup(learned, value.shape, args)


def fake_quantize_without_graph(
    value: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    *,
    global_scale: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantize and dequantize as :func:`fake_quantize`, bit for bit, without gradient.

    The quantizers of ``forward/recomputed_product.py`` call it for a module in training: in the forward, and again in
    the backward. ``calibration/fit_errors.py`` calls it to estimate the error of a weight that is rounded to nearest.

    Args:
        value, scale, zero_point, args, global_scale: as of :func:`fake_quantize`.
        memory: a tensor in the shape and dtype of ``value``, which the result may overwrite. None: take new memory.
    """
    if value.numel() == 0:
        return value
    return _forward(value, (scale, zero_point, args, global_scale), memory)


def fake_quantize_dynamic(
    value: torch.Tensor, args: QuantizationArgs, *, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize and dequantize with the range of the value itself, as compressed-tensors does at run time.

    The quantized forward (``forward/quantized_module.py``) and packed weights (``model/packed_weight.py``) call it in
    each call of a module for an activation whose scheme is dynamic.

    Args:
        value: an activation ``(..., C)``.
        args: ``dynamic`` is True, or ``"local"`` (tensor_group under a calibrated global scale).
        global_scale: ``(1,)``, only for tensor_group.

    Returns:
        The result of compressed-tensors. The gradient passes everywhere, because the range ends at the largest value,
        so at most the rounding of the scale puts a value beyond the grid. With a global scale the gradient is that of
        :func:`fake_quantize`: zero where a value was clipped, because a local scale is limited to what float8 holds.

    >>> x = torch.tensor([[[0.1, -1.0]]], requires_grad=True)
    >>> fake_quantize_dynamic(x, QuantizationArgs(strategy="token", dynamic=True)).sum().backward()
    >>> x.grad.tolist()
    [[[1.0, 1.0]]]
    """
    if value.numel() == 0:
        return value
    # compressed-tensors makes small tensors here: the host must not wait for their upload, and those that it keeps for
    # the process must not be made in inference mode.
    with torch.no_grad(), no_upload(value.device):
        keep_range_readable(args, value.device)
        observed = value.detach()
        module = nn.Identity()  # compressed-tensors asks it for nothing here
        scale, zero_point = compute_dynamic_scales_and_zp(observed, args, module, global_scale)
    if global_scale is not None:
        return fake_quantize(value, scale, zero_point, args, global_scale=global_scale)
    qparams = scale, zero_point, args, None
    quantized = _forward(value, qparams)
    if not torch.is_grad_enabled() or not value.requires_grad:
        return quantized
    return _with_gradient(value, quantized)


def learned_scale(
    calibrated: torch.Tensor, log_factor: torch.Tensor, stored: torch.dtype | None = None
) -> torch.Tensor:
    """A scale that can be learned and keeps its sign: ``calibrated * exp(log_factor)``.

    The quantized forward calls it in each call of a module in training (``set_learned_scale`` of
    ``forward/quantized_forward.py``). ``fine_tuning/learned_scales.py`` calls it when scales are written to the
    modules, and at the end of a fit to see whether they have changed.

    The LSQ paper learns the scale itself. Under Adam, whose steps are about the learning rate for any gradient,
    a step at a learning rate of 0.001 moves a scale of 0.002 by half, and nothing keeps its sign. Here
    the same step changes any scale by 0.1 %. ``log_factor`` starts at zero, where the result is exactly the calibrated
    scale, and weight decay pulls the scale back to the calibrated one rather than to zero.

    Args:
        calibrated: the scale that calibration found; a constant.
        log_factor: ``calibrated``'s shape, float32, zeros at first: the parameter that the optimizer gets.
        stored: a narrower float dtype in which the scale is stored (NVFP4: float8, in steps of 6 to 12 %). The scale is
            rounded to it, and the gradient passes straight through.

    Returns:
        The scale in ``calibrated``'s dtype, its magnitude at least the smallest normal number of the dtype in which it
        is stored, unless the calibrated one is smaller.

    >>> log_factor = nn.Parameter(torch.zeros(1))
    >>> learned_scale(torch.tensor([0.25]), log_factor).item()
    0.25
    """
    calibrated = calibrated.detach()
    wide = calibrated * log_factor.exp()  # float32
    smallest_normal = torch.finfo(stored or calibrated.dtype).tiny
    least = calibrated.abs().clamp(max=smallest_normal)
    positive = torch.maximum(wide, least)
    negative = torch.minimum(wide, -least)
    wide = torch.where(calibrated < 0, negative, positive)
    scale = wide.to(calibrated.dtype)
    if stored is None:
        return scale
    rounded = round_to_quantized_type_dtype(wide.detach(), stored)
    return straight_through(scale, rounded)


def straight_through(value: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """``quantized`` in the dtype of ``value``, to which the gradient goes unchanged.

    Called by :func:`learned_scale`, and by the quantized forward for weights that GPTQ rounded and for rounded biases.
    """
    return _with_gradient(value, quantized.to(value.dtype))


def _with_gradient(value: torch.Tensor, quantized: torch.Tensor, inside: torch.Tensor | None = None) -> torch.Tensor:
    """``quantized``, whose gradient goes to ``value`` where ``inside`` is True (None: everywhere)."""
    result: torch.Tensor = _StraightThrough.apply(value, quantized.detach(), inside, None, 1.0)
    return result


class _StraightThrough(torch.autograd.Function):
    """Return ``quantized`` in the forward; in the backward, pass the gradient to ``value``.

    The gradient passes where ``inside`` is True (None: everywhere). ``scale`` broadcasts against the other tensors and
    gets the gradient of a learned step size (LSQ), times ``factor``; None: no scale is learned.
    """

    @staticmethod
    def forward(
        value: torch.Tensor,
        quantized: torch.Tensor,
        inside: torch.Tensor | None,
        scale: torch.Tensor | None,
        factor: float,
    ) -> torch.Tensor:
        return quantized

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        value, quantized, inside, scale, factor = inputs
        ctx.mark_dirty(quantized)  # returned as it is, not as a view that an in-place ReLU could not change
        ctx.dtype = value.dtype
        ctx.factor = factor
        if scale is None:
            ctx.save_for_backward(inside, None, None, None)
        else:
            ctx.save_for_backward(inside, scale, value, output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inside, scale, value, quantized = ctx.saved_tensors
        value_grad = None
        if ctx.needs_input_grad[0]:
            value_grad = grad if inside is None else torch.where(inside, grad, 0)
            value_grad = value_grad.to(ctx.dtype)
        scale_grad = None
        if scale is not None:
            on_grid = torch.where(inside, value, 0)
            difference = quantized - on_grid
            del on_grid  # as large as the value
            difference = grad * difference
            total = difference.float().sum_to_size(scale.shape)
            scale_grad = total / scale.float() * ctx.factor
            scale_grad = scale_grad.to(scale.dtype)
        return value_grad, None, None, scale_grad, None


@torch.no_grad()
def _forward(value: torch.Tensor, qparams: _QParams, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Quantize and dequantize without a graph, bit for bit as compressed-tensors.

    The result may lie in ``memory``, a tensor in the value's shape and dtype, which is then overwritten.
    """
    scale, zero_point, args, global_scale = qparams
    number = format_of(args)
    is_float8 = number is not None and number.dtype is not None
    computed_dtype = torch.promote_types(value.dtype, scale.dtype)
    if is_float8 or computed_dtype == torch.float64:  # float64 is rare, and NumberGrid rounds in float32
        keep_range_readable(args, value.device)
        return exact_fake_quantize(value, scale, zero_point, args, global_scale=global_scale)
    levels, step = _in_steps(value, qparams, memory)
    grid = NumberGrid.of(args)
    if number is None:
        levels = levels.clamp_(grid.low, grid.high).round_().to(step.dtype)
    else:
        if zero_point is None:
            levels.add_(0.0)  # -0.0 becomes 0.0; a value that is rounded to zero keeps its sign below
        nearest = grid.round(levels.float())
        levels = nearest.copysign_(levels).to(step.dtype)
    if zero_point is not None:
        zero = _broadcastable(zero_point, args)
        levels.sub_(zero.to(step.dtype))
    quantized = _ungroup(levels.mul_(step), value.shape, args)
    if args.strategy in _GROUPED:
        return quantized.to(value.dtype)
    return quantized


def _in_steps(
    value: torch.Tensor, qparams: _QParams, memory: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``value / step + zero_point``, not rounded yet, in the layout of :func:`_group`; and the step, which broadcasts.

    The first result is written to ``memory``, which has the shape of the value, if it has the dtype of the step and the
    strategy is not block: blocks may need padding, for which ``memory`` has no room.
    """
    scale, zero_point, args, global_scale = qparams
    step = scale if global_scale is None else scale / global_scale
    step = _broadcastable(step, args)
    grouped = _group(value, args)
    if memory is None or args.strategy == QuantizationStrategy.BLOCK or step.dtype != memory.dtype:
        steps = grouped / step
    else:
        steps = torch.div(grouped, step, out=_group(memory, args))
    if zero_point is not None:
        zero = _broadcastable(zero_point, args)
        steps.add_(zero.to(value.dtype))
    return steps, step


@torch.no_grad()
def _on_grid(value: torch.Tensor, qparams: _QParams) -> torch.Tensor:
    """Whether each value lies on the grid, so that it was not clipped, in the layout of :func:`_group`."""
    scale, zero_point, args, global_scale = qparams
    lowest, highest = _ends(value, qparams)
    step = scale.float() if global_scale is None else scale / global_scale
    zero = 0.0 if zero_point is None else zero_point.float()
    low = (lowest - zero) * step
    high = (highest - zero) * step
    # A negative scale exchanges the two ends.
    lower = torch.minimum(low, high)
    upper = torch.maximum(low, high)
    lower = _broadcastable(lower, args)
    upper = _broadcastable(upper, args)
    grouped = _group(value, args)
    inside = grouped >= lower
    return inside.logical_and_(grouped <= upper)


def _ends(value: torch.Tensor, qparams: _QParams) -> tuple[float, float]:
    """The two levels beyond which a value counts as clipped: half a step and the rounding error outside the grid."""
    scale, _, args, _ = qparams
    grid = NumberGrid.of(args)
    value_eps = torch.finfo(value.dtype).eps
    scale_eps = torch.finfo(scale.dtype).eps
    rounding_error = max(value_eps, scale_eps) * (grid.high - grid.low)
    slack = grid.last_step() / 2 + rounding_error
    return grid.low - slack, grid.high + slack


def clip_gradient_(
    gradient: torch.Tensor,
    value: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    *,
    global_scale: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn the gradient at :func:`fake_quantize`'s result into the gradient at its value: zero where it was clipped.

    The quantizers of ``forward/recomputed_product.py`` call it in the backward of a module in training, for the weight.
    In float32 it takes two passes and no mask; a value within a rounding error of the clip bound may count as clipped
    or not.

    Args:
        gradient: at the result. It may be changed in place, so the caller must not use it afterwards.
        value, scale, zero_point, args, global_scale: as of :func:`fake_quantize`.
        memory: a tensor in the shape and dtype of ``value``, which may be overwritten. None: take new memory.
    """
    qparams = scale, zero_point, args, global_scale
    is_float32 = value.dtype == scale.dtype == gradient.dtype == torch.float32
    if not is_float32 or args.strategy == QuantizationStrategy.BLOCK:
        inside = _ungroup(_on_grid(value, qparams), value.shape, args)
        return torch.where(inside, gradient, 0)
    steps, _ = _in_steps(value, qparams, memory)
    lowest, highest = _ends(value, qparams)
    grouped = _group(gradient, args)
    torch.ops.aten.hardtanh_backward(grouped, steps, lowest, highest, grad_input=grouped)
    return gradient


# ---------------------------------------------------------------------- layouts in which a scale broadcasts


def _group(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Give each group or block a dimension of its own: ``(..., C/g, g)``, or ``(R/h, C/w, h, w)``, padded with zeros.

    Other strategies leave the value as it is. The result is a view where possible.
    """
    if args.strategy in _GROUPED:
        return value.unflatten(-1, (-1, args.group_size))
    if args.strategy == QuantizationStrategy.BLOCK:
        return split_blocks(value, args)
    return value


def _ungroup(grouped: torch.Tensor, shape: torch.Size, args: QuantizationArgs) -> torch.Tensor:
    """The inverse of :func:`_group`."""
    if args.strategy in _GROUPED:
        return grouped.flatten(-2)
    if args.strategy == QuantizationStrategy.BLOCK:
        rows, columns = shape
        padded = grouped.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return padded[:rows, :columns]
    return grouped


def _broadcastable(scale: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """A view of a parameter, one number per scale, that broadcasts against values in the layout of :func:`_group`.

    A grouped parameter is ``(R, C/g)`` for a weight, and ``(..., C/g)`` for the dynamic range of an activation. A
    parameter with one dimension is taken as a column ``(R, 1)``, as in compressed-tensors. So calibrated scales of an
    activation, ``(C/g,)``, would be misread, here as in compressed-tensors; a plan refuses them.
    """
    if args.strategy in _GROUPED:
        if scale.ndim <= 1:
            scale = scale.reshape(-1, 1)
        return scale.unsqueeze(-1)
    if args.strategy == QuantizationStrategy.BLOCK:
        return scale[..., None, None]
    return scale


def elementwise(parameter: torch.Tensor, weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Expand a quantization parameter, which has a number per scale, to the shape ``(R, C)`` of a weight.

    Each element gets the parameter of the scale that covers it. Called by :func:`dequantize`, and by ``rounding.py``
    before it rounds a weight.
    """
    grouped = _group(weight, args)
    expanded = _broadcastable(parameter, args).expand_as(grouped)
    return _ungroup(expanded, weight.shape, args)


def sum_per_scale(values: torch.Tensor, scale: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Sum the values ``(R, C)`` that share a scale, in the shape of ``scale``: the transpose of :func:`elementwise`.

    It turns a gradient of each weight into a gradient of each scale, in the backward of :func:`dequantize`.
    """
    shape = _broadcastable(scale, args).shape
    return _group(values, args).sum_to_size(shape).reshape(scale.shape)


@torch.no_grad()
def quantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    *,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round a weight to nearest and return its codes ``(R, C)``: int8, float8, or the four bits of E2M1 in int8.

    Called by export (``checkpoint/entries.py``) for a weight whose codes it packs itself, and by ``model/stored.py``
    for files of other formats. Neither calls it for six-bit floats: compressed-tensors packs these, and the other
    formats do not hold them.
    """
    grid = NumberGrid.of(args)
    qparams = scale, zero_point, args, global_scale
    steps, _ = _in_steps(weight, qparams)
    if grid.number is None:
        steps.clamp_(grid.low, grid.high)
        codes = steps.round_().to(torch.int8)
    elif grid.number.dtype is not None:
        steps.clamp_(grid.low, grid.high)
        codes = steps.to(grid.number.dtype)
    else:
        codes = _e2m1_codes(steps, grid)
    return _ungroup(codes, weight.shape, args)


def _e2m1_codes(steps: torch.Tensor, grid: NumberGrid) -> torch.Tensor:
    """The four bits of the E2M1 numbers nearest to ``steps``, in int8: a sign, then 0 to 7 for the magnitude."""
    levels = grid.round(steps.float())
    twice = levels.mul_(2).to(torch.int8).abs_()  # of 0, 0.5, 1, 1.5, 2, 3, 4, 6
    from_two_on = (twice >> 1).add_(2)  # the codes of 2, 3 and 4; for 6 it is 8, which clamp_ makes 7
    magnitude = torch.minimum(twice, from_two_on).clamp_(max=7)
    is_negative = steps < 0
    sign = is_negative.to(torch.int8) << 3
    return magnitude.bitwise_or_(sign)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack the low four bits of int8 codes ``(R, C)`` into bytes ``(R, C / 2)``, even columns in the low half.

    Called by export (``checkpoint/entries.py``) for weights of four bits.
    """
    # Flat, because int8 of a single row, or of a transposed weight, has strides that cannot be viewed as int16.
    pairs = codes.flatten().view(torch.int16)
    first = pairs & 0xF
    second = (pairs >> 4).bitwise_and_(0xF0)
    packed = first.bitwise_or_(second).to(torch.uint8)
    rows, columns = codes.shape
    return packed.view(rows, columns // 2)


def dequantize(
    levels: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    *,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight ``(R, C)`` in float32 that the levels of a grid stand for; ``scale`` gets a gradient.

    Called for a weight that GPTQ rounded, whose levels are fixed: by the quantized forward, by export
    (``checkpoint/entries.py``, and ``model/stored.py`` for files of other formats), and by
    ``calibration/fit_errors.py`` to estimate the weight's error.
    """
    step = scale.float()
    if global_scale is not None:
        step = step / global_scale
    weight: torch.Tensor = _Dequantized.apply(levels, step, zero_point, args)
    return weight


class _Dequantized(torch.autograd.Function):
    """``(levels - zero_point) * step``; only ``step`` gets a gradient. The backward keeps the levels, a byte each."""

    @staticmethod
    def forward(
        levels: torch.Tensor, step: torch.Tensor, zero_point: torch.Tensor | None, args: QuantizationArgs
    ) -> torch.Tensor:
        steps = _from_zero(levels, zero_point, args)
        return steps * elementwise(step, levels, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        levels, step, zero_point, args = inputs
        ctx.args = args
        ctx.save_for_backward(levels, step, zero_point)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        levels, step, zero_point = ctx.saved_tensors
        steps = _from_zero(levels, zero_point, ctx.args)
        return None, sum_per_scale(grad * steps, step, ctx.args), None, None


def _from_zero(levels: torch.Tensor, zero_point: torch.Tensor | None, args: QuantizationArgs) -> torch.Tensor:
    """Levels less their zero points, in float32."""
    if zero_point is None:
        return levels.float()
    zero = elementwise(zero_point.float(), levels, args)
    return levels.float() - zero


def _refuse_learned(qparams: _QParams) -> None:
    """Raise a CalibrationError if a parameter requires a gradient although a checkpoint stores it rounded."""
    scale, zero_point, args, global_scale = qparams
    is_scale_rounded = args.scale_dtype is not None or args.strategy == QuantizationStrategy.TENSOR_GROUP
    parameters = {"scale": scale, "zero point": zero_point, "global scale": global_scale}
    if not is_scale_rounded:
        del parameters["scale"]
    for name, parameter in parameters.items():
        if parameter is not None and parameter.requires_grad:
            raise CalibrationError(
                f"this {name} cannot be learned: the checkpoint stores it rounded",
                got=f"a {name} with requires_grad, strategy {args.strategy}, scale_dtype {args.scale_dtype}",
                expected="requires_grad only on the scale of a format without scale_dtype",
                remedy=f"set requires_grad_(False) on the {name}; it can be observed anew as the weights change.",
            )
