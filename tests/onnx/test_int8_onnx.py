"""INT8_ONNX: outputs are quantized where an engine quantizes them, so that it computes with integers throughout."""

import copy
import math
import sys
from collections import Counter

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    QuantizationAwareTraining,
    export_checkpoint,
    export_onnx,
    load_checkpoint,
    measure_onnx,
    quantized,
    sensitivity,
)
from lightning_obs.calibration.output_readers import OutputReaders
from lightning_obs.files.sealed import sealed
from lightning_obs.model.module_qparams import calibrated_modules, read_qparams
from lightning_obs.ranks.collectives import Collectives
from tests.support.lightning_package import L
from tests.support.rank_processes import run_ranks


class Block(nn.Module):
    """Two convolutions with batch norms; the input is added to the second one's output in place, as timm does."""

    def __init__(self, in_place):
        super().__init__()
        self.conv1, self.norm1, self.relu1 = convolution(16), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.conv2, self.norm2, self.relu2 = convolution(16), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.in_place = in_place

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        if self.in_place:
            y += x
        else:
            y = y + x
        return self.relu2(y)


def convolution(channels):
    return nn.Conv2d(channels, 16, 3, padding=1, bias=False)


class Residual(nn.Module):
    """One block adds in place, the other one does not."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(convolution(3), nn.BatchNorm2d(16), nn.ReLU6())
        self.blocks = nn.Sequential(Block(in_place=True), Block(in_place=False))
        self.head = nn.Linear(16, 4)

    def forward(self, image):
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


class Functional(nn.Module):
    """Activations and sums are functions: no module's output is theirs."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1, self.conv2 = convolution(3), nn.BatchNorm2d(16), convolution(16)
        self.head = nn.Linear(16, 4)

    def forward(self, image):
        x = F.relu(self.norm1(self.conv1(image)))
        return self.head(F.relu(x + self.conv2(x)).mean((2, 3)))


class Chain(nn.Module):
    """Convolutions with functions between them; ``gated``: another function than the ReLU reads the output, too."""

    def __init__(self, gated=False):
        super().__init__()
        self.conv1, self.norm1, self.conv2 = convolution(3), nn.BatchNorm2d(16), convolution(16)
        self.head = nn.Linear(16, 4)
        self.idle = nn.ReLU()  # never called
        self.gated = gated

    def forward(self, image):
        y = self.norm1(self.conv1(image))
        x = F.relu(y)
        if self.gated:
            x = x * torch.sigmoid(y)
        return self.head(F.relu(self.conv2(x), inplace=True).mean((2, 3)))


class FunctionalBlock(nn.Module):
    """A residual block of functions: no module's output is its activation, or its sum."""

    def __init__(self, in_place=False):
        super().__init__()
        self.conv1, self.norm1 = convolution(16), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = convolution(16), nn.BatchNorm2d(16)
        self.in_place = in_place

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.in_place:
            y += x
            return F.relu(y, inplace=True)
        return F.relu(y + x)


