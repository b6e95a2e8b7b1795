"""QDQ ONNX files: what onnxruntime computes with them, how small they are, what is refused."""

import re
import sys
from typing import NamedTuple

import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    export_checkpoint,
    export_onnx,
    load_checkpoint,
    packages,
    quantized,
)
from lightning_obs.files.write import Staging
from lightning_obs.onnx import onnx_file
from tests.support.versions import needs_release

WEIGHTS = {"num_bits": 8, "strategy": "channel"}
INPUTS = {"num_bits": 8, "observer": "static_minmax"}
ASYMMETRIC = {**INPUTS, "symmetric": False}


class Norms(nn.Module):
    """Convolutions of several kinds with batch norms that have seen data, one of which turns signs around."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, -1.5, 1.5)
                nn.init.normal_(module.bias)
                nn.init.normal_(module.running_mean, std=0.1)
                nn.init.uniform_(module.running_var, 0.5, 2)

    def forward(self, image):
        return self.head(self.up(self.depthwise(self.first(image))).mean((-2, -1)))


def tokens():
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


IMAGES, TOKENS = (Norms, lambda: torch.randn(4, 3, 9, 9)), (tokens, lambda: torch.randint(0, 50, (2, 7)))
CONVOLUTIONS = ["Conv2d", "ConvTranspose2d", "Linear"]
CASES = {
    "int8": (IMAGES, {"targets": CONVOLUTIONS, "weights": WEIGHTS, "input_activations": INPUTS}),
    "int8 asymmetric inputs": (IMAGES, {"targets": CONVOLUTIONS, "weights": WEIGHTS, "input_activations": ASYMMETRIC}),
    "int8, one scale": (
        IMAGES,
        {"targets": CONVOLUTIONS, "weights": {"strategy": "tensor"}, "input_activations": INPUTS},
    ),
    "int4 asymmetric": (
        IMAGES,
        {"targets": CONVOLUTIONS, "weights": {"num_bits": 4, "strategy": "channel", "symmetric": False}},
    ),
    "outputs too": (IMAGES, {"targets": ["Linear"], "weights": WEIGHTS, "output_activations": ASYMMETRIC}),
    "int8 of tokens": (TOKENS, {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ASYMMETRIC}),
    "int8 of tokens, symmetric": (TOKENS, {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}),
    "int8 embedding": (TOKENS, {"targets": ["Embedding"], "weights": WEIGHTS}),
    "int4 groups": (TOKENS, {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}),
    "int3 groups": (TOKENS, {"targets": ["Linear"], "weights": {"num_bits": 3, "group_size": 16, "symmetric": False}}),
}


def calibrated(build, x, scheme):
    model = build().eval()
    with (
        CalibrationSession(model, {"group": scheme} if isinstance(scheme, dict) else scheme) as session,
        torch.no_grad(),
    ):
        for batch in [x] if session.needs_data else ():
            model(batch)
    return model


def run(file, *inputs, optimized=True, **session_options):
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"], **session_options)
    names = [value.name for value in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))[0])


def initializers(file):
    return {value.name: value for value in onnx.load(file).graph.initializer}


FAST = {"int4 groups": ()}
MARKS = (
    dict.fromkeys(CASES, (pytest.mark.slow,)) | dict.fromkeys(["int8", "int3 groups"], (pytest.mark.nightly,)) | FAST
)


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks) for case, marks in MARKS.items()])
@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_onnxruntime_computes_what_quantized_does(case, tmp_path):
    torch.manual_seed(0)
    (build, make_input), scheme = CASES[case]
    x = make_input()
    model = calibrated(build, x, scheme)
    with torch.no_grad():
        before = model(x)
        with quantized(model):
            expected = model(x)
    file = export_onnx(model, tmp_path / "model.onnx", x)
    onnx.checker.check_model(file)
    assert (before - expected).abs().max() > 1e-3
    torch.testing.assert_close(run(file, x, optimized=False), expected, atol=2e-5, rtol=1e-5)
    # It rounds biases to integers of its own: an input beside a rounding boundary may go to the next level.
    assert (run(file, x) - expected).abs().max() < 0.05 * (before - expected).abs().max()
    with torch.no_grad():
        assert torch.equal(model(x), before)


class OfBatch(nn.Module):
    """A convolution and a batch norm that takes the statistics of its batch in evaluation mode, too."""

    def __init__(self, *, has_running_statistics):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.uniform_(self.norm.running_mean)
        nn.init.uniform_(self.norm.bias, 1, 2)
        self.has_running_statistics = has_running_statistics

    def forward(self, image):
        norm = self.norm
        running = (norm.running_mean, norm.running_var) if self.has_running_statistics else (None, None)
        return nn.functional.batch_norm(self.conv(image), *running, norm.weight, norm.bias, True)


def test_a_batch_norm_that_takes_the_statistics_of_its_batch_is_refused_and_the_remedy_works(tmp_path):
    x = torch.randn(2, 3, 9, 9)
    scheme = CASES["int8"][1]
    model = calibrated(lambda: nn.Sequential(OfBatch(has_running_statistics=True)), x, scheme)
    message = "cannot write a batch norm that takes the statistics of its batch and has running ones: 0.*Remedy: call"
    with pytest.raises(CalibrationError, match=message):
        export_onnx(model, tmp_path / "refused.onnx", x)
    assert not list(tmp_path.iterdir())
    model = calibrated(lambda: OfBatch(has_running_statistics=False), x, scheme)
    x = torch.randn_like(x)
    file = export_onnx(model, tmp_path / "model.onnx", x)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    torch.testing.assert_close(run(file, x, optimized=False), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_of_weights_alone_onnxruntime_computes_what_quantized_does_if_it_rounds_no_inputs(bits, tmp_path):
    x = torch.randn(2, 7, 64)
    weights = {"num_bits": bits, "strategy": "channel"}
    model = calibrated(lambda: nn.Sequential(nn.Linear(64, 96)), x, {"targets": ["Linear"], "weights": weights})
    file = export_onnx(model, tmp_path / "m.onnx", x)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # the guide's remedy
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    [outputs] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), expected, atol=1e-5, rtol=1e-5)


def test_weights_are_stored_as_integers_and_nothing_beside_them(tmp_path):
    x = torch.randn(2, 3, 9, 9)
    model = calibrated(Norms, x, CASES["int8"][1])
    stored = initializers(export_onnx(model, tmp_path / "model.onnx", x))
    kinds = onnx.TensorProto
    for name in ("first.0", "depthwise.0", "up.0", "head"):
        assert stored[f"{name}.weight_codes"].data_type == kinds.INT8
        assert list(stored[f"{name}.weight_codes"].dims) == list(model.get_submodule(name).weight.shape)
    floats = [name for name, value in stored.items() if value.data_type == kinds.FLOAT and len(value.dims) > 1]
    assert floats == []
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert sum(node.op_type == "BatchNormalization" for node in nodes) == 1  # behind the transposed convolution


def test_a_channel_that_a_batch_norm_switches_off_keeps_a_positive_scale(tmp_path):
    class SwitchedOff(Norms):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.first[1].weight[2:4])

    x = torch.randn(2, 3, 9, 9)
    model = calibrated(SwitchedOff, x, CASES["int8"][1])
    file = export_onnx(model, tmp_path / "model.onnx", x)
    scales = [onnx.numpy_helper.to_array(value) for name, value in initializers(file).items() if "_scale" in name]
    assert len(scales) == 2
    assert all((scale != 0).all() for scale in scales)
    with torch.no_grad(), quantized(model):
        torch.testing.assert_close(run(file, x, optimized=False), model(x), atol=2e-5, rtol=1e-5)


@pytest.mark.slow
def test_weights_of_4_bits_are_stored_in_4_bits(tmp_path):
    x = torch.randint(0, 50, (2, 7))
    stored = initializers(export_onnx(calibrated(tokens, x, CASES["int4 groups"][1]), tmp_path / "model.onnx", x))
    narrow = [value for value in stored.values() if value.data_type == onnx.TensorProto.INT4]
    weights = [value for value in narrow if list(value.dims) in ([64, 32], [8, 64])]
    assert sorted(len(value.raw_data) for value in weights) == [8 * 64 // 2, 64 * 32 // 2]
    assert not any(list(value.dims) == [64, 32] for value in stored.values() if value not in weights)


@pytest.mark.slow
def test_what_was_loaded_gives_the_same_file(tmp_path):
    x = torch.randn(2, 3, 9, 9)
    model = calibrated(Norms, x, CASES["int8 asymmetric inputs"][1])
    loaded = load_checkpoint(Norms().eval(), export_checkpoint(model, tmp_path / "folder"))
    one, other = (export_onnx(m, tmp_path / f"{name}.onnx", x) for name, m in {"a": model, "b": loaded}.items())
    first, second = (initializers(file) for file in (one, other))
    assert first == second
    assert torch.equal(run(one, x), run(other, x))


@pytest.mark.slow
def test_a_batch_of_any_size_and_keyword_arguments(tmp_path):
    model = calibrated(Norms, torch.randn(2, 3, 9, 9), CASES["int8"][1])
    shapes = {"image": {0: torch.export.Dim.DYNAMIC}}
    file = export_onnx(model, tmp_path / "m.onnx", {"image": torch.randn(2, 3, 9, 9)}, dynamic_shapes=shapes)
    x = torch.randn(5, 3, 9, 9) / 4
    with torch.no_grad(), quantized(model):
        torch.testing.assert_close(run(file, x), model(x), atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------------- refused


def refused(model, message, tmp_path, x=None, **options):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CalibrationError, match=message):
        export_onnx(model, tmp_path / "m.onnx", torch.randn(2, 16) if x is None else x, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


GROUPED = {"weights": {"num_bits": 4, "group_size": 16}}


@pytest.mark.parametrize(
    ("build", "scheme", "message"),
    [
        (mlp, "FP8", r"cannot hold 8-bit floating point: 0 \(weight\), 0 \(input\).*Expected integers.*INT8_ONNX"),
        (
            mlp,
            {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", **WEIGHTS | {"num_bits": 4}}},
            "4-bit fl",
        ),
        (mlp, "W8A8", r"ranges per token that are found at run time: 0 \(input\), 2 \(input\)"),
        (
            mlp,
            {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {**INPUTS, "num_bits": 4}},
            "4-bit activations per tensor",
        ),
        (lambda: nn.Conv2d(16, 4, 1), {"targets": ["Conv2d"], **GROUPED}, "weights of 4 dimensions per group"),
    ],
)
def test_a_scheme_that_qdq_cannot_express_is_refused(build, scheme, message, tmp_path):
    model = calibrated(lambda: nn.Sequential(build()) if build is not mlp else mlp(), torch.randn(2, 16), scheme)
    refused(model, message, tmp_path)


def int8(x=None):
    return calibrated(mlp, torch.randn(2, 16) if x is None else x, {"targets": ["Linear"], "weights": WEIGHTS})


def test_an_exporter_that_names_weights_otherwise_is_refused(tmp_path, monkeypatch):
    """Up to onnxscript 0.5 weights of 4 bits were stored in 8 without a word."""
    monkeypatch.setattr(packages, "version", {"onnxscript": "0.5.7"}.__getitem__)
    refused(int8(), r"export_onnx needs onnxscript>=0\.6\. Got onnxscript 0\.5\.7\. Remedy: pip install -U", tmp_path)


def test_a_model_that_is_not_ready_is_refused(tmp_path):
    refused(mlp().eval(), "Sequential was not calibrated.*CalibrationSession", tmp_path)
    changed = int8()
    with torch.no_grad():
        changed[0].weight.mul_(2)
    refused(changed, r"changed since the model was calibrated: 0\.weight", tmp_path)
    x = torch.randn(2, 16, dtype=torch.bfloat16)
    half = calibrated(lambda: mlp().bfloat16(), x, {"targets": ["Linear"], "weights": WEIGHTS})
    refused(half, r"not in float32.*0\.bias \(torch\.bfloat16\)", tmp_path, x)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    refused(int8(), r'export_onnx needs the package onnxscript.*pip install "lightning-obs\[onnx\]"', tmp_path)


@pytest.mark.slow
def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "m.onnx").write_text("precious")
    refused(int8(), r"m\.onnx is already there.*overwrite=True", tmp_path)
    assert (tmp_path / "m.onnx").read_text() == "precious"
    export_onnx(int8(), tmp_path / "m.onnx", torch.randn(2, 16), overwrite=True)
    onnx.checker.check_model(tmp_path / "m.onnx")


class Sizes(nn.Module):
    """Takes one dict, as models of series do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, batch):
        return {"mean": self.fc(batch["past"]), "width": self.fc(batch["past"] * batch["scale"]).abs()}


