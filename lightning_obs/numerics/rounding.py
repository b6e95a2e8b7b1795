"""Round a weight by GPTQ, so that its module's output changes little, with scales that are fixed before.

``calibration/weight_rounding.py`` calls :func:`round_by_hessian` for each weight whose scheme asks for ``rounding``,
once scales are chosen.

Method. The columns are rounded one after the other, each to the nearest level, and the columns that follow compensate
for the error of column i: ``w[j] -= (w[i] - q[i]) * U[i, j] / U[i, i]``, where U is the upper Cholesky factor of the
inverse Hessian. Columns with the largest inputs come first (``act_order``), while most columns are left to compensate.
Scales belong to columns in the order in which they are stored, so this order leaves no trace in a checkpoint.

Where the sums of ``g g^T`` over the gradients at the module's outputs are known as well, rows are rounded block by
block, and later rows compensate for a block's errors in the same way: rows whose outputs affect the predictions alike
can make up for each other.

A *panel* is some consecutive columns. An error is passed to later columns of its panel at once, and to all columns
behind the panel in one matrix product per panel.
"""

from __future__ import annotations

import math

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.fake_quantize import elementwise
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import QParamsDict, exact_products

# Columns of a panel.
_PANEL = 128
# Fewest rows of a block, and most blocks of a weight: the time grows with the number of blocks, since the columns are
# rounded one after the other in each block.
_ROWS = 64
_BLOCKS = 32
# Damping of the gradients' sums; it is large because the gradients come from one random probe of each prediction.
_OUTPUT_DAMPING = 0.5


@torch.no_grad()
@exact_products()
def round_by_hessian(
    weight: torch.Tensor,
    qparams: QParamsDict,
    args: QuantizationArgs,
    hessian: torch.Tensor,
    outputs: torch.Tensor | None = None,
    *,
    act_order: bool = True,
    damping: float = 0.1,
) -> torch.Tensor:
    """Round ``weight`` to codes of its format so that the rounding changes the module's output little.

    With D the error of the rounded weight, ``trace(D @ hessian @ D.T)`` is kept small: the squared error of the
    outputs. If ``outputs`` is given, it is ``trace(outputs @ D @ hessian @ D.T)``: the effect on the predictions.
    Called by ``calibration/weight_rounding.py`` for each weight whose scheme asks for rounding, once its scales are
    chosen.

    Args:
        weight: ``(R, C)``.
        qparams: scale, zero point and global scale, as compressed-tensors stores them for ``args``; not changed.
        args: number format and strategy.
        hessian: ``(C, C)``, the sum or mean of ``x x^T`` over the module's inputs. A column that no input reached
            (zero on the diagonal) is rounded to nearest.
        outputs: ``(R, R)``, the sum or mean of ``g g^T`` over gradients g at the module's outputs; None: rows are
            rounded independently.
        act_order: round the columns in the order of the Hessian's diagonal, largest first. False: in stored order.
        damping: share of the mean of the Hessian's diagonal that is added to the diagonal. GPTQ's default of 0.01 loses
            a little less on text like that of the calibration, and much more on other text
            (docs/evidence/four_bits.md).

    Returns:
        ``(R, C)`` in the dtype of the format's codes (int8 for integers): the levels, before the zero point is
        subtracted and the scale is multiplied.

    Raises:
        CalibrationError: the Hessian is not positive definite, not even with this damping.

    Reference:
        Frantar et al., GPTQ, 2023, arXiv:2210.17323, algorithm 1; Tseng, Sun, De Sa, Model-Preserving Adaptive
        Rounding, 2025, arXiv:2505.22988 (rounding by moments of inputs and of the gradients at outputs).

    >>> weight, inputs = torch.tensor([[0.4, 0.4]]), torch.tensor([[1.0, 1.0]])
    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> round_by_hessian(weight, {"scale": torch.tensor([[1.0]])}, args, inputs.T @ inputs)
    tensor([[0, 1]], dtype=torch.int8)
    """
    columns = torch.arange(len(hessian))
    if act_order:
        columns = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    columns = columns.to(weight.device)
    # Passed on without a name, so that inverse_factor can free the reordered copies.
    factor = inverse_factor(hessian.to(weight.device)[columns[:, None], columns], damping)
    rows = None
    output_factor = None
    if outputs is not None:
        outputs = outputs.to(weight.device)
        rows = outputs.diagonal().argsort(descending=True, stable=True)
        output_factor = inverse_factor(outputs[rows[:, None], rows], _OUTPUT_DAMPING, of_gradients=True)
    grid = NumberGrid.of(args)
    left = _reordered(weight, columns, rows).float()
    steps, zeros = _steps_and_zeros(weight, qparams, args)
    step = _reordered(steps, columns, rows)
    zero = torch.zeros_like(left) if zeros is None else _reordered(zeros, columns, rows)
    levels = torch.empty_like(left)
    if output_factor is None:
        _round_rows(left, step, zero, factor, grid, levels)
    else:
        _round_blocks(left, step, zero, factor, output_factor, grid, levels)
    codes = torch.int8 if grid.number is None else grid.number.codes
    placed = torch.empty_like(levels).index_copy_(0, columns, levels)
    if rows is not None:
        placed = torch.empty_like(levels).index_copy_(1, rows, placed)
    return placed.T.to(codes).contiguous()