class Stage(nn.Module):
    """A block of the user's own that returns what the one in it returns."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


class FunctionalResidual(nn.Module):
    """One of the two blocks adds in place, the first one where ``first_in_place``."""

    def __init__(self, first_in_place=False):
        super().__init__()
        self.conv, self.norm = convolution(3), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(FunctionalBlock(first_in_place), Stage(FunctionalBlock(not first_in_place)))
        self.head = nn.Linear(16, 4)

    def forward(self, image):
        return self.head(self.blocks(F.relu(self.norm(self.conv(image)))).mean((2, 3)))


def calibrated(model, scheme="INT8_ONNX", **options):
    """The model in evaluation mode, and the session that has calibrated it under inference mode, as Lightning runs."""
    model.eval()
    torch.manual_seed(0)
    with CalibrationSession(model, scheme, **options) as session, torch.inference_mode():
        for _ in range(3):
            model(torch.randn(4, 3, 12, 12))
    return model, session


def quantized_outputs(model):
    return {name for name, module in calibrated_modules(model) if "output_scale" in read_qparams(module)}


def run(file, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = f"{file}.optimized"
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    [name] = [value.name for value in session.get_inputs()]
    [output] = session.run(None, {name: x.numpy()})
    graph = onnx.load(f"{file}.optimized", load_external_data=False).graph
    return torch.tensor(output), Counter(node.op_type for node in graph.node)


def test_every_convolution_sum_and_product_is_computed_with_integers(tmp_path):
    model, _ = calibrated(Residual())
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert (operations["QLinearConv"], operations["QLinearAdd"], operations["QGemm"]) == (5, 2, 1)
    assert not {"Conv", "FusedConv", "Add", "Gemm", "MatMul", "BatchNormalization"} & operations.keys()
    with quantized(model), torch.no_grad():
        expected = model(x)
    # onnxruntime rounds the biases of convolutions to integers (docs/reference/onnx.md)
    torch.testing.assert_close(output, expected, rtol=0, atol=2 * float(model.head.output_scale))


def test_an_output_is_quantized_behind_the_batch_norm_and_relu_that_read_it():
    model, session = calibrated(Residual())
    behind = {"stem.2", "blocks.0.relu1", "blocks.0.relu2", "blocks.1.relu1", "blocks.1.relu2"}
    assert quantized_outputs(model) == {*behind, "blocks.0.norm2", "blocks.1.norm2", "head"}
    assert "blocks.0.norm1" not in session.result.modules  # nothing of it is left to quantize


def test_functions_leave_the_output_of_the_module_before_them_quantized():
    model, _ = calibrated(Functional())
    assert quantized_outputs(model) == {"norm1", "conv2", "head"}


def test_a_relu_that_is_a_function_is_a_part_of_the_convolution(tmp_path):
    model, session = calibrated(Chain())
    assert quantized_outputs(model) == {"norm1", "conv2", "head"}
    for module in (model.norm1, model.conv2):
        assert module.output_zero_point == -128  # no level below zero
    assert torch.equal(model.conv2.input_scale, model.norm1.output_scale)
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert (operations["QLinearConv"], operations["QGemm"]) == (2, 1)
    assert not {"Conv", "FusedConv", "Relu", "Gemm"} & operations.keys()
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=2 * float(model.head.output_scale))
    later = CalibrationSession(Chain().eval(), "INT8_ONNX")
    later.load_state_dict(copy.deepcopy(session.state_dict()))
    assert later.qparams.keys() == session.qparams.keys()


@pytest.mark.parametrize("first_in_place", [True, False])
def test_a_sum_that_a_block_returns_is_quantized(first_in_place):
    model, session = calibrated(FunctionalResidual(first_in_place))
    norms = {"norm", "blocks.0.norm1", "blocks.0.norm2", "blocks.1.block.norm1", "blocks.1.block.norm2"}
    assert quantized_outputs(model) == {*norms, "blocks.0", "blocks.1.block", "head"}
    assert "blocks.1" not in session.result.modules


def test_a_sum_that_a_block_returns_is_computed_with_integers(tmp_path):
    model, session = calibrated(FunctionalResidual())
    assert torch.equal(model.blocks[1].block.conv1.input_scale, model.blocks[0].output_scale)
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert (operations["QLinearConv"], operations["QLinearAdd"], operations["QGemm"]) == (5, 2, 1)
    assert not {"Conv", "FusedConv", "Add", "Relu", "Gemm"} & operations.keys()
    with quantized(model), torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=2 * float(model.head.output_scale))
    resumed = FunctionalResidual().eval()
    resumed.load_state_dict(model.state_dict())
    CalibrationSession(resumed, "INT8_ONNX").load_state_dict(copy.deepcopy(session.state_dict()))
    export_checkpoint(model, tmp_path / "folder")
    loaded = load_checkpoint(FunctionalResidual().eval(), tmp_path / "folder")
    with torch.no_grad(), quantized(resumed):
        torch.testing.assert_close(loaded(x), expected, rtol=0, atol=0)
        torch.testing.assert_close(resumed(x), expected, rtol=0, atol=0)


def test_a_call_that_is_not_observed_does_not_change_which_outputs_are_quantized():
    model = FunctionalResidual().eval()
    with CalibrationSession(model, "INT8_ONNX") as session, torch.inference_mode():
        model(torch.randn(4, 3, 12, 12))
        with session.paused():
            model(torch.randn(4, 3, 12, 12))
    assert {"blocks.0", "blocks.1.block"} <= quantized_outputs(model)
    assert session.result.batches == 1


class NormAct(nn.BatchNorm2d):
    """A batch norm that activates, as timm has it: F.batch_norm, then two modules."""

    def __init__(self, act):
        super().__init__(16)
        self.drop, self.act = nn.Identity(), act()
        nn.init.uniform_(self.running_var, 0.5, 1.5)

    def forward(self, x):
        statistics = (self.running_mean, self.running_var, self.weight, self.bias)
        return self.act(self.drop(F.batch_norm(x, *statistics, self.training, self.momentum, self.eps)))


class Inverted(nn.Module):
    """A block as in MobileNets: the sum is not rectified."""

    def __init__(self, act):
        super().__init__()
        self.conv1, self.norm1 = convolution(16), NormAct(act)
        self.conv2, self.norm2 = convolution(16), NormAct(nn.Identity)

    def forward(self, x):
        return self.norm2(self.conv2(self.norm1(self.conv1(x)))) + x


class Mobile(nn.Module):
    """A batch norm with each kind of activation, of which SiLU is no part of a convolution."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = convolution(3), NormAct(nn.ReLU6)
        self.blocks = nn.Sequential(Inverted(nn.ReLU), Inverted(nn.SiLU))
        self.head = nn.Linear(16, 4)

    def forward(self, image):
        return self.head(self.blocks(self.norm(self.stem(image))).mean((2, 3)))


