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
SCHEME = {"scheme": "INT8_STATIC_ASYM", "targets": ["Linear", "Conv2d"]}  # it has no Linear


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
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], **quiet)
    trainer.fit(model, train, val, ckpt_path=resumed)
    return trainer


row, model = Row("segmentation-models-pytorch Unet"), Segmentation()
callback = CalibrationCallback(**SCHEME, evaluate=True)
best = ModelCheckpoint(row.folder, monitor="val_loss_quantized", save_last=True)
trainer = fit(model, callback, best)
row.fit(trainer)
loaded, model = load_checkpoint(Segmentation(), row.export(callback)).eval(), model.eval()
with torch.no_grad(), quantized(model):
    row.reload(loaded(images[:16]), model(images[:16]))
training = QuantizationAwareTraining(**SCHEME)
row.qat(fit(Segmentation(), training), training)
again = CalibrationCallback(**SCHEME, evaluate=True)
row.resume(fit(Segmentation(), again, epochs=2, resumed=best.last_model_path), again, trainer.global_step)
