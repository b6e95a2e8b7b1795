"""segmentation-models-pytorch: a Unet that finds the strokes of scikit-learn's digits."""

import lightning as L
import segmentation_models_pytorch as smp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

digits = torch.tensor(load_digits().images, dtype=torch.float32)[:96, None] / 16
images = interpolate(digits, 64).repeat(1, 3, 1, 1)
masks = (images[:, :1] > 0.5).float()
train = DataLoader(TensorDataset(images[:64], masks[:64]), batch_size=16, shuffle=True)
val = DataLoader(TensorDataset(images[64:], masks[64:]), batch_size=16)
# gallery: begin
SCHEME = {"scheme": "INT8_STATIC_ASYM", "targets": ["Linear", "Conv2d"]}  # it has no Linear
# gallery: end


class Segmentation(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(model, *callbacks, epochs=1, resumed=None):
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], logger=False)
    trainer.fit(model, train, val, ckpt_path=resumed)


row = Row("segmentation-models-pytorch Unet")
model = Segmentation()
# gallery: begin
callback = CalibrationCallback(**SCHEME, evaluate=True)
best = ModelCheckpoint("checkpoints", monitor="val_loss_quantized", save_last=True)
fit(model, callback, best)
row.fit(callback)
folder = callback.export("unet-int8")
loaded = load_checkpoint(Segmentation(), folder).eval()
# gallery: end
row.export(callback, folder)
with torch.no_grad(), quantized(model.eval()):
    row.reload(loaded(images[:16]), model(images[:16]))
# gallery: begin
training = QuantizationAwareTraining(**SCHEME)
fit(Segmentation(), training)
row.qat(training)
again = CalibrationCallback(**SCHEME, evaluate=True)
fit(Segmentation(), again, epochs=2, resumed=best.last_model_path)
# gallery: end
row.resume(again)
