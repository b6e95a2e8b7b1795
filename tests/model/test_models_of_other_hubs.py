"""A model that another library saves and loads is a plain module: only transformers' own models are taken for them."""

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from lightning_obs import CalibrationCallback, CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.model.kinds import is_transformers_model
from tests.callbacks.calibration_modules import Plain, loader, trainer

SCHEME = "INT8_STATIC"


class Net(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.hidden(x).relu())


class OfSegmentationModels(Net, PyTorchModelHubMixin):
    """As every model of segmentation-models-pytorch: a dict of the constructor's arguments as ``config``."""

    def __init__(self, width: int = 16):
        super().__init__(width)
        self.config = {"width": width}


class OfDiffusers(Net):
    """As diffusers' ModelMixin: a frozen dict as ``config``, and methods named as in transformers."""

    @property
    def config(self):
        return {"width": self.hidden.out_features}

    def save_pretrained(self, folder, is_main_process=True, safe_serialization=True):
        raise AssertionError("a plain module is not saved by its own library")


class WithTheirConfig(Net, PyTorchModelHubMixin):
    """The hub's mixin, around parts of transformers, with a config of transformers."""

    def __init__(self, width: int = 16):
        super().__init__(width)
        self.config = PretrainedConfig(width=width)


class Own(PreTrainedModel):
    """A model of one's own, of transformers."""

    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = Net()


OTHERS = [OfSegmentationModels, OfDiffusers, WithTheirConfig]


def test_models_of_transformers_are_known_by_their_base_class():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    assert is_transformers_model(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)))
    assert is_transformers_model(Own(PretrainedConfig()))
    assert not is_transformers_model(PretrainedConfig())
    assert not is_transformers_model(Net())


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_another_library_is_calibrated_exported_and_loaded_as_a_plain_module(kind, tmp_path):
    model, x = kind().eval(), torch.randn(4, 8)
    assert not is_transformers_model(model)
    with torch.no_grad(), CalibrationSession(model, SCHEME) as session:
        model(x)
    assert session.result.plan.engines == {}  # engines load transformers' models
    export_checkpoint(model, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    loaded = load_checkpoint(kind(), tmp_path / "out").eval()
    with torch.no_grad(), quantized(model):
        assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("kind", OTHERS)
def test_in_a_lightning_module_it_is_a_plain_child(kind, tmp_path):
    class Module(Plain):
        def build(self):
            return kind()

    module, callback = Module(), CalibrationCallback(SCHEME, evaluate=True, export_to=tmp_path / "out")
    runner = trainer(callback, max_epochs=1)
    runner.fit(module, loader(), loader())
    assert "val_loss_quantized" in runner.callback_metrics
    assert callback.session.model is module  # as of any module with a forward
    loaded = load_checkpoint(Module(), tmp_path / "out").eval()
    x = torch.randn(4, 8)
    with torch.no_grad(), quantized(module.eval()):
        assert torch.equal(loaded(x), module(x))
