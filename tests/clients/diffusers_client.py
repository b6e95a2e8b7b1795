"""diffusers: a UNet2DModel that learns to remove noise, trained as in diffusers' own example."""

import lightning as L
import torch
from diffusers import DDPMScheduler, UNet2DModel
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate, mse_loss
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

images = interpolate(torch.tensor(load_digits().images, dtype=torch.float32)[:96, None] / 8 - 1, 16)
train, val = DataLoader(images[:64], batch_size=16, shuffle=True), DataLoader(images[64:], batch_size=16)
# gallery: begin
SCHEME = {"scheme": "INT8_STATIC", "targets": ["Linear", "Conv2d"]}
# gallery: end


class Diffusion(L.LightningModule):
    def __init__(self):
        super().__init__()
        channels = {"sample_size": 16, "in_channels": 1, "out_channels": 1, "block_out_channels": (32, 32)}
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        blocks = {"down_block_types": down, "up_block_types": up, "layers_per_block": 1}
        self.unet = UNet2DModel(**channels, **blocks, norm_num_groups=8)
        self.scheduler = DDPMScheduler(num_train_timesteps=100)

    def training_step(self, batch, batch_idx):
        noise, steps = torch.randn_like(batch), torch.randint(0, 100, (len(batch),))
        return mse_loss(self.unet(self.scheduler.add_noise(batch, noise, steps), steps).sample, noise)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(model, *callbacks, epochs=1, resumed=None):
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], logger=False)
    trainer.fit(model, train, val, ckpt_path=resumed)


row = Row("diffusers UNet2DModel")
model = Diffusion()
# gallery: begin
callback = CalibrationCallback(**SCHEME, evaluate=True)  # of the only child with weights, `unet`
best = ModelCheckpoint("checkpoints", monitor="val_loss_quantized", save_last=True)
fit(model, callback, best)
row.fit(callback)
folder = callback.export("unet-int8")
loaded = load_checkpoint(Diffusion().unet, folder).eval()
# gallery: end
row.export(callback, folder)
unet = model.unet.eval()
steps = torch.arange(16)
with torch.no_grad(), quantized(unet):
    row.reload(loaded(images[:16], steps).sample, unet(images[:16], steps).sample)
# gallery: begin
training = QuantizationAwareTraining(**SCHEME)
fit(Diffusion(), training)
row.qat(training)
again = CalibrationCallback(**SCHEME, evaluate=True)
fit(Diffusion(), again, epochs=2, resumed=best.last_model_path)
# gallery: end
row.resume(again)
