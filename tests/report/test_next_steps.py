"""The steps that a report proposes: from made-up numbers, and after real calibrations, which carry them out."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationCallback, CalibrationOptions, QuantizationAwareTraining
from lightning_obs.engines import Verdict
from lightning_obs.report.judgement import judge
from lightning_obs.report.predictions import Moved
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.report.runs import layer, run

GOOD = {"metrics": {"perplexity": (14.80, 15.10)}, "moved": Moved(0.02, 0.95, 100)}


def names(report, folder="."):
    return [step.name for step in judge(report, folder).steps]


def test_remedies_are_ordered_by_the_noise_that_they_remove_by_this_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = judge(run(), tmp_path / "out").steps
    assert [step.name for step in steps] == ["leave_out", "smooth", "token_scales"]
    assert steps[0].reason == "removes 100 % of the noise, costs 6.00 MiB"
    assert steps[0].changes == {"ignore": ["lm_head", "layers.1.down_proj", "layers.11.down_proj"]}
    assert steps[0].python == (
        'ignore = json.load(open("out/report.json"))["ignore"]\nCalibrationCallback(\'INT8_STATIC\', ignore=ignore)'
    )
    assert steps[1].reason == "inputs make 100 % of the noise; the unquantized model's outputs stay the same"
    assert steps[1].python == (
        "smooth_inputs(model, batches, callback.options)\nCalibrationCallback('INT8_STATIC', ignore=['lm_head'])"
    )
    assert steps[2].reason.startswith("removes up to 100 % of the noise")
    assert steps[2].python == "CalibrationCallback('W8A8', ignore=['lm_head'])"
    choosing = judge(run(can_run=lambda step: step.name == "observers")).steps
    assert [step.python for step in choosing] == [
        "CalibrationCallback('INT8_STATIC', ignore=['lm_head'], observers='auto')"
    ]


def test_steps_name_the_token_mask_of_the_run():
    """It is an argument of the callback and of ``smooth_inputs``, and no option of the calibration."""
    leave_out, smooth, token_scales = judge(run(token_mask="attention_mask")).steps
    mask = "token_mask='attention_mask'"
    assert leave_out.python.endswith(f"ignore=ignore, {mask})")
    assert smooth.python == (
        f"smooth_inputs(model, batches, callback.options, {mask})\n"
        f"CalibrationCallback('INT8_STATIC', ignore=['lm_head'], {mask})"
    )
    assert token_scales.python == f"CalibrationCallback('W8A8', ignore=['lm_head'], {mask})"
    (_, smooth, _) = judge(run(token_mask=lambda batch: batch["mask"])).steps
    assert "smooth_inputs(model, batches, callback.options, token_mask=callback.batches.token_mask)" in smooth.python


@pytest.mark.parametrize(
    ("scheme", "is_proposed"),
    [("NVFP4", True), ("MXFP4", True), ("W8A8", False), ("FP8", False), ("NVFP4A16", False), ("W4A16", False)],
)
def test_smooth_inputs_are_proposed_for_inputs_of_four_bits(scheme, is_proposed):
    errors = [layer(f"layers.{i}.down_proj", 16.0, 40.0, 16.0) for i in range(9)]
    assert ("smooth" in names(run(scheme, errors))) == is_proposed


def test_no_step_says_what_another_model_gained():
    spread = [layer(f"layers.{i}.down_proj", 16.0, 18.0, 19.0) for i in range(9)]
    for report in (run(), run("W4A16", spread)):
        assert not any("SmolLM2" in step.reason for step in judge(report).steps)


def test_a_step_that_cannot_run_is_not_proposed():
    assert names(run(can_run=lambda step: step.name == "token_scales")) == ["token_scales"]
    assert names(replace(run(), can_run=lambda step: False)) == []


def test_a_good_run_without_a_checkpoint_is_told_to_write_one():
    judgement = judge(run(**GOOD))
    assert (judgement.grade, judgement.cause) == ("good", "")
    assert [step.python for step in judgement.steps] == ['callback.export("checkpoint")']


@pytest.mark.parametrize(
    ("takes", "kind", "expected", "python"),
    [
        (("transformers", "vLLM"), "LlamaForCausalLM", ["serve", "load"], "transformers.LlamaForCausalLM"),
        (("transformers", "vLLM"), "BertModel", ["load"], "transformers.BertModel"),
        (("vLLM",), "LlamaForCausalLM", ["serve", "load"], "load_checkpoint"),
        ((), None, ["load"], "load_checkpoint"),
    ],
)
def test_a_good_run_is_told_what_takes_its_checkpoint(tmp_path, monkeypatch, takes, kind, expected, python):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a run").mkdir()
    if kind:
        (tmp_path / "a run/config.json").write_text(json.dumps({"architectures": [kind]}))
    report = run(checkpoint=tmp_path / "a run", **GOOD)
    report.result.plan.engines = {name: Verdict(True, "CPU") for name in takes}
    steps = {step.name: step for step in judge(report).steps}
    assert list(steps) == expected
    assert python in steps["load"].python
    assert all(step.python == 'vllm.LLM("a run")' for name, step in steps.items() if name == "serve")


def test_a_run_that_measured_nothing_is_told_to_measure_and_no_remedy_for_a_loss_that_nobody_knows():
    steps = judge(run(metrics={})).steps
    assert [step.name for step in steps] == ["measure", "leave_out"]
    assert steps[0].python == "CalibrationCallback('INT8_STATIC', ignore=['lm_head'], evaluate=True)"
    fine = [layer("a", 40.0), layer("b", 41.0)]
    assert names(run(errors=fine, metrics={})) == ["measure"]
    assert names(run(errors=fine, metrics={"power": (1.0, 2.0)})) == []


def test_training_is_the_last_step_and_never_follows_training():
    errors = [layer(f"layers.{i}.down_proj", 16.0, 18.0, 19.0) for i in range(9)]
    assert names(run("W4A16", errors)) == ["rounding", "fine_tune"]
    assert names(run("W4A16", errors, was_trained=True)) == []
    steps = judge(run(was_trained=True)).steps
    assert "fine_tune" not in [step.name for step in steps]
    assert steps[0].python.endswith("QuantizationAwareTraining('INT8_STATIC', ignore=ignore)")


def test_a_run_that_training_made_worse_is_told_to_calibrate_alone():
    steps = judge(run(was_trained=True, calibrated={"perplexity": 20.0})).steps
    assert steps[0].name == "untrained"
    assert steps[0].python == "CalibrationCallback('INT8_STATIC', ignore=['lm_head'])"


def test_a_plan_is_told_another_budget_and_never_to_leave_out_what_it_gave_few_bits():
    points = [("", 4.0, 2.0), ("chosen", 5.0, 1.0), ("", 5.4, 0.6)]
    frontier = [{"name": name, "bits_per_weight": bits, "loss": loss} for name, bits, loss in points]
    frontier[1]["mark"] = "chosen"
    choices = dict.fromkeys([error.name for error in run().errors], "int4")
    steps = judge(run("W4A16", choices=choices, frontier=frontier)).steps
    assert [step.name for step in steps] == ["budget", "fine_tune"]
    assert steps[0].share == pytest.approx(0.4)
    assert steps[0].changes == {"budget": 5.5}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ignore": ["0"]}, "CalibrationCallback('W8A8', ignore=['0'])"),
        ({"observers": {"input": "minmax"}}, "CalibrationCallback('W8A8')"),
        (
            {"observers": {"input": "minmax", "weight": "memoryless_mse"}},
            "CalibrationCallback('W8A8', observers={'weight': 'memoryless_mse'})",
        ),
        ({"kv_cache": {"num_bits": 8, "type": "float"}, "on_missing": "warn"}, "CalibrationCallback('W8A8', kv_cache="),
    ],
)
def test_python_has_the_options_of_the_run(options, expected):
    steps = {step.name: step for step in judge(run(options=CalibrationOptions("INT8_STATIC", **options))).steps}
    assert steps["token_scales"].python.startswith(expected)


def test_python_of_a_scheme_without_a_name_takes_the_callback_s_options():
    options = CalibrationOptions({"weights": {"num_bits": 4, "group_size": 32}}, ignore=["lm_head"])
    errors = [layer(f"layers.{i}.down_proj", 16.0, 18.0, 19.0) for i in range(9)]
    (rounding, _) = judge(run(errors=errors, options=options)).steps
    assert rounding.python == ("CalibrationCallback(callback.options, observers=None, recipe='accurate')")


FITTED = {"observers": {"weight": "imatrix_mse"}, "rounding": "gptq"}


def fitted_run(fit_errors, scheme="W4A16"):
    errors = [layer(f"layers.{i}.down_proj", 16.0, 18.0, 40.0) for i in range(9)]
    report = run(errors=errors, options=CalibrationOptions(scheme, **FITTED))
    report.result.fit_errors = fit_errors
    return report


def test_weights_without_data_are_proposed_where_fitting_loses():
    first, *_ = judge(fitted_run({"layers.0.down_proj": (0.01, 0.04, 0.05, 0.04)})).steps
    assert first.name == "without_data"
    assert first.reason == "fitted to this calibration data, errors on other data of its kind are 25 % larger"
    assert first.python == "CalibrationCallback('W4A16', recipe='fast')"


def test_weights_without_data_are_not_proposed_where_fitting_gains_or_the_recipe_has_no_choice():
    loses = {"layers.0.down_proj": (0.01, 0.04, 0.05, 0.04)}
    gains = {"layers.0.down_proj": (0.01, 0.04, 0.02, 0.04)}
    assert "without_data" not in names(fitted_run(gains))
    assert "without_data" not in names(fitted_run({}))
    assert "without_data" not in names(fitted_run(loses, "W8A16"))


# ---------------------------------------------------------------------- after real runs


class Pictures(Plain):
    """A network of convolutions, with a trainable loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))

    def forward(self, x):
        return self.net(x.view(-1, 1, 4, 8).repeat(1, 1, 2, 1))


