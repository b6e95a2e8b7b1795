"""Training through the quantized forward: gradients, checkpointing, compiled graphs, pruning, ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_obs import CalibrationSession
from lightning_obs.forward.quantized_forward import set_learned_scale
from lightning_obs.forward.quantized_module import Switch
from tests.forward.quantized_modules import (
    INT8,
    as_compressed_tensors_runs,
    calibrated,
    calibrated_everything,
    tokens,
    train_quantized,
    two_layers,
)
from tests.numerics.fake_quantize_cases import quiet
from tests.support.rank_processes import run_ranks


def test_no_parameter_is_without_a_gradient(everything):
    train_quantized(everything)
    everything(tokens()).square().sum().backward()
    assert [name for name, p in everything.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_gradient_is_that_of_the_quantized_weight_where_nothing_is_clipped():
    """Straight-through: dL/dW at the quantized point, computed by torch itself with the quantized weight as leaf."""
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    scheme = {"targets": ["Conv2d"], "weights": {"num_bits": 8, "strategy": "channel"}}
    train_quantized(calibrated(nn.Sequential(conv), scheme, x))
    conv(x).square().sum().backward()
    with torch.no_grad():
        matrix = conv.weight.flatten(1)
        step = conv.weight_scale
        leaf = ((matrix / step).round().clamp(-128, 127) * step).view_as(conv.weight)
    leaf.requires_grad_()
    nn.functional.conv2d(x, leaf, conv.bias).square().sum().backward()
    assert torch.equal(conv.weight.grad, leaf.grad)


def test_a_learned_scale_gets_a_gradient_and_starts_at_the_calibrated_value(mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    train_quantized(mlp)
    before = mlp(x)
    factors = {}
    for base_name in ("weight", "input"):
        scale = getattr(mlp.fc1, f"{base_name}_scale")
        factors[base_name] = nn.Parameter(torch.zeros_like(scale))
        set_learned_scale(mlp.fc1, base_name, scale, factors[base_name])
    out = mlp(x)
    assert torch.equal(out, before)
    out.square().sum().backward()
    assert all(f.grad.any() for f in factors.values())
    assert all(p.grad.any() for p in mlp.parameters())


@pytest.mark.parametrize(
    "scheme", ["W8A8", "INT8_STATIC", "FP8", "FP8_DYNAMIC", "W4A16", "W4A16_ASYM", "W4A8", "Q4_0", "NVFP4", "MXFP4"]
)
def test_almost_every_weight_of_a_model_gets_a_gradient(scheme):
    x = torch.randn(2, 3, 128)
    model = calibrated(two_layers(), scheme, x, engines="unchecked")
    train_quantized(model)
    model(x).square().mean().backward()
    assert all((parameter.grad != 0).double().mean() > 0.95 for parameter in model.parameters())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", ["W8A8", "NVFP4"])
def test_training_reaches_at_most_half_the_loss_of_compressed_tensors_own_wrapper(scheme):
    x = torch.randn(64, 1, 128)
    y = torch.sin(3 * x @ torch.randn(128, 128) / 128**0.5)
    model = calibrated(two_layers(), scheme, x, engines="unchecked")
    theirs = as_compressed_tensors_runs(model)
    train_quantized(model)
    losses = []
    for run in (theirs, model):
        optimizer = torch.optim.Adam(run.parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.mse_loss(run(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0] / 2


def test_under_autocast_every_parameter_gets_a_gradient_of_its_own_dtype(everything):
    train_quantized(everything)
    with torch.autocast("cpu", torch.bfloat16):
        out = everything(tokens())
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in everything.parameters())


# ---------------------------------------------------------------------- what else people do with a forward


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(reentrant, everything):
    train_quantized(everything)
    everything(tokens()).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in everything.named_parameters()}
    everything.zero_grad()
    x = everything.embedding(tokens()).transpose(1, 2)
    x = checkpoint(lambda v: everything.up(everything.conv(v).relu()), x, use_reentrant=reentrant)
    x = x.transpose(1, 2).contiguous()
    x = checkpoint(lambda v: everything.linear(everything.conv1d(v).relu()), x, use_reentrant=reentrant)
    everything.own(x.relu()).square().sum().backward()
    for name, p in everything.named_parameters():
        assert torch.equal(p.grad, expected[name]), name
    assert not any("weight" in vars(m) for m in everything.modules())


def test_an_observer_does_not_see_what_activation_checkpointing_computes_again(mlp):
    session = CalibrationSession(mlp, {"targets": ["Linear"], "input_activations": INT8}, observers={"input": "minmax"})
    session.attach()
    output = checkpoint(mlp.fc1, torch.ones(2, 16, requires_grad=True), use_reentrant=False)
    seen = session.observation.calls.measurements
    output.sum().backward()
    assert session.observation.calls.measurements == seen > 0
    session.detach()


def test_an_observer_of_outputs_sees_them_unquantized(mlp):
    scheme = {"targets": ["re:fc2"], "output_activations": INT8}
    x = torch.randn(5, 16)
    session = CalibrationSession(mlp, scheme)
    with session:
        mlp(x)
    train_quantized(mlp)
    session.attach()
    wide = mlp.fc2.forward(mlp.act(mlp.fc1(10 * x)))  # forward: without the hook that quantizes
    mlp(10 * x)
    session.finalize()
    torch.testing.assert_close(mlp.fc2.output_scale, wide.abs().amax().reshape(1) / 127.5)


@pytest.mark.slow_but_first
@quiet
@pytest.mark.parametrize(
    ("scheme", "learned"), [("INT8_STATIC", False), ("INT8_STATIC", True), ("W8A8", False), ("W4A16", True)]
)
def test_a_linear_model_compiles_without_a_graph_break(scheme, learned):
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    x = torch.randn(4, 128)
    calibrated(model, scheme, x)
    train_quantized(model)
    if learned:
        factor = nn.Parameter(torch.zeros_like(model[0].weight_scale))
        set_learned_scale(model[0], "weight", model[0].weight_scale, factor)
    expected = model(x)
    expected.square().sum().backward()
    gradient, model[0].weight.grad = model[0].weight.grad, None
    torch.compiler.reset()
    out = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)(x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model[0].weight.grad, gradient, rtol=1e-5, atol=1e-5)


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["FP8", "NVFP4", "MXFP4"])
def test_a_model_of_floating_point_formats_compiles_without_a_graph_break(scheme):
    x = torch.randn(2, 3, 128)
    model = calibrated(two_layers(), scheme, x, engines="unchecked")
    train_quantized(model)
    torch.compiler.reset()
    grads = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(x).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@quiet
def test_new_ranges_and_a_switch_reach_a_compiled_model(mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    switch = Switch()
    train_quantized(mlp, switch)
    torch.compiler.reset()
    compiled = torch.compile(mlp, backend="eager")
    compiled(x)
    mlp.fc1.input_scale = mlp.fc1.input_scale * 7
    assert torch.equal(compiled(x), mlp(x))
    switch.weights = switch.activations = False
    assert torch.equal(compiled(x), mlp(x))


def test_a_pruned_weight_is_quantized_as_it_is_masked(mlp):
    x = torch.randn(5, 16)
    prune.l1_unstructured(mlp.fc1, "weight", amount=0.5)
    calibrated(mlp, "INT8_STATIC", x)
    with torch.no_grad():
        step = mlp.fc1.weight_scale
        masked = mlp.fc1.weight_orig * mlp.fc1.weight_mask
        rounded = (masked / step).round().clamp(-128, 127) * step
    train_quantized(mlp, Switch(activations=False))
    mlp(x).sum().backward()
    assert torch.equal(mlp.fc1(x), nn.functional.linear(x, rounded, mlp.fc1.bias))
    assert not mlp.fc1.weight_orig.grad[mlp.fc1.weight_mask == 0].any()
    assert mlp.fc1.weight_orig.grad.any()


def test_a_pruned_convolution_keeps_its_masked_weight(cnn):
    image = torch.randn(2, 3, 8, 8)
    prune.l1_unstructured(cnn.conv, "weight", amount=0.5)
    calibrated(cnn, {"targets": ["Conv2d"], "weights": {"num_bits": 8, "strategy": "channel"}}, image)
    train_quantized(cnn)
    cnn(image).sum().backward()
    assert torch.equal(cnn.conv.weight, cnn.conv.weight_orig * cnn.conv.weight_mask)
    assert cnn.conv.weight_orig.grad.any()


# ---------------------------------------------------------------------- several ranks


def _gradients_of_a_rank(rank, sharded):
    """Two steps on this rank's rows of the batch; the gradients of the whole batch."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = calibrated_everything()
    if sharded:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for module in model.children():
            fully_shard(module, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    else:
        run = nn.parallel.DistributedDataParallel(model)
    train_quantized(model)
    return _two_steps(run, model, tokens().repeat(2, 1).chunk(dist.get_world_size())[rank])


def _two_steps(run, model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        run(batch).square().mean().backward()
        optimizer.step()
    full = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return full


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_ranks_have_the_gradients_of_one(sharded):
    model = calibrated_everything()
    train_quantized(model)
    expected = _two_steps(model, model, tokens().repeat(2, 1))
    for found in run_ranks(_gradients_of_a_rank, 2, sharded):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)
