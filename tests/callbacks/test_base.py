"""What both callbacks share: which module is calibrated, and which tokens count."""

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import Metric
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining
from lightning_obs.callbacks.trainer_session import find_module
from tests.callbacks.calibration_modules import Language, Plain, trainer
from tests.support.lightning_package import MESSAGES
from tests.support.tiny_model import save_tiny_llama

# ---------------------------------------------------------------------- which module


def test_the_one_transformers_model_is_found(tiny_llama):
    module = Language(tiny_llama())
    assert find_module(module) == ("model", module.model)
    plain = Plain()
    assert find_module(plain) == ("", plain)


def test_two_transformers_models_have_to_be_told_apart(tiny_llama):
    module = Language(tiny_llama())
    module.teacher = tiny_llama()
    with pytest.raises(CalibrationError, match="several transformers models: model, teacher"):
        find_module(module)
    assert find_module(module, "teacher") == ("teacher", module.teacher)


def test_an_unknown_module_path_lists_the_modules():
    with pytest.raises(CalibrationError, match=r"Plain has no module 'nett'.*one of its modules: net"):
        find_module(Plain(), "nett")


@pytest.mark.parametrize("callback", [CalibrationCallback, QuantizationAwareTraining])
def test_options_of_another_type_are_refused_by_the_constructor(callback):
    with pytest.raises(CalibrationError, match=r"module. Got 3, expected the attribute path of a module"):
        callback("FP8", module=3)
    with pytest.raises(CalibrationError, match=r"token_mask. Got 3, expected a key of the batch, or a function of it"):
        callback("FP8", token_mask=3)
    with pytest.raises(CalibrationError, match=r"export_to. Got 3, expected a path, a list of paths, or a dict"):
        callback("FP8", export_to=3)


@pytest.mark.parametrize(
    ("callback", "option", "expected"),
    [
        (CalibrationCallback, "evaluate", "True, False, or a share"),
        (CalibrationCallback, "every_n_epochs", "a whole number, one or more"),
        (CalibrationCallback, "max_batches", "a whole number, one or more"),
        (QuantizationAwareTraining, "start_step", "a whole number, zero or more"),
    ],
)
def test_a_number_that_is_a_text_is_refused(callback, option, expected):
    with pytest.raises(CalibrationError, match=rf"{option}. Got '?half'?, expected {expected}"):
        callback("FP8", **{option: "half"})


class Wrapped(torch.nn.Module):
    """One wrapper deeper: the model beside a head of one's own."""

    def __init__(self, model):
        super().__init__()
        self.backbone, self.head = model, torch.nn.Linear(8, 2)

    def forward(self, **batch):
        return self.backbone(**batch)


def test_a_transformers_model_one_wrapper_deeper_is_found(tiny_llama):
    module = Language(Wrapped(tiny_llama()))
    assert find_module(module) == ("model.backbone", module.model.backbone)
    assert find_module(torch.nn.ModuleList([module])) == ("0.model.backbone", module.model.backbone)


def test_of_several_transformers_models_the_nearest_counts(tiny_llama):
    module = Language(tiny_llama())
    module.other = Wrapped(tiny_llama())
    assert find_module(module) == ("model", module.model)


def test_a_transformers_model_inside_of_a_metric_is_not_calibrated(tiny_llama):
    class Score(Metric):
        def __init__(self):
            super().__init__()
            self.model = tiny_llama()

        def update(self): ...

        def compute(self): ...

    module = Plain()
    module.score = Score()
    assert find_module(module) == ("", module)


def tokens():
    return DataLoader([{"input_ids": torch.arange(8)}], batch_size=2)


def said(caplog, *callbacks, module, data=None, runs=1):
    with caplog.at_level("INFO", logger=MESSAGES):
        for _ in range(runs):
            trainer(*callbacks).validate(module, data or tokens(), verbose=False)
    messages = [record.message for record in caplog.records if "calibrating" in record.message]
    assert all("; left in float: Embedding " in message for message in messages)
    return [message.partition("; left in float: ")[0] for message in messages]


def test_which_module_is_calibrated_and_what_is_left_out_is_said_once(tiny_llama, caplog):
    module = Language(Wrapped(tiny_llama()))
    callback = CalibrationCallback("FP8", ignore=["lm_head"], show=False)
    assert said(caplog, callback, module=module, runs=2) == [
        "FP8: calibrating LlamaForCausalLM (`model.backbone`): 14 of 15 Linear; left out: lm_head; "
        "not part of it, and left in full precision: model.head"
    ]


def test_a_tied_head_is_left_out_and_it_is_said(tmp_path, caplog):
    module = Language(AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path)))
    assert said(caplog, CalibrationCallback("FP8", show=False), module=module) == [
        "FP8: calibrating LlamaForCausalLM (`model`): 14 of 15 Linear; left out: lm_head (tied to model.embed_tokens)"
    ]


def test_an_empty_path_calibrates_the_lightning_module_itself(tiny_llama, caplog):
    module = Language(tiny_llama())
    callback = CalibrationCallback("FP8", module="", engines="unchecked", ignore=["model.lm_head"], show=False)
    assert said(caplog, callback, module=module) == [
        "FP8: calibrating Language (the LightningModule itself): 14 of 15 Linear; left out: model.lm_head"
    ]
    assert "model.model.layers.0.mlp.up_proj" in callback.result.modules


def test_hydra_containers_are_taken():
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"scheme": {"FP8": ["net.0"]}, "ignore": ["x"], "observers": {"input": {"name": "minmax"}}}
    )
    callback = CalibrationCallback(config.scheme, ignore=config.ignore, observers=config.observers)
    assert callback.options.ignore == ["x"]
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
