"""The guides "Fine-tune through the quantization" and "LoRA": their Python runs, in fewer steps."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_obs import CalibrationSession, export_checkpoint
from tests.callbacks.qat_modules import Language, language_data
from tests.support.markdown import blocks, page

PAGES = page("docs/guide/finetune.md") + page("docs/guide/lora.md")
EXAMPLES = blocks(PAGES.replace("max_steps=200", "max_steps=20"), "python")


class Texts(L.LightningDataModule):
    """Tokens for more training steps than an example takes, so that it ends inside of an epoch."""

    def _batches(self, count):
        generator = torch.Generator().manual_seed(count)
        return [{"input_ids": torch.randint(0, 60, (1, 8), generator=generator)} for _ in range(count)]

    def train_dataloader(self) -> DataLoader:
        return language_data(self._batches(30))

    def val_dataloader(self) -> DataLoader:
        return language_data(self._batches(2))


def language_model(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes)
    return Language(AutoModelForCausalLM.from_config(config, dtype=dtype))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:NVFP4. no scale has changed")  # in a few steps
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_the_python_of_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    known = {"module": language_model(), "datamodule": Texts()}
    for number, code in enumerate(EXAMPLES):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        if "get_peft_model" in code:
            known["module"] = language_model()
        if "keep_packed" in code:
            with CalibrationSession(known["module"].model, "W4A16", ignore=["lm_head"]):
                pass
            export_checkpoint(known["module"].model, folder / "checkpoint")
        exec(compile(code, "docs/guide/finetune.md", "exec"), known)
        if "keep_packed" in code:
            assert (folder / "adapters" / "adapter_model.safetensors").is_file()
        elif "export" not in code:  # a callback alone
            known["module"] = language_model(torch.bfloat16 if '"NVFP4"' in code else torch.float32)
            run = L.Trainer(callbacks=[known["callback"]], max_steps=20, logger=False, enable_checkpointing=False)
            run.fit(known["module"], known["datamodule"])
            known["callback"].export("checkpoint")
        assert list(folder.glob("*/config.json"))
