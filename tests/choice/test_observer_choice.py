"""The observer of each tensor, chosen on batches that it did not observe."""

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationOptions,
    CalibrationSession,
    choose_observers,
)
from lightning_obs.choice.observer_choice import _choose, fitting_candidates
from lightning_obs.choice.sensitivity import Group, Sensitivity, sensitivity
from lightning_obs.schemes.config import has_rounding, resolve_config

INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
CHANNELS = {"weights": {"num_bits": 4, "strategy": "channel"}}


@pytest.fixture
def classifier():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


@pytest.fixture
def outliers():
    """Six batches; one value of a hundred is fifty times as large as the others, in a column that is not used."""
    x = torch.randn(6, 64, 32)
    x[:, :, 0] = 0
    x[:, ::10, 0] = 200
    return x


def test_a_range_that_clips_what_does_not_matter_is_chosen(classifier, outliers):
    with torch.no_grad():
        classifier[0].weight[:, 0] = 0
    choice = choose_observers(
        classifier, outliers, "INT8_STATIC", {"input": [{"name": "percentile", "percentile": 99.0}]}
    )
    assert choice.observers["0"]["input"] == {"name": "percentile", "percentile": 99.0}
    assert choice.losses["input"]["percentile(percentile=99.0)"] < 0.1 * choice.losses["input"]["static_minmax"]


def test_a_range_that_clips_what_matters_is_not(classifier):
    candidates = {"input": [{"name": "percentile", "percentile": 80.0}]}
    choice = choose_observers(classifier, torch.randn(6, 64, 32), "INT8_STATIC", candidates)
    assert {of_module["input"]["name"] for of_module in choice.observers.values()} == {"static_minmax"}


def test_the_choice_is_never_worse_than_any_candidate_on_what_was_held_out(classifier, outliers):
    choice = choose_observers(classifier, outliers, "INT8_STATIC")
    assert set(choice.losses) == {"input", "weight"}
    assert "static_minmax" in choice.losses["input"]
    for base_name, losses in choice.losses.items():
        assert choice.chosen[base_name] <= min(losses.values())


def test_the_losses_are_those_of_the_batches_that_were_held_out(classifier, outliers):
    choice = choose_observers(classifier, outliers, "INT8_STATIC", {"input": ["static_minmax"]})
    measured = sensitivity(classifier, outliers[1::2], {"x": "INT8_STATIC"}, calibration=outliers[0::2])
    total = sum(group.losses["x"] for group in measured.groups)
    assert choice.losses["input"]["static_minmax"] == pytest.approx(total)


def test_the_choice_calibrates_as_any_scheme(classifier, outliers):
    choice = choose_observers(classifier, outliers, "INT8_STATIC", ignore=["2"])
    with CalibrationSession(classifier, choice.config) as session:
        for batch in outliers:
            classifier(batch)
    assert session.result.modules == ["0"]
    for base_name in ("input", "weight"):
        args = session.observers["0", base_name].args
        assert {"name": args.observer, **args.observer_kwargs} == choice.observers["0"][base_name]


def test_modules_that_are_fused_have_one_observer(tiny_llama, batches):
    choice = choose_observers(tiny_llama(), batches, INT4, ignore=["lm_head"])
    for layer in range(2):
        attention = [choice.observers[f"model.layers.{layer}.self_attn.{name}_proj"] for name in "qkv"]
        assert attention[0] == attention[1] == attention[2]
    assert "static_minmax" not in choice.losses.get("input", {})


def test_observers_that_do_not_fit_are_left_out_unless_they_are_asked_for(classifier, outliers):
    scheme = {**INT4, "input_activations": {"num_bits": 8, "strategy": "tensor"}}
    assert "histogram" in choose_observers(classifier, outliers, scheme).losses["input"]
    with pytest.raises(CalibrationError, match="one histogram of 512 KiB per scale"):
        choose_observers(classifier, outliers, INT4, {"weight": ["histogram"]})


