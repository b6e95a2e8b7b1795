"""litgpt: a small GPT on the bytes of Python's documentation, as in its tutorial on LightningModule."""

import pydoc_data.topics

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from litgpt.model import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

text = "\n".join(pydoc_data.topics.topics.values()).encode()[: 65 * 192]
tokens = torch.tensor(list(text)).view(192, 65)
train, val = DataLoader(tokens[:128], batch_size=16, shuffle=True), DataLoader(tokens[128:], batch_size=16)
# gallery: begin
FOUR_BITS = {"weights": {"num_bits": 4, "group_size": 32}}
# gallery: end


class LitLLM(L.LightningModule):
    def __init__(self):
        super().__init__()
        sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64}
        self.model = GPT(Config(**sizes, vocab_size=256, padded_vocab_size=256, bias=True))

    def training_step(self, batch, batch_idx):
        return chunked_cross_entropy(self.model(batch[:, :-1]), batch[:, 1:], chunk_size=0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


def fit(model, *callbacks, epochs=1, resumed=None):
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], logger=False)
    trainer.fit(model, train, val, ckpt_path=resumed)


L.seed_everything(0)
row = Row("litgpt GPT")
module = LitLLM()
# gallery: begin
callback = CalibrationCallback("INT8_STATIC", evaluate=True)
best = ModelCheckpoint("checkpoints", monitor="val_loss_quantized", save_last=True)
fit(module, callback, best)
row.fit(callback)
folder = callback.export("gpt-int8")
loaded = load_checkpoint(LitLLM().model, folder).eval()
# gallery: end
row.export(callback, folder)
gpt = module.model.eval()
with torch.no_grad(), quantized(gpt):
    row.reload(loaded(tokens[:8, :64]), gpt(tokens[:8, :64]))
# gallery: begin
training = QuantizationAwareTraining(FOUR_BITS)
fit(LitLLM(), training)
row.qat(training)
again = CalibrationCallback("INT8_STATIC", evaluate=True)
fit(LitLLM(), again, epochs=2, resumed=best.last_model_path)
# gallery: end
row.resume(again)