def validated(module, callback):
    trainer(callback).validate(module, loader(), verbose=False)
    return callback


def steps_after(callback, tmp_path, **parts):
    """The steps of a run that lost by every layer's weight and input."""
    names = callback.session.result.modules
    errors = [layer(name, 16.0, 18.0, 19.0) for name in names]
    report = callback.results.facts(errors=errors, **({"metrics": {"perplexity": (10.0, 30.0)}} | parts))
    return {step.name: step for step in judge(report, tmp_path).steps}


INT4 = {"weights": {"num_bits": 4, "strategy": "channel"}, "input_activations": {"num_bits": 8}}


def test_rounding_by_inputs_is_proposed_for_a_linear_and_not_for_a_convolution(tmp_path):
    linear = steps_after(validated(Plain(), CalibrationCallback(INT4)), tmp_path)
    pictures = CalibrationCallback(INT4, targets=["Conv2d"], engines="unchecked")
    convolution = steps_after(validated(Pictures(), pictures), tmp_path)
    assert "rounding" in linear
    assert "rounding" not in convolution


@pytest.mark.filterwarnings("ignore:W8A8 needs no data")
def test_the_python_of_each_step_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = validated(Plain(), CalibrationCallback("INT8_STATIC"))
    callback.report("report")
    steps = steps_after(callback, tmp_path / "report")
    steps |= steps_after(validated(Plain(), CalibrationCallback(INT4)), tmp_path)
    steps |= steps_after(callback, tmp_path, metrics={})
    assert {"token_scales", "rounding", "measure"} <= steps.keys()
    for step in steps.values():
        known = {"CalibrationCallback": CalibrationCallback, "QuantizationAwareTraining": QuantizationAwareTraining}
        made = eval(step.python, {**known, "callback": callback})
        validated(Plain(), made)
        assert made.result is not None


