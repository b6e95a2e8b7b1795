"""CalibrationCallback(evaluate=True) of language models: quantized states of attention, and changed predictions."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationCallback, quantized
from tests.callbacks.calibration_modules import Language, hooks_on, trainer
from tests.callbacks.second_pass.test_quantized_validation import numbers
from tests.support.lightning_package import ModelCheckpoint
from tests.support.tiny_model import save_tiny_llama

# ---------------------------------------------------------------------- attention


@pytest.mark.filterwarnings("ignore:vLLM .* loads a kv cache in symmetric 8-bit float only")
@pytest.mark.parametrize("observed", ["kv_cache", "attention"])
def test_the_second_pass_runs_with_quantized_attention_states(tmp_path, observed):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path))
    config = QuantizationConfig(
        config_groups={"a": {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 4, "dynamic": False}}}
    )
    options = {"kv_cache": "FP8", "ignore": ["lm_head"]} if observed == "kv_cache" else {}
    callback = CalibrationCallback("INT8_STATIC" if options else config, evaluate=True, show=False, **options)
    module, ids = Language(model), torch.arange(48).reshape(6, 8)
    data = DataLoader([{"input_ids": row} for row in ids], batch_size=2)
    (found,) = trainer(callback).validate(module, data, verbose=False)
    with torch.no_grad(), quantized(model):
        expected = float(torch.stack([model(input_ids=part, labels=part).loss for part in ids.split(2)]).mean())
    assert found["val_loss_quantized"] == pytest.approx(expected, rel=1e-5)
    assert found["val_loss_quantized"] != found["val_loss"]


# ---------------------------------------------------------------------- predictions


class Learning(Language):
    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


def language(tmp_path, kind=Language):
    module, ids = kind(AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path)).train()), torch.arange(48)
    return module, DataLoader([{"input_ids": row} for row in ids.reshape(6, 8)], batch_size=2)


@pytest.mark.parametrize("share", [True, 0.5])
def test_predictions_are_compared_with_the_first_pass(tmp_path, share):
    module, data = language(tmp_path)
    callback = CalibrationCallback("INT8_STATIC", evaluate=share, show=False, ignore=["lm_head"])
    run = trainer(callback)
    run.validate(module, [data, data], verbose=False)
    found = numbers(run.callback_metrics)
    batches = [batch["input_ids"] for batch in data][: 3 if share is True else 2]
    with torch.no_grad():
        plain = torch.cat([module.model(input_ids=ids).logits for ids in batches]).log_softmax(-1)
        with quantized(module.model):
            moved = torch.cat([module.model(input_ids=ids).logits for ids in batches]).log_softmax(-1)
    divergence = (plain.exp() * (plain - moved)).sum(-1).mean()
    assert found["quant/divergence"] == pytest.approx(float(divergence), rel=1e-4)
    assert found["quant/agreement"] == pytest.approx(float((plain.argmax(-1) == moved.argmax(-1)).float().mean()))
    assert callback.moved.positions == 2 * 16 * len(batches)
    assert not hooks_on(module)
    callback.report(tmp_path / "page")
    assert '"divergence": ' in (tmp_path / "page" / "report.json").read_text()
    assert "same top-1 [%]" in (tmp_path / "page" / "report.html").read_text()


def test_a_monitor_can_follow_the_divergence_in_fit(tmp_path):
    module, data = language(tmp_path, Learning)
    best = ModelCheckpoint(tmp_path / "best", monitor="quant/divergence")
    callback = CalibrationCallback("FP8", evaluate=True, every_n_epochs=2, ignore=["lm_head"])
    run = trainer(callback, best, max_epochs=3, enable_checkpointing=True, num_sanity_val_steps=0)
    run.fit(module, data, data)
    assert 0 < float(best.best_model_score) < 1
    assert not hooks_on(module)
