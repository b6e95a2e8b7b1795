"""chemprop: a message-passing network that learns logP of small molecules."""

import lightning.pytorch as L
import numpy as np
import torch
from chemprop import data, models, nn
from lightning.pytorch.callbacks import ModelCheckpoint
from rdkit import Chem
from rdkit.Chem.Descriptors import MolLogP

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

random = np.random.default_rng(0)
parts = ["C", "O", "N", "CC", "C(C)", "C(=O)", "c1ccccc1C"]
texts = ["C" + "".join(random.choice(parts, size=random.integers(2, 6))) for _ in range(300)]
molecules = {text: Chem.MolFromSmiles(text) for text in dict.fromkeys(texts)}
points = [data.MoleculeDatapoint.from_smi(t, np.array([MolLogP(m)])) for t, m in molecules.items() if m is not None]
train_data, val_data = data.MoleculeDataset(points[:-40]), data.MoleculeDataset(points[-40:])
scaler = train_data.normalize_targets()
val_data.normalize_targets(scaler)
train, val = data.build_dataloader(train_data, batch_size=64), data.build_dataloader(val_data, shuffle=False)


def network():
    unscale = nn.UnscaleTransform.from_standard_scaler(scaler)
    predictor = nn.RegressionFFN(input_dim=128, output_transform=unscale)
    return models.MPNN(nn.BondMessagePassing(d_h=128), nn.MeanAggregation(), predictor, batch_norm=True)


def trainer_with(*callbacks, epochs=2, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[*callbacks], **quiet, **options)


def predict(model):
    return torch.cat(trainer_with(enable_checkpointing=False).predict(model, val))


L.seed_everything(0)
row = Row("chemprop MPNN")
model = network()
# gallery: begin
callback = CalibrationCallback("INT8_STATIC", evaluate=True)
best = ModelCheckpoint("checkpoints", monitor="val_loss_quantized", save_last=True)
trainer_with(callback, best).fit(model, train, val)
row.fit(callback)
folder = callback.export("chemprop-int8")
loaded = predict(load_checkpoint(network(), folder))
# gallery: end
row.export(callback, folder)
original = predict(model)
with quantized(model):
    row.reload(loaded, predict(model), original)
# gallery: begin
training = QuantizationAwareTraining("INT8_STATIC")
trainer_with(training).fit(network(), train, val)
row.qat(training)
again = CalibrationCallback("INT8_STATIC", evaluate=True)
trainer_with(again, epochs=3).fit(network(), train, val, ckpt_path=best.last_model_path, weights_only=False)
# gallery: end
row.resume(again)
