"""`export_to` writes checkpoints and files by their suffix; what cannot be written is refused before any batch."""

import sys
from importlib import import_module

import gguf
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    QuantizationAwareTraining,
    load_checkpoint,
    quantized,
)
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer
from tests.callbacks.test_export_gguf import Language
from tests.support.gguf_base import write_base
from tests.support.lightning_package import PYTORCH, L
from tests.support.tiny_model import save_tiny_llama

CALLBACKS = pytest.mark.parametrize("kind", [CalibrationCallback, QuantizationAwareTraining])
DYNAMIC = torch.export.Dim.DYNAMIC


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def quantized_outputs(module, x):
    with torch.no_grad(), quantized(module):
        return module(x)


def run_onnx(file, x):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [outputs] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(outputs)


@pytest.mark.slow_but_first
@CALLBACKS
def test_a_fit_ends_with_a_checkpoint_an_onnx_file_and_a_program_of_the_same_model(kind, tmp_path):
    module = Plain()
    callback = kind("INT8_STATIC", export_to=[tmp_path / name for name in ("model-v1.5", "m.onnx", "m.pt2")])
    trainer(callback, max_epochs=2).fit(module, loader(), loader(2))
    assert names_in(tmp_path) == ["m.onnx", "m.pt2", "model-v1.5"]
    assert hooks_on(module) == []
    x = torch.randn(1, 8)
    expected = quantized_outputs(module.net, x)
    loaded = load_checkpoint(Plain(), tmp_path / "model-v1.5")
    assert torch.equal(loaded(x), expected)
    torch.testing.assert_close(run_onnx(tmp_path / "m.onnx", x), expected, atol=2e-5, rtol=1e-5)
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(program(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_each_path_may_have_the_options_of_its_writer(tmp_path):
    module = Plain()
    example = torch.randn(3, 8)
    paths = {
        str(tmp_path / "signed.onnx"): {"signed": True, "measure": False, "dynamic_shapes": ({0: DYNAMIC},)},
        str(tmp_path / "m.pt2"): {"backend": "inductor", "example": example},
        str(tmp_path / "folder"): {"max_shard_size": 300},
        str(tmp_path / "plain.onnx"): None,
    }
    callback = CalibrationCallback("INT8_TENSORRT", export_to=paths)
    trainer(callback).validate(module, loader(), verbose=False)
    assert onnx.TensorProto.INT8 in zero_point_types(tmp_path / "signed.onnx")
    assert run_onnx(tmp_path / "signed.onnx", torch.randn(5, 8)).shape == (5, 2)
    program = torch.export.load(tmp_path / "m.pt2")
    assert "torch.uint8" in str(program.graph)
    assert program.module()(example).shape == (3, 2)
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 1
    assert (tmp_path / "plain.onnx").is_file()


def zero_point_types(file):
    graph = onnx.load(file).graph
    names = {node.input[2] for node in graph.node if node.op_type == "QuantizeLinear"}
    return {value.data_type for value in graph.initializer if value.name in names}


def test_a_validation_ends_with_a_gguf_file(tmp_path):
    module = Language()
    base = write_base(module.model, tmp_path / "base.gguf")
    observers = {"weight": {"name": "imatrix_mse", "signed": True}}
    callback = CalibrationCallback("Q4_0", observers=observers, export_to={tmp_path / "m.gguf": {"base": base}})
    trainer(callback).validate(module, DataLoader(torch.randint(3, 96, (4, 16)), batch_size=2), verbose=False)
    file = callback.export_gguf(tmp_path / "again.gguf", base)
    assert (tmp_path / "m.gguf").read_bytes() == file.read_bytes()
    types = [tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors]
    assert types.count("Q4_0") == 15


def test_a_second_run_replaces_the_file_of_the_first_and_another_callback_only_when_asked(tmp_path):
    file = tmp_path / "m.pt2"
    callback = CalibrationCallback("INT8_STATIC", export_to=file)
    trainer(callback).validate(Plain(), loader(), verbose=False)
    module = Plain()
    trainer(callback).validate(module, loader(), verbose=False)
    x = torch.randn(1, 8)
    torch.testing.assert_close(torch.export.load(file).module()(x), quantized_outputs(module, x), atol=1e-6, rtol=1e-5)
    with pytest.raises(CalibrationError, match=r"m\.pt2 is already there.*export_overwrite=True"):
        trainer(CalibrationCallback("INT8_STATIC", export_to=file)).validate(Plain(), loader(), verbose=False)
    other = CalibrationCallback("INT8_STATIC", export_to=file, export_overwrite=True)
    trainer(other).validate(Plain(), loader(), verbose=False)


# ---------------------------------------------------------------------- refused by the constructor


@CALLBACKS
@pytest.mark.parametrize(
    ("export_to", "message"),
    [
        (3, "export_to. Got 3, expected a path, a list of paths, or a dict of paths and the options"),
        ([], r"export_to. Got \[\], expected a path"),
        (["a", 3], "export_to. Got"),
        (["a", ["b"]], "export_to. Got"),
        ({"m.onnx": 3}, "export_to. Got .*options of their writers"),
        ({"m.onnx": {"singed": True}}, r"unknown option of m.onnx in export_to: singed \(did you mean `signed`\?\)"),
        ({"m.onnx": {"overwrite": True}}, "unknown option of m.onnx in export_to: overwrite"),
        (
            {"m.pt2": {"signed": True}},
            "unknown option of m.pt2 in export_to: signed. Expected some of backend, dynamic",
        ),
        ("m.gguf", r'one of the same model in float: m.gguf. Got no base. Remedy: export_to=\{"m.gguf": \{"base": '),
        ("m.pte", "export_to writes no .pte file: m.pte. Expected a folder .* ends in .onnx, .pt2, .gguf"),
        (["out", "out/m.onnx"], "two paths of export_to are the same, or one lies inside the other"),
        (["m.onnx", "./m.onnx"], "two paths of export_to are the same, or one lies inside the other"),
    ],
)
def test_a_wrong_export_to_is_refused_by_the_constructor(kind, export_to, message):
    with pytest.raises(CalibrationError, match=message):
        kind("INT8_STATIC", export_to=export_to)


@CALLBACKS
@pytest.mark.parametrize("name", ["m.onnx", "m.PT2", "m.gguf", "m.safetensors"])
def test_the_folder_of_an_export_has_not_the_name_of_a_file(kind, name):
    with pytest.raises(CalibrationError, match=f"is a folder: {name}. Got the name of a file. Remedy: .*export_onnx"):
        kind("INT8_STATIC").export(name)


class Tuned(Plain):
    lr, batch_size = 1e-3, 4

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return DataLoader(loader(count=64).dataset, batch_size=self.batch_size)


SEARCHES = {
    "learning rate": lambda tuner, module: tuner.lr_find(module, val_dataloaders=loader(), num_training=10),
    "batch size": lambda tuner, module: tuner.scale_batch_size(
        module, val_dataloaders=loader(), max_trials=2, steps_per_trial=1
    ),
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The number of training batches")
@CALLBACKS
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_search_of_the_tuner_writes_nothing_and_the_fit_after_it_does(kind, search, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the Tuner saves the state that it restores
    module = Tuned()
    fit = trainer(kind("INT8_STATIC", export_to=tmp_path / "out"), max_epochs=1)
    search(import_module(f"{PYTORCH}.tuner").Tuner(fit), module)
    assert not (tmp_path / "out").exists()
    fit.fit(module, val_dataloaders=loader())
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(load_checkpoint(Tuned(), tmp_path / "out")(x), quantized_outputs(module, x))


# ---------------------------------------------------------------------- refused before the first batch


class Untouched(Plain):
    """Fails if a batch reaches it."""

    def training_step(self, batch, batch_idx):
        pytest.fail("a batch was run")

    validation_step = training_step


class Convolution(Untouched):
    def build(self):
        return nn.Sequential(nn.Conv1d(8, 16, 1), nn.Flatten(), nn.Linear(16, 2))


def refused_before_data(callback, module, message, run="validate"):
    runner = trainer(callback, max_epochs=1, num_sanity_val_steps=0)
    arguments = (module, loader(), loader(2)) if run == "fit" else (module, loader())
    with pytest.raises(CalibrationError, match=message) as error:
        getattr(runner, run)(*arguments)
    return error.value


GROUPS = {"targets": ["Conv1d"], "weights": {"num_bits": 4, "group_size": 4}}


@pytest.mark.parametrize("run", ["validate", "fit"])
@pytest.mark.parametrize(
    ("scheme", "name", "message"),
    [
        ("W8A8", "m.onnx", r"QDQ ONNX cannot hold ranges per token that are found at run time: net\.0 \(input\)"),
        ("FP8", "m.onnx", r"QDQ ONNX cannot hold 8-bit floating point: net\.0 \(weight\)"),
        ("INT8_DYNAMIC", "m.pt2", r"a program cannot hold activations whose range is found at run time: net\.0"),
        ("FP8", "m.pt2", r"a program cannot hold 8-bit floating point"),
    ],
)
def test_a_scheme_that_a_file_cannot_hold(run, scheme, name, message, tmp_path):
    callback = CalibrationCallback(scheme, export_to=tmp_path / name)
    refused_before_data(callback, Untouched(), message, run)
    assert names_in(tmp_path) == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["m.onnx", "m.pt2"])
def test_the_remedy_of_a_scheme_that_a_file_cannot_hold_works(name, tmp_path):
    error = refused_before_data(CalibrationCallback("W8A8", export_to=tmp_path / name), Untouched(), "cannot hold")
    scheme = error.remedy.partition("use ")[2].partition(" ")[0].strip(",")
    assert scheme in ("INT8_ONNX", "INT8_STATIC")
    trainer(CalibrationCallback(scheme, export_to=tmp_path / name)).validate(Plain(), loader(), verbose=False)
    assert names_in(tmp_path) == [name]


@CALLBACKS
def test_qat_refuses_it_before_the_first_batch_too(kind, tmp_path):
    refused_before_data(kind("FP8", export_to=tmp_path / "m.onnx"), Untouched(), "QDQ ONNX cannot hold", "fit")


def test_a_kind_of_module_that_a_file_cannot_hold(tmp_path):
    callback = CalibrationCallback(GROUPS, export_to=tmp_path / "m.onnx", module="")
    refused_before_data(callback, Convolution(), r"weights of 3 dimensions per group: net\.0")


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2"])
def test_a_model_that_is_not_in_float32(name, tmp_path):
    callback = CalibrationCallback("INT8_STATIC", export_to=tmp_path / name)
    refused_before_data(callback, Untouched().half(), r"not in float32.*net\.0\.bias.*model\.float\(\)")


def test_a_kv_cache(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path / "tiny"), dtype=torch.float32)
    module = Language()
    module.model = model
    for name, options in (("m.onnx", None), ("m.pt2", None)):
        export_to = {tmp_path / name: options}
        callback = CalibrationCallback("INT8_STATIC", ignore=["lm_head"], kv_cache="FP8", export_to=export_to)
        refused_before_data(callback, module, "has no quantized attention states: model.layers.0.self_attn")


@pytest.mark.parametrize(
    ("path", "packages", "message"),
    [
        ("m.onnx", ["onnxscript"], r'needs the package onnxscript.*pip install "lightning-obs\[onnx\]"'),
        ("m.gguf", ["gguf"], r'needs the package gguf.*pip install "lightning-obs\[gguf\]"'),
    ],
)
def test_a_package_that_is_missing(path, packages, message, tmp_path, monkeypatch):
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    options = {"base": "base.gguf"} if path == "m.gguf" else None
    callback = CalibrationCallback("INT8_STATIC", export_to={tmp_path / path: options})
    refused_before_data(callback, Untouched(), message)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("m.onnx", {"signed": "yes"}, "signed. Got 'yes', expected True or False"),
        ("m.onnx", {"measure": 1}, "measure. Got 1, expected True or False"),
        ("m.pt2", {"backend": "xnpack"}, r"backend. Got 'xnpack' \(did you mean `xnnpack`\?\)"),
        ("m.gguf", {"base": "none.gguf"}, "none.gguf does not exist"),
    ],
)
def test_options_of_a_wrong_value(name, options, message, tmp_path):
    refused_before_data(CalibrationCallback("INT8_STATIC", export_to={tmp_path / name: options}), Untouched(), message)


