"""Ranges by the second moments of the inputs, against direct formulas in float64."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize, preset_name_to_scheme
from hypothesis import given, settings
from torch import nn
from torch.distributed import ReduceOp

from lightning_obs import CalibrationError, CalibrationSession
from lightning_obs.observers import Observer
from tests.observers.contract import range_of, two_tensors

TENSOR = QuantizationArgs(num_bits=4, strategy="tensor")
CHANNEL = QuantizationArgs(num_bits=4, strategy="channel")
GROUP = QuantizationArgs(num_bits=4, group_size=16)
ASYMMETRIC = QuantizationArgs(num_bits=4, group_size=16, symmetric=False)
BLOCK = QuantizationArgs(num_bits=4, strategy="block", block_structure=[3, 32])
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
HESSIANS = ["local_hessian", "hessian"]
every_strategy = pytest.mark.parametrize(
    "args", [TENSOR, CHANNEL, GROUP, ASYMMETRIC, BLOCK], ids=lambda a: str(a.strategy)
)
each = pytest.mark.parametrize("name", HESSIANS)


def make(name, args=GROUP, **kwargs):
    return Observer.load_from_registry(name, base_name="weight", args=args, **kwargs)


def observe(name, args, weight, inputs, **kwargs):
    observer = make(name, args, **kwargs)
    observer.observe_inputs(inputs)
    return observer(weight)


def lost(observer, weight, inputs):
    """What the outputs lose, in float64, per row."""
    qparams = observer.get_qparams()
    back = fake_quantize(
        weight, qparams["scale"], qparams["zero_point"], observer.args, global_scale=qparams["global_scale"]
    )
    return ((back - weight).double() @ inputs.flatten(0, -2).double().T).square().sum(1)


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.distributions.StudentT(4.0).sample((12, 160))


@pytest.fixture
def inputs():
    """Channels that go together, of different sizes."""
    torch.manual_seed(1)
    mixed = torch.randn(4, 50, 160) @ (torch.randn(160, 160) / 12 + torch.eye(160) / 2)
    return mixed * torch.logspace(-1, 1, 160)


# ---------------------------------------------------------------------- the statistic


@pytest.mark.parametrize(
    ("name", "args", "width"),
    [
        ("hessian", GROUP, 160),
        ("local_hessian", GROUP, 16),
        ("local_hessian", QuantizationArgs(num_bits=4, group_size=160), 80),
        ("local_hessian", BLOCK, 32),
        ("local_hessian", CHANNEL, 128),
        ("local_hessian", TENSOR, 128),
    ],
)
@pytest.mark.parametrize("cuts", [(1, 4), (4, 1), (2, 2)])
def test_the_statistic_is_the_sum_of_products_however_data_are_cut(name, args, width, cuts, inputs):
    observer = make(name, args)
    for part in inputs.chunk(cuts[0]):
        for piece in part.chunk(cuts[1], 1):
            observer.observe_inputs(piece)
    x = inputs.flatten(0, 1).double()
    expected = x.T @ x
    if name == "local_hessian":
        x = nn.functional.pad(x, (0, -160 % width))
        expected = torch.stack([part.T @ part for part in x.split(width, 1)])
    assert observer.input_hessian.dtype == torch.float32
    torch.testing.assert_close(observer.input_hessian.double(), expected, rtol=1e-5, atol=1e-5 * expected.amax().item())
    assert observer.input_count.item() == 200
    assert observer._act_sync_dict == {"input_hessian": ReduceOp.SUM, "input_count": ReduceOp.SUM}


@each
def test_inputs_are_multiplied_in_float32_also_under_autocast(name):
    observer = make(name, CHANNEL)
    with torch.autocast("cpu", torch.bfloat16):
        observer.observe_inputs(torch.full((256, 2), 1.001))
    assert observer.input_hessian.unique().tolist() == [pytest.approx(256 * 1.001**2, rel=1e-5)]


# ---------------------------------------------------------------------- the range


def brute_force(args, weight, hessian, candidates, signed):
    """Each scale's candidate with the least ``d H d^T`` by itself, one range of the whole search after the other."""
    plain = make("memoryless_minmax", args, signed=signed)(weight)
    low, high = plain.get_min_max()
    errors, ends = [], []
    for p in candidates:
        plain.min_vals, plain.max_vals = low * p, high * p
        qparams = plain.get_qparams()
        d = (fake_quantize(weight, qparams["scale"], qparams["zero_point"], args) - weight).double()
        ends.append((low * p, high * p))
        errors.append(sum_per_scale(d * (d @ hessian), args))
    best = torch.stack(errors).argmin(0)
    return [torch.stack(end).gather(0, best[None])[0] for end in zip(*ends, strict=True)], torch.stack(errors)


