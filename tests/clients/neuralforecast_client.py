"""neuralforecast: NHITS and PatchTST, in one call each; it deep-copies the callback, and the original answers."""

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS, PatchTST

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

time = np.arange(200)
noise = np.random.default_rng(0)
waves = [np.sin(time / 7 + phase) + 0.1 * noise.normal(size=200) for phase in range(8)]
series = pd.concat([pd.DataFrame({"ds": time, "unique_id": str(i), "y": wave}) for i, wave in enumerate(waves)])
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def forecast(name, kind, **options):
    row = Row(f"neuralforecast {name}")

    def fit(callback):
        lengths = {"h": 12, "input_size": 24, "max_steps": 20, "val_check_steps": 10, "batch_size": 8}
        # gallery: begin
        model = kind(**lengths, **options, **QUIET, callbacks=[callback], random_seed=1)
        forecaster = NeuralForecast(models=[model], freq=1)
        forecaster.fit(series, val_size=24)
        # gallery: end
        return forecaster

    def predict(forecaster):
        return forecaster.predict().iloc[:, -1].to_numpy()

    # gallery: begin
    callback = CalibrationCallback("INT8_STATIC", evaluate=True)
    forecaster = fit(callback)
    row.fit(callback)
    folder = callback.export(f"{name}-int8")
    forecaster.save("saved", overwrite=True)
    loaded = NeuralForecast.load("saved")
    load_checkpoint(loaded.models[0], folder)
    # gallery: end
    row.export(callback, folder)
    original = predict(forecaster)
    with quantized(forecaster.models[0]):
        row.reload(predict(loaded), predict(forecaster), original)
    # gallery: begin
    training = QuantizationAwareTraining("INT8_STATIC")
    fit(training)
    # gallery: end
    row.qat(training)
    row.refused("resume", "fit takes no checkpoint of a Trainer, it goes on from the model's weights")


forecast("NHITS", NHITS, mlp_units=[[64, 64]] * 3)
forecast("PatchTST", PatchTST, hidden_size=32, n_heads=4, encoder_layers=2, linear_hidden_size=64)
