"""What both callbacks share: which module is calibrated, and which tokens count."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, CalibrationError
from lightning_obs.callbacks.base import find_module
from tests.callbacks.calibration_modules import Language, Plain, trainer

# ---------------------------------------------------------------------- which module


def test_the_one_transformers_model_is_found(tiny_llama):
    module = Language(tiny_llama())
    assert find_module(module) is module.model
    assert find_module(Plain()).__class__ is Plain


def test_two_transformers_models_have_to_be_told_apart(tiny_llama):
    module = Language(tiny_llama())
    module.teacher = tiny_llama()
    with pytest.raises(CalibrationError, match="several transformers models: model, teacher"):
        find_module(module)
    assert find_module(module, "teacher") is module.teacher


def test_an_unknown_module_path_lists_the_modules():
    with pytest.raises(CalibrationError, match=r"Plain has no module 'nett'.*one of its modules: net"):
        find_module(Plain(), "nett")


def test_hydra_containers_are_taken():
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"scheme": {"FP8": ["net.0"]}, "ignore": ["x"], "observers": {"input": {"name": "minmax"}}}
    )
    callback = CalibrationCallback(config.scheme, ignore=config.ignore, observers=config.observers)
    assert callback.ignore == ["x"]
    assert callback.options.config.config_groups["FP8"].input_activations.observer == "minmax"


# ---------------------------------------------------------------------- padding


def padded_loader():
    x = torch.randn(4, 3, 8)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
    x[mask == 0] = 1e6
    rows = [{"x": a, "attention_mask": m} for a, m in zip(x, mask, strict=True)]
    return x[mask.bool()], DataLoader(rows, batch_size=2)


class Padded(Plain):
    def validation_step(self, batch, batch_idx):
        self(batch["x"])


@pytest.mark.parametrize("token_mask", ["attention_mask", lambda batch: batch["attention_mask"]])
def test_padding_named_in_the_batch_reaches_no_observer(token_mask):
    kept, data = padded_loader()
    callback = CalibrationCallback("INT8_STATIC", token_mask=token_mask)
    trainer(callback).validate(Padded(), data, verbose=False)
    assert callback.result.input_ranges["net.0"] == (kept.min().item(), kept.max().item())


def test_a_batch_without_the_mask_is_an_error_that_lists_its_keys():
    callback = CalibrationCallback("INT8_STATIC", token_mask="mask")
    with pytest.raises(CalibrationError, match=r"no 'mask'.*x, attention_mask"):
        trainer(callback).validate(Padded(), padded_loader()[1], verbose=False)
    assert callback.result is None
