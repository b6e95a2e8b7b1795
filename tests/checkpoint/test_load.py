"""Plain modules: what load_checkpoint gives back of an export."""

import copy
import json
import pickle
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    export_checkpoint,
    linearize_attention,
    load_checkpoint,
    quantized,
)
from lightning_obs.model.module_qparams import read_qparams


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 2, 2)
        self.norm = nn.BatchNorm1d(32)
        self.fc1 = nn.Linear(32, 32)
        self.fc2 = nn.Linear(32, 8)

    def forward(self, ids):
        x = self.norm(self.embedding(ids).flatten(0, 1))
        x = self.up(self.conv(x.view(-1, 1, 4, 8)))[:, 0, :4, :8].flatten(1)
        return self.fc2(self.fc1(x).relu())


WEIGHTS = {"num_bits": 8, "strategy": "channel"}
PLAIN = {
    "int8": {
        "embeddings": {"targets": ["Embedding"], "weights": WEIGHTS},
        "rest": {
            "targets": ["Linear", "Conv2d", "ConvTranspose2d"],
            "weights": WEIGHTS,
            "input_activations": {"num_bits": 8, "observer": "static_minmax"},
        },
    },
    "asymmetric": {
        "rest": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 8, "symmetric": False},
            "input_activations": {"num_bits": 8, "symmetric": False, "observer": "static_minmax"},
            "output_activations": {"num_bits": 8, "observer": "static_minmax"},
        }
    },
    "fp8": {"FP8": ["Linear"]},
    "nvfp4": {"NVFP4": ["Linear"]},
    "mxfp4": {"MXFP4": ["Linear"]},
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, d) for name in PLAIN for d in (torch.float32, torch.bfloat16) if (name, d) != ("nvfp4", torch.float32)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_a_plain_module_is_loaded_with_the_same_outputs(name, dtype, tmp_path):
    scheme = PLAIN[name]
    model = Everything().to(dtype).eval()
    ids = [torch.randint(0, 50, (3, 5)) for _ in range(3)]
    with CalibrationSession(model, scheme) as session:
        for batch in ids if session.needs_data else ():
            model(batch)
    with torch.no_grad(), quantized(model):
        expected = model(ids[0])
    export_checkpoint(model, tmp_path / "out")
    loaded = load_checkpoint(Everything().to(dtype).eval(), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(ids[0]), expected)
        assert not torch.equal(model(ids[0]), expected)
    for module_name in session.result.modules:
        module = loaded.get_submodule(module_name)
        for key, value in read_qparams(model.get_submodule(module_name)).items():
            assert torch.equal(read_qparams(module)[key], value), (module_name, key)


def test_gpt2_with_its_conv1d_and_tied_head_is_loaded(tmp_path):
    def build():
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).eval()

    model, ids = build(), torch.randint(0, 64, (2, 8))
    with CalibrationSession(model, "INT8_STATIC", targets=["Conv1D"], engines="unchecked"):
        model(ids)
    with torch.no_grad(), quantized(model):
        expected = model(ids).logits
    loaded = load_checkpoint(build(), export_checkpoint(model, tmp_path / "out"))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected)
        assert not torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("bits", [3, 4])
def test_a_narrow_head_with_zero_points_of_groups_is_loaded(rows, bits, tmp_path):
    model, x = nn.Sequential(nn.Linear(64, rows)), torch.randn(3, 64)
    weights = {"num_bits": bits, "group_size": 16, "symmetric": False}
    with CalibrationSession(model, {"head": {"targets": ["Linear"], "weights": weights}}):
        pass
    loaded = load_checkpoint(nn.Sequential(nn.Linear(64, rows)), export_checkpoint(model, tmp_path / "out"))
    with torch.no_grad(), quantized(model):
        assert torch.equal(loaded(x), model(x))


