"""Rounding after calibration: ``quantized()``, a checkpoint and a resumed run have the numbers that were chosen."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    QuantizationAwareTraining,
    export_checkpoint,
    export_onnx,
    load_checkpoint,
    quantized,
)
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.layer_errors import measure_layer_errors
from tests.calibration.expert_blocks import INDEX, linear_block
from tests.support.rank_processes import run_ranks

NEAREST = {"weight": "memoryless_minmax"}
OPTIONS = {"observers": {"weight": "hessian"}, "rounding": "gptq"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 16}
SCHEMES = {
    "int4": {"weights": GROUPS},
    "int4, zero points": {"weights": GROUPS | {"symmetric": False}},
    "int4, signed": {"weights": GROUPS | {"observer_kwargs": {"signed": True}}},
    "int8 channels": {"weights": {"num_bits": 8, "strategy": "channel"}},
    "fp8 tensor": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    "int8 blocks": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [8, 16]}},
    "nvfp4": "NVFP4A16",
}


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32)).to(dtype).requires_grad_(False)


def data(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Correlated whole numbers: their products add up to the same sums in any order."""
    torch.manual_seed(1)
    return (torch.randint(-2, 3, (256, 16)) @ torch.randint(-1, 2, (16, 64))).to(dtype)


def calibrated(model: nn.Module, scheme, **options) -> CalibrationSession:
    with CalibrationSession(model, scheme, **{**OPTIONS, **options}) as session:
        model(data(next(model.parameters()).dtype))
    return session


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_quantized_checkpoint_and_resumed_run_have_the_rounded_numbers(scheme, tmp_path):
    model, inputs = net(), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrated(model, scheme, rounding=None)
    with quantized(model):
        nearest = model(inputs)
    session = calibrated(model, scheme)
    with quantized(model):
        rounded = model(inputs)
    expected = net()(inputs)
    assert (rounded - expected).float().norm() < (nearest - expected).float().norm()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    export_checkpoint(model, tmp_path / "out")
    loaded = load_checkpoint(net(), tmp_path / "out")
    assert torch.equal((net() if loaded is None else loaded)(inputs), rounded)

    resumed = net()
    CalibrationSession(resumed, scheme, **OPTIONS).load_state_dict(session.state_dict())
    with quantized(resumed):
        assert torch.equal(resumed(inputs), rounded)


def test_a_calibration_without_rounding_forgets_it():
    model = net()
    session = calibrated(model, SCHEMES["int4"])
    assert model[0].weight_rounded.dtype == torch.int8
    assert model[0].weight_rounded.shape == model[0].weight.shape
    assert not any(name.endswith("rounded") for name in session.result.qparams)
    assert session.result.scheme.endswith(" + gptq")
    calibrated(model, SCHEMES["int4"], rounding=None)
    assert not hasattr(model[0], "weight_rounded")


def test_the_error_of_a_weight_is_that_of_the_rounded_one():
    model = net(torch.float32)
    calibrated(model, SCHEMES["int4"])
    weight, steps = model[0].weight, model[0].weight_scale.unsqueeze(-1)
    rounded = (model[0].weight_rounded.float().unflatten(1, (-1, 16)) * steps).flatten(1)
    expected = 10 * torch.log10(weight.square().sum() / (rounded - weight).square().sum())
    errors = {error.name: error for error in measure_layer_errors(model, [data(torch.float32)])}
    assert errors["0"].weight.sqnr == pytest.approx(expected.item(), abs=0.01)


def test_options_are_checked_and_reach_the_rounding():
    model, orders = net(torch.float32), []
    for order in (True, False):
        calibrated(model, SCHEMES["int4"], rounding={"name": "gptq", "act_order": order, "damping": 0.05})
        orders.append(model[0].weight_rounded)
    assert not torch.equal(*orders)
    for wrong in ("gtpq", {"act_ordr": True}, {"damping": -1}, {"act_order": 3}, 4):
        with pytest.raises(CalibrationError, match=r"rounding\. Got"):
            CalibrationSession(net(), "W4A16", rounding=wrong)


@pytest.mark.parametrize("observer", ["memoryless_minmax", "imatrix_mse", "local_hessian"])
def test_scales_can_be_those_of_any_observer(observer):
    model, other = net(torch.float32), net(torch.float32)
    session = calibrated(model, SCHEMES["int4"], observers={"weight": observer})
    assert session.needs_data
    with CalibrationSession(other, SCHEMES["int4"], observers={"weight": observer}) as plain:
        if plain.needs_data:
            other(data(torch.float32))
    assert torch.equal(model[0].weight_scale, other[0].weight_scale)
    inputs = data(torch.float32)
    expected = net(torch.float32)[0](inputs)
    with quantized(model), quantized(other):
        lost, nearest = ((each[0](inputs) - expected).norm() for each in (model, other))
    assert lost < 0.9 * nearest


