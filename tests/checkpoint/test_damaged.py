"""A checkpoint that is damaged, or of something else, is named, and the model stays what it was."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint, quantized


class Net(nn.Module):
    """A convolution, a wide layer and a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, image):
        return self.head(self.fc(self.conv(image).relu().mean((-2, -1))).relu())


INPUTS = {"symmetric": False, "observer": "static_minmax"}
SCHEME = {
    "packed": {"targets": ["fc"], "weights": {"num_bits": 4, "group_size": 4, "symmetric": False}},
    "int8": {"targets": ["head", "conv"], "weights": {"strategy": "channel"}, "input_activations": INPUTS},
}
IMAGE = torch.linspace(-1, 2, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.manual_seed(0)
    model = Net()
    with CalibrationSession(model, SCHEME):
        model(IMAGE)
    folder = export_checkpoint(model, tmp_path_factory.mktemp("written") / "out")
    with quantized(model), torch.no_grad():
        return folder, model(IMAGE)


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written[0], tmp_path / "out")


def refused(folder, message):
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(CalibrationError, match=message):
        load_checkpoint(model, folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def rewrite(path, change):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata)


def test_what_is_whole_is_loaded(written, folder):
    assert torch.equal(load_checkpoint(Net(), folder)(IMAGE), written[1])


def fill(name, value):
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def drop(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model", drop("fc.weight_zero_point"), r"fc\.weight_zero_point is missing instead of int32 \(4, 2\)"),
        ("model", drop("head.weight_scale"), r"head\.weight_scale is missing"),
        ("model", drop("head.input_zero_point"), r"head\.input_zero_point is missing"),
        ("model", drop("conv.bias"), r"conv\.bias is missing instead of float \(8,\)"),
        ("model", put("fc.forward", torch.ones(1)), r"fc\.forward is float \(1,\) instead of absent"),
        ("model", put("other", torch.ones(1)), r"other is float \(1,\) instead of absent"),
        ("model", put("head.weight_scale", torch.ones(1, 1)), r"head\.weight_scale is float \(1, 1\) instead of"),
        ("model", put("fc.weight_scale", torch.ones(32, 1)), r"fc\.weight_scale is float \(32, 1\) instead of"),
        ("model", put("head.input_scale", torch.ones(1, 1)), r"head\.input_scale is float \(1, 1\) instead of"),
        ("model", put("head.weight", torch.ones(10, 32)), r"head\.weight is float .* instead of int8"),
        ("model", fill("head.weight_scale", float("nan")), r"head\.weight_scale is not finite and other than zero"),
        ("model", fill("head.input_scale", 0), r"head\.input_scale is not finite and positive"),
        ("model", fill("fc.weight_scale", -1), r"fc\.weight_scale is not finite and positive"),
        ("model", fill("fc.weight_shape", 31), r"model\.safetensors cannot be read"),
        ("model", fill("head.bias", 1), r"files of .* have changed since they were written: model\.safetensors"),
        ("model", drop("conv.weight_scale"), r"conv\.weight_scale is missing"),
        ("model", drop("conv.input_zero_point"), r"conv\.input_zero_point is missing"),
        ("model", put("conv.forward", torch.ones(1)), r"conv\.forward is float \(1,\) instead of absent"),
        ("model", put("conv.weight_scale", torch.ones(1)), r"conv\.weight_scale is float \(1,\) instead of"),
        ("model", put("conv.weight", torch.ones(8, 3, 3, 3)), r"conv\.weight is float .* instead of int8 \(8, 27\)"),
        ("model", fill("conv.weight_scale", float("inf")), r"conv\.weight_scale is not finite and other than zero"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, file, change, message):
    rewrite(folder / f"{file}.safetensors", change)
    refused(folder, message)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_missing_is_named(folder, name):
    (folder / name).unlink()
    refused(folder, rf"{name} (is missing|does not exist|cannot be read)")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "lightning_obs.json"])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.95])
def test_a_file_that_is_cut_off_is_named(folder, name, share):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(share * len(whole))])
    refused(folder, rf"{name} (cannot be read|is cut off)")


@pytest.mark.parametrize("text", ["[1, 2", "[1]", "\xff", '{"quantization_config": 3}', '{"quantization_config": {}}'])
def test_a_config_that_is_none_is_named(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    refused(folder, r"config\.json cannot be read|does not fit")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("targets", ["re:["], r"config\.json cannot be read"),
        ("format", "zip", r"config\.json cannot be read|model\.safetensors cannot be read"),
        ("weights", {"num_bits": 8, "group_size": 3}, "does not fit|cannot be read|does not divide"),
        ("weights", None, "does not fit"),
    ],
)
def test_a_config_of_something_else_is_named(folder, key, value, message):
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, message)
