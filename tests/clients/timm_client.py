"""timm: ResNet, ViT and ConvNeXt on scikit-learn's digits."""

import lightning as L
import timm
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

digits = load_digits()
images = interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, 64).repeat(1, 3, 1, 1)
pairs = list(zip(images, digits.target, strict=True))
train, val = DataLoader(pairs[:128], 32, shuffle=True), DataLoader(pairs[128:192], 32)
# gallery: begin
SCHEME = {"scheme": "INT8_STATIC_ASYM", "targets": ["Linear", "Conv2d"]}
# gallery: end


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
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], logger=False)
    trainer.fit(model, train, val, ckpt_path=resumed)


VIT = {"img_size": 64, "depth": 4}
for name, options in [("resnet18", {}), ("vit_tiny_patch16_224", VIT), ("convnext_atto", {})]:
    row = Row(f"timm {name}")
    model = Classifier(name, **options)
    # gallery: begin
    callback = CalibrationCallback(**SCHEME, evaluate=True)
    best = ModelCheckpoint(name, monitor="val_loss_quantized", save_last=True)
    fit(model, callback, best)
    row.fit(callback)
    folder = callback.export(f"{name}-int8")
    loaded = load_checkpoint(Classifier(name, **options), folder).eval()
    # gallery: end
    row.export(callback, folder)
    with torch.no_grad(), quantized(model.eval()):
        row.reload(loaded(images[:32]), model(images[:32]))
    # gallery: begin
    training = QuantizationAwareTraining(**SCHEME)
    fit(Classifier(name, **options), training)
    row.qat(training)
    again = CalibrationCallback(**SCHEME)
    fit(Classifier(name, **options), again, epochs=2, resumed=best.last_model_path)
    # gallery: end
    row.resume(again)