def test_a_scheme_says_it_of_each_group(tmp_path):
    rounded = {"weights": {**GROUPS, "observer": "hessian", "observer_kwargs": {"signed": True, "rounding": "gptq"}}}
    scheme = {"rounded": {"targets": ["0"], **rounded}, "nearest": {"targets": ["2"], "weights": GROUPS}}
    model, alone, inputs = net(), net(), data()
    session = calibrated(model, scheme, observers=None, rounding=None)
    assert hasattr(model[0], "weight_rounded")
    assert not hasattr(model[2], "weight_rounded")
    assert session.observers["0", "weight"].signed
    assert session.label.endswith(" + gptq")
    calibrated(alone, rounded, observers=None, rounding=None)
    assert torch.equal(model[0].weight_rounded, alone[0].weight_rounded)
    with quantized(model):
        expected = model(inputs)
    assert torch.equal(load_checkpoint(net(), export_checkpoint(model, tmp_path / "out"))(inputs), expected)

    state = session.state_dict()
    CalibrationSession(net(), scheme).load_state_dict(state)
    with pytest.raises(CalibrationError, match=r"another scheme.*rounded.weights.observer: 'hessian' -> 'memoryless"):
        CalibrationSession(net(), scheme, observers=NEAREST).load_state_dict(state)
    with pytest.raises(CalibrationError, match=r"rounding: .*act_order"):
        CalibrationSession(net(), scheme, rounding={"act_order": False}).load_state_dict(state)


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(CalibrationError, match=r"only weights are rounded\. Got rounding for input"):
        CalibrationSession(net(), "INT8_STATIC", observers={"input": {"name": "minmax", "rounding": "gptq"}})
    only_inputs = {"input_activations": {"num_bits": 8, "strategy": "tensor"}}
    with pytest.raises(CalibrationError, match=r"the scheme quantizes no weights\. Got rounding='gptq'"):
        CalibrationSession(net(), only_inputs, rounding="gptq")


def test_without_data_it_is_an_error():
    session = CalibrationSession(net(), SCHEMES["int4"], observers={"weight": "memoryless_mse"}, rounding="gptq")
    session.attach()
    session.detach()
    with pytest.raises(CalibrationError, match=r"saw no data"):
        session.finalize()


def test_training_is_refused():
    for options in (OPTIONS, {"observers": {"weight": {"name": "hessian", "rounding": "gptq"}}}):
        with pytest.raises(CalibrationError, match=r"training the weights undoes their rounding.*CalibrationCallback"):
            QuantizationAwareTraining("W4A16", **options)


def test_a_module_without_data_keeps_the_nearest_numbers():
    model = net(torch.float32)
    lenient = {"weight": {"name": "hessian", "strict": False}}
    with (
        pytest.warns(CalibrationWarning, match=r"rounded to nearest: 2"),
        CalibrationSession(model, SCHEMES["int4"], observers=lenient, rounding="gptq"),
    ):
        model[0](data(torch.float32))
    assert hasattr(model[0], "weight_rounded")
    assert not hasattr(model[2], "weight_rounded")


def test_an_onnx_file_has_the_rounded_numbers(tmp_path):
    onnx = pytest.importorskip("onnx")
    model = net(torch.float32)
    calibrated(model, SCHEMES["int8 channels"])
    graph = onnx.load(export_onnx(model.eval(), tmp_path / "m.onnx", data(torch.float32)[:2])).graph
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    assert (stored["0.weight_codes"] == model[0].weight_rounded.numpy()).all()
    nearest = (model[0].weight / model[0].weight_scale).round()
    assert (model[0].weight_rounded != nearest).any()


@pytest.mark.filterwarnings("ignore:no token reached these modules")
def test_experts_without_tokens_keep_the_nearest_numbers(x):
    torch.manual_seed(0)
    block = linear_block()
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}}
    with (
        pytest.warns(CalibrationWarning, match=r"rounded to nearest: .*experts\.3\."),
        CalibrationSession(block, scheme, on_missing="siblings", observers=NEAREST, rounding="gptq"),
    ):
        block(x, INDEX)
    have = {name for name, module in block.named_modules() if hasattr(module, "weight_rounded")}
    assert not any(".3." in name for name in have)
    assert any(".0." in name for name in have)


# ---------------------------------------------------------------------- ranks


def _on_ranks(rank: int, scheme, sharded: bool, options=OPTIONS):
    model, collectives = net(torch.float32), Collectives.of_group()
    if sharded:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    with CalibrationSession(model, scheme, collectives=collectives, **options):
        model(data(torch.float32)[rank::2])
    return {n: m.weight_rounded.float() for n, m in model.named_modules() if hasattr(m, "weight_rounded")}


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "FSDP2"])
@pytest.mark.parametrize("scheme", ["int4", "fp8 tensor"])
def test_ranks_round_as_one_device_does(scheme, sharded):
    alone = net(torch.float32)
    calibrated(alone, SCHEMES[scheme])
    for found in run_ranks(_on_ranks, 2, SCHEMES[scheme], sharded):
        assert found.keys() == {"0", "2"}
        assert torch.equal(found["0"], alone[0].weight_rounded.float())
        # what the second layer reads is not whole numbers: sums differ in their last bits
        assert (found["2"] == alone[2].weight_rounded.float()).float().mean() > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "FSDP2"])
def test_ranks_round_the_groups_whose_scheme_says_so(sharded):
    by_hessian = {"observer": "local_hessian", "observer_kwargs": {"signed": True, "rounding": "gptq"}}
    scheme = {
        "rounded": {"targets": ["0"], "weights": GROUPS | by_hessian},
        "nearest": {"targets": ["2"], "weights": GROUPS},
    }
    alone = net(torch.float32)
    calibrated(alone, scheme, observers=None, rounding=None)
    for found in run_ranks(_on_ranks, 2, scheme, sharded, {}):
        assert found.keys() == {"0"}
        assert torch.equal(found["0"], alone[0].weight_rounded.float())