def test_a_base_of_other_weights_and_a_fit_that_changes_them(tmp_path):
    base = write_base(Language().model, tmp_path / "base.gguf")
    module = Language()
    module.validation_step = module.training_step = lambda *_: pytest.fail("a batch was run")
    module.configure_optimizers = lambda: None
    with torch.no_grad():
        module.model.lm_head.weight.mul_(2)
        module.model.model.embed_tokens.weight.mul_(2)
    export_to = {tmp_path / "m.gguf": {"base": base}}
    message = "base.gguf holds other weights than the model"
    refused_before_data(CalibrationCallback("Q4_0", export_to=export_to), module, message)
    message = r"holds the weights from before the training: .*m\.gguf.*callback\.export_gguf\(file, base\)"
    refused_before_data(CalibrationCallback("Q4_0", export_to=export_to), module, message, "fit")


# ---------------------------------------------------------------------- refused after the first validation


class InParts(Plain):
    """Its validation calls the parts of the module, and never the module."""

    trained = 0

    def training_step(self, batch, batch_idx):
        InParts.trained += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())


@pytest.mark.slow_but_first
@CALLBACKS
def test_a_module_without_an_example_is_refused_by_the_sanity_check(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(InParts, "trained", 0)
    callback = kind("INT8_STATIC", module="", export_to=tmp_path / "m.onnx")
    with pytest.raises(CalibrationError, match=r'no validation batch has called InParts.*"model.onnx": \{"example"'):
        trainer(callback, max_epochs=1).fit(InParts(), loader(), loader(2))
    assert InParts.trained == 0
    assert names_in(tmp_path) == []
    export_to = {tmp_path / "m.onnx": {"example": torch.randn(1, 8)}}
    trainer(kind("INT8_STATIC", module="", export_to=export_to), max_epochs=1).fit(InParts(), loader(), loader(2))
    assert InParts.trained > 0
    assert names_in(tmp_path) == ["m.onnx"]


def test_a_model_that_a_sanity_check_calls_has_an_example_then(tmp_path):
    callback = CalibrationCallback("INT8_STATIC", export_to=tmp_path / "m.pt2", max_batches=1)
    trainer(callback, max_epochs=1, num_sanity_val_steps=1).fit(Plain(), loader(), loader(2))
    assert names_in(tmp_path) == ["m.pt2"]


# ---------------------------------------------------------------------- engines


class Images(L.LightningModule):
    """A model of transformers with a convolution, which transformers would load in full precision."""

    def __init__(self):
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
        )
        self.model = ViTForImageClassification(config)

    def validation_step(self, batch, batch_idx):
        self.model(batch[0])


@pytest.mark.slow
def test_engines_for_checkpoints_are_asked_only_where_a_checkpoint_is_written(tmp_path):
    images = DataLoader(TensorDataset(torch.randn(4, 3, 8, 8)), batch_size=2)
    for options in ({"export_to": [tmp_path / "m.onnx", tmp_path / "out"]}, {"engines": "transformers"}):
        callback = CalibrationCallback("INT8_ONNX", **{"export_to": tmp_path / "m.onnx", **options})
        with pytest.raises(CalibrationError, match="transformers loads quantized Linear and Embedding modules only"):
            trainer(callback).validate(Images(), images, verbose=False)
    trainer(CalibrationCallback("INT8_ONNX", export_to=tmp_path / "m.onnx")).validate(Images(), images, verbose=False)
    assert names_in(tmp_path) == ["m.onnx"]