def _steps_and_zeros(
    weight: torch.Tensor, qparams: QParamsDict, args: QuantizationArgs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scale and the zero point of each element of a weight, in float32, in the weight's shape.

    A global scale is divided out of the scales. None in place of zero points: the format is symmetric.
    :func:`round_by_hessian` calls this.
    """
    zero_point = qparams.get("zero_point")
    global_scale = qparams.get("global_scale")
    scale = qparams["scale"].float()
    if global_scale is not None:
        scale = scale / global_scale
    steps = elementwise(scale, weight, args)
    zeros = None if zero_point is None else elementwise(zero_point.float(), weight, args)
    return steps, zeros


def _reordered(matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """A transposed copy ``(C, R)`` of a matrix ``(R, C)``, with columns and rows in the order of the rounding."""
    reordered = matrix.T.index_select(0, columns)
    if rows is None:
        return reordered
    return reordered.index_select(1, rows)


def _round_blocks(
    left: torch.Tensor,
    step: torch.Tensor,
    zero: torch.Tensor,
    factor: torch.Tensor,
    output_factor: torch.Tensor,
    grid: NumberGrid,
    levels: torch.Tensor,
) -> None:
    """Round all rows into ``levels``, block by block; later rows compensate for a block's errors.

    ``factor`` is ``(C, C)`` and ``output_factor`` is ``(R, R)``: the inverse factors of the Hessian and of the
    gradients' sums. All other tensors are ``(C, R)``. ``left`` is overwritten.
    """
    number_of_rows = left.shape[1]
    height = max(_ROWS, math.ceil(number_of_rows / _BLOCKS))
    for start in range(0, number_of_rows, height):
        stop = start + height
        block = slice(start, stop)
        later = slice(stop, None)
        block_left = left[:, block]
        block_step = step[:, block]
        block_zero = zero[:, block]
        block_levels = levels[:, block]
        contiguous_left = block_left.contiguous()  # a copy if there are several blocks; it is overwritten
        contiguous_step = block_step.contiguous()
        contiguous_zero = block_zero.contiguous()
        _round_rows(contiguous_left, contiguous_step, contiguous_zero, factor, grid, block_levels)
        if stop < number_of_rows:
            steps = block_levels - block_zero
            rounded = steps * block_step
            error = block_left - rounded
            of_block = output_factor[block, block]
            of_later = output_factor[block, later]
            corrections = torch.linalg.solve_triangular(of_block, of_later, upper=True)
            left[:, later].addmm_(error, corrections, alpha=-1)


def _round_rows(
    left: torch.Tensor,
    step: torch.Tensor,
    zero: torch.Tensor,
    factor: torch.Tensor,
    grid: NumberGrid,
    levels: torch.Tensor,
) -> None:
    """Round r rows into ``levels``, panel by panel. All tensors but ``factor`` are ``(C, r)``; overwrites ``left``."""
    round_panel = on_gpu.round_panel if on_gpu.can_run(left) else on_gpu.round_panel_plainly
    columns = len(left)
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        panel = slice(start, stop)
        later = slice(stop, None)
        panel_factor = factor[panel, panel]
        panel_levels, errors = round_panel(left[panel], step[panel], zero[panel], panel_factor, grid)
        levels[panel] = panel_levels
        left[later].addmm_(factor[panel, later].T, errors, alpha=-1)


@torch.no_grad()
@exact_products()
def corrected_target(
    weight: torch.Tensor, hessian: torch.Tensor, input_errors: torch.Tensor, *, damping: float, share: float
) -> torch.Tensor:
    """The weight that makes up, on quantized inputs, for a share of the error in these inputs.

    It is ``W + share * W A (H + damping)^-1``. With x an input in full precision and x~ the same input computed by the
    quantized modules before, a share of 1 without damping gives the least squares solution W' of ``W' x~ = W x``; that
    share fits the calibration data too closely. Called by ``calibration/weight_rounding.py`` before a rounding on
    quantized inputs: the result is rounded in place of W, and not kept.

    Args:
        weight: W, ``(R, C)``; not changed.
        hessian: H, ``(C, C)``, the sum of ``x~ x~^T``.
        input_errors: A, ``(C, C)``, the sum of ``(x - x~) x~^T``.
        damping: share of the mean of H's diagonal that is added to it.
        share: how much of the difference is made up for, from 0 (nothing, W itself) to 1.

    Returns:
        ``(R, C)`` in float32.

    Raises:
        CalibrationError: the Hessian is not positive definite, not even with this damping.

    Reference:
        Li et al., GPTAQ, 2025, arXiv:2504.02692; Zhang et al., Qronos, 2025, arXiv:2505.11695.

    >>> twice_as_large = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> exact, quantized = twice_as_large
    >>> hessian, errors = quantized.T @ quantized, (exact - quantized).T @ quantized
    >>> corrected_target(torch.tensor([[0.4, 0.4]]), hessian, errors, damping=0.0, share=0.5)
    tensor([[0.6000, 0.4000]])
    """
    damped = _damped(hessian.to(weight.device), damping)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise _not_positive(len(hessian), damping)
    errors = input_errors.to(weight.device, torch.float32)
    output_errors = weight.float() @ errors
    shift = torch.cholesky_solve(output_errors.double().mT, factor).mT
    return weight.float() + share * shift.float()


def inverse_factor(hessian: torch.Tensor, damping: float, of_gradients: bool = False) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian, in float32; :func:`round_by_hessian` rounds by it.

    All steps work in place on one float64 copy, to save memory.

    Args:
        hessian: the sums over the module's inputs, ``(C, C)``, or over the gradients at its outputs, ``(R, R)``.
        damping: share of the mean of the diagonal that is added to the diagonal.
        of_gradients: whether ``hessian`` is that of the gradients, for the error.

    Raises:
        CalibrationError: the damped Hessian is not positive definite.
    """
    damped = _damped(hessian, damping)
    del hessian  # the caller's may be a temporary
    failed = torch.empty(2, dtype=torch.int32, device=damped.device)
    torch.linalg.cholesky_ex(damped, out=(damped, failed[0]))
    torch.cholesky_inverse(damped, out=damped)
    torch.linalg.cholesky_ex(damped, upper=True, out=(damped, failed[1]))
    if failed.any():
        raise _gradients_not_positive(len(damped)) if of_gradients else _not_positive(len(damped), damping)
    return damped.to(torch.float32, memory_format=torch.contiguous_format)


def _damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """A float64 copy of a Hessian with zeros on its diagonal replaced, and the diagonal raised by a share of its mean.

    The copy is column-major, so that LAPACK factors it in place.
    """
    damped = torch.empty_like(hessian, dtype=torch.float64).mT
    damped.copy_(hessian)
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    # A column that no input reached gets the mean, or 1: it is independent of all others.
    for_unreached = torch.where(mean > 0, mean, 1.0)
    filled = torch.where(diagonal == 0, for_unreached, diagonal)
    diagonal.copy_(filled)
    diagonal += damping * mean
    return damped


def _not_positive(columns: int, damping: float) -> CalibrationError:
    """The error of a Hessian of inputs, with so many columns, that has no Cholesky factor."""
    return CalibrationError(
        "the Hessian of the inputs is not positive definite",
        got=f"{columns} columns, damping={damping}",
        remedy=f"calibrate with more tokens, or raise damping ({max(1.0, 10 * damping):g}).",
    )


def _gradients_not_positive(outputs: int) -> CalibrationError:
    """The error of the gradients' sums at so many outputs that have no Cholesky factor; their damping is fixed."""
    return CalibrationError(
        "the Hessian of the gradients at the module's outputs is not positive definite",
        got=f"{outputs} outputs",
        remedy="calibrate with more tokens, or leave out weigh_tokens.",
    )