@pytest.mark.slow
def test_a_batch_norm_that_activates_and_a_sum_are_computed_with_integers(tmp_path):
    model, session = calibrated(Mobile())
    norms = {"norm.act", "blocks.0.norm1.act", "blocks.1.norm1.drop", "blocks.1.norm1"}
    blocks = {"blocks.0.norm2.act", "blocks.1.norm2.act", "blocks.0", "blocks.1"}
    assert quantized_outputs(model) == norms | blocks | {"head"}
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert (operations["QLinearConv"], operations["QLinearAdd"], operations["QGemm"]) == (5, 2, 1)
    assert not {"Conv", "FusedConv", "Add", "Gemm", "BatchNormalization"} & operations.keys()
    with quantized(model), torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=2 * float(model.head.output_scale))
    resumed = Mobile().eval()
    resumed.load_state_dict(model.state_dict())
    CalibrationSession(resumed, "INT8_ONNX").load_state_dict(copy.deepcopy(session.state_dict()))
    export_checkpoint(model, tmp_path / "folder")
    loaded = load_checkpoint(Mobile().eval(), tmp_path / "folder")
    with torch.no_grad(), quantized(resumed):
        assert torch.equal(loaded(x), expected)
        assert torch.equal(resumed(x), expected)


def test_an_input_behind_a_batch_norm_that_is_a_function_has_a_range_of_its_own():
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.norm, self.conv2 = convolution(3), nn.BatchNorm2d(16), convolution(16)

        def forward(self, image):
            norm = self.norm
            y = F.batch_norm(self.conv1(image), norm.running_mean + 3, norm.running_var, norm.weight, norm.bias)
            return self.conv2(y) + y

    [model], session = calibrated(nn.Sequential(Normalized()))
    assert not torch.equal(model.conv2.input_scale, model.conv1.output_scale)
    assert "0" not in session.result.modules  # the sum reads a value in float


def test_a_sum_with_a_value_that_is_not_quantized_stays_in_float():
    class Shifted(FunctionalBlock):
        def forward(self, x):
            return F.relu(self.norm2(self.conv2(self.norm1(self.conv1(x)))) + torch.sin(x))

    model = FunctionalResidual()
    model.blocks[0] = Shifted()
    _, session = calibrated(model)
    assert "blocks.0" not in session.result.modules
    assert "blocks.1.block" not in session.result.modules  # it adds the first block's output


def test_blocks_that_are_ignored_stay_in_float():
    _, session = calibrated(FunctionalResidual(), ignore=["blocks.0"])
    assert "blocks.0" not in session.result.modules