def test_the_table_says_by_how_much(classifier, outliers):
    choice = choose_observers(classifier, outliers, "INT8_STATIC", {"input": ["minmax"]})
    console = Console(width=120, force_terminal=False)
    with console.capture() as shown:
        console.print(choice.table())
    assert f"{choice.losses['input']['minmax']:.4g}" in shown.get()
    assert f"{choice.chosen['input']:.4g}" in shown.get()
    assert shown.get().startswith("observers")


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "W8A8"])
def test_nothing_to_choose_is_an_error(classifier, outliers, scheme):
    with pytest.raises(CalibrationError, match="there is no observer to choose"):
        choose_observers(classifier, outliers, scheme, {})


def test_observers_of_attention_states_are_refused(classifier, outliers):
    with pytest.raises(CalibrationError, match="observers are chosen for input and weight: k"):
        choose_observers(classifier, outliers, "INT8_STATIC", {"k": ["minmax"]})


@pytest.mark.parametrize(
    ("candidates", "got"),
    [
        ({"input": ["minmax", {}]}, "candidates of 'input'. Got {}, expected"),
        ({"input": ["minmax", {"norm": 2.0}]}, "candidates of 'input'. Got {'norm': 2.0}, expected"),
        ({"input": ["minmax", {"name": None}]}, "candidates of 'input'. Got {'name': None}, expected"),
        ({"input": ["minmax", None]}, "candidates of 'input'. Got None, expected"),
        ({"input": [["minmax"]]}, r"candidates of 'input'. Got \['minmax'\], expected"),
        ({"input": 3}, "candidates of 'input'. Got 3, expected"),
    ],
)
def test_a_candidate_that_is_no_observer_is_named(classifier, outliers, candidates, got):
    with pytest.raises(CalibrationError, match=got):
        choose_observers(classifier, outliers, "INT8_STATIC", candidates)


@pytest.mark.parametrize("candidates", [[{"name": "mse"}], "minmax"])
def test_candidates_are_given_by_base_name(classifier, outliers, candidates):
    with pytest.raises(CalibrationError, match=r"candidates. Got .*expected {'input': "):
        choose_observers(classifier, outliers, "INT8_STATIC", candidates)


def test_a_callback_names_a_wrong_candidate_before_it_runs():
    with pytest.raises(CalibrationError, match=r"candidates of 'input'. Got {}"):
        CalibrationCallback("INT8_STATIC", observers={"input": ["minmax", {}]})


def test_one_batch_is_too_few(classifier, outliers):
    with pytest.raises(CalibrationError, match="too few batches"):
        choose_observers(classifier, outliers[:1], "INT8_STATIC")


def test_observers_auto_names_the_way():
    with pytest.raises(CalibrationError, match=r"observers\. Got 'auto'.*choose_observers\(model, batches, scheme\)"):
        CalibrationOptions("INT8_STATIC", observers="auto")


def test_a_tensor_leaves_the_overall_best_observer_only_for_one_that_is_clearly_better():
    (scheme,) = resolve_config("INT8_STATIC").config_groups.values()
    tried = {"input": {name: {"name": name} for name in ("static_minmax", "minmax")}}
    losses = {"overall": (1.0, 5.0), "little": (1.0, 0.9), "clearly": (1.0, 0.5)}
    groups = [
        Group((name,), 8, {"input: static_minmax": first, "input: minmax": second}, {})
        for name, (first, second) in losses.items()
    ]
    schemes = {f"input: {name}": dict.fromkeys(losses, scheme) for name in tried["input"]}
    choice = _choose(Sensitivity(groups, {}, schemes), tried, resolve_config("INT8_STATIC"))
    assert {name: of["input"]["name"] for name, of in choice.observers.items()} == {
        "overall": "static_minmax",
        "little": "static_minmax",
        "clearly": "minmax",
    }
    assert choice.chosen == {"input": 2.5}


def test_a_kv_cache_is_left_as_it_is(tiny_llama, batches):
    asked = CalibrationOptions("INT8_STATIC", ignore="lm_head", kv_cache="FP8")
    choice = choose_observers(tiny_llama(), batches, asked, {"input": ["minmax"]})
    assert choice.config.kv_cache_scheme == asked.config.kv_cache_scheme
    chosen = asked.with_config(choice.config)
    assert chosen.config == choice.config
    assert chosen.with_config(chosen.config) == chosen  # as a resumed run makes them again


