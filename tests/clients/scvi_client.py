"""scvi-tools: SCVI on synthetic cells; the callback goes into train(), and its layers are those of `module`."""

import scvi
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

scvi.settings.seed = 0
cells = scvi.data.synthetic_iid(n_genes=200)
scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
# gallery: begin
# Two layers that SCVI has and does not call: for the library's size, and for dispersions by cell.
SCHEME = {"scheme": "INT8_STATIC", "ignore": ["re:module.l_encoder.*", "module.decoder.px_r_decoder"]}
# gallery: end


def train(*callbacks, epochs=2, **options):
    model = scvi.model.SCVI(cells, n_hidden=128, n_latent=10)
    quiet = {"enable_progress_bar": False, "logger": False, "check_val_every_n_epoch": 1}
    sizes = {"max_epochs": epochs, "batch_size": 128, "train_size": 0.8}
    model.train(accelerator="cpu", callbacks=[*callbacks], **sizes, **quiet, **options)
    return model


row = Row("scvi-tools SCVI")
# gallery: begin
callback = CalibrationCallback(**SCHEME, evaluate=True)
last = ModelCheckpoint("checkpoints", save_last=True)
model = train(callback, last, enable_checkpointing=True)
row.fit(callback)
folder = callback.export("scvi-int8")
model.save("saved")
loaded = scvi.model.SCVI.load("saved", adata=cells)
load_checkpoint(loaded.module, folder)  # the folder's names begin with "module."
# gallery: end
row.export(callback, folder)
latent = model.get_latent_representation()
with quantized(model.module):
    row.reload(loaded.get_latent_representation(), model.get_latent_representation(), latent)
# gallery: begin
training = QuantizationAwareTraining(**SCHEME)
train(training)
row.qat(training)
again = CalibrationCallback(**SCHEME, evaluate=True)
train(again, epochs=3, ckpt_path=last.last_model_path)
# gallery: end
row.resume(again)
