"""What CalibrationCallback tells the user's loggers, read back from their files, and the table it prints."""

import csv
import json
import re
import time
from pathlib import Path

import pytest
import torch

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer
from tests.support.in_process import run_command_line
from tests.support.lightning_package import CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoardLogger
from tests.support.lightning_ranks import Module, calibration, like_torchrun, samples
from tests.support.lightning_ranks import loader as rank_loader
from tests.support.lightning_ranks import trainer as rank_trainer
from tests.support.rank_processes import run_ranks

HISTOGRAM = {"observers": {"input": "histogram"}}


def test_the_csv_logger_has_the_numbers_and_the_table(tmp_path):
    logger, callback = CSVLogger(tmp_path), CalibrationCallback("INT8_STATIC", **HISTOGRAM)
    trainer(callback, logger=logger, max_epochs=2, num_sanity_val_steps=0, log_every_n_steps=1).fit(
        Plain(), loader(), loader()
    )
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        found = [row for row in csv.DictReader(file) if row["quant/sqnr_min"]]
    assert len(found) == 2
    assert 20 < float(found[0]["quant/sqnr_min"]) <= float(found[0]["quant/sqnr_median"]) < 60
    assert found[0]["quant/scale_drift_max"] == ""
    assert 0 < float(found[1]["quant/scale_drift_max"]) < 2
    tables = sorted(Path(logger.log_dir).glob("quant_layers_step*.csv"))
    assert len(tables) == 2
    with open(tables[-1]) as file:
        rows = list(csv.DictReader(file))
    errors = callback.layer_errors()
    assert [row["name"] for row in rows] == [error.name for error in errors]
    assert float(rows[0]["sqnr"]) == errors[0].sqnr == pytest.approx(float(found[1]["quant/sqnr_min"]), rel=1e-6)
    assert float(rows[0]["input_bits"]) == errors[0].input.bits
    assert {row["input_observer"] for row in rows} == {"histogram"}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("scheme", "observed_steps"), [("FP8_DYNAMIC", 0), ("INT8_STATIC", 1)])
def test_the_seconds_of_fine_tuning_are_of_the_calibration_alone(scheme, observed_steps, tmp_path):
    class Slow(Plain):
        def training_step(self, batch, batch_idx):
            time.sleep(0.3)
            return super().training_step(batch, batch_idx)

    logger, callback = CSVLogger(tmp_path), QuantizationAwareTraining(scheme, calibration_batches=1)
    fit = trainer(callback, logger=logger, max_epochs=2, num_sanity_val_steps=0)
    started = time.perf_counter()
    fit.fit(Slow(), loader(count=8), loader(count=8))
    wall = time.perf_counter() - started
    logged = float(fit.callback_metrics["quant/seconds"])
    assert logged == pytest.approx(callback.result.seconds, rel=1e-5)
    assert 0 < logged < wall - (4 - observed_steps) * 0.3


