"""Values of the kind that the configs declare are taken, others refused."""

import pytest

from lightning_obs import CalibrationError
from lightning_obs.app.config_files import option_names, options, options_with
from lightning_obs.app.values import check_values

CHOICES = [f"experiment={name}" for name in option_names("experiment")] + [
    f"task={name}" for name in option_names("task")
]


@pytest.mark.parametrize("choice", CHOICES)
def test_what_the_configs_say_themselves_is_taken(composed, choice):
    check_values(composed(choice))


@pytest.mark.parametrize(
    "words",
    [
        ["task=plan", "budget='70 MB'"],
        ["task=plan", "budget=null"],
        ["task=finetune", "task.seed=null"],
        ["task=finetune", "task.callback.distill=only"],
        ["scheme=w4a16", "recipe=accurate", "rounding=gptq"],
        ["experiment=qat_nvfp4_scales", "recipe.nvfp4_weights.rounding=null"],
        ["model.layerwise=quantized"],
        ["trainer.devices=auto", "trainer.logger={_target_: lightning.pytorch.loggers.CSVLogger, save_dir: logs}"],
        ["scheme=int8_static", "observer=histogram", "observer.patience=null", "observer.norm=2"],
        ["export.folder=null", "export.max_shard_size=5GB", "ignore=lm_head", "module=''"],
        ["scheme=w4a16", "group_size=32", "weight_observer=imatrix_mse", "weight_observer.norm=2"],
    ],
)
def test_values_of_another_kind_that_have_a_meaning_are_taken(composed, words):
    check_values(composed(*words))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("export.verify=0", r"export\.verify\. Got 0, expected true or false"),
        ("task.seed=once", r"task\.seed\. Got 'once', expected a whole number, or null"),
        ("report.worst_layers=null", r"report\.worst_layers\. Got None, expected a whole number"),
        ("data.num_workers=true", r"data\.num_workers\. Got True, expected a whole number"),
        ("model.path=''", r"model\.path is empty"),
    ],
)
def test_values_of_another_kind_are_refused(composed, word, message):
    with pytest.raises(CalibrationError, match=message):
        check_values(composed("task=finetune", word))


def test_the_options_of_a_key_are_found_in_the_configs_that_they_build_on():
    assert [str(option) for option in options_with("observer.averaging_constant")] == [
        "observer=minmax",
        "observer=mse",
    ]
    assert "weight_observer=mse" in map(str, options_with("weight_observer.averaging_constant"))
    values = {str(option): option.values for option in options()}
    assert values["scheme=w3a16"]["scheme.weights.num_bits"] == 3
    assert values["scheme=w3a16"]["scheme.weights.group_size"] == 128
    assert values["task=plan"]["budget"] == 5.0
