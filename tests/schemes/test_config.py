"""What the user can write as a scheme, and the one config it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, preset_name_to_scheme

from lightning_obs.errors import CalibrationError
from lightning_obs.schemes.config import label, make_observer, preset_names, resolve_config

INT4 = {"num_bits": 4, "group_size": 8}

FP8 = preset_name_to_scheme("FP8", ["Linear"])


@pytest.mark.parametrize(
    "scheme",
    [
        "FP8",
        "fp8",
        {"FP8": ["Linear"]},
        {"FP8": "Linear"},
        FP8,
        {"group_0": FP8},
        FP8.model_dump(),
        {key: value for key, value in FP8.model_dump().items() if key != "targets"},
        {"weights": FP8.weights, "input_activations": FP8.input_activations},
        {"g": {"weights": FP8.weights, "input_activations": FP8.input_activations.model_dump()}},
        {"config_groups": {"FP8": ["Linear"]}},
        {"config_groups": {"group_0": FP8}},
        QuantizationConfig(config_groups={"FP8": ["Linear"]}),
        QuantizationConfig(config_groups={"group_0": FP8}).model_dump(),
        {"config_groups": {"group_0": FP8}, "version": "0.12.2", "sparsity_config": {}, "transform_config": {}},
    ],
)
def test_every_way_to_write_a_scheme_gives_the_same_config(scheme):
    (found,) = resolve_config(scheme).config_groups.values()
    assert found == FP8


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "W4A16", "W4A16_ASYM", "FP8_BLOCK", "NVFP4", "MXFP4", "INT8_STATIC"])
def test_every_preset_resolves(scheme):
    (found,) = resolve_config(scheme, targets="re:.*mlp.*").config_groups.values()
    assert found.targets == ["re:.*mlp.*"]
    assert scheme in preset_names()


def test_int8_static_is_static_and_symmetric_and_needs_data():
    (scheme,) = resolve_config("INT8_STATIC").config_groups.values()
    assert (scheme.weights.num_bits, scheme.weights.strategy, scheme.weights.symmetric) == (8, "channel", True)
    activations = scheme.input_activations
    assert (activations.num_bits, activations.strategy, activations.dynamic) == (8, "tensor", False)
    assert activations.observer == "static_minmax"


def test_several_groups_keep_their_schemes():
    groups = resolve_config({"FP8": ["re:.*mlp.*"], "INT8_STATIC": ["fc1", "fc2"]}).config_groups
    assert {name: group.targets for name, group in groups.items()} == {
        "FP8": ["re:.*mlp.*"],
        "INT8_STATIC": ["fc1", "fc2"],
    }
    assert groups["FP8"].weights.type == "float"


def test_resolving_changes_nothing_that_was_given():
    config = QuantizationConfig(config_groups={"group_0": FP8}, ignore=["lm_head"])
    before = config.model_dump()
    found = resolve_config(config, ignore="fc1", observers={"input": "minmax"})
    assert found.ignore == ["lm_head", "fc1"]
    assert config.model_dump() == before
    preset = resolve_config("INT8_STATIC", observers={"input": "minmax"})
    assert preset != resolve_config("INT8_STATIC")


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("fp8", "FP8"),
        ({"int8_static": ["a"], "FP8": ["b"]}, "INT8_STATIC + FP8"),
        (
            {"W8A8": ["a"], "g": {"weights": INT4}},
            "int8 channel weights, dynamic int8 token inputs + int4 group 8 weights",
        ),
        ({"a": {"weights": INT4}, "b": {"weights": INT4}}, "int4 group 8 weights"),
    ],
)
def test_a_scheme_has_a_short_name(scheme, expected):
    assert label(scheme, resolve_config(scheme)) == expected


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("FP9", {}, r"unknown scheme 'FP9' .did you mean `FP8`.*Expected one of .*FP8.*INT8_STATIC.*NVFP4"),
        ("UNQUANTIZED", {}, r"unknown scheme 'UNQUANTIZED'"),
        ({"FP9": ["Linear"]}, {}, r"unknown scheme 'FP9'"),
        ({}, {}, r"the scheme is empty"),
        (8, {}, r"not a scheme. Got int, expected the name of a preset, a dict of weights.*, or a QuantizationConfig"),
        ("recipe.yaml", {}, r"a scheme is not read from a file. Got recipe.yaml, expected .*config_groups.*Remedy"),
        (Path("some/recipe"), {}, r"a scheme is not read from a file. Got some/recipe"),
        (
            {"weights": INT4, "inputs": INT4},
            {},
            r"the scheme has no such field: inputs. Expected .*input_activations",
        ),
        (
            {"g": {"weight": INT4}},
            {},
            r"scheme group 'g' has no such field: weight .did you mean `weights`",
        ),
        ({"g": 3}, {}, r"scheme group 'g'. Got 3, expected a list of targets or a dict of fields"),
        ({"weights": {"bits": 4}}, {}, r"(?s)compressed-tensors refuses the scheme: .*bits"),
        ({"weights": {"num_bits": 0}}, {}, r"num_bits of the weight\. Got 0, expected 1 to 24"),
        ({"weights": {"num_bits": 32, "strategy": "tensor"}}, {}, r"num_bits of the weight\. Got 32, expected 1 to 24"),
        ({"preset": "INT8_STATIC", "input_activations": {"num_bits": -3}}, {}, r"num_bits of the input\. Got -3"),
        ({"weights": {"strategy": "rows"}}, {}, r"(?s)compressed-tensors refuses the scheme: .*rows"),
        ({"input_activations": {"strategy": "channel"}}, {}, r"compressed-tensors refuses the scheme"),
        ({"config_groups": {"FP9": ["Linear"]}}, {}, r"compressed-tensors refuses the scheme"),
        (
            FP8,
            {"targets": "Linear"},
            r"targets are given twice. Got targets=\['Linear'\] beside the QuantizationScheme",
        ),
        ({"weights": INT4, "targets": ["a"]}, {"targets": ["b"]}, r"targets are given twice.*the scheme\."),
        ({"FP8": ["a"]}, {"targets": ["b"]}, r"targets are given twice.*the scheme's groups"),
        (
            {"config_groups": {"FP8": ["a"]}},
            {"targets": ["b"]},
            r"targets are given twice.*QuantizationConfig's groups",
        ),
        (
            "FP8",
            {"observers": {"inputs": "minmax"}},
            r"observers are given for an unknown tensor: inputs .did you mean `input`",
        ),
        ("FP8", {"observers": 5}, r"observers\. Got 5, expected one for each base name"),
        ("FP8", {"observers": ["minmax"]}, r"observers\. Got \['minmax'\], expected one for each base name"),
        (
            "FP8",
            {"observers": {"input": ("minmax", "mse")}},
            r"observers\. Got \{'input': \('minmax', 'mse'\)\}, expected one for each base name",
        ),
        (
            "FP8",
            {"observers": {"input": "minmx"}},
            r"unknown observer 'minmx' .did you mean `minmax`.*Expected one of .*minmax",
        ),
        (
            "FP8",
            {"observers": {"input": {"averaging_constant": 1}}},
            r"observers\['input'\] has hyperparameters but no name",
        ),
        (
            "FP8",
            {"observers": {"input": {"name": "minmax", "c": 1}}},
            r"no hyperparameter 'c'. Expected signed, averaging_constant",
        ),
        ("FP8", {"observers": {"input": {"name": "minmax", "averaging_constant": 2}}}, r"averaging_constant. Got 2"),
        ("W8A8", {"observers": {"input": "minmax"}}, r"'minmax' is given for input, but the scheme has nothing static"),
        (
            "FP8",
            {"observers": {"output": "minmax"}},
            r"'minmax' is given for output, but the scheme has nothing static",
        ),
    ],
)
def test_what_cannot_be_a_scheme_is_refused(scheme, options, message):
    with pytest.raises(CalibrationError, match=message):
        resolve_config(scheme, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "FP8", "ignore": ["re:("]},
        {"scheme": "FP8", "targets": "re:("},
        {"scheme": {"FP8": ["re:("]}},
        {"scheme": {"weights": INT4, "targets": ["re:("]}},
        {"scheme": {"config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}, "ignore": ["re:("]}},
    ],
)
def test_a_pattern_that_is_no_regular_expression_is_named(options):
    with pytest.raises(CalibrationError, match=r"(targets|ignore): a pattern is no regular expression: re:\(.*missing"):
        resolve_config(**options)


def test_an_observer_that_the_scheme_itself_names_is_checked():
    with pytest.raises(CalibrationError, match="unknown observer 'minmx'"):
        resolve_config({"weights": {**INT4, "observer": "minmx"}})


# ---------------------------------------------------------------------- observers


def test_observers_replace_those_of_the_scheme_in_every_group():
    config = resolve_config(
        {"FP8": ["fc1"], "INT8_STATIC": ["fc2"]},
        observers={"input": {"name": "minmax", "averaging_constant": 0.05}, "weight": "static_minmax"},
    )
    for group in config.config_groups.values():
        assert (group.input_activations.observer, group.weights.observer) == ("minmax", "static_minmax")
        assert group.input_activations.observer_kwargs == {"averaging_constant": 0.05}


@pytest.mark.parametrize("value", [None, {}, {"name": None}])
def test_no_observer_leaves_the_scheme_s_own(value):
    assert resolve_config("FP8", observers={"input": value, "weight": value}) == resolve_config("FP8")


@pytest.mark.parametrize(
    ("base_name", "expected"),
    [("weight", "MemorylessMinMaxObserver"), ("input", "MinMaxObserver"), ("output", "MinMaxObserver")],
)
def test_the_default_observer_is_that_of_the_ecosystem(base_name, expected):
    assert type(make_observer(base_name, QuantizationArgs())).__name__ == expected


def test_another_observer_leaves_the_rounding_that_the_scheme_names():
    weights = {"num_bits": 4, "group_size": 64, "observer": "mse", "observer_kwargs": {"rounding": "gptq", "norm": 3.0}}
    config = resolve_config({"weights": weights}, observers={"weight": "memoryless_minmax"})
    args = config.config_groups["group_0"].weights
    assert (args.observer, args.observer_kwargs) == ("memoryless_minmax", {"rounding": "gptq"})


# ---------------------------------------------------------------------- a preset, and fields that differ from it


def groups_of(scheme, **options):
    return list(resolve_config(scheme, **options).config_groups.values())


def test_fields_beside_a_preset_replace_its_own():
    [group] = groups_of({"preset": "int8_static", "input_activations": {"num_bits": 4}})
    [expected] = groups_of("INT8_STATIC")
    assert group.input_activations.num_bits == 4
    assert group.input_activations.observer == expected.input_activations.observer
    assert group.weights == expected.weights
    assert expected.input_activations.num_bits == 8


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_is_the_same_in_a_dict(preset):
    assert groups_of({"preset": preset, "targets": ["fc1"]}) == groups_of(preset, targets="fc1")


def test_none_beside_a_preset_leaves_a_tensor_in_full_precision():
    [group] = groups_of({"preset": "FP8", "input_activations": None})
    assert (group.input_activations, group.weights.num_bits) == (None, 8)


def test_another_type_beside_a_preset_has_zero_points_of_its_own():
    [group] = groups_of({"preset": "INT8_STATIC", "input_activations": {"type": "float"}})
    assert group.input_activations.zp_dtype == torch.float8_e4m3fn


def test_each_group_may_begin_with_a_preset():
    first, second = groups_of({
        "mlp": {"preset": "FP8", "targets": ["re:.*mlp"], "weights": {"observer": "memoryless_mse"}},
        "W8A8": ["Linear"],
    })  # fmt: skip
    assert (first.targets, first.weights.observer) == (["re:.*mlp"], "memoryless_mse")
    assert second.targets == ["Linear"]


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("INT8_STATIC", "INT8_STATIC"),
        ({"preset": "int8_static", "targets": ["Linear"]}, "INT8_STATIC"),
        ({"preset": "INT8_STATIC", "input_activations": {"num_bits": 4}}, "int8 channel weights, int4 tensor inputs"),
    ],
)
def test_a_changed_preset_is_not_called_by_its_name(scheme, name):
    assert label(scheme, resolve_config(scheme)) == name


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"preset": "FP9"}, r"unknown scheme 'FP9' \(did you mean `FP8`\?\)"),
        ({"preset": 8}, r"the scheme: preset\. Got 8, expected the name of a preset"),
        ({"preset": "FP8", "weigths": {}}, r"the scheme has no such field: weigths \(did you mean `weights`\?\)"),
        ({"preset": "FP8", "weights": {"num_bit": 4}}, r"compressed-tensors refuses the scheme: .*num_bit"),
        ({"preset": "FP8", "weights": {"symmetric": "flase"}}, r"compressed-tensors refuses the scheme"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {}}}, "preset": "FP8"},
            r"beside config_groups: pres",
        ),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {}}}, "ignored": ["a"]}, r"did you mean `ignore`"),
    ],
)
def test_nothing_beside_a_preset_or_config_groups_is_dropped(scheme, message):
    with pytest.raises(CalibrationError, match=f"(?s){message}"):
        resolve_config(scheme)
