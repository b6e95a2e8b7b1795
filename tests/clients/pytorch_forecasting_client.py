"""pytorch-forecasting: TFT, NHiTS and DeepAR on eight sine waves."""

import lightning.pytorch as L
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pytorch_forecasting import DeepAR, NHiTS, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

time = np.arange(120)
noise = np.random.default_rng(0)
waves = [np.sin(time / 7 + phase) + 0.1 * noise.normal(size=120) for phase in range(8)]
series = pd.concat([pd.DataFrame({"time": time, "wave": str(i), "value": w}) for i, w in enumerate(waves)])
series = series.astype({"value": "float32"}).reset_index(drop=True)
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def forecast(name, kind, dataset, options):
    L.seed_everything(0)
    row = Row(f"pytorch-forecasting {name}")
    lengths = dict.fromkeys(["min_encoder_length", "max_encoder_length"], 24)
    lengths |= dict.fromkeys(["min_prediction_length", "max_prediction_length"], 12)
    normalizer = GroupNormalizer(groups=["wave"])
    known = {"time_idx": "time", "target": "value", "group_ids": ["wave"], "time_varying_unknown_reals": ["value"]}
    train = TimeSeriesDataSet(series[series.time < 100], **known, **lengths, target_normalizer=normalizer, **dataset)
    val = TimeSeriesDataSet.from_dataset(train, series, min_prediction_idx=100)
    train_loader, val_loader = train.to_dataloader(True, batch_size=64), val.to_dataloader(False, batch_size=64)

    def model():
        return kind.from_dataset(train, learning_rate=1e-2, **options)

    def fit(module, *callbacks, epochs=1, **resumed):
        trainer = L.Trainer(max_epochs=epochs, limit_train_batches=4, callbacks=[*callbacks], **QUIET)
        trainer.fit(module, train_loader, val_loader, **resumed)

    # gallery: begin
    forecaster, callback = model(), CalibrationCallback("INT8_STATIC", evaluate=True)
    best = ModelCheckpoint(name, monitor="val_loss_quantized", save_last=True)
    fit(forecaster, callback, best)
    row.fit(callback)
    folder = callback.export(f"{name}-int8")
    loaded = load_checkpoint(model(), folder).eval()
    # gallery: end
    row.export(callback, folder)
    batch, _ = next(iter(val_loader))
    with torch.no_grad():
        original = forecaster.eval()(batch)["prediction"]
        with quantized(forecaster):
            row.reload(loaded(batch)["prediction"], forecaster(batch)["prediction"], original)
    # gallery: begin
    training = QuantizationAwareTraining("INT8_STATIC")
    fit(model(), training)
    row.qat(training)
    again = CalibrationCallback("INT8_STATIC", evaluate=True)
    fit(model(), again, epochs=2, ckpt_path=best.last_model_path, weights_only=False)
    # gallery: end
    row.resume(again)


forecast("TFT", TemporalFusionTransformer, {"static_categoricals": ["wave"]}, {"hidden_size": 16})
forecast("NHiTS", NHiTS, {}, {"hidden_size": 64})
forecast("DeepAR", DeepAR, {"static_categoricals": ["wave"]}, {"hidden_size": 32})