def test_an_output_that_another_function_reads_keeps_its_negative_values(tmp_path):
    model, _ = calibrated(Chain(gated=True))
    assert model.norm1.output_zero_point > -100
    assert model.conv2.output_zero_point == -128
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, _ = run(tmp_path / "model.onnx", x)
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=2 * float(model.head.output_scale))


def test_a_relu_that_is_a_function_comes_before_tensorrts_quantization(tmp_path):
    model, _ = calibrated(Chain(), "INT8_TENSORRT")
    x = torch.randn(1, 3, 12, 12)
    graph = onnx.load(export_onnx(model, tmp_path / "model.onnx", x, signed=True)).graph
    readers = {node.input[0]: node.op_type for node in graph.node}
    for node in graph.node:
        if node.op_type == "Conv":
            assert readers[node.output[0]] == "Relu"
        if node.op_type == "Relu":
            assert readers[node.output[0]] == "QuantizeLinear"


def test_a_follower_that_has_no_data_is_missed_where_nothing_has_any():
    with pytest.raises(CalibrationError, match="no data"), CalibrationSession(Chain().eval(), "INT8_ONNX"):
        pass


class Sampling(nn.Module):
    """Attention of torch's own, and random numbers in evaluation, too; it fails on request."""

    def __init__(self):
        super().__init__()
        self.chain = Chain()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, image, fails=False):
        x = F.dropout(self.chain.norm1(self.chain.conv1(image)), 0.5, training=True)
        if fails:
            raise ZeroDivisionError
        x = self.chain.conv2(F.relu(x)).flatten(2)[..., :8]
        x = self.attention(x, x, x)[0]
        return self.head(F.scaled_dot_product_attention(x, x, x)), self.chain.norm1.weight * torch.rand(16)


def test_watched_functions_change_neither_outputs_nor_random_numbers():
    model = Sampling().eval()
    image = torch.randn(2, 3, 12, 12)
    runs = []
    for scheme in (None, "INT8_ONNX"):
        torch.manual_seed(1)
        session = None if scheme is None else CalibrationSession(model, scheme, on_missing="warn")
        if session is not None:
            session.attach()
        with torch.inference_mode():
            runs.append((*model(image), *model(image), torch.get_rng_state()))
    session.detach()
    for value, expected in zip(runs[1], runs[0], strict=True):
        assert torch.equal(value, expected)


def test_a_forward_that_raises_is_watched_no_longer():
    model = Sampling().eval()
    session = CalibrationSession(model, "INT8_ONNX")
    session.attach()
    with pytest.raises(ZeroDivisionError), torch.inference_mode():
        model(torch.randn(2, 3, 12, 12), fails=True)
    assert _get_current_dispatch_mode() is None
    session.detach()


def zero_points_of_rank(rank, gated_rank):
    """Calibrate on two ranks; on one of them another function reads the output that the ReLU reads."""
    torch.manual_seed(0)
    model = Chain(gated=rank == gated_rank).eval()
    collectives = Collectives.of_group()
    torch.manual_seed(rank)
    with CalibrationSession(model, "INT8_ONNX", collectives=collectives), torch.inference_mode():
        model(torch.randn(4, 3, 12, 12))
    return int(model.norm1.output_zero_point), float(model.norm1.output_scale)


@pytest.mark.parametrize("gated_rank", [None, 0, 1])
def test_ranks_agree_on_whether_a_range_begins_at_zero(gated_rank):
    first, second = run_ranks(zero_points_of_rank, 2, gated_rank)
    assert first == second
    assert (first[0] == -128) == (gated_rank is None)


def test_the_same_scheme_without_zero_points_is_tensorrts(tmp_path):
    """Signed integers, zero points of 0, positive scales, also where a batch norm turns signs around.

    A scale is negative only where the code -128, which has no counterpart, would change its sign.
    """
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1.5, 1.5)
    model, _ = calibrated(model, "INT8_TENSORRT")
    x = torch.randn(1, 3, 12, 12)
    graph = onnx.load(export_onnx(model, tmp_path / "model.onnx", x, signed=True)).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    quantizing = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(quantizing) == 2 * 14 + 6  # activations, weights
    for node in quantizing:
        codes, scale, zero_point = (stored.get(name) for name in node.input)
        assert zero_point.dtype == "int8"
        assert not zero_point.any()
        if codes is None:
            assert scale > 0
        else:
            has_lowest = (codes.reshape(len(codes), -1) == -128).any(1)
            assert ((scale > 0) | has_lowest).all()
    output, _ = run(tmp_path / "model.onnx", x)
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=2 * float(model.head.output_scale))


