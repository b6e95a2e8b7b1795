"""Round a weight so that its module's output changes least, with scales that are fixed before.

Method. GPTQ: the columns are rounded one after the other, each to the nearest level, and the columns that follow take
up the error, ``w[j] -= (w[i] - q[i]) * U[i, j] / U[i, i]``, U the upper Cholesky factor of the inverse Hessian. Columns
whose inputs are largest come first (``act_order``), when most columns are left to take up an error. Since scales belong
to columns as they are stored, that order leaves no trace in a checkpoint.

Where the moments of the gradients at the module's outputs are known, too, rows are rounded one block after the other,
and the rows that follow take up its errors in the same way: rows whose outputs act on the predictions alike compensate
each other.

The error travels inside a panel of columns first, and to all later columns in one matrix product per panel.
"""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics import on_gpu
from lightning_obs.numerics.fake_quantize import elementwise
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.qparams import QParamsDict, exact_products

_PANEL = 128
# Rows of a block, and most blocks of a weight: each takes as many steps as there are columns.
_ROWS, _BLOCKS = 64, 32
# Damping of the gradients' moments: they come from one random probe of each prediction.
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
    damping: float = 0.01,
) -> torch.Tensor:
    """Levels of the grid for ``weight`` whose errors D change the module's output, or the predictions, little.

    ``trace(D @ hessian @ D.T)`` is kept small, with ``outputs`` ``trace(outputs @ D @ hessian @ D.T)``.

    Args:
        weight: ``(R, C)``.
        qparams: as compressed-tensors stores them for ``args``; not changed.
        args: number format and strategy.
        hessian: ``(C, C)``, the sum or mean of ``x x^T`` over the module's inputs. A column that no input reached
            (zero on the diagonal) is rounded to nearest.
        outputs: ``(R, R)``, the sum or mean of ``g g^T`` over gradients g at the module's outputs; None: rows are
            rounded independently.
        act_order: round columns in the order of the diagonal, largest first; off: as stored.
        damping: share of the diagonal's mean that is added to it.

    Returns:
        ``(R, C)`` in the dtype of the format's codes (int8 for integers): the numbers before the zero point is
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
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    order = order.to(weight.device)
    factor = inverse_factor(hessian.to(weight.device)[order[:, None], order], damping)
    grid, zero_point, global_scale = NumberGrid.of(args), qparams.get("zero_point"), qparams.get("global_scale")
    scale = qparams["scale"].float() if global_scale is None else qparams["scale"].float() / global_scale
    left = weight.T.index_select(0, order).float()
    step, zero = elementwise(scale, weight, args).T.index_select(0, order), torch.zeros_like(left)
    if zero_point is not None:
        zero = elementwise(zero_point.float(), weight, args).T.index_select(0, order)
    rows, height, across = None, len(weight), None
    if outputs is not None:
        outputs = outputs.to(weight.device)
        rows, height = outputs.diagonal().argsort(descending=True, stable=True), max(_ROWS, -(-len(weight) // _BLOCKS))
        across = inverse_factor(outputs[rows[:, None], rows], _OUTPUT_DAMPING)
        left, step, zero = (each.index_select(1, rows) for each in (left, step, zero))
    levels = torch.empty_like(left)
    for start in range(0, len(weight), height):
        own, later = slice(start, start + height), slice(start + height, None)
        of_rows = step[:, own].contiguous(), zero[:, own].contiguous()
        _round_rows(left[:, own].contiguous(), *of_rows, factor, grid, levels[:, own])
        if across is not None and start + height < len(weight):
            error = left[:, own] - (levels[:, own] - zero[:, own]) * step[:, own]
            taken = torch.linalg.solve_triangular(across[own, own], across[own, later], upper=True)
            left[:, later].addmm_(error, taken, alpha=-1)
    codes = torch.int8 if grid.number is None else grid.number.codes
    placed = torch.empty_like(levels).index_copy_(0, order, levels)
    if rows is not None:
        placed = torch.empty_like(levels).index_copy_(1, rows, placed)
    return placed.T.to(codes).contiguous()


def _round_rows(
    left: torch.Tensor,
    step: torch.Tensor,
    zero: torch.Tensor,
    factor: torch.Tensor,
    grid: NumberGrid,
    levels: torch.Tensor,
) -> None:
    """Write the levels of some rows, panel by panel. All but the factor are ``(C, r)``; ``left`` is written over."""
    round_panel = on_gpu.round_panel if on_gpu.can_run(left) else on_gpu.round_panel_plainly
    for start in range(0, len(left), _PANEL):
        part = slice(start, min(start + _PANEL, len(left)))
        levels[part], errors = round_panel(left[part], step[part], zero[part], factor[part, part], grid)
        left[part.stop :].addmm_(factor[part, part.stop :].T, errors, alpha=-1)


def inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian, in float32; one matrix in float64 on the way."""
    damped = torch.empty_like(hessian, dtype=torch.float64).mT.copy_(hessian)
    del hessian  # the caller's may be a temporary
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    # no input: apart from all others
    diagonal.copy_(torch.where(diagonal == 0, torch.where(mean > 0, mean, 1.0), diagonal))
    diagonal += damping * mean
    failed = torch.empty(2, dtype=torch.int32, device=damped.device)
    torch.linalg.cholesky_ex(damped, out=(damped, failed[0]))
    torch.cholesky_inverse(damped, out=damped)
    torch.linalg.cholesky_ex(damped, upper=True, out=(damped, failed[1]))
    if failed.any():
        raise CalibrationError(
            "the Hessian of the inputs is not positive definite",
            got=f"{len(damped)} columns, damping={damping}",
            remedy="calibrate with more tokens, or raise damping (0.1).",
        )
    return damped.to(torch.float32, memory_format=torch.contiguous_format)
