"""The forward that trains through fake quantization, against compressed-tensors' own and against float gradients."""

import copy
import gc
import socket

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_obs import CalibrationSession, quantized
from lightning_obs.model.quantized_forward import LearnedScale, Switch, quantize_training_forward, set_learned_scale

INT8 = {"num_bits": 8, "strategy": "tensor"}
SCHEMES = ["INT8_STATIC", "W8A8", "FP8", "FP8_DYNAMIC"]


class Everything(nn.Module):
    """An Embedding, convolutions both ways, transformers' Conv1D, a Linear, a Linear subclass with its own forward."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embedding = nn.Embedding(10, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(16, 8, 2, stride=2)
        self.conv1d = Conv1D(32, 8)
        self.linear = nn.Linear(32, 16)
        self.own = Doubling(16, 4)

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        x = self.up(self.conv(x).relu()).transpose(1, 2).contiguous()
        return self.own(self.linear(self.conv1d(x).relu()).relu())


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


TYPES = ["Conv1d", "ConvTranspose1d", "Conv1D", "Linear"]
EVERYTHING = {
    "config_groups": {
        "embedding": {"targets": ["Embedding"], "weights": {"num_bits": 4, "strategy": "channel"}},
        "others": {
            "targets": TYPES,
            "weights": {"num_bits": 4, "strategy": "channel"},
            "input_activations": {**INT8, "symmetric": False},
            "output_activations": INT8,
        },
    }
}


def tokens():
    return torch.randint(0, 10, (3, 7), generator=torch.Generator().manual_seed(1))


def calibrated(model, scheme, x, **options):
    with CalibrationSession(model, scheme, **options) as session:
        if session.needs_data:
            model(x)
    return model


def train_quantized(model, switch=None):
    """Let every calibrated module of the model train through fake quantization; returns the undo of all."""
    switch = switch or Switch()
    modules = [m for m in model.modules() if hasattr(m, "quantization_scheme") or hasattr(m, "calibrated_scheme")]
    undos = [
        quantize_training_forward(m, switch, output=getattr(_scheme(m), "output_activations", None) is not None)
        for m in modules
    ]
    return lambda: [undo() for undo in undos]


def _scheme(module):
    return getattr(module, "quantization_scheme", None) or module.calibrated_scheme


@pytest.fixture
def everything():
    return calibrated(Everything(), EVERYTHING, tokens())


# ---------------------------------------------------------------------- numbers


def test_every_kind_of_module_gives_the_numbers_of_the_quantized_model(everything):
    with quantized(everything), torch.no_grad():
        expected = everything(tokens())
    train_quantized(everything)
    assert torch.equal(everything(tokens()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_linear_model_gives_the_numbers_of_the_quantized_model(scheme, dtype, mlp):
    x = torch.randn(5, 16, dtype=dtype)
    calibrated(mlp.to(dtype), scheme, x)
    with quantized(mlp), torch.no_grad():
        expected = mlp(x)
    train_quantized(mlp)
    assert torch.equal(mlp(x), expected)


def test_under_autocast_it_gives_the_numbers_of_the_quantized_model(everything):
    with quantized(everything), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = everything(tokens())
    train_quantized(everything)
    with torch.autocast("cpu", torch.bfloat16):
        out = everything(tokens())
    assert torch.equal(out, expected)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in everything.parameters())


def test_quantized_inside_it_does_not_quantize_twice(everything):
    train_quantized(everything)
    expected = everything(tokens())
    with quantized(everything), torch.no_grad():
        assert torch.equal(everything(tokens()), expected)
    assert torch.equal(everything(tokens()), expected)


# ---------------------------------------------------------------------- gradients


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


def test_switched_off_it_is_the_float_model(everything):
    switch = Switch(weights=False, activations=False)
    expected = everything(tokens())
    train_quantized(everything, switch)
    assert torch.equal(everything(tokens()), expected)


@pytest.mark.parametrize("part", ["weights", "activations"])
def test_weights_or_activations_alone_can_be_quantized(part, mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    train_quantized(mlp, Switch(weights=part == "weights", activations=part == "activations"))
    with torch.no_grad():
        step = mlp.fc1.weight_scale if part == "weights" else mlp.fc1.input_scale
        value = mlp.fc1.weight if part == "weights" else x
        rounded = (value / step).round().clamp(-128, 127) * step
        expected = nn.functional.linear(
            x if part == "weights" else rounded, rounded if part == "weights" else mlp.fc1.weight, mlp.fc1.bias
        )
    assert torch.equal(mlp.fc1(x), expected)


def test_a_module_without_ranges_passes_unquantized(mlp):
    x = torch.randn(5, 16)
    expected = mlp(x)
    undo = quantize_training_forward(mlp.fc1, Switch())
    assert torch.equal(mlp(x), expected)
    undo()


def test_a_learned_scale_gets_a_gradient_and_starts_at_the_calibrated_value(mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    train_quantized(mlp)
    before = mlp(x)
    factors = {}
    for base_name in ("weight", "input"):
        scale = getattr(mlp.fc1, f"{base_name}_scale")
        factors[base_name] = nn.Parameter(torch.zeros_like(scale))
        set_learned_scale(mlp.fc1, base_name, LearnedScale(scale, factors[base_name]))
    out = mlp(x)
    assert torch.equal(out, before)
    out.square().sum().backward()
    assert all(f.grad.any() for f in factors.values())
    assert all(p.grad.any() for p in mlp.parameters())


# ---------------------------------------------------------------------- nothing is left, nothing is registered


def test_state_dict_parameters_and_buffers_are_what_they_were(everything):
    keys = list(everything.state_dict())
    names = [n for n, _ in (*everything.named_parameters(), *everything.named_buffers())]
    train_quantized(everything)
    everything(tokens()).sum().backward()
    assert list(everything.state_dict()) == keys
    assert [n for n, _ in (*everything.named_parameters(), *everything.named_buffers())] == names
    Everything().load_state_dict(everything.state_dict(), strict=True)


def test_undo_restores_every_forward(everything):
    expected = everything(tokens())
    attributes = {name: set(vars(m)) for name, m in everything.named_modules()}
    undo = train_quantized(everything)
    assert not torch.equal(everything(tokens()), expected)
    undo()
    assert torch.equal(everything(tokens()), expected)
    assert {name: set(vars(m)) for name, m in everything.named_modules()} == attributes
    assert not any(m._forward_hooks for m in everything.modules())


def test_a_forward_of_the_users_is_run_and_is_back_afterwards(mlp):
    x = torch.randn(5, 16)
    calibrated(mlp, "INT8_STATIC", x)
    plain = mlp.fc1.forward

    def own(value):
        return plain(value) + 1

    with quantized(mlp), torch.no_grad():
        expected = mlp.fc1(x) + 1
    mlp.fc1.forward = own
    undo = quantize_training_forward(mlp.fc1, Switch())
    assert torch.equal(mlp.fc1(x), expected)
    undo()
    assert mlp.fc1.forward is own


def test_a_copy_runs_with_its_own_weights(everything):
    train_quantized(everything)
    twin = copy.deepcopy(everything)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not twin(tokens()).any()
    assert everything(tokens()).any()


def test_an_exception_in_the_forward_gives_the_parameter_back(everything):
    train_quantized(everything)
    with pytest.raises(RuntimeError):
        everything.conv(torch.randn(2, 3, 4))
    assert "weight" not in vars(everything.conv)
    assert everything.conv.weight is everything.conv._parameters["weight"]


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
    checkpoint(mlp.fc1, torch.ones(2, 16, requires_grad=True), use_reentrant=False).sum().backward()
    assert session._hooks.measurements == 1
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


def quiet(test):
    """What torch.compile says once about compressed-tensors and about any autograd function."""
    test = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")(test)
    return pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")(test)


@quiet
@pytest.mark.parametrize("scheme", ["INT8_STATIC", "W8A8", "W4A16"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_linear_model_compiles_without_a_graph_break(scheme, learned):
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    x = torch.randn(4, 128)
    calibrated(model, scheme, x)
    train_quantized(model)
    if learned:
        factor = nn.Parameter(torch.zeros_like(model[0].weight_scale))
        set_learned_scale(model[0], "weight", LearnedScale(model[0].weight_scale, factor))
    expected = model(x)
    expected.square().sum().backward()
    gradient, model[0].weight.grad = model[0].weight.grad, None
    torch.compiler.reset()
    out = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)(x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model[0].weight.grad, gradient, rtol=1e-5, atol=1e-5)


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


def test_the_forward_holds_no_reference_to_a_deleted_model(mlp):
    import weakref

    calibrated(mlp, "INT8_STATIC", torch.randn(5, 16))
    model = copy.deepcopy(mlp)
    train_quantized(model)()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------------- several ranks


def _train_a_rank(rank, world_size, port, sharded, queue):
    """Two steps on this rank's rows of the batch; the gradients of the whole batch go to the queue."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    model = _calibrated_everything()
    if sharded:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
        for module in model.children():
            fully_shard(module, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    else:
        run = nn.parallel.DistributedDataParallel(model)
    train_quantized(model)
    grads = _two_steps(run, model, tokens().repeat(2, 1).chunk(world_size)[rank])
    if rank == 0:
        queue.put(grads)
    dist.barrier()
    dist.destroy_process_group()


def _calibrated_everything():
    torch.manual_seed(0)
    return calibrated(Everything(), EVERYTHING, tokens())


def _two_steps(run, model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        run(batch).square().mean().backward()
        optimizer.step()
    full = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return {name: grad.numpy() for name, grad in full.items()}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_ranks_have_the_gradients_of_one(sharded):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=_train_a_rank, args=(rank, 2, port, sharded, queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    model = _calibrated_everything()
    train_quantized(model)
    expected = _two_steps(model, model, tokens().repeat(2, 1))
    for rank in ranks:
        rank.join(120)
        if rank.exitcode is None:
            rank.kill()
        assert rank.exitcode == 0
    found = queue.get()
    for name, grad in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), torch.from_numpy(grad), rtol=1e-4, atol=1e-6)