def test_a_run_without_a_logged_metric_is_not_told_to_measure(tmp_path):
    class Silent(Plain):
        def validation_step(self, batch, batch_idx):
            self(batch[0] if isinstance(batch, (list, tuple)) else batch)

    assert "measure" in steps_after(validated(Plain(), CalibrationCallback("INT8_STATIC")), tmp_path, metrics={})
    assert "measure" not in steps_after(validated(Silent(), CalibrationCallback("INT8_STATIC")), tmp_path, metrics={})


def test_a_module_that_cannot_be_trained_is_not_told_to_train(tmp_path):
    class OnlyValidates(Plain):
        training_step = None

    trains = steps_after(validated(Plain(), CalibrationCallback(INT4)), tmp_path)
    assert ("fine_tune" in trains) == hasattr(Plain, "training_step")
    assert "fine_tune" not in steps_after(validated(OnlyValidates(), CalibrationCallback(INT4)), tmp_path)


def test_after_quantization_aware_training_nobody_is_told_to_fine_tune(tmp_path):
    callback = QuantizationAwareTraining(INT4)
    run = trainer(callback, max_epochs=1, num_sanity_val_steps=0)
    run.fit(Plain(), loader(), loader())
    assert "fine_tune" not in steps_after(callback, tmp_path)


def test_a_direction_that_torchmetrics_knows_grades_a_metric_of_any_name(tmp_path):
    from torchmetrics import MeanSquaredError

    class Measured(Plain):
        def __init__(self):
            super().__init__()
            self.power = MeanSquaredError()

        def validation_step(self, batch, batch_idx):
            out = self(batch[0] if isinstance(batch, (list, tuple)) else batch)
            self.power.update(out, torch.zeros_like(out))
            self.log("power", self.power)

    callback = validated(Measured(), CalibrationCallback("INT8_STATIC", evaluate=True))
    report = callback.results.facts()
    assert report.quality.higher_is_better == {"power": False}
    assert judge(report).grade in ("good", "usable", "broken")
