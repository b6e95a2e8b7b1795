"""The metrics of the report, against torchmetrics, compressed-tensors and float64."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from torchmetrics.audio import SignalNoiseRatio

from lightning_obs.numerics.histogram import count_values, join_supports, support, support_of
from lightning_obs.numerics.qparams import compute_global_scale, compute_qparams, flatten_for_calibration
from lightning_obs.report.metrics import LayerSums, ScaleDrift, counted_error, difference_error, grid_error, only_range
from tests.support.rank_processes import run_ranks

ARGS = [
    QuantizationArgs(num_bits=8, strategy="tensor"),
    QuantizationArgs(num_bits=8, strategy="channel"),
    QuantizationArgs(num_bits=4, strategy="group", group_size=16),
    QuantizationArgs(num_bits=4, strategy="group", group_size=16, symmetric=False),
    QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[16, 16]),
    QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype="float8_e4m3fn"),
]


def grid(x, args, share=1.0):
    """Scale, zero point and global scale of a weight, of a share of its range, and the scale that divides values."""
    flat = flatten_for_calibration(x, "weight", args)
    low, high = share * flat.amin((0, -1)), share * flat.amax((0, -1))
    whole = compute_global_scale([(low, high)], args)
    qparams = compute_qparams(low, high, args, whole)
    scale, zero = qparams["scale"], None if args.symmetric else qparams["zero_point"]
    return scale, zero, whole, scale.float() if whole is None else scale.float() / whole


@pytest.mark.parametrize("args", ARGS, ids=lambda a: f"{a.type}{a.num_bits}{a.strategy}{a.symmetric}")
def test_weights_are_measured_as_compressed_tensors_rounds_them(args):
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.rand(64, 1)
    scale, zero, whole, effective = grid(x, args, 0.6)
    quantized = fake_quantize(x, scale, zero, args, global_scale=whole).double()
    metrics = LayerSums(["other", "fc"])
    metrics.update("fc", grid_error(x, effective, zero, args, "weight"))
    found = {name: value[1] for name, value in metrics.compute().items()}
    wide = x.double()
    noise = (quantized - wide).square()
    assert found["sqnr"].item() == pytest.approx(10 * (wide.square().sum() / noise.sum()).log10().item(), abs=1e-4)
    assert found["mse"].item() == pytest.approx(noise.mean().item(), rel=1e-5)
    expected = torch.nn.functional.cosine_similarity(quantized.flatten(), wide.flatten(), dim=0)
    assert found["cosine"].item() == pytest.approx(expected.item(), abs=1e-7)
    assert [found["low"], found["high"]] == pytest.approx([x.min().item(), x.max().item()])
    assert 0 < found["clipped"].item() < 50
    assert 0 < found["bits"].item() <= args.num_bits


def test_what_was_not_seen_is_not_a_number():
    metrics = LayerSums(["other", "fc"])
    metrics.update("fc", only_range(torch.tensor([1.0, 2.0])))
    found = metrics.compute()
    assert all(value[0].isnan().all() for value in found.values())
    assert [found["low"][1], found["high"][1]] == [1, 2]
    assert found["sqnr"].isnan().all()


def test_outputs_are_measured_token_by_token_as_torchmetrics_does():
    torch.manual_seed(0)
    original, oracle, metric = torch.randn(3, 5, 16), SignalNoiseRatio(), LayerSums(["a", "b"])
    original[0, 0] *= 3000
    for part in original.split(1):
        quantized = part.round()
        oracle.update(quantized, part)
        metric.update("a", difference_error(quantized, part))
    assert metric.compute()["sqnr"][0].item() == pytest.approx(oracle.compute().item(), abs=1e-3)


def test_codes_that_are_used_evenly_need_all_bits_and_one_code_needs_none():
    args, metric = QuantizationArgs(num_bits=4), LayerSums(["even", "one"])
    metric.update("even", grid_error(torch.arange(-8.0, 8.0)[None], torch.ones(1), None, args, "input"))
    metric.update("one", grid_error(torch.full((1, 16), 3.0), torch.ones(1), None, args, "input"))
    assert metric.compute()["bits"].tolist() == [4, 0]


def test_values_beyond_the_last_step_are_clipped_and_those_that_round_to_it_are_not():
    args, metric = QuantizationArgs(num_bits=4), LayerSums(["a", "b"])
    x = torch.tensor([[7.0, 7.4, 7.6, -8.4, -9.0, 0.0, 0.0, 100.0]])
    metric.update("a", grid_error(x, torch.ones(1), None, args, "input"))
    assert metric.compute()["clipped"][0].item() == 100 * 3 / 8


@pytest.mark.parametrize("symmetric", [True, False])
def test_counted_values_have_the_error_of_the_values_themselves(symmetric):
    torch.manual_seed(0)
    args = QuantizationArgs(num_bits=8, symmetric=symmetric)
    x = torch.randn(1000, 8).bfloat16().float()
    scale, zero, _, _ = grid(x, args, 0.7)
    counted = count_values(x.reshape(-1, 1, 8))
    seen = support(counted.counts[0], counted.low[0], counted.high[0])
    metrics = LayerSums(["values", "counts"])
    metrics.update("values", grid_error(x, scale, zero, args, "input"))
    metrics.update("counts", counted_error(seen.values, seen.counts, scale, zero, args))
    for name, (one, other) in metrics.compute().items():
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9, msg=name)


def test_counts_of_two_tensors_are_those_of_both():
    one, other = torch.randn(100), torch.randn(50)
    joined, whole = join_supports(support_of(one), support_of(other)), support_of(torch.cat([one, other]))
    assert joined.counts.sum() == whole.counts.sum() == 150
    bins = torch.unique(joined.values.bfloat16())
    assert torch.equal(bins, torch.unique(whole.values.bfloat16()))


def on_rank(rank):
    from lightning_obs.ranks.collectives import Collectives

    torch.manual_seed(0)
    x = torch.randn(8, 4)
    layers = LayerSums(["a", "b"])
    layers.update("a", grid_error(x[4 * rank : 4 * rank + 4], torch.ones(1) / 4, None, ARGS[0], "input"))
    layers.reduce_ranks(Collectives.of_group())
    return {name: value.tolist() for name, value in layers.compute().items()}


def test_sums_of_all_ranks_are_those_of_one_device():
    torch.manual_seed(0)
    alone = LayerSums(["a", "b"])
    alone.update("a", grid_error(torch.randn(8, 4), torch.ones(1) / 4, None, ARGS[0], "input"))
    expected = {name: value[0].item() for name, value in alone.compute().items() if name != "sqnr"}
    for found in run_ranks(on_rank, 2):
        for name, value in expected.items():
            assert found[name][0] == pytest.approx(value), name


@pytest.mark.parametrize("args", ARGS[:1] + ARGS[-2:], ids=lambda a: f"{a.type}{a.num_bits}")
def test_a_tensor_with_nan_has_no_ratio_and_is_no_failure(args):
    x = torch.randn(16, 16)
    _, zero, _, effective = grid(x, args)
    x[3, 5] = torch.nan
    layers = LayerSums(["fc"])
    layers.update("fc", grid_error(x, effective, zero, args, "weight"))
    (error,) = layers.errors().values()
    assert (error.sqnr, error.mse) == (None, None)


def test_drifts_stand_at_their_steps_if_a_scale_is_absent_at_one():
    drift = ScaleDrift()
    for step, scale in enumerate((1.0, 2.0, None, 8.0)):
        qparams = {"a.weight_scale": torch.ones(1)}
        if scale is not None:
            qparams["b.weight_scale"] = torch.tensor([scale])
        drift.add(step, qparams)
    assert drift.drifts == {"a.weight_scale": [0.0] * 4, "b.weight_scale": [0.0, 1.0, 1.0, 3.0]}
    assert drift.numbers() == {"scale_drift_max": 3.0, "scale_drift_mean": 1.5}