def test_a_model_without_followers_needs_none():
    model, _ = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(400, 4)))
    assert quantized_outputs(model) == {"0", "3"}


def test_targets_of_the_users_own_keep_the_followers():
    model, _ = calibrated(Residual(), targets=["Conv2d"])
    assert quantized_outputs(model) >= {"stem.2", "blocks.0.norm2"}
    assert not hasattr(model.head, "weight_scale")


def test_a_checkpoint_keeps_which_outputs_are_quantized(tmp_path):
    model, _ = calibrated(Residual())
    export_checkpoint(model, tmp_path / "folder")
    x = torch.randn(2, 3, 12, 12)
    with quantized(model), torch.no_grad():
        expected = model(x)
    loaded = load_checkpoint(Residual().eval(), tmp_path / "folder")
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected, rtol=0, atol=0)


def test_a_saved_calibration_keeps_which_outputs_are_quantized():
    model, session = calibrated(Residual())
    state = copy.deepcopy(session.state_dict())
    resumed = Residual().eval()
    resumed.load_state_dict(model.state_dict())
    later = CalibrationSession(resumed, "INT8_ONNX")
    later.load_state_dict(state)
    assert quantized_outputs(resumed) == quantized_outputs(model)
    assert later.state_dict()["followed"] == state["followed"]


def test_a_saved_calibration_that_does_not_fit_leaves_the_plan_as_it_was():
    _, session = calibrated(Residual())
    state = session.state_dict()
    name = next(name for name in state["qparams"] if name.endswith("weight_scale"))
    state["qparams"][name] = torch.ones(1, 2, 3)
    later = CalibrationSession(Residual().eval(), "INT8_ONNX")
    before = [target.args.keys() for target in later.plan.targets]
    with pytest.raises(CalibrationError, match="does not fit"):
        later.load_state_dict(sealed(state))
    assert [target.args.keys() for target in later.plan.targets] == before


def test_a_second_calibration_is_as_the_first():
    model, session = calibrated(Residual())
    first = dict(session.qparams)
    torch.manual_seed(0)
    with session, torch.inference_mode():
        for _ in range(3):
            model(torch.randn(4, 3, 12, 12))
    assert session.qparams.keys() == first.keys()
    for name, value in session.qparams.items():
        torch.testing.assert_close(value, first[name], rtol=0, atol=0)


def outputs_of_rank(rank):
    """Calibrate on two ranks, of which one sees no data."""
    model = Residual().eval()
    collectives = Collectives.of_group()
    with CalibrationSession(model, "INT8_ONNX", collectives=collectives), torch.inference_mode():
        if rank == 1:
            model(torch.randn(4, 3, 12, 12))
    return quantized_outputs(model)


def test_a_rank_that_saw_no_data_quantizes_the_same_outputs():
    model, _ = calibrated(Residual())
    assert run_ranks(outputs_of_rank, 2) == [quantized_outputs(model)] * 2


class Classifier(L.LightningModule):
    def __init__(self, net=None):
        super().__init__()
        self.net = Residual() if net is None else net

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, _):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self(images), labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_sensitivities_are_the_same_where_a_relu_works_in_place():
    batches = [torch.randn(4, 3, 12, 12) for _ in range(2)]
    losses = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = Residual().eval()
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = in_place
        groups = sensitivity(model, batches, ["INT8_ONNX"]).groups
        losses.append({group.names: group.losses["INT8_ONNX"] for group in groups})
    assert losses[0] == losses[1]
    assert losses[0]["blocks.0.relu2",] > 0


