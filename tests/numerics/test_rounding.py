"""Rounding by the Hessian of the inputs, against the algorithm written out in float64."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs import CalibrationError
from lightning_obs.numerics.fake_quantize import dequantize, fake_quantize
from lightning_obs.numerics.formats import NumberGrid
from lightning_obs.numerics.rounding import round_by_hessian
from lightning_obs.observers import Observer

FORMATS = {
    "int4 groups": QuantizationArgs(num_bits=4, strategy="group", group_size=32),
    "int4 groups, zero points": QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=False),
    "int8 channels": QuantizationArgs(num_bits=8, strategy="channel"),
    "int8 blocks over the edge": QuantizationArgs(num_bits=8, strategy="block", block_structure=[10, 32]),
    "fp8 tensor": QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
    "nvfp4": QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    ),
}


def correlated(tokens: int = 512, channels: int = 160) -> torch.Tensor:
    """``sum x x^T`` of channels that depend on each other and differ in size, ``(C, C)``."""
    mix = torch.randn(channels, channels) * torch.logspace(-1, 1, channels)
    inputs = torch.randn(tokens, channels) @ mix
    return inputs.T @ inputs


def qparams_of(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor | None]:
    observer = Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)
    observer(weight)
    found = dict(observer.get_qparams())
    return found | {"zero_point": None if args.symmetric else found["zero_point"]}


def by_the_book(weight, step, zero, args, hessian, order, damping=0.1):
    """Optimal brain quantization of one column after the other: the inverse is updated, nothing is factored."""
    grid, left = NumberGrid.of(args), weight.double()[:, order]
    step, zero = step.double()[:, order], zero.double()[:, order]
    damped = hessian.double()[order][:, order]
    damped = damped + damping * damped.diagonal().mean() * torch.eye(len(damped), dtype=torch.float64)
    inverse, levels = torch.linalg.inv(damped), torch.empty_like(left)
    for i in range(left.shape[1]):
        levels[:, i] = grid.round((left[:, i] / step[:, i] + zero[:, i]).float())
        error = (left[:, i] - (levels[:, i] - zero[:, i]) * step[:, i]) / inverse[i, i]
        left = left - error[:, None] * inverse[i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return levels[:, torch.argsort(order)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("act_order", [True, False])
def test_levels_are_those_of_the_algorithm(name, act_order):
    torch.manual_seed(0)
    args, weight, hessian = FORMATS[name], torch.randn(24, 160) * 0.05, correlated()
    qparams = qparams_of(weight, args)
    order = torch.argsort(hessian.diagonal(), descending=True) if act_order else torch.arange(160)
    ones = torch.ones_like(weight, dtype=torch.int8)
    step = dequantize(ones, qparams["scale"], None, args, global_scale=qparams["global_scale"])
    zero = torch.zeros_like(step)
    if qparams["zero_point"] is not None:
        zero = -dequantize(ones * 0, qparams["scale"], qparams["zero_point"], args) / step

    levels = round_by_hessian(weight, qparams, args, hessian, act_order=act_order)

    expected = by_the_book(weight, step, zero.round(), args, hessian, order)
    # float32 panels and float64 updates part ways where a value lies on the middle of two levels
    assert (levels.double() == expected).double().mean() > 0.97
    errors = [(each.float() - zero.round()) * step - weight for each in (levels, expected)]
    mine, book = (float((error @ hessian * error).sum()) for error in errors)
    assert mine == pytest.approx(book, rel=0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_loses_less_than_rounding_to_nearest_and_stays_on_the_grid(name):
    torch.manual_seed(1)
    args, weight, hessian = FORMATS[name], torch.randn(24, 160) * 0.05, correlated()
    qparams = qparams_of(weight, args)
    levels = round_by_hessian(weight, qparams, args, hessian)
    rounded = dequantize(levels, qparams["scale"], qparams["zero_point"], args, global_scale=qparams["global_scale"])

    def again(value: torch.Tensor) -> torch.Tensor:
        return fake_quantize(value, **{**qparams, "args": args})

    lost, nearest = (float((error @ hessian * error).sum()) for error in (rounded - weight, again(weight) - weight))
    assert lost < 0.9 * nearest
    torch.testing.assert_close(again(rounded), rounded, rtol=0, atol=0)  # as a checkpoint would store it


def test_independent_inputs_are_rounded_to_nearest():
    torch.manual_seed(0)
    args, weight = FORMATS["int4 groups"], torch.randn(8, 64)
    qparams = qparams_of(weight, args)
    levels = round_by_hessian(weight, qparams, args, torch.diag(torch.rand(64)))
    nearest = fake_quantize(weight, **{**qparams, "args": args})
    torch.testing.assert_close(dequantize(levels, qparams["scale"], None, args), nearest, rtol=0, atol=0)


def test_a_column_that_no_input_reached_is_rounded_to_nearest():
    torch.manual_seed(0)
    args, weight, hessian = FORMATS["int8 channels"], torch.randn(8, 160), correlated()
    hessian[3], hessian[:, 3] = 0, 0
    qparams = qparams_of(weight, args)
    levels = round_by_hessian(weight, qparams, args, hessian)
    assert torch.equal(levels[:, 3].float(), (weight[:, 3] / qparams["scale"][:, 0]).round())


@pytest.mark.parametrize("name", FORMATS)
def test_rows_whose_outputs_go_together_compensate_each_other(name):
    torch.manual_seed(0)
    args, weight, hessian, outputs = FORMATS[name], torch.randn(160, 160) * 0.05, correlated(), correlated()
    qparams = qparams_of(weight, args)
    lost = []
    for given in (None, outputs):
        levels = round_by_hessian(weight, qparams, args, hessian, given)
        kept = {"global_scale": qparams["global_scale"]}
        error = dequantize(levels, qparams["scale"], qparams["zero_point"], args, **kept) - weight
        lost.append(float((outputs @ error @ hessian * error).sum()))
    assert lost[1] < 0.95 * lost[0]


def test_each_row_takes_up_the_errors_of_the_rows_before_it(monkeypatch):
    """By hand: with damping, the error of the first row counts 0.9 / 1.5 in the second."""
    monkeypatch.setattr("lightning_obs.numerics.rounding._ROWS", 1)
    args, qparams = QuantizationArgs(num_bits=8, strategy="channel"), {"scale": torch.ones(2, 1)}
    outputs = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    for second, expected in ((0.24, 0), (0.28, 1)):  # 0.24 + 0.6 * 0.4 < 0.5 < 0.28 + 0.6 * 0.4
        weight = torch.tensor([[0.4], [second]])
        assert round_by_hessian(weight, qparams, args, torch.ones(1, 1), outputs).tolist() == [[0], [expected]]


def test_independent_outputs_change_nothing():
    torch.manual_seed(0)
    args, weight, hessian = FORMATS["int4 groups"], torch.randn(160, 160), correlated()
    qparams, outputs = qparams_of(weight, args), torch.rand(160).diag()
    levels = [round_by_hessian(weight, qparams, args, hessian, given) for given in (None, outputs)]
    assert (levels[0] == levels[1]).float().mean() > 0.999  # products of other shapes round otherwise


def test_gradients_without_a_factor_are_named():
    args, weight = FORMATS["int8 channels"], torch.randn(2, 2)
    outputs = torch.tensor([[1.0, 4.0], [4.0, 1.0]])
    with pytest.raises(CalibrationError, match=r"gradients at the module's outputs is not positive[\s\S]*weigh_tokens"):
        round_by_hessian(weight, {"scale": torch.ones(2, 1)}, args, torch.eye(2), outputs)


def test_a_hessian_that_is_not_positive_definite_is_an_error():
    args, weight = FORMATS["int8 channels"], torch.randn(2, 2)
    with pytest.raises(CalibrationError, match=r"not positive definite[\s\S]*damping"):
        round_by_hessian(weight, {"scale": torch.ones(2, 1)}, args, torch.tensor([[1.0, 4.0], [4.0, 1.0]]))