def sum_per_scale(values, args):
    if args.strategy == "tensor":
        return values.sum().reshape(1)
    if args.strategy == "block":
        high, wide = args.block_structure
        return values.view(-1, high, values.shape[1] // wide, wide).sum((1, 3))
    return values.view(len(values), -1, args.group_size or values.shape[1]).sum(-1)


@every_strategy
@pytest.mark.parametrize("signed", [False, True])
def test_a_local_range_has_the_least_error_of_all_candidates(args, signed, weight, inputs):
    if signed and not args.symmetric:
        pytest.skip("refused")
    x = inputs.flatten(0, 1).double()
    width = {"group": 16, "block": 32}.get(str(getattr(args.strategy, "value", args.strategy)), 128)
    local = torch.block_diag(*(part.T @ part for part in x.split(width, 1)))
    found = observe("local_hessian", args, weight, inputs, signed=signed, patience=0, expand=1.1)
    candidates = [(1 - i / 36) * 1.1 * (16 / 15 if signed else 1) for i in range(24)]
    _, errors = brute_force(args, weight, local, candidates, signed)
    qparams = found.get_qparams()
    d = (fake_quantize(weight, qparams["scale"], qparams["zero_point"], args) - weight).double()
    own = sum_per_scale(d * (d @ local), args)
    assert own.shape == qparams["scale"].shape
    torch.testing.assert_close(own, errors.amin(0), rtol=1e-4, atol=0)


def test_many_parts_and_rows_are_measured_as_one(weight, inputs):
    """Scales that span several tiles of the search, and late candidates that patience excludes."""
    tall = weight.repeat(900, 1) * torch.rand(900 * 12, 1)
    found = observe("local_hessian", GROUP, tall, inputs, patience=1)
    some = observe("local_hessian", GROUP, tall[5000:5003], inputs, patience=0)
    stop = observe("local_hessian", GROUP, tall, inputs, patience=0)
    assert torch.equal(stop.get_min_max()[1][5000:5003], some.get_min_max()[1])
    assert (lost(found, tall, inputs).sum() >= lost(stop, tall, inputs).sum() * 0.999).all()


@pytest.mark.parametrize("args", [GROUP, BLOCK, NVFP4], ids=["group", "block", "NVFP4"])
@pytest.mark.parametrize("signed", [False, True])
def test_the_more_of_the_inputs_is_known_the_less_is_lost(args, signed, weight, inputs):
    kwargs = {"signed": True} if signed and args is not NVFP4 else {}
    names = ["memoryless_minmax", "imatrix_mse", "local_hessian", "hessian"]
    observers = [make(name, args, **kwargs) for name in names]
    for observer in observers:
        if observer.needs_inputs:
            observer.observe_inputs(inputs)
        observer(weight)
    of_each = [lost(observer, weight, inputs).sum().item() for observer in observers]
    assert of_each == sorted(of_each, reverse=True)
    assert of_each[-1] < 0.9 * of_each[0]


def test_more_sweeps_lose_less_and_rows_are_chosen_apart(weight, inputs):
    by_sweeps = [
        lost(observe("hessian", GROUP, weight, inputs, sweeps=n, damping=0.0), weight, inputs) for n in (1, 2, 6)
    ]
    assert (by_sweeps[1] <= by_sweeps[0] * (1 + 1e-4)).all()
    assert (by_sweeps[2] <= by_sweeps[1] * (1 + 1e-4)).all()
    whole, rows = (observe("hessian", GROUP, part, inputs) for part in (weight, weight[3:5]))
    assert torch.equal(whole.get_min_max()[1][3:5], rows.get_min_max()[1])


@pytest.mark.parametrize("args", [CHANNEL, TENSOR], ids=["channel", "tensor"])
def test_a_later_sweep_takes_the_best_range_around_the_chosen_one(args, weight, inputs):
    first, second, third = (observe("hessian", args, weight, inputs, sweeps=n, damping=0.0) for n in (1, 2, 3))
    for before, after, gap in ((first, second, 1 / 36), (second, third, 1 / 72)):
        found, ends, losses = lost(after, weight, inputs), before.get_min_max(), []
        for step in range(-12, 13):
            before.min_vals, before.max_vals = (end * (1 + step * gap) for end in ends)
            losses.append(lost(before, weight, inputs))
        each = [loss.sum(0, keepdim=True) if args is TENSOR else loss for loss in (torch.stack(losses).T, found)]
        torch.testing.assert_close(each[1], each[0].amin(-1), rtol=1e-4, atol=0)


@each
def test_nvfp4_has_ranges_wider_than_the_values_and_a_global_scale(name, weight, inputs):
    observer = observe(name, NVFP4, weight, inputs)
    plain = make("memoryless_minmax", NVFP4)(weight)
    assert (observer.get_min_max()[1] > plain.get_min_max()[1] * 1.2).any()
    assert observer.get_global_scale().shape == (1,)
    assert lost(observer, weight, inputs).sum() < 0.9 * lost(plain, weight, inputs).sum()


def test_columns_without_inputs_lose_least_by_themselves(weight, inputs):
    inputs[..., 32:48] = 0
    found = observe("local_hessian", NVFP4, weight, inputs).get_min_max()[1]
    alone = make("local_hessian", NVFP4, strict=False)(weight).get_min_max()[1]
    assert torch.equal(found[:, 2], alone[:, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each
def test_ranges_are_in_the_dtype_of_the_weight(name, dtype, weight, inputs):
    low, high = observe(name, GROUP, weight.to(dtype), inputs).get_min_max()
    assert (low.dtype, high.dtype) == (dtype, dtype)


# ---------------------------------------------------------------------- what is refused


@each
def test_without_inputs_it_is_an_error_or_every_column_counts_alike(name, weight):
    with pytest.raises(CalibrationError, match=r"saw no inputs.*strict=False"):
        make(name)(weight)
    found = make(name, strict=False, expand=1.0, maxshrink=0.5, grid=20)(weight)
    expected = make("memoryless_mse", norm=2.0, maxshrink=0.55, grid=20, patience=100)(weight)
    assert torch.equal(torch.stack(found.get_min_max()), torch.stack(expected.get_min_max()))


@each
@pytest.mark.parametrize("channels", [16, 144, 176])
def test_inputs_of_another_width_are_an_error(name, channels, weight):
    with pytest.raises(CalibrationError, match=rf"inputs of {channels} channels, a weight of shape \(12, 160\)"):
        observe(name, GROUP, weight, torch.ones(3, channels))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("local_hessian", {"norm": 2.4}),
        ("local_hessian", {"sweeps": 2}),
        ("local_hessian", {"expand": 0.5}),
        ("hessian", {"patience": 5}),
        ("hessian", {"sweeps": 0}),
        ("hessian", {"damping": -0.1}),
        ("hessian", {"damping": float("nan")}),
    ],
)
def test_hyperparameters_out_of_range_are_refused(name, wrong):
    with pytest.raises(CalibrationError, match=next(iter(wrong))):
        make(name, **wrong)


@each
def test_only_weights_are_observed(name):
    with pytest.raises(CalibrationError, match="base name 'input'"):
        Observer.load_from_registry(name, base_name="input", args=QuantizationArgs())


@each
def test_a_nan_in_the_inputs_is_found(name, weight):
    observer = observe(name, GROUP, weight, torch.full((1, 160), torch.nan))
    assert "input_hessian not finite" in observer.nonfinite_statistics()


# ---------------------------------------------------------------------- in a session


@each
def test_modules_that_read_one_tensor_multiply_it_once(name, tiny_llama, batches):
    model = tiny_llama()
    scheme = {"weights": {"num_bits": 4, "group_size": 16, "observer": name}}
    with CalibrationSession(model, scheme, ignore="lm_head") as session:
        model(**batches[0])
    assert session.result.measurements == 4 * model.config.num_hidden_layers  # q/k/v, o, gate/up, down
    observers = {key[0].rpartition(".")[2]: o for key, o in session.observers.items() if ".0." in key[0]}
    assert torch.equal(observers["q_proj"].input_hessian, observers["v_proj"].input_hessian)


@each
def test_masked_tokens_do_not_count(name):
    scheme = {"weights": {"num_bits": 4, "group_size": 16, "observer": name}}
    x, model = torch.randn(2, 6, 32), nn.Sequential(nn.Linear(32, 8))
    with CalibrationSession(model, scheme) as session:
        session.mask_tokens(torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]))
        model(x)
    seen = make(name)
    seen.observe_inputs(torch.cat([x[0, :4], x[1, :2]]))
    torch.testing.assert_close(session.observers["0", "weight"].input_hessian, seen.input_hessian)
    assert session.observers["0", "weight"].input_count.item() == 6


@pytest.mark.slow_but_first
@each
@settings(max_examples=25)
@given(pair=two_tensors())
def test_without_inputs_the_range_is_that_of_any_last_tensor_times_one_factor(name, pair):
    observer = make(name, QuantizationArgs(num_bits=8), strict=False)
    assert range_of(observer, *pair).is_scaled(pair[1], 0.36, 1.8)