def test_one_candidate_is_a_name_and_not_its_letters():
    for one in ("histogram", {"name": "histogram"}, ["histogram"]):
        tried = fitting_candidates(nn.Linear(8, 8), CalibrationOptions("INT8_STATIC"), {"input": one})
        assert list(tried["input"]) == ["static_minmax", "histogram"]


# ---------------------------------------------------------------------- signed scales, Hessians, rounding

SIGNED = {"name": "hessian", "signed": True}
ROUNDED = {**SIGNED, "rounding": "gptq"}


def test_a_candidate_carries_hyperparameters_and_rounding(classifier):
    batches = torch.randn(6, 256, 8) @ torch.randn(8, 32)
    choice = choose_observers(classifier, batches, INT4, {"weight": [SIGNED, ROUNDED]})
    losses = choice.losses["weight"]
    assert list(losses) == ["memoryless_minmax", "hessian(signed=True)", "hessian(signed=True, rounding=gptq)"]
    assert losses["hessian(signed=True, rounding=gptq)"] < losses["hessian(signed=True)"] < losses["memoryless_minmax"]
    assert {str(of["weight"]) for of in choice.observers.values()} == {str(ROUNDED)}
    assert "hessian(signed=True, rounding=gptq)" in {row["observer"] for row in choice.scores}
    with CalibrationSession(classifier, choice.config) as session:
        classifier(batches.flatten(0, 1))
    assert {name for (name, _), observer in session.observers.items() if observer.rounding} == {"0", "2"}


def test_candidates_are_rounded_as_the_scheme_says(classifier, outliers):
    candidates = {"weight": ["memoryless_mse", {"name": "memoryless_mse", "rounding": None}]}
    options = CalibrationOptions(INT4, rounding="gptq")
    choice = choose_observers(classifier, outliers, options, candidates)
    chosen = options.with_config(choice.config)
    losses = choice.losses["weight"]
    assert losses["memoryless_mse"] < losses["memoryless_mse(rounding=None)"]
    assert has_rounding(chosen.config)
    assert chosen.rounding is None
    assert choose_observers(classifier, outliers, INT4, candidates, rounding="gptq").losses == choice.losses


@pytest.mark.parametrize(
    ("scheme", "engine", "labels"),
    [
        (
            INT4,
            "transformers",
            {"hessian(signed=True)", "local_hessian(signed=True)", "imatrix_mse(norm=2.0, signed=True)"},
        ),
        ("NVFP4A16", "unchecked", {"hessian", "local_hessian", "memoryless_mse"}),
        ("W8A16", "transformers", {"memoryless_mse", "imatrix_mse", "imatrix_mse(norm=2.0)"}),
    ],
)
def test_our_own_candidates_are_those_that_the_format_takes(classifier, scheme, engine, labels):
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}} if scheme == "W8A16" else scheme
    tried = fitting_candidates(classifier, CalibrationOptions(scheme, engines=engine))["weight"]
    assert labels < set(tried)
    assert ("hessian" in str(tried)) == ("hessian" in str(labels))
    assert ("signed" in str(tried)) == ("signed" in str(labels))


@pytest.mark.filterwarnings("ignore:where vLLM has no kernel")
def test_signed_scales_that_the_engine_reads_wrongly_are_not_tried_unless_asked_for(tiny_llama):
    model, base = tiny_llama(), resolve_config("W4A8", ignore="lm_head")
    base.config_groups["group_0"].weights.group_size = 32
    tried = fitting_candidates(model, CalibrationOptions(base, engines="vllm"))["weight"]
    assert "hessian" in tried
    assert "signed" not in str(tried)

    def untouched():
        raise AssertionError("data were read")
        yield

    with pytest.raises(CalibrationError, match="does not read the negative scales"):
        choose_observers(model, untouched(), base, {"weight": [SIGNED]}, engines="vllm")


def test_modules_whose_inputs_have_other_channels_are_not_tried_by_hessians():
    tried = fitting_candidates(nn.Sequential(nn.Conv2d(4, 4, 3)), CalibrationOptions(CHANNELS, targets="Conv2d"))
    assert list(tried["weight"]) == ["memoryless_minmax", "memoryless_mse(signed=True)"]
