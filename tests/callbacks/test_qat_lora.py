"""QuantizationAwareTraining of LoRA adapters: what is trained is what is merged, quantized and exported."""

import lightning as L
import peft
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError, QuantizationAwareTraining, export_checkpoint, load_checkpoint, quantized

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
    L.Trainer(
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(module, data, data)


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


@pytest.mark.parametrize("use", ["export", "quantized"])
def test_unmerged_adapters_are_refused_where_the_merged_weight_is_needed(use, tiny_llama, batches, tmp_path):
    module = Language(lora(tiny_llama()))
    callback = QuantizationAwareTraining("W4A16", ignore=["lm_head"])
    fit(module, callback, batches)
    uses = {
        "export": lambda: export_checkpoint(module.model.get_base_model(), tmp_path / "out"),
        "quantized": lambda: quantized(module.model).__enter__(),
    }
    with pytest.raises(CalibrationError, match=r"needs adapters merged.*q_proj.*merge_and_unload"):
        uses[use]()


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
