"""lightly: SimCLR with a ResNet-18, as in its tutorial, on scikit-learn's digits."""

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

digits = torch.tensor(load_digits().images[:192, None] / 16, dtype=torch.float32)
images = nn.functional.interpolate(digits, 32).repeat(1, 3, 1, 1)
views = [(image + 0.1 * torch.randn_like(image), image.roll(2, -1)) for image in images]
train, val = DataLoader(views[:128], 32), DataLoader(views[128:], 32)
# gallery: begin
SCHEME = {"scheme": "INT8_STATIC", "targets": ["Linear", "Conv2d"]}
# gallery: end


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(*list(resnet18().children())[:-1])
        self.projection_head = SimCLRProjectionHead(512, 512, 128)

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_idx):
        return NTXentLoss()(self(batch[0]), self(batch[1]))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", NTXentLoss()(self(batch[0]), self(batch[1])))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


def fit(model, *callbacks, epochs=1, resumed=None):
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], logger=False)
    trainer.fit(model, train, val, ckpt_path=resumed)


row = Row("lightly SimCLR")
model = SimCLR()
# gallery: begin
callback = CalibrationCallback(**SCHEME, evaluate=True)
best = pl.callbacks.ModelCheckpoint("checkpoints", monitor="val_loss_quantized", save_last=True)
fit(model, callback, best)
row.fit(callback)
folder = callback.export("simclr-int8")
loaded = load_checkpoint(SimCLR(), folder).eval()
# gallery: end
row.export(callback, folder)
with torch.no_grad(), quantized(model.eval()):
    row.reload(loaded(images[:32]), model(images[:32]))
# gallery: begin
training = QuantizationAwareTraining(**SCHEME)
fit(SimCLR(), training)
row.qat(training)
again = CalibrationCallback(**SCHEME, evaluate=True)
fit(SimCLR(), again, epochs=2, resumed=best.last_model_path)
# gallery: end
row.resume(again)
