"""QuantizationAwareTraining of LoRA adapters: what is trained is what is merged, quantized and exported."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    QuantizationAwareTraining,
    load_checkpoint,
    quantized,
)
from tests.conftest import VOCAB
from tests.support.lightning_package import L
from tests.support.versions import needs_release

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def lora(model, **options):
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options)).train()


class Language(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def on_validation_epoch_start(self):
        self.logits = []

    def validation_step(self, batch, batch_idx):
        self.logits.append(self.model(**batch).logits)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(module, callback, batches, **options):
    data = DataLoader(batches, batch_size=None)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    ckpt_path, save = options.pop("ckpt_path", None), options.pop("save", None)
    trainer = L.Trainer(
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["INT8_STATIC", "W4A16"])
def test_merged_and_exported_it_gives_the_logits_of_the_last_validation(scheme, dtype, tiny_llama, batches, tmp_path):
    module = Language(lora(tiny_llama(dtype)))
    callback = QuantizationAwareTraining(scheme, ignore=["lm_head"], calibration_batches=2)
    before = {name: p.clone() for name, p in module.named_parameters()}
    fit(module, callback, batches)
    trained = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert trained == {name for name in before if "lora_" in name}
    module.model.merge_and_unload()
    callback.export(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for batch, expected in zip(batches, module.logits, strict=True):
            assert torch.equal(reloaded(**batch).logits, expected)


def test_under_autocast_the_adapters_are_added_as_they_are_merged(tiny_llama, batches):
    module = Language(lora(tiny_llama()))
    callback = QuantizationAwareTraining("W4A16", ignore=["lm_head"])
    fit(module, callback, batches, precision="bf16-mixed")
    merged = module.model.merge_and_unload()
    with torch.no_grad(), quantized(merged), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merged(**batches[0]).logits, module.logits[0])


def test_names_are_those_of_the_merged_model(tiny_llama, batches):
    module = Language(lora(tiny_llama()))
    callback = QuantizationAwareTraining("W4A16", ignore=["lm_head", "re:.*layers.0.*"])
    fit(module, callback, batches)
    merged = {name for name, m in tiny_llama().named_modules() if isinstance(m, torch.nn.Linear)}
    assert set(callback.result.modules) == {name for name in merged if "layers.1" in name}


def test_quantized_runs_adapters_that_are_not_merged_as_the_last_validation_ran_them(tiny_llama, batches):
    module = Language(lora(tiny_llama()))
    fit(module, QuantizationAwareTraining("W4A16", ignore=["lm_head"]), batches)
    with torch.no_grad(), quantized(module.model.eval()):
        assert torch.equal(module.model(**batches[0]).logits, module.logits[0])


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignore", [["lm_head"], ["lm_head", "re:.*layers.0.*"]])
def test_export_writes_what_it_writes_after_merging_and_the_model_keeps_its_adapters(
    dtype, ignore, tiny_llama, batches, tmp_path
):
    module = Language(lora(tiny_llama(dtype)))
    callback = QuantizationAwareTraining("W4A16", ignore=ignore, export_to=tmp_path / "end")
    fit(module, callback, batches)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    names = [name for name, _ in module.named_modules()]
    attributes = {name: set(vars(m)) for name, m in module.named_modules()}
    callback.export(tmp_path / "apart")
    assert [name for name, _ in module.named_modules()] == names
    assert {name: set(vars(m)) for name, m in module.named_modules()} == attributes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.model.merge_and_unload()
    callback.export(tmp_path / "merged")
    assert files(tmp_path / "apart") == files(tmp_path / "merged") == files(tmp_path / "end")


@needs_release("peft", "0.19.1", "transformers asks for it")
def test_adapters_that_transformers_added_are_merged_too(tiny_llama, batches, tmp_path):
    model = tiny_llama().train()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False))
    module = Language(model)
    callback = QuantizationAwareTraining("W4A16", ignore=["lm_head"], export_to=tmp_path / "out")
    fit(module, callback, batches)
    assert model._hf_peft_config_loaded
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(reloaded(**batches[0]).logits, module.logits[0])


def test_adapters_added_after_the_calibration_are_not_left_out_in_silence(tiny_llama, batches, tmp_path):
    module = Language(tiny_llama())
    callback = CalibrationCallback("INT8_STATIC", ignore=["lm_head"], show=False)
    L.Trainer(callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False).validate(
        module, DataLoader(batches, batch_size=None), verbose=False
    )
    lora(module.model)
    with pytest.raises(CalibrationError, match=r"have changed since the model was calibrated.*q_proj"):
        callback.export(tmp_path / "out")


class Classifier(Language):
    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=torch.zeros(2, dtype=torch.long)).loss


@pytest.mark.parametrize("callback_class", [QuantizationAwareTraining, CalibrationCallback])
def test_a_classifiers_head_that_peft_trains_whole_has_its_own_name(callback_class, batches, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, **sizes, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    module = Classifier(lora(LlamaForSequenceClassification(config), task_type="SEQ_CLS"))
    callback = callback_class("INT8_STATIC", export_to=tmp_path / "out")
    fit(module, callback, batches)
    assert "score" in callback.result.modules
    assert not [name for name in callback.result.modules if "modules_to_save" in name or "lora" in name]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in tensors if "modules_to_save" in name or "original_module" in name or "lora" in name]
    score = module.model.base_model.model.score
    assert not torch.equal(score.original_module.weight, score.modules_to_save["default"].weight)
    assert torch.equal(tensors["score.input_scale"], score.modules_to_save["default"].input_scale)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    if callback_class is QuantizationAwareTraining:
        with torch.no_grad():
            assert torch.equal(reloaded(**batches[0]).logits, module.logits[0])


def test_a_head_that_peft_trains_whole_resumes_and_is_known_after_merging(tiny_llama, batches, tmp_path):
    def made():
        options = {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}
        return Language(lora(tiny_llama(), **options)), QuantizationAwareTraining("W4A16", ignore=["lm_head"])

    module, callback = made()
    fit(module, callback, batches, save=tmp_path / "c.ckpt")
    resumed, again = made()
    fit(resumed, again, batches, ckpt_path=tmp_path / "c.ckpt")
    assert again.session.qparams.keys() == callback.session.qparams.keys()
    assert "model.layers.0.mlp.down_proj.weight_scale" in again.session.qparams
    again.export(tmp_path / "apart")
    resumed.model.merge_and_unload()
    again.export(tmp_path / "merged")
    assert files(tmp_path / "apart") == files(tmp_path / "merged")


def test_after_fit_the_adapters_forward_is_theirs_again(tiny_llama, batches):
    module = Language(lora(tiny_llama()))
    fit(module, QuantizationAwareTraining("W4A16", ignore=["lm_head"]), batches)
    assert not [m for m in module.modules() if "forward" in vars(m)]
    twin = lora(tiny_llama()).eval()
    twin.load_state_dict(module.model.state_dict())
    with torch.no_grad():
        assert torch.equal(module.model.eval()(**batches[0]).logits, twin(**batches[0]).logits)


@pytest.mark.parametrize(("options", "text"), [({"lora_dropout": 0.1}, "lora_dropout=0"), ({"use_dora": True}, "DoRA")])
def test_adapters_that_are_no_sum_are_refused(options, text, tiny_llama, batches):
    module = Language(lora(tiny_llama(), **options))
    with pytest.raises(CalibrationError, match=text):
        fit(module, QuantizationAwareTraining("W4A16", ignore=["lm_head"]), batches)


def test_adapters_on_a_module_of_ones_own(tmp_path):
    class Own(L.LightningModule):
        def __init__(self):
            super().__init__()
            net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
            self.net = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.net(batch[0]), batch[0][..., :2])

        def on_validation_epoch_start(self):
            self.seen = []

        def validation_step(self, batch, batch_idx):
            self.seen.append(self.net(batch[0]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Own()
    callback = QuantizationAwareTraining("INT8_STATIC", module="net", calibration_batches=1)
    data = TensorDataset(torch.randn(8, 8))
    fit(module, callback, data)
    module.net.merge_and_unload()
    callback.export(tmp_path / "out")
    fresh = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    reloaded = load_checkpoint(fresh, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(torch.stack([reloaded(x) for (x,) in data]), torch.stack(module.seen))
