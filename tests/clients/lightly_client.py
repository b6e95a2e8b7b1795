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

digits = torch.tensor(load_digits().images, dtype=torch.float32)[:192, None] / 16
images = nn.functional.interpolate(digits, 32).repeat(1, 3, 1, 1)
views = [(image + 0.1 * torch.randn_like(image), image.roll(2, -1)) for image in images]
train, val = DataLoader(views[:128], 32, shuffle=True), DataLoader(views[128:], 32)
SCHEME = {"scheme": "INT8_STATIC", "targets": ["Linear", "Conv2d"]}


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(*list(resnet18().children())[:-1])
        self.projection_head = SimCLRProjectionHead(512, 512, 128)
        self.criterion = NTXentLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_idx):
        return self.criterion(self(batch[0]), self(batch[1]))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self(batch[0]), self(batch[1])))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


def fit(model, *callbacks, epochs=1, resumed=None):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], **quiet)
    trainer.fit(model, train, val, ckpt_path=resumed)
    return trainer


row, model, callback = Row("lightly SimCLR"), SimCLR(), CalibrationCallback(**SCHEME, evaluate=True)
best = pl.callbacks.ModelCheckpoint(row.folder, monitor="val_loss_quantized", save_last=True)
trainer = fit(model, callback, best)
row.fit(trainer)
loaded, model = load_checkpoint(SimCLR(), row.export(callback)).eval(), model.eval()
with torch.no_grad(), quantized(model):
    row.reload(loaded(images[:32]), model(images[:32]))
training = QuantizationAwareTraining(**SCHEME)
row.qat(fit(SimCLR(), training), training)
again = CalibrationCallback(**SCHEME, evaluate=True)
row.resume(fit(SimCLR(), again, epochs=2, resumed=best.last_model_path), again, trainer.global_step)