def test_tensorboard_has_the_numbers_a_table_and_a_histogram(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger, callback = TensorBoardLogger(tmp_path), CalibrationCallback("INT8_STATIC")
    trainer(callback, logger=logger).validate(Plain(), loader(), verbose=False)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert {"quant/sqnr_min", "quant/sqnr_median", "quant/seconds", "val_loss"} <= set(events.Tags()["scalars"])
    (value,) = events.Scalars("quant/sqnr_min")
    assert value.value == pytest.approx(min(error.sqnr for error in callback.layer_errors()), rel=1e-6)
    (table,) = events.Tensors("quant/layers/text_summary")
    assert b"| net.0 |" in table.tensor_proto.string_val[0]
    (histogram,) = events.Histograms("quant/sqnr")
    assert histogram.histogram_value.num == 2


def test_checkpoints_and_early_stopping_can_monitor_what_is_logged(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="quant/sqnr_min", mode="max")
    stop = EarlyStopping("quant/sqnr_median", mode="max")
    run = trainer(
        CalibrationCallback("INT8_STATIC", log=True), checkpoint, stop, max_epochs=2, enable_checkpointing=True
    )
    run.fit(Plain(), loader(), loader())
    assert checkpoint.best_model_score > 20
    assert stop.best_score > 20


def test_nothing_is_logged_without_loggers_or_where_it_is_turned_off(tmp_path):
    for log, logger in ((None, False), (False, CSVLogger(tmp_path))):
        run = trainer(CalibrationCallback("INT8_STATIC", log=log), logger=logger)
        run.validate(Plain(), loader(), verbose=False)
        assert not [name for name in run.callback_metrics if name.startswith("quant/")]


def test_two_callbacks_log_under_names_of_their_own():
    callbacks = [CalibrationCallback(name, log=True) for name in ("INT8_STATIC", "FP8")]
    run = trainer(*callbacks)
    run.validate(Plain(), loader(), verbose=False)
    assert {"quant/INT8_STATIC/sqnr_min", "quant/FP8/sqnr_min"} <= run.callback_metrics.keys()


def test_fine_tuning_logs_how_far_scales_move_and_how_far_logits_are(tmp_path):
    callback = QuantizationAwareTraining("W8A8", distill=0.5, log=True, refresh_weights=True)
    run = trainer(callback, logger=CSVLogger(tmp_path), max_epochs=3, num_sanity_val_steps=0, log_every_n_steps=1)
    run.fit(Plain(), loader(), loader(2))
    assert 0 < run.callback_metrics["quant/scale_drift_mean"] <= run.callback_metrics["quant/scale_drift_max"] < 2
    assert 0 < run.callback_metrics["quant/distillation"] < 1
    assert run.callback_metrics["quant/sqnr_min"] > 20


# ---------------------------------------------------------------------- layer_errors


def test_layer_errors_need_no_data_for_weights_and_counted_inputs():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC", **HISTOGRAM)
    trainer(callback).validate(module, loader(), verbose=False)
    module.net.register_forward_pre_hook(lambda *_: pytest.fail("it was run"))
    errors = callback.layer_errors()
    assert {error.name for error in errors} == {"net.0", "net.2"}
    assert [error.sqnr for error in errors] == sorted(error.sqnr for error in errors)
    for error in errors:
        assert error.sqnr == min(error.weight.sqnr, error.input.sqnr)
        assert error.output is None
        read = (error.input.low, error.input.high)
        assert read == pytest.approx(callback.result.input_ranges[error.name], rel=1e-6)


def test_layer_errors_on_batches_compare_outputs_too():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    errors = callback.layer_errors([batch[0] for batch in loader(3)])
    assert all(error.sqnr == error.output.sqnr and error.weight.sqnr and error.input.bits for error in errors)
    assert not hooks_on(module)


def test_layer_errors_before_calibration_are_an_error():
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        CalibrationCallback("FP8").layer_errors()


def test_validate_prints_the_worst_layers_once_and_fit_does_not(capsys):
    trainer(CalibrationCallback("INT8_STATIC")).validate(Plain(), loader(), verbose=False)
    output = capsys.readouterr().out
    assert output.count("worst layers") == 1
    assert "weight SQNR [dB]" in output
    assert "net.2" in output
    trainer(CalibrationCallback("INT8_STATIC"), max_epochs=1).fit(Plain(), loader(), loader())
    trainer(CalibrationCallback("INT8_STATIC", show=False)).validate(Plain(), loader(), verbose=False)
    assert "worst layers" not in capsys.readouterr().out


def test_a_result_prints_on_ten_lines():
    callback = CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(Plain(), loader(), verbose=False)
    lines = str(callback.result).splitlines()
    assert len(lines) <= 10
    assert "  scheme: INT8_STATIC" in lines
    assert "  modules: 2: net.0, net.2" in lines


def test_a_callback_writes_the_page_of_its_calibration(tmp_path):
    module, callback, data = Plain(), CalibrationCallback("INT8_STATIC"), [batch[0] for batch in loader()]
    trainer(callback).validate(module, loader(), verbose=False)
    page = callback.report(tmp_path, data, metrics={"val_loss": (0.5, 0.6)})
    found = json.loads((tmp_path / "report.json").read_text())
    assert page == tmp_path / "report.html"
    assert found["metrics"] == {"val_loss": [0.5, 0.6]}
    assert [layer["name"] for layer in found["layers"]] == [error.name for error in callback.layer_errors(data)]
    first = next(layer for layer in found["layers"] if layer["name"] == "net.0")
    assert sum(first["histogram"]["counts"]) == 16 * 8
    assert (first["chosen_low"], first["chosen_high"]) == callback.result.chosen_input_ranges["net.0"]


def test_a_report_of_a_callback_is_compared_with_others(tmp_path):
    for scheme in ("INT8_STATIC", "FP8"):
        callback = CalibrationCallback(scheme, evaluate=True, show=False)
        trainer(callback).validate(Plain(), loader(), verbose=False)
        callback.report(tmp_path / scheme)
    runs = f"runs=[{tmp_path / 'INT8_STATIC'},{tmp_path / 'FP8'}]"
    done = run_command_line("task=compare", runs, f"output_dir={tmp_path / 'compared'}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"run +val_loss +change .*\nINT8_STATIC \(INT8_STATIC\) +\d.*\nFP8 \(FP8\) +\d", done.stdout)


def test_the_page_of_a_fit_has_metrics_curves_and_size(tmp_path):
    callback = CalibrationCallback("INT8_STATIC", evaluate=True)
    run = trainer(callback, max_epochs=3)
    run.fit(Plain(), loader(), loader())
    callback.report(tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())
    logged = [float(run.callback_metrics[name]) for name in ("val_loss", "val_loss_quantized")]
    assert found["metrics"]["val_loss"] == pytest.approx(logged)
    assert [point["step"] for point in found["curves"]] == sorted({point["step"] for point in found["curves"]})
    assert len(found["curves"]) == 3
    before, after = (sum(pair[at] for pair in found["kinds"].values()) for at in (0, 1))
    assert before == sum(value.nbytes for value in run.lightning_module.state_dict().values()) > after
    assert found["judgement"]["numbers"][0]["label"] == "val_loss"


# ---------------------------------------------------------------------- on ranks


def on_share(rank, ranks):
    like_torchrun(rank, ranks)
    callback = calibration(scheme="INT8_STATIC", input="histogram", ignore=["re:experts.*"], log=True)
    run = rank_trainer(callback, ranks=ranks)
    run.validate(Module(), rank_loader(samples(16)), verbose=False)
    logged = {name: float(v) for name, v in run.callback_metrics.items() if "quant" in name and "seconds" not in name}
    return logged, callback.layer_errors()


def test_ranks_log_and_return_what_one_device_does():
    ((one, errors),) = run_ranks(on_share, 1, 1)
    assert {"quant/sqnr_min", "quant/sqnr_median", "quant/clipped_max"} <= one.keys()
    for logged, found in run_ranks(on_share, 2, 2):
        assert logged == pytest.approx(one)
        assert [error.name for error in found] == [error.name for error in errors]
        assert [error.weight.bits for error in found] == [error.weight.bits for error in errors]
        assert torch.tensor([error.sqnr for error in found]).isfinite().all()
