"""darts: NHiTS, TCN and Transformer; the callback goes into pl_trainer_kwargs, and checkpoints are darts' own."""

import numpy as np
import torch
from darts import TimeSeries
from darts.models import NHiTSModel, TCNModel, TransformerModel

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

time = np.arange(600)
noise = np.random.default_rng(0).normal(size=600)
series = TimeSeries.from_values((np.sin(time / 7) + 0.5 * np.sin(time / 23) + 0.1 * noise).astype("float32"))
train, val = series[:300], series[280:400]


def forecast(name, kind, targets, **options):
    row = Row(f"darts {name}")

    def model(*callbacks, epochs=1):
        # gallery: begin
        trainer = {"accelerator": "cpu", "callbacks": list(callbacks), "enable_progress_bar": False}
        lengths = {"input_chunk_length": 24, "output_chunk_length": 12}
        kept = {"model_name": name, "work_dir": "darts", "save_checkpoints": True, "force_reset": True}
        fit = {"n_epochs": epochs, "batch_size": 64, "random_state": 0, "pl_trainer_kwargs": trainer}
        return kind(**lengths, **options, **kept, **fit)
        # gallery: end

    # gallery: begin
    callback = CalibrationCallback("INT8_STATIC", targets=targets, evaluate=True)
    forecaster = model(callback).fit(train, val_series=val, verbose=False)
    row.fit(callback)
    folder = callback.export(f"{name}-int8")
    forecaster.save(f"{name}.pt")
    loaded = kind.load(f"{name}.pt", trusted=True)
    load_checkpoint(loaded.model, folder)
    # gallery: end
    row.export(callback, folder)
    predictions = [m.predict(12, series=train, verbose=False).values() for m in (loaded, forecaster)]
    with quantized(forecaster.model):
        row.reload(predictions[0], forecaster.predict(12, series=train, verbose=False).values(), predictions[1])

    # gallery: begin
    training = QuantizationAwareTraining("INT8_STATIC", targets=targets)
    model(training).fit(train, val_series=val, verbose=False)
    row.qat(training)
    resumed = kind.load_from_checkpoint(name, work_dir="darts", best=False, trusted=True)
    again = CalibrationCallback("INT8_STATIC", targets=targets, evaluate=True)
    resumed.trainer_params["callbacks"].append(again)
    resumed.fit(train, val_series=val, epochs=2, verbose=False)
    # gallery: end
    row.resume(again)


torch.manual_seed(0)
forecast("NHiTS", NHiTSModel, None)
forecast("TCN", TCNModel, ["Linear", "Conv1d"])
forecast("Transformer", TransformerModel, None, d_model=32, nhead=4, dim_feedforward=64)
