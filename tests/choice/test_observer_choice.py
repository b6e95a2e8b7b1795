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
    quantized,
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


def test_the_choice_is_never_worse_than_any_candidate_on_what_was_kept_out(classifier, outliers):
    choice = choose_observers(classifier, outliers, "INT8_STATIC")
    assert set(choice.divergences) == {"input", "weight"}
    assert "static_minmax" in choice.divergences["input"]
    for base_name, divergences in choice.divergences.items():
        assert choice.taken[base_name].divergence == min(divergences.values())
        assert set(choice.losses[base_name]) <= set(divergences)


def test_the_losses_are_those_of_the_batches_that_were_held_out(classifier, outliers):
    choice = choose_observers(classifier, outliers, "INT8_STATIC", {"input": ["static_minmax"]})
    measured = sensitivity(classifier, outliers[1::4], {"x": "INT8_STATIC"}, calibration=outliers[0::2])
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
    assert f"{choice.divergences['input']['minmax']:.4g}" in shown.get()
    assert f"{choice.taken['input'].label} (chosen)" in shown.get()
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


def chosen_by(losses, measure, of=("input",)):
    """The choice for made-up losses, by module and observer, and a made-up measurement of assignments."""
    (scheme,) = resolve_config("INT8_STATIC").config_groups.values()
    labels = list(next(iter(losses.values())))
    tried = {base_name: {label: {"name": label} for label in labels} for base_name in of}
    groups = []
    for name, loss_by_label in losses.items():
        loss_by_key = {f"{base_name}: {label}": loss for base_name in of for label, loss in loss_by_label.items()}
        groups.append(Group((name,), 8, loss_by_key, {}))
    schemes = {key: dict.fromkeys(losses, scheme) for key in groups[0].losses}
    return _choose(Sensitivity(groups, {}, schemes), tried, resolve_config("INT8_STATIC"), measure)


def names_of(choice, base_name="input"):
    return {module_name: specs[base_name]["name"] for module_name, specs in choice.observers.items()}


def test_a_tensor_leaves_the_overall_best_observer_only_for_one_that_is_clearly_better():
    losses = {"overall": (1.0, 5.0), "little": (1.0, 0.9), "clearly": (1.0, 0.5)}
    losses = {name: dict(zip(("static_minmax", "minmax"), pair, strict=True)) for name, pair in losses.items()}

    def as_estimated(assignments):
        sums = []
        for names in assignments:
            sums.append(sum(losses[name][keys["input"].removeprefix("input: ")] for name, keys in names.items()))
        return sums

    choice = chosen_by(losses, as_estimated)
    assert names_of(choice) == {"overall": "static_minmax", "little": "static_minmax", "clearly": "minmax"}
    assert choice.divergences == {"input": {"static_minmax": 3.0, "minmax": 6.4, "by tensor": 2.5}}
    assert choice.taken["input"].loss == 2.5


#: by the estimate, percentile is the best of the first module, and minmax that of the second
MISLEADING = {
    "first": {"static_minmax": 1.0, "minmax": 0.9, "percentile": 0.1},
    "second": {"static_minmax": 1.0, "minmax": 0.5, "percentile": 0.4},
}


def measured_as(static_minmax, minmax, percentile, mixed):
    """Measures each candidate alone, and each choice by tensor: ``mixed`` by what the two modules have."""
    alone = {"static_minmax": static_minmax, "minmax": minmax, "percentile": percentile}

    def measure(assignments):
        values = []
        for names in assignments:
            labels = tuple(keys["input"].removeprefix("input: ") for keys in names.values())
            values.append(alone[labels[0]] if len(set(labels)) == 1 else mixed[labels])
        return values

    return measure


def test_a_choice_by_tensor_that_is_worse_as_a_whole_gives_way_to_the_best_observer_for_all():
    mixed = {("static_minmax", "minmax"): 0.8, ("percentile", "static_minmax"): 7.0, ("percentile", "minmax"): 9.0}
    choice = chosen_by(MISLEADING, measured_as(0.7, 0.75, 5.0, mixed))
    assert names_of(choice) == {"first": "static_minmax", "second": "static_minmax"}
    assert choice.taken["input"].label == "static_minmax"
    (line,) = choice.lines
    assert line.startswith(
        "input observers: static_minmax for all, divergence 0.7 nats; by tensor, best 2: 0.8. Measured"
    )


def test_a_choice_by_tensor_without_the_candidates_that_are_worst_as_a_whole_is_tried():
    mixed = {("static_minmax", "minmax"): 0.5, ("percentile", "minmax"): 9.0, ("percentile", "percentile"): 5.0}
    choice = chosen_by(MISLEADING, measured_as(0.7, 0.75, 5.0, mixed))
    assert names_of(choice) == {"first": "static_minmax", "second": "minmax"}
    assert choice.taken["input"].label == "by tensor, best 2"
    (line,) = choice.lines
    assert "by tensor, best 2, divergence 0.5 nats; the best for all, static_minmax: 0.7." in line


