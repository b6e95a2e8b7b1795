"""linearize_recurrent: the same outputs, whatever the arguments; weights quantized, trained, exported and loaded."""

import contextlib
import copy
import pickle
import re
import weakref

import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    QuantizationAwareTraining,
    export_checkpoint,
    export_onnx,
    export_program,
    linearize_recurrent,
    load_checkpoint,
    quantized,
)
from lightning_obs.forward.linear_recurrent import LinearRecurrent
from lightning_obs.model.module_qparams import get_scheme
from tests.callbacks.calibration_modules import loader, trainer
from tests.support.lightning_package import L

LAYERS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "batch_first": True, "dropout": 0.1}),
    (nn.LSTM, {"bidirectional": True, "proj_size": 3}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"batch_first": True, "bias": False}),
]
KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
#: of torch.export, for a recurrent layer whose batch may vary
EXPORTS = pytest.mark.filterwarnings("ignore:_check_is_size will be removed:FutureWarning")


def leaves(outputs):
    first, states = outputs
    first = first.data if isinstance(first, PackedSequence) else first
    return [first, *(states if isinstance(states, tuple) else (states,))]


def equal(outputs, expected):
    return all(torch.equal(a, b) for a, b in zip(leaves(outputs), leaves(expected), strict=True))


class Forecast(nn.Module):
    """A recurrent layer between two Linears, as in models of series."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.inputs = nn.Linear(8, 16)
        self.rnn = kind(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.rnn(self.inputs(x))[0][:, -1])


def forecast(kind=nn.LSTM, seed=0):
    torch.manual_seed(seed)
    model = Forecast(kind).eval()
    linearize_recurrent(model)
    return model


def calibrated(kind=nn.LSTM, scheme="INT8_ONNX"):
    model = forecast(kind)
    x = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1))
    with CalibrationSession(model, scheme) as session:
        if session.needs_data:
            model(x)
    return model, x


def quantized_outputs(model, x):
    with torch.no_grad(), quantized(model):
        return model(x)


# ---------------------------------------------------------------------- in float


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_outputs_are_the_same_whatever_the_arguments(kind, options):
    torch.manual_seed(0)
    layer = kind(4, 6, **options).eval()
    x = torch.randn(3, 5, 4)
    lengths = [5, 3, 1] if options.get("batch_first") else [3, 1, 3, 2, 2]
    packed = pack_padded_sequence(x, lengths, options.get("batch_first", False), enforce_sorted=False)
    calls = [(x,), (x[0],), (packed,), (x, layer(x)[1])]
    expected = [layer(*call) for call in calls]
    assert linearize_recurrent(layer) == [""]
    assert isinstance(layer, kind)
    for call, outputs in zip(calls, expected, strict=True):
        assert equal(layer(*call), outputs)


def test_a_layer_keeps_its_hooks_and_takes_a_state_dict_from_before():
    before, after = nn.LSTM(4, 6), nn.LSTM(4, 6)
    calls = []
    after.register_forward_hook(lambda *_: calls.append(1))
    linearize_recurrent(after)
    after.load_state_dict(before.state_dict())
    x = torch.randn(5, 4)
    assert equal(after(x), before(x))
    assert calls == [1]
    assert "weight_ih_l0.weight" in after.state_dict()
    again = nn.LSTM(4, 6)
    linearize_recurrent(again)
    again.load_state_dict(after.state_dict())
    assert equal(again(x), before(x))


class Own(nn.LSTM):
    """A class of another package, with a forward of its own."""

    def forward(self, x, states=None, scale=1.0):
        return super().forward(x * scale, states)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, Own])
def test_copies_pickles_and_other_dtypes_work_also_after_a_training_step(kind):
    layer = kind(4, 6)
    linearize_recurrent(layer)
    x = torch.randn(5, 4)
    layer(x)[0].sum().backward()
    assert layer.weight_ih_l0.weight.grad is not None
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert equal(other(x), expected)
        with torch.no_grad():
            other.weight_ih_l0.weight.zero_()
        assert not equal(other(x), expected)
    assert equal(layer(x), expected)
    assert layer.double()(x.double())[0].dtype == torch.float64


def test_what_is_changed():
    model = nn.ModuleDict({"a": nn.LSTM(4, 6), "b": nn.RNN(4, 6), "c": nn.Sequential(nn.GRU(4, 6))})
    shared = model["a"].weight_hh_l0
    assert linearize_recurrent(model) == ["a", "c.0"]
    assert model["a"].weight_hh_l0.weight is shared
    assert linearize_recurrent(model) == []
    parametrized = nn.Sequential(weight_norm(nn.LSTM(4, 6), "weight_hh_l0"))
    with pytest.raises(CalibrationError, match=r"sharded, offloaded or parametrized.*: 0"):
        linearize_recurrent(parametrized)
    assert type(parametrized[0]).__name__ != "LinearLSTM"


# ---------------------------------------------------------------------- quantized


@KINDS
def test_quantized_outputs_are_those_of_the_layer_with_rounded_weights(kind):
    model, x = calibrated(kind, {"targets": ["re:rnn[.]weight_.*"], "weights": {"num_bits": 8, "strategy": "channel"}})
    expected = Forecast(kind).eval()
    expected.load_state_dict(
        {
            name.replace("l0.weight", "l0").replace("l1.weight", "l1"): value
            for name, value in model.state_dict().items()
        }
    )
    with torch.no_grad():
        for name, weight in expected.rnn.named_parameters():
            if name.startswith("weight"):
                scale = (weight.abs().amax(1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
                weight.copy_((weight / scale).round().clamp(-128, 127) * scale)
        torch.testing.assert_close(quantized_outputs(model, x), expected(x), atol=1e-6, rtol=1e-5)
        assert (expected(x) - model(x)).abs().max() > 1e-5


@KINDS
@pytest.mark.parametrize("features", [16, 15], ids=["it returns", "it fails"])
def test_a_call_leaves_no_quantized_weight_in_memory(kind, features):
    model, _ = calibrated(kind)
    x = torch.randn(4, 12, features, requires_grad=True)
    weights = []

    def keep(module, args, weight):
        weights.append(weakref.ref(weight))

    for name in ("weight_ih_l0", "weight_hh_l1"):
        model.rnn.get_submodule(name).register_forward_hook(keep)
    with quantized(model), contextlib.suppress(RuntimeError):
        model.rnn(x)
    assert len(weights) == 2
    assert [weight() for weight in weights] == [None, None]


@KINDS
def test_a_scheme_with_activations_quantizes_the_weights_of_the_layer_alone(kind):
    model, _ = calibrated(kind)
    scheme = get_scheme(model.rnn.weight_hh_l1)
    assert scheme.weights.num_bits == 8
    assert scheme.input_activations is None
    assert scheme.output_activations is None
    assert scheme.targets == [f"rnn.weight_{part}_l{layer}" for layer in (0, 1) for part in ("ih", "hh")]
    assert get_scheme(model.head).input_activations is not None


def test_the_report_says_what_helps_and_what_is_left():
    model = Forecast().eval()
    warned = pytest.warns(CalibrationWarning, match="parameters stay in full precision")
    with warned, CalibrationSession(model, "W8A8") as session:
        pass
    line = session.result.line(", ")
    assert "LSTM 9" in line
    assert "% (linearize_recurrent lets its weights be quantized: smaller, not faster)" in line
    model = forecast()
    with CalibrationSession(model, "W8A8") as session:
        pass
    line = session.result.line(", ")
    assert re.search(r"left in float: LinearLSTM \S+ % \(its products stay in float, too: smaller, not faster\)", line)
    assert "linearize_recurrent" not in line


@KINDS
def test_a_checkpoint_holds_integers_and_loads_into_the_layer_as_it_was(kind, tmp_path):
    model, x = calibrated(kind)
    folder = export_checkpoint(model, tmp_path / "int8")
    with safe_open(folder / "model.safetensors", "pt") as file:
        packed = file.get_tensor("rnn.weight_hh_l1.weight_packed")
    assert packed.dtype == torch.int32
    assert packed.shape[1] == 8  # 32 columns, four in an int32
    loaded = load_checkpoint(Forecast(kind).eval(), folder)
    with torch.no_grad():
        assert torch.equal(loaded(x), quantized_outputs(model, x))
    assert isinstance(loaded.rnn, LinearRecurrent)


@pytest.mark.slow_but_first
@EXPORTS
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [(nn.LSTM, "INT8_ONNX"), (nn.GRU, {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}})],
)
def test_an_onnx_file_holds_the_integers_and_answers_as_quantized(kind, scheme, tmp_path):
    model, x = calibrated(kind, scheme)
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    file = export_onnx(model, tmp_path / "m.onnx", x, dynamic_shapes=shapes)
    graph = onnx.load(file).graph
    assert [node.op_type for node in graph.node].count(kind.__name__) == 2
    floats = [value for value in graph.initializer if value.data_type == onnx.TensorProto.FLOAT]
    assert max(torch.Size(value.dims).numel() for value in floats) <= 1024  # biases and scales; weights have 4096
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x = torch.randn(3, 12, 8)
    [outputs] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), quantized_outputs(model, x), atol=1e-5, rtol=1e-5)


@EXPORTS
def test_a_program_answers_as_quantized(tmp_path):
    model, x = calibrated()
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x)).module()
    torch.testing.assert_close(program(x), quantized_outputs(model, x), atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------- in Lightning


class Series(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = forecast().train()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0].unsqueeze(1)).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@EXPORTS
def test_a_callback_calibrates_measures_layers_and_writes_files(tmp_path):
    module = Series()
    callback = CalibrationCallback("INT8_ONNX", evaluate=True, module="net", export_to=tmp_path / "m.onnx")
    trainer(callback).validate(module, loader(), verbose=False)
    assert (tmp_path / "m.onnx").is_file()
    assert {"rnn.weight_ih_l0", "head"} <= {error.name for error in callback.layer_errors()}
    assert {error.name for error in callback.layer_errors([torch.randn(2, 3, 8)])} == {"inputs", "head"}
    callback.report(tmp_path / "report")


def test_weights_are_trained_through_quantization(tmp_path):
    module = Series()
    before = module.net.rnn.weight_ih_l0.weight.detach().clone()
    callback = QuantizationAwareTraining("INT8_ONNX", module="net", export_to=tmp_path / "int8")
    trainer(callback, max_epochs=2).fit(module, loader(), loader(2))
    assert not torch.equal(module.net.rnn.weight_ih_l0.weight, before)
    x = torch.randn(2, 3, 8)
    loaded = load_checkpoint(Forecast().eval(), tmp_path / "int8")
    with torch.no_grad():
        assert torch.equal(loaded(x), quantized_outputs(module.net.eval(), x))