def test_scales_of_outputs_are_learned_where_a_relu_works_in_place():
    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 12, 12), torch.randint(0, 4, (16,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    module = Classifier()
    callback = QuantizationAwareTraining("INT8_ONNX", train="scales")
    trainer = L.Trainer(
        max_epochs=2, callbacks=[callback], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    assert callback.result is not None
    observed = callback.result.qparams["net.blocks.0.norm2.output_scale"]
    assert not torch.equal(module.net.blocks[0].norm2.output_scale, observed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "net"), [(CalibrationCallback, Residual), (QuantizationAwareTraining, FunctionalResidual)]
)
def test_a_fit_ends_with_a_file_of_integers(tmp_path, callback, net):
    torch.manual_seed(0)
    images, labels = torch.randn(32, 3, 12, 12), torch.randint(0, 4, (32,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    module = Classifier(net())
    trainer = L.Trainer(
        max_epochs=2, callbacks=[callback("INT8_ONNX")], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    module.eval()
    export_onnx(module.net, tmp_path / "model.onnx", images[:1])
    output, operations = run(tmp_path / "model.onnx", images[:1])
    assert (operations["QLinearConv"], operations["QLinearAdd"], operations["QGemm"]) == (5, 2, 1)
    with quantized(module), torch.no_grad():
        expected = module(images[:1])
    torch.testing.assert_close(output, expected, rtol=0, atol=2 * float(module.net.head.output_scale))


def linears(bias):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=bias), nn.GELU(), nn.Linear(96, 32, bias=bias)).eval()


ASYMMETRIC_WEIGHTS = {
    "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "symmetric": False, "dynamic": True},
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("scheme", "shape", "bias"),
    [
        ("INT8_DYNAMIC", (5, 64), True),
        ("INT8_DYNAMIC", (2, 7, 64), False),
        (ASYMMETRIC_WEIGHTS, (5, 64), False),
        (ASYMMETRIC_WEIGHTS, (2, 7, 64), True),
    ],
    ids=["preset, matrix", "preset, tokens", "asymmetric weights, matrix", "asymmetric weights, tokens"],
)
def test_a_range_found_at_run_time_multiplies_integers(tmp_path, scheme, shape, bias):
    model = linears(bias)
    with CalibrationSession(model, scheme):
        pass
    x = torch.randn(shape)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert not {"Gemm", "MatMul", "MatMulNBits", "DequantizeLinear"} & operations.keys()
    with quantized(model), torch.no_grad():
        expected = model(x)
    # A value halfway between two integers may go to the other one: onnxruntime multiplies by the inverse of the scale.
    differs = (output - expected).abs() > 1e-5
    assert differs.float().mean() < 0.01
    torch.testing.assert_close(output, expected, rtol=0, atol=0.01)


class Twice(nn.Module):
    """One Linear that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, value):
        return self.layer(self.layer(value))


def test_products_of_one_weight_share_its_integers(tmp_path):
    torch.manual_seed(0)
    model = Twice().eval()
    with CalibrationSession(model, ASYMMETRIC_WEIGHTS):
        pass
    x = torch.randn(5, 64)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert not {"Gemm", "MatMul", "DequantizeLinear"} & operations.keys()
    assert sum("_transposed" in value.name for value in onnx.load(tmp_path / "model.onnx").graph.initializer) == 1
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=0.02)


def test_a_product_in_float_may_read_an_output_whose_range_is_found_at_run_time(tmp_path):
    model = linears(bias=True)
    activations = ASYMMETRIC_WEIGHTS["input_activations"]
    with CalibrationSession(model[:1], {**ASYMMETRIC_WEIGHTS, "output_activations": activations}):
        pass
    model = nn.Sequential(model[0], model[2]).eval()
    x = torch.randn(5, 64)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, _ = run(tmp_path / "model.onnx", x)
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=0.02)


class Tapped(nn.Module):
    """A convolution and its batch norm, of which the model returns both outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.constant_(self.norm.weight, 3)

    def forward(self, image):
        value = self.conv(image)
        return value, self.norm(value)


def test_a_batch_norm_stays_where_the_model_returns_what_it_reads(tmp_path):
    scheme = {"weights": ASYMMETRIC_WEIGHTS["weights"], "input_activations": {"num_bits": 8, "symmetric": False}}
    model, _ = calibrated(Tapped(), scheme, targets=["Conv2d"])
    x = torch.randn(1, 3, 12, 12)
    file = export_onnx(model, tmp_path / "model.onnx", x)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with quantized(model), torch.no_grad():
        for output, expected in zip(outputs, model(x), strict=True):
            torch.testing.assert_close(torch.tensor(output), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("W8A8", "ranges per token that are found at run time.*use INT8_ONNX, INT8_DYNAMIC"),
        ({"preset": "INT8_DYNAMIC", "targets": ["Conv2d"]}, "found at run time, but for matrix products"),
        (
            {"preset": "INT8_DYNAMIC", "input_activations": {"symmetric": True}},
            "symmetric ranges that are found at run time",
        ),
    ],
)
def test_other_ranges_found_at_run_time_are_refused(tmp_path, scheme, reason):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 4)).eval()
    with CalibrationSession(model, scheme):
        pass
    with pytest.raises(CalibrationError, match=reason):
        export_onnx(model, tmp_path / "model.onnx", torch.randn(1, 3, 12, 12))
    assert not list(tmp_path.iterdir())


