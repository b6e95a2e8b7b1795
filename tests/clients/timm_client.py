"""timm: ResNet, ViT and ConvNeXt on scikit-learn's digits."""

import lightning as L
import timm
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

digits = load_digits()
images = interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, 64).repeat(1, 3, 1, 1)
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:128], labels[:128]), batch_size=32, shuffle=True)
val = DataLoader(TensorDataset(images[128:192], labels[128:192]), batch_size=32)
SCHEME = {"scheme": "INT8_STATIC_ASYM", "targets": ["Linear", "Conv2d"]}


class Classifier(L.LightningModule):
    def __init__(self, name, **options):
        super().__init__()
        self.model = timm.create_model(name, num_classes=10, **options)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(model, *callbacks, epochs=1, resumed=None):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], **quiet)
    trainer.fit(model, train, val, ckpt_path=resumed)
    return trainer


VIT = {"img_size": 64, "depth": 4}
for name, options in [("resnet18", {}), ("vit_tiny_patch16_224", VIT), ("convnext_atto", {})]:
    row, model = Row(f"timm {name}"), Classifier(name, **options)
    callback = CalibrationCallback(**SCHEME, evaluate=True)
    best = ModelCheckpoint(row.folder, monitor="val_loss_quantized", save_last=True)
    trainer = fit(model, callback, best)
    row.fit(trainer)
    loaded, model = load_checkpoint(Classifier(name, **options), row.export(callback)).eval(), model.eval()
    with torch.no_grad(), quantized(model):
        row.reload(loaded(images[:32]), model(images[:32]))
    training = QuantizationAwareTraining(**SCHEME)
    row.qat(fit(Classifier(name, **options), training), training)
    again = CalibrationCallback(**SCHEME, evaluate=True)
    resumed = fit(Classifier(name, **options), again, epochs=2, resumed=best.last_model_path)
    row.resume(resumed, again, trainer.global_step)