def test_a_model_may_take_one_dict_and_return_another(tmp_path):
    batch = {"past": torch.randn(3, 16), "scale": torch.rand(3, 1)}
    model = calibrated(Sizes, batch, {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ASYMMETRIC})
    shapes = ({"past": {0: torch.export.Dim.DYNAMIC}, "scale": {0: torch.export.Dim.DYNAMIC}},)
    file = export_onnx(model, tmp_path / "m.onnx", (batch,), dynamic_shapes=shapes)
    other = {"past": torch.randn(5, 16), "scale": torch.rand(5, 1)}
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == ["mean", "width"]
    mean, width = session.run(None, {f"batch_{name}": value.numpy() for name, value in other.items()})
    with torch.no_grad(), quantized(model):
        expected = model(other)
    torch.testing.assert_close(torch.from_numpy(mean), expected["mean"], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(torch.from_numpy(width), expected["width"], atol=2e-5, rtol=1e-5)


class Scaled(nn.Module):
    """Takes a tensor and a dict, under one name."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, *inputs):
        x, options = inputs
        return self.fc(x * options["scale"])


def test_a_dict_may_be_the_last_of_arguments_without_names(tmp_path):
    torch.manual_seed(0)
    example = (torch.randn(3, 16), {"scale": torch.rand(3, 1)})
    model = Scaled().eval()
    with torch.no_grad(), CalibrationSession(model, "INT8_STATIC"):
        model(*example)
    file = export_onnx(model, tmp_path / "m.onnx", example)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    feeds = {}
    for value, tensor in zip(session.get_inputs(), (example[0], example[1]["scale"]), strict=True):
        feeds[value.name] = tensor.numpy()
    [result] = session.run(None, feeds)
    with torch.no_grad(), quantized(model):
        expected = model(*example)
    torch.testing.assert_close(torch.from_numpy(result), expected, atol=2e-5, rtol=1e-5)


class Ranges(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class Returns(nn.Module):
    """Returns what a function makes of one tensor."""

    def __init__(self, result):
        super().__init__()
        self.fc, self.result = nn.Linear(16, 4), result
        self.register_buffer("mean", torch.ones(4))

    def forward(self, output):
        return self.result(self.fc(output) * self.mean)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda y: {"mean": y, "parts": (y + 1, y + 2)}, ["mean_1", "parts_0", "parts_1"]),
        (lambda y: y, ["output_1"]),  # the input has the first name
        (lambda y: (y, y + 1), ["output_0", "output_1"]),
        (lambda y: [y], ["output_0"]),
        (lambda y: Ranges(y - 1, y + 1), ["low", "high"]),
        (lambda y: CausalLMOutput(logits=y, hidden_states=(y + 1,)), ["logits", "hidden_states_0"]),
        (lambda y: (None, y), ["output_1"]),
    ],
    ids=["dict", "tensor", "tuple", "list", "named tuple", "of transformers", "None"],
)  # fmt: skip
def test_outputs_have_the_names_of_what_the_model_returns(result, names, tmp_path):
    x = torch.randn(2, 16)
    model = calibrated(lambda: Returns(result), x, {"targets": ["Linear"], "weights": WEIGHTS})
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path / "m.onnx", x))
    assert [value.name for value in session.get_outputs()] == names
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad(), quantized(model):
        expected = [leaf for leaf in pytree.tree_leaves(model(x)) if leaf is not None]
    for output, tensor in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(output), tensor, atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------------- weights beside the file


def full(self, overwrite):
    """In place of ``Staging.replace_file``: what it raises where the disk is full."""
    raise OSError("No space left on device")


def large(monkeypatch):
    """From now on the weights of every model are too large for one file."""
    monkeypatch.setattr(onnx_file, "_LARGEST_FILE", 100)


def test_weights_too_large_for_one_file_lie_beside_it(tmp_path, monkeypatch):
    x = torch.randn(2, 16)
    model = int8()
    expected = run(export_onnx(model, tmp_path / "whole.onnx", x), x)
    large(monkeypatch)
    file = export_onnx(model, tmp_path / "m.onnx", x)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert re.fullmatch(r"m\.onnx\.[0-9a-f]{8}\.data", names[1])
    assert file.stat().st_size < (tmp_path / "whole.onnx").stat().st_size
    assert torch.equal(run(file, x), expected)


def test_an_export_that_fails_leaves_a_large_model_with_its_weights(tmp_path, monkeypatch):
    x = torch.randn(2, 16)
    large(monkeypatch)
    file = export_onnx(int8(), tmp_path / "m.onnx", x)
    expected, names = run(file, x), sorted(path.name for path in tmp_path.iterdir())
    other = int8(torch.randn(2, 16) * 3)
    with torch.no_grad(), CalibrationSession(other, {"group": {"targets": ["Linear"], "weights": {"num_bits": 4}}}):
        other[0].weight.mul_(2)

    with monkeypatch.context() as broken:
        broken.setattr(Staging, "replace_file", full)
        with pytest.raises(CalibrationError, match=r"cannot be written\. Got No space left"):
            export_onnx(other, file, x, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert torch.equal(run(file, x), expected)
    export_onnx(other, file, x, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 2  # the old weights are gone
    assert not torch.equal(run(file, x), expected)
    monkeypatch.undo()
    export_onnx(other, file, x, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.nightly
def test_a_file_above_two_gigabytes_is_whole_or_not_there(tmp_path, monkeypatch):
    """2 GiB and a row, of zeros but for the last row; protobuf, which holds the model, ends at 2 GiB."""
    table = torch.zeros((1 << 20) + 1, 512)
    table[-1] = torch.randn(512)
    x = torch.tensor([[len(table) - 1, 0]])
    scheme = {"targets": ["Linear"], "weights": WEIGHTS}
    with pytest.warns(CalibrationWarning, match="stay in full precision: Embedding"):
        model = calibrated(lambda: nn.Sequential(nn.Embedding.from_pretrained(table), nn.Linear(512, 4)), x, scheme)
    with monkeypatch.context() as broken:
        broken.setattr(Staging, "replace_file", full)
        with pytest.raises(CalibrationError, match=r"cannot be written\. Got No space left"):
            export_onnx(model, tmp_path / "m.onnx", x)
    assert list(tmp_path.iterdir()) == []
    file = export_onnx(model, tmp_path / "m.onnx", x)
    [weights] = tmp_path.glob("m.onnx.*.data")
    assert weights.stat().st_size > 1 << 31
    with torch.no_grad(), quantized(model):
        expected = model(x)
    torch.testing.assert_close(run(file, x, optimized=False), expected, atol=1e-5, rtol=1e-5)
    assert (expected[0, 0] - expected[0, 1]).abs().max() > 0.01


# ---------------------------------------------------------------------- what engines do with it


def test_symmetric_schemes_follow_tensorrts_rules(tmp_path):
    """TensorRT takes signed integers with zero points 0, and activations with one scale; no TensorRT reads it here.

    https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
    """
    x = torch.randn(2, 3, 9, 9)
    model = calibrated(Norms, x, CASES["int8"][1])
    graph = onnx.load(export_onnx(model, tmp_path / "model.onnx", x, signed=True)).graph
    stored = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    kinds = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(kinds) == 3 * 4
    for node in kinds:
        _, scale, zero_point = (stored.get(name) for name in node.input)
        assert zero_point.dtype == "int8"
        assert not zero_point.any()
        is_weight = node.op_type == "DequantizeLinear" and node.input[0] in stored
        assert scale.ndim == (1 if is_weight else 0)
    for node in graph.node:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            for name in node.input[:2]:
                assert producers[name].op_type in ("DequantizeLinear", "Transpose")


def test_signed_activations_are_the_default_where_onnxruntime_loads_them(tmp_path, monkeypatch):
    x = torch.randint(0, 50, (2, 7))
    model = calibrated(tokens, x, CASES["int8 of tokens, symmetric"][1])
    as_signed = export_onnx(model, tmp_path / "signed.onnx", x, signed=True)
    as_unsigned = export_onnx(model, tmp_path / "unsigned.onnx", x, signed=False)
    assert torch.equal(run(as_signed, x, optimized=False), run(as_unsigned, x, optimized=False))
    try:
        run(as_signed, x)
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
        expected = as_unsigned
    else:
        expected = as_signed
    file = export_onnx(model, tmp_path / "m.onnx", x)
    assert initializers(file)["1.input_zero"] == initializers(expected)["1.input_zero"]
    run(file, x)


def convolutions():
    layers = [nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.ReLU()) for i in range(4)]
    for conv, _ in layers:
        nn.init.normal_(conv.bias, std=0.3)
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 1))


@needs_release("onnxruntime", "1.23", "it computes with the biases of the file")
def test_where_onnxruntime_differs_it_is_by_its_own_rounding_of_biases(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 24, 24)
    scheme = {"targets": ["Conv2d"], "weights": WEIGHTS, "input_activations": ASYMMETRIC}
    model = calibrated(convolutions, x, scheme)
    with quantized(model), torch.no_grad():
        expected = model(x)
    file = export_onnx(model, tmp_path / "m.onnx", x)

    def share(output):
        return ((output - expected).abs() > 1e-5).float().mean()

    unrounded = run(file, x, disabled_optimizers=["WeightBiasQuantization"])
    assert torch.equal(unrounded, run(file, x, optimized=False))
    assert share(run(file, x)) > 10 * share(unrounded)
    assert share(unrounded) < 2e-3  # sums in another order, beside a rounding boundary


class CalledTwice(nn.Module):
    """A Linear that reads the model's input in one call, and a ReLU's output in the other."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.fc(self.relu(self.fc(x))))


@needs_release("onnxruntime", "1.23", "measured with these alone")
def test_onnxruntime_rounds_once_where_a_layer_called_twice_reads_a_quantized_output(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    model = calibrated(CalledTwice, x, "INT8_TENSORRT")
    with quantized(model), torch.no_grad():
        expected = model(x)
    file = export_onnx(model, tmp_path / "m.onnx", x)
    as_written = run(file, x, disabled_optimizers=["DoubleQDQPairsRemover", "WeightBiasQuantization"])
    assert torch.equal(as_written, expected)
    rounded_once = run(file, x, disabled_optimizers=["WeightBiasQuantization"])
    assert not torch.equal(rounded_once, expected)
    assert (rounded_once - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_model_that_cannot_be_traced_is_named_and_stays_as_it_was(tmp_path):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else x

    model = calibrated(Branches, torch.ones(2, 16), {"targets": ["Linear"], "weights": WEIGHTS})
    before, buffers = set(vars(model.fc)), dict(model.named_buffers())
    cause = r"exporter cannot export Branches: .*test_onnx_file.py:\d+\. Got GuardOnDataDependentSymNode: Could not"
    refused(model, cause + ".*torch.onnx.export", tmp_path, torch.ones(2, 16))
    assert set(vars(model.fc)) == before
    assert dict(model.named_buffers()) == buffers


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(model, path, **options):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(onnx_ir, "save", full)
    refused(int8(), "cannot be written. Got No space left", tmp_path)
