"""The Python of the README and of docs/guide/schemes.md runs on a tiny model, under either name of Lightning."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.support.lightning_package import L, under_the_chosen_name
from tests.support.markdown import blocks, page
from tests.support.tiny_model import save_tiny_llama

PYTHON = [*blocks(page("README.md"), "python"), *blocks(page("docs/guide/schemes.md"), "python")]


class LanguageModel(L.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def validation_step(self, batch, batch_idx):
        self.model(**batch)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed")  # the README's own Trainer
def test_the_python_runs(code, tmp_path, monkeypatch, own_registry):
    monkeypatch.chdir(tmp_path)
    module = LanguageModel(save_tiny_llama(tmp_path / "tiny"))
    batch = {"input_ids": torch.randint(3, 128, (2, 16))}
    from lightning_obs import CalibrationCallback

    exec(
        compile(under_the_chosen_name(code), "README.md", "exec"),
        {
            "module": module,
            "model": module.model,
            "loader": DataLoader([batch], batch_size=None),
            "batch": batch,
            "batches": [batch],
            "CalibrationCallback": CalibrationCallback,
        },
    )
