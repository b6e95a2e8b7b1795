"""What a fine-tuned checkpoint gives to somebody who has transformers and not this package."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from lightning_obs import QuantizationAwareTraining
from tests.support.lightning_package import L

#: each scheme once; test_qat.py reloads them in the process that wrote them
RUNS = [
    ("INT8_STATIC", torch.float32),
    ("FP8", torch.bfloat16),
    ("W4A16", torch.float32),
    ("NVFP4", torch.bfloat16),  # transformers loads it in bfloat16 alone
]

READER = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

differences = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder + "/checkpoint").eval()
    expected = load_file(folder + "/validated.safetensors")
    with torch.no_grad():
        logits = model(input_ids=expected["input_ids"]).logits
    assert logits.dtype == expected["logits"].dtype
    differences[folder] = (logits.double() - expected["logits"].double()).abs().max().item()
print(json.dumps({"differences": differences, "foreign": [m for m in sys.modules if m.startswith("lightning")]}))
"""


class Language(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model.train()

    def training_step(self, batch, batch_idx):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def validation_step(self, batch, batch_idx):
        self.validated = {"input_ids": batch["input_ids"], "logits": self.model(**batch).logits.clone()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.slow
def test_a_new_process_with_transformers_alone_gets_the_logits_of_the_last_validation(tiny_llama, batches, tmp_path):
    folders = {}
    for scheme, dtype in RUNS:
        module = Language(tiny_llama(dtype))
        callback = QuantizationAwareTraining(scheme, ignore=["lm_head"], calibration_batches=2)
        data = DataLoader(batches, batch_size=None)
        trainer = L.Trainer(
            callbacks=[callback],
            max_epochs=2,
            num_sanity_val_steps=0,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data, data)
        folder = tmp_path / f"{scheme}_{str(dtype).removeprefix('torch.')}"
        callback.export(folder / "checkpoint")
        save_file(module.validated, folder / "validated.safetensors")
        folders[str(folder)] = 0.0
    done = subprocess.run(
        [sys.executable, "-c", READER, *folders], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"differences": folders, "foreign": []}