def test_a_convolution_is_stored_like_a_linear_of_its_matrix(cnn, tmp_path):
    with CalibrationSession(cnn, "INT8_STATIC", targets=["Linear", "Conv2d"]):
        cnn(torch.randn(2, 3, 8, 8))
    export_checkpoint(cnn, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, shape in {"conv": (8, 27), "head": tuple(cnn.head.weight.shape)}.items():
        assert stored[f"{name}.weight"].dtype is torch.int8
        assert stored[f"{name}.weight"].shape == shape
        assert stored[f"{name}.weight_scale"].shape == (shape[0], 1)
        assert stored[f"{name}.input_scale"].shape == (1,)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert set(group["targets"]) == {"Linear", "Conv2d"}


#: what compressed-tensors does not know: a module and an input
OTHERS = {
    "Conv1d": (lambda: nn.Conv1d(32, 6, 3), (2, 32, 9)),
    "Conv2d": (lambda: nn.Conv2d(32, 6, 3), (2, 32, 9, 9)),
    "Conv3d": (lambda: nn.Conv3d(32, 6, 2), (2, 32, 3, 3, 3)),
    "depthwise": (lambda: nn.Conv2d(16, 16, (4, 8), groups=16), (2, 16, 9, 9)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(32, 6, 3), (2, 32, 9)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(32, 6, 2), (2, 32, 5, 5)),
    "Conv1D of transformers": (lambda: Conv1D(6, 32), (2, 5, 32)),
}
INPUT8 = {"num_bits": 8, "observer": "static_minmax"}
#: scheme, and the most bytes that are stored for a weight, scales and padding included
STORED_BYTES = {
    "int8": ({"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": INPUT8}, 1.25),
    "int8 tensor": ({"weights": {"num_bits": 8, "strategy": "tensor"}, "input_activations": INPUT8}, 1.1),
    "packed int8": ({"weights": {"num_bits": 8, "strategy": "channel"}}, 1.25),
    "int4 groups": ({"weights": {"num_bits": 4, "group_size": 16}}, 0.85),
    "int4 groups asymmetric": ({"weights": {"num_bits": 4, "group_size": 16, "symmetric": False}}, 1.1),
    "int4 and inputs": ({"weights": {"num_bits": 4, "strategy": "channel"}, "input_activations": INPUT8}, 0.75),
    "fp8": ("FP8", 1.25),
    "fp8 block": ({"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 24]}}, 1.25),
    "mxfp4": ("MXFP4A16", 0.55),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("scheme", STORED_BYTES)
def test_every_module_with_a_weight_matrix_is_stored_small_and_loaded_with_the_same_outputs(kind, scheme, tmp_path):
    (make, shape), (scheme, most) = OTHERS[kind], STORED_BYTES[scheme]
    model, x = nn.Sequential(make()), torch.randn(shape)
    with CalibrationSession(model, scheme, targets="0") as session:
        for batch in [x] if session.needs_data else ():
            model(batch)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    stored = load_file(export_checkpoint(model, tmp_path / "out") / "model.safetensors")
    values = model[0].weight.numel()
    assert (
        sum(v.nbytes for k, v in stored.items() if k.startswith("0.weight") and k != "0.weight_shape") < most * values
    )
    with torch.no_grad():
        assert torch.equal(load_checkpoint(nn.Sequential(make()), tmp_path / "out")(x), expected)
        assert not torch.equal(model(x), expected)


def test_a_module_without_weight_matrix_whose_input_is_quantized_is_loaded(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8))

    model, x = build(), torch.randn(5, 8)
    with CalibrationSession(model, {"g": {"targets": ["LayerNorm", "ReLU"], "input_activations": INPUT8}}):
        model(x)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    loaded = load_checkpoint(build(), export_checkpoint(model, tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(load_checkpoint(build(), tmp_path / "out")(x), expected)
        assert not torch.equal(model(x), expected)
    assert loaded[2].quantization_scheme.input_activations.num_bits == 8


def test_a_pattern_that_matches_containers_and_what_was_ignored_is_loaded(tmp_path):
    def build():
        return nn.ModuleDict(
            {"body": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))}
        )

    model, x = build().eval(), torch.randn(2, 3, 8, 8)
    ignore = ["BatchNorm2d", "body.3"]
    with CalibrationSession(model, "INT8_STATIC", targets=["re:.*body.*"], ignore=ignore) as session:
        model["body"](x)
    assert list(session.result.modules) == ["body.0"]
    with torch.no_grad(), quantized(model):
        expected = model["body"](x)
    loaded = load_checkpoint(build().eval(), export_checkpoint(model, tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(loaded["body"](x), expected)


@pytest.mark.parametrize("grad", [False, True])
def test_what_was_loaded_goes_through_torch_export(cnn, tmp_path, grad):
    with CalibrationSession(cnn, "INT8_STATIC", targets=["Linear", "Conv2d"]):
        cnn(torch.randn(2, 3, 8, 8))
    loaded = load_checkpoint(type(cnn)(), export_checkpoint(cnn, tmp_path / "out")).eval()
    image = torch.randn(2, 3, 8, 8)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(loaded, (image,))
    with torch.no_grad():
        assert torch.equal(program.module()(image), loaded(image))
        assert not torch.equal(program.module()(image), cnn(image))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_what_was_loaded_runs_quantized_by_itself(cnn, tmp_path, copied):
    with CalibrationSession(cnn, "INT8_STATIC", targets=["Linear", "Conv2d"]):
        cnn(torch.randn(2, 3, 8, 8))
    loaded = load_checkpoint(type(cnn)(), export_checkpoint(cnn, tmp_path / "out"))
    image = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        expected = loaded(image)
        other = copied(loaded)
        for value in (*loaded.parameters(), *loaded.buffers()):
            value.zero_()
        assert torch.equal(other(image), expected)
        assert not torch.equal(other(image * 10), expected)
        with quantized(other):
            assert torch.equal(other(image), expected)
        assert torch.equal(other(image), expected)


def test_what_was_loaded_cannot_be_trained(cnn, tmp_path):
    with CalibrationSession(cnn, "INT8_STATIC", targets=["Linear", "Conv2d"]):
        cnn(torch.randn(2, 3, 8, 8))
    loaded = load_checkpoint(type(cnn)(), export_checkpoint(cnn, tmp_path / "out"))
    image = torch.randn(1, 3, 8, 8, requires_grad=True)
    for module in (loaded, copy.deepcopy(loaded), loaded.conv):
        with pytest.raises(CalibrationError, match="QuantizationAwareTraining"):
            module(image).sum().backward()
    with quantized(loaded), pytest.raises(CalibrationError, match="QuantizationAwareTraining"):
        loaded(image).sum().backward()
    assert torch.autograd.grad(loaded(image).sum(), image)[0].any()  # inputs have gradients
    loaded.conv.requires_grad_(False)
    loaded.head.weight.requires_grad_(False)
    loaded(image).sum().backward()
    assert loaded.head.bias.grad is not None


def test_only_a_convolution_is_a_checkpoint_too(cnn, tmp_path):
    with CalibrationSession(cnn, "INT8_STATIC", targets=["Conv2d"]):
        cnn(torch.randn(2, 3, 8, 8))
    export_checkpoint(cnn, tmp_path / "out")
    loaded = load_checkpoint(type(cnn)(), tmp_path / "out")
    image = torch.randn(1, 3, 8, 8)
    with torch.no_grad(), quantized(cnn):
        expected = cnn(image)
    assert torch.equal(loaded(image), expected)


@pytest.mark.parametrize("targets", [None, ["a"]])
def test_a_module_used_under_two_names_is_stored_under_both(targets, tmp_path):
    def build():
        model = nn.ModuleDict({"a": nn.Linear(4, 4)})
        model["b"] = model["a"]
        return model

    model = build()
    with CalibrationSession(model, "W8A8", targets=targets):
        pass
    export_checkpoint(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["a.weight"], stored["b.weight"])
    assert stored["b.weight"].dtype is torch.int8
    loaded = load_checkpoint(build(), tmp_path / "out")
    x = torch.randn(2, 4)
    with torch.no_grad(), quantized(model):
        assert torch.equal(loaded["b"](x), model["b"](x))


class Holder(nn.Module):
    """As a LightningModule: the net beside a loss with a weight, or without."""

    def __init__(self, loss=None):
        super().__init__()
        self.plan = nn.Module()
        self.plan.net = Everything()
        if loss is not None:
            self.loss = loss

    def forward(self, ids):
        return self.plan.net(ids)


def exported(model, folder):
    """The calibrated model's outputs, and the batch."""
    ids = torch.randint(0, 50, (3, 5))
    with CalibrationSession(model.eval(), "INT8_STATIC", targets=["Linear", "Conv2d"], ignore="re:.*fc2") as session:
        model(ids)
    assert len(session.result.modules) == 2
    export_checkpoint(model, folder)
    with torch.no_grad(), quantized(model):
        return model(ids), ids


def test_a_checkpoint_of_the_module_around_it_is_loaded_without_its_prefix(tmp_path):
    expected, ids = exported(Holder(), tmp_path / "out")
    net = Everything().eval()
    assert load_checkpoint(net, tmp_path / "out") is net
    with torch.no_grad():
        assert torch.equal(net(ids), expected)
    assert not torch.equal(net.fc1.weight, Everything().fc1.weight)
    single = nn.Linear(4, 4)
    with CalibrationSession(holder := nn.Sequential(single), {"weights": WEIGHTS}):
        pass
    export_checkpoint(holder, tmp_path / "single")
    load_checkpoint(nn.Linear(4, 4), tmp_path / "single")


def test_a_checkpoint_with_more_than_the_module_says_which_part_of_it_the_module_is(tmp_path):
    exported(Holder(nn.BatchNorm1d(3)), tmp_path / "out")
    net = Everything()
    before = copy.deepcopy(net.state_dict())
    expected = r"held this one as `plan.net`, beside others \(loss\): build that module, .* and take module.plan.net[.]"
    with pytest.raises(CalibrationError, match=expected):
        load_checkpoint(net, tmp_path / "out")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_checkpoint_of_a_part_says_which_part(tmp_path):
    exported(Everything(), tmp_path / "out")
    holder = Holder(nn.BatchNorm1d(3))
    with pytest.raises(CalibrationError, match=r"holds `plan.net` of this module: load_checkpoint\(module.plan.net,"):
        load_checkpoint(holder, tmp_path / "out")
    load_checkpoint(holder.plan.net, tmp_path / "out")


def test_names_that_fit_nowhere_get_no_hint(tmp_path):
    exported(Everything(), tmp_path / "out")
    with pytest.raises(CalibrationError, match="Remedy: build the model that was exported"):
        load_checkpoint(nn.Sequential(nn.Linear(2, 2)), tmp_path / "out")


class Inner(nn.Module):
    """A network that its own constructor wraps."""

    def __init__(self, wrap):
        super().__init__()
        self.net = wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
        self.head = wrap(nn.Linear(8, 8))

    def forward(self, x):
        return self.head(self.net(x))


WRAPS = {"torch.compile": partial(torch.compile, backend="eager"), "activation checkpointing": checkpoint_wrapper}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_model_with_wrappers_inside_loads_its_own_checkpoint(wrap, tmp_path):
    model, x = Inner(wrap).eval(), torch.randn(4, 8)
    with CalibrationSession(model, "INT8_STATIC"):
        model(x)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    export_checkpoint(model, tmp_path / "folder")
    for reader in (Inner(wrap).eval(), Inner(lambda module: module).eval()):
        kinds = [type(module) for module in reader.modules()]
        loaded = load_checkpoint(reader, tmp_path / "folder")
        assert [type(module) for module in loaded.modules()] == kinds
        with torch.no_grad():
            assert torch.equal(loaded(x), expected)


def test_wrapped_attention_that_was_made_of_linears_is_loaded(tmp_path):
    def network():
        return nn.Sequential(torch.compile(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), backend="eager"))

    model, x = network().eval(), torch.randn(2, 4, 8)
    linearize_attention(model)
    with CalibrationSession(model, "INT8_STATIC"):
        model(x)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    loaded = load_checkpoint(network().eval(), export_checkpoint(model, tmp_path / "folder"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("wrong", [Everything, "Everything"])
def test_what_is_no_module_is_refused(wrong, tmp_path):
    with pytest.raises(CalibrationError, match=r"^model\. Got .*Everything.*, expected a module to load into"):
        load_checkpoint(wrong, tmp_path)
    with pytest.raises(CalibrationError, match=r"^model\. Got .*Everything.*, expected a module"):
        CalibrationSession(wrong, "W8A8")


class Extra(nn.Linear):
    """A Linear with an extra state that is no tensor."""

    state = "of the constructor"

    def get_extra_state(self):
        return {"state": self.state}

    def set_extra_state(self, state):
        self.state = state["state"]


def test_an_extra_state_is_warned_of_and_the_model_that_loads_keeps_its_own(tmp_path):
    model, loaded, x = nn.Sequential(Extra(8, 8)), nn.Sequential(Extra(8, 8)), torch.randn(4, 8)
    with CalibrationSession(model, "INT8_STATIC", targets=["Extra"]):
        model(x)
    model[0].state = "of the training"
    with pytest.warns(CalibrationWarning, match=r"\(get_extra_state\) are not in it: 0\._extra_state\. Set"):
        export_checkpoint(model, tmp_path / "folder")
    load_checkpoint(loaded, tmp_path / "folder")
    assert loaded[0].state == "of the constructor"
    with torch.no_grad(), quantized(model):
        assert torch.equal(loaded(x), model(x))


def pruned_and_calibrated(x):
    model = nn.Sequential(nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "weight", amount=0.25)
    with CalibrationSession(model, "INT8_STATIC"):
        model(x)
    return model


def test_a_pruning_that_was_made_permanent_after_the_calibration_is_stored(tmp_path):
    x = torch.randn(4, 8)
    model = pruned_and_calibrated(x)
    prune.remove(model[0], "weight")
    loaded = load_checkpoint(nn.Sequential(nn.Linear(8, 8)), export_checkpoint(model, tmp_path / "folder"))
    with torch.no_grad(), quantized(model):
        assert torch.equal(loaded(x), model(x))
    assert (loaded[0].weight == 0).sum() >= 16


def test_a_pruning_that_went_on_after_the_calibration_is_refused(tmp_path):
    model = pruned_and_calibrated(torch.randn(4, 8))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    prune.remove(model[0], "weight")
    with pytest.raises(CalibrationError, match=r"1 parameters and buffers have changed .*calibrated: 0\.weight"):
        export_checkpoint(model, tmp_path / "folder")