def test_what_gives_no_finite_logits_is_not_taken():
    mixed = {("static_minmax", "minmax"): float("nan"), ("percentile", "minmax"): float("nan")}
    choice = chosen_by(MISLEADING, measured_as(float("nan"), 3.0, float("inf"), mixed))
    assert choice.taken["input"].label == "minmax"


def test_weights_are_measured_with_the_inputs_that_were_taken():
    measured = []

    def measure(assignments):
        measured.extend(assignments)
        return [float(names["first"]["input"] != "input: minmax") for names in assignments]

    choice = chosen_by({"first": {"static_minmax": 1.0, "minmax": 1.0}}, measure, of=("input", "weight"))
    assert names_of(choice) == {"first": "minmax"}
    of_weights = [names["first"] for names in measured if "weight" in names["first"]]
    assert [names["weight"] for names in of_weights] == ["weight: static_minmax", "weight: minmax"]
    assert {names["input"] for names in of_weights} == {"input: minmax"}


def whole_divergence(model, config, observed, batches):
    """What an assignment's divergence is, in other words: calibrate, run quantized, compare the log-probabilities."""
    with CalibrationSession(model, config), torch.no_grad():
        for batch in observed:
            model(batch)
    divergences = []
    for batch in batches:
        with torch.no_grad():
            original = model(batch).log_softmax(-1)
            with quantized(model):
                predicted = model(batch).log_softmax(-1)
        divergences.append((original.exp() * (original - predicted)).sum(-1).mean())
    return torch.stack(divergences).mean().item()


INT4_STATIC = {**CHANNELS, "input_activations": {"num_bits": 4, "strategy": "tensor"}}


@pytest.mark.parametrize(
    "weight",
    [["memoryless_mse"], [{"name": "hessian", "signed": True, "rounding": "gptq"}]],
    ids=["scales", "rounded"],
)
@pytest.mark.parametrize("scale", [1, 30])
def test_the_divergence_of_the_choice_is_that_of_its_calibration(weight, scale):
    torch.manual_seed(scale)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    x = torch.randn(8, 64, 32)
    x[:, ::20] *= scale
    choice = choose_observers(model, x, INT4_STATIC, {"input": ["histogram", "minmax"], "weight": weight})
    assert (choice.batches, choice.are_kept_out) == (2, True)
    expected = whole_divergence(model, choice.config, x[0::2], x[3::4])
    assert choice.taken["weight"].divergence == pytest.approx(expected, rel=1e-3)


def test_the_divergence_of_each_observer_is_that_of_its_calibration(classifier, outliers):
    candidates = {"input": [{"name": "percentile", "percentile": 80.0}]}
    choice = choose_observers(classifier, outliers, "INT8_STATIC", candidates)
    options = CalibrationOptions("INT8_STATIC", observers={"input": candidates["input"][0]})
    expected = whole_divergence(classifier, options, outliers[0::2], outliers[3::4])
    assert choice.divergences["input"]["percentile(percentile=80.0)"] == pytest.approx(expected, rel=1e-3)


def test_one_batch_that_is_not_observed_scores_and_measures_and_the_line_says_so(classifier, outliers):
    few = choose_observers(classifier, outliers[:2], "INT8_STATIC", {"input": ["minmax"]})
    assert (few.batches, few.are_kept_out) == (1, False)
    assert few.lines[0].endswith("on the batch that was scored, too: give more batches")
    more = choose_observers(classifier, outliers[:1], "INT8_STATIC", {"input": ["minmax"]}, held_out=outliers[1:4])
    assert (more.batches, more.are_kept_out) == (1, True)
    assert more.lines[0].endswith("on 1 batch kept out of the estimates")


def test_a_batch_that_is_kept_out_runs_at_most_twice_as_often_as_there_are_candidates_and_once_more(classifier):
    calls = []
    classifier.register_forward_hook(lambda module, args, output: calls.append(1))
    candidates = {"input": ["minmax", "histogram", {"name": "percentile", "percentile": 90.0}]}
    choice = choose_observers(classifier, torch.randn(8, 64, 32), "INT8_STATIC", candidates)
    unquantized = 2 if any(assignment.is_by_tensor for assignment in choice.assignments["input"]) else 1
    runs = unquantized + len(choice.assignments["input"])
    assert len(calls) == 4 + 2 + 2 * runs  # observed, scored, kept out
    assert runs <= 2 * 4 + 1


def test_a_choice_leaves_the_model_and_its_calibration_as_they_were(classifier, outliers):
    with CalibrationSession(classifier, "W8A8"):
        pass
    classifier.train()
    scales = classifier[0].weight_scale
    attributes = [set(vars(module)) for module in classifier.modules()]
    torch.manual_seed(0)
    random_numbers = torch.get_rng_state()
    choose_observers(classifier, outliers, "INT8_STATIC", {"input": ["minmax"]})
    assert classifier[0].weight_scale is scales
    assert [set(vars(module)) for module in classifier.modules()] == attributes
    assert all(module.training for module in classifier.modules())
    assert torch.equal(torch.get_rng_state(), random_numbers)


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