def test_what_onnxruntime_makes_of_a_file_is_measured_and_nothing_of_the_model_changes(tmp_path):
    model, _ = calibrated(Residual())
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    model.train()
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    measurement = measure_onnx(model, tmp_path / "model.onnx", x)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert (measurement.products, measurement.in_float) == (6, [])
    assert measurement.speed == measurement.float_milliseconds / measurement.milliseconds > 0
    assert measurement.difference <= 2 * float(model.head.output_scale)
    assert "6 of 6 products in integers" in str(measurement)


def test_products_that_stay_in_float_are_named(tmp_path):
    model, _ = calibrated(Residual(), ignore=["stem.0", "head"])
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    measurement = measure_onnx(model, tmp_path / "model.onnx", x)
    # torch's exporter makes the convolution in float a part of its batch norm
    assert measurement.in_float == ["stem.1/Conv", "head/Gemm"]
    assert "4 of 6 products in integers" in str(measurement)


def test_a_product_that_is_fused_with_its_activation_is_named_after_its_module(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(2, 4)
    with CalibrationSession(model, "INT8_STATIC", ignore=["0"]), torch.no_grad():
        model(x)
    export_onnx(model, tmp_path / "model.onnx", x)
    assert measure_onnx(model, tmp_path / "model.onnx", x).in_float[0] == "0/FusedGemm"


class Quotient(nn.Module):
    """A Linear divided by itself: 0 / 0 where the input is 0."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(128, 4, bias=False)

    def forward(self, x):
        y = self.fc(x)
        return y / y


def test_a_difference_from_an_output_that_is_no_number_is_none(tmp_path):
    model = Quotient().eval()
    x = torch.zeros(1, 128)
    with CalibrationSession(model, "W8A16"):
        pass
    export_onnx(model, tmp_path / "model.onnx", x)
    assert math.isnan(measure_onnx(model, tmp_path / "model.onnx", x).difference)


def test_a_measurement_without_onnxruntime_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CalibrationError, match=r"measure_onnx needs the package onnxruntime.*lightning-obs\[onnx\]"):
        measure_onnx(Residual(), tmp_path / "model.onnx", torch.randn(1, 3, 12, 12))


class Pooled(nn.Module):
    """A convolution is called on the pooled image, and once more on its own output where ``twice``."""

    def __init__(self, twice):
        super().__init__()
        self.first = nn.Sequential(convolution(3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.second = convolution(16)
        self.twice = twice

    def forward(self, image):
        x = self.first(image)
        y = self.second(x)
        return self.second(y) + x if self.twice else y


def test_an_input_that_is_a_quantized_output_keeps_its_range(tmp_path):
    model, _ = calibrated(Pooled(twice=False))
    assert torch.equal(model.second.input_scale, model.first[2].output_scale)
    assert torch.equal(model.second.input_zero_point, model.first[2].output_zero_point)
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    # One at the file's input and one at its output: between them there are integers alone.
    assert (operations["QuantizeLinear"], operations["DequantizeLinear"], operations["QLinearConv"]) == (1, 1, 2)
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=2 * float(model.second.output_scale))


def test_a_sum_that_reads_a_pool_is_computed_with_integers(tmp_path):
    class PooledSum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(convolution(3), nn.ReLU(), nn.MaxPool2d(2))
            self.second = convolution(16)
            self.last = nn.ReLU()

        def forward(self, image):
            x = self.first(image)
            return self.last(self.second(x) + x)

    model, _ = calibrated(PooledSum())
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert (operations["QLinearConv"], operations["QLinearAdd"], operations["Add"]) == (2, 1, 0)
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=2 * float(model.last.output_scale))


class Decoder(nn.Module):
    """As a Unet has it: small features are enlarged and joined with large ones."""

    def __init__(self, mode):
        super().__init__()
        self.large = nn.Sequential(convolution(3), nn.ReLU())
        self.small = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU())
        self.upsample, self.last = nn.Upsample(scale_factor=2, mode=mode), convolution(32)

    def forward(self, image):
        large = self.large(image)
        return self.last(torch.cat([self.upsample(self.small(large)), large], 1))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("mode", "joined_in"), [("nearest", "QLinearConcat"), ("bilinear", "Concat")])
def test_a_concatenation_that_reads_the_nearest_values_is_of_integers(tmp_path, mode, joined_in):
    model, _ = calibrated(Decoder(mode))
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert (operations["QLinearConv"], operations["Resize"], operations[joined_in]) == (3, 1, 1)
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=2 * float(model.last.output_scale))


def test_an_input_that_reads_other_tensors_too_has_a_range_of_its_own():
    model, session = calibrated(Pooled(twice=True))
    assert session.observation.calls.readers.sources["second"] is None
    assert not torch.equal(model.second.input_scale, model.first[2].output_scale)


def test_ranks_and_resumed_runs_add_what_they_have_seen():
    first, second, third = OutputReaders(), OutputReaders(), OutputReaders()
    output, other = torch.ones(2, 3), torch.zeros(2, 3)
    first.note_output("conv", output)
    first.note_input("relu", output, is_follower=True)
    second.note_output("relu", output)
    second.note_input("a", output, is_follower=False)
    second.note_input("b", output, is_follower=False)
    third.note_input("b", other, is_follower=False)
    third.note_output("relu", other)
    third.note_passed_on(other, output)
    third.note_input("a", output, is_follower=False)
    together = OutputReaders()
    together.add(readers.state_dict() for readers in (first, second, third))
    assert together.followed == {"conv"}
    assert together.sources == {"a": "relu", "b": None}
    assert copy.deepcopy(together).state_dict() == together.state_dict()


def test_a_sum_before_a_layer_norm_is_not_fused_into_a_slower_operation(tmp_path):
    class AddNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x):
            return self.norm(x + self.linear(x))

    model = AddNorm().eval()
    x = torch.randn(2, 7, 32)
    with CalibrationSession(model, "INT8_ONNX"), torch.no_grad():
        model(x)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    assert (operations["LayerNormalization"], operations["SkipLayerNormalization"]) == (1, 0)
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x))


class Joined(nn.Module):
    """Two branches side by side, and an average of their activations."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([convolution(3), convolution(3)])
        self.reduce, self.pool, self.last = nn.Conv2d(32, 16, 3), nn.AvgPool2d(2), convolution(16)

    def forward(self, image):
        joined = torch.cat([F.relu(branch(image)) for branch in self.branches], 1)
        return self.last(self.pool(F.relu(self.reduce(joined))))


def test_a_concatenation_and_an_average_have_the_range_of_the_input_that_reads_them(tmp_path):
    model, _ = calibrated(Joined())
    x = torch.randn(1, 3, 12, 12)
    export_onnx(model, tmp_path / "model.onnx", x)
    output, operations = run(tmp_path / "model.onnx", x)
    kinds = ("QLinearConv", "QLinearConcat", "QLinearAveragePool", "QuantizeLinear", "DequantizeLinear")
    assert [operations[kind] for kind in kinds] == [4, 1, 1, 1, 1]
    with quantized(model), torch.no_grad():
        torch.testing.assert_close(output, model(x), rtol=0, atol=2 * float(model.last.output_scale))
