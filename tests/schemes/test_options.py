"""Options are checked where they are said: in the constructor of whoever takes them."""

import inspect
import re
from dataclasses import FrozenInstanceError

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from typing_extensions import get_type_hints

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationOptions,
    CalibrationSession,
    QuantizationAwareTraining,
    choose_observers,
    mixed_precision,
    sensitivity,
)
from lightning_obs.calibration.options import OptionKeywords
from tests.support.markdown import ROOT


def make_session(*args, **options):
    return CalibrationSession(nn.Sequential(nn.Linear(16, 4)), *args, **options)


TAKERS = [CalibrationOptions, CalibrationCallback, QuantizationAwareTraining, make_session]


@pytest.mark.parametrize("taker", TAKERS[1:])
def test_a_misspelt_option_is_named_with_the_nearest(taker):
    with pytest.raises(CalibrationError, match=r"unknown option: ignores \(did you mean `ignore`\?\)"):
        taker("FP8", ignores=["lm_head"])
    with pytest.raises(CalibrationError, match=r"unknown option: zzz\. Expected some of (?!.*on_missing.*on_missing)"):
        taker("FP8", zzz=1)


def test_options_of_a_callback_are_known_to_it_only():
    for callback in (CalibrationCallback, QuantizationAwareTraining):
        with pytest.raises(CalibrationError, match="did you mean `export_to`"):
            callback("FP8", export_dir="out")
    with pytest.raises(CalibrationError, match="did you mean `train`"):
        QuantizationAwareTraining("FP8", trains="all")
    with pytest.raises(CalibrationError, match="unknown option: config"):
        CalibrationCallback("FP8", config=None)

    class Own(CalibrationCallback):
        def __init__(self, scheme, *, own_option=1, **options):
            super().__init__(scheme, **options)

    with pytest.raises(CalibrationError, match="did you mean `own_option`"):
        Own("FP8", own_optoin=2)


@pytest.mark.parametrize("taker", [*TAKERS[1:3], CalibrationSession, sensitivity, choose_observers, mixed_precision])
def test_every_option_is_in_the_signature_with_its_type_and_default(taker):
    told = inspect.signature(taker).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in told.values())
    for name, option in inspect.signature(CalibrationOptions, eval_str=True).parameters.items():
        if option.kind is option.KEYWORD_ONLY:
            assert (told[name].annotation, told[name].default) == (option.annotation, option.default)


def test_type_checkers_are_told_the_same():
    written = inspect.signature(CalibrationOptions, eval_str=True).parameters.values()
    expected = {option.name: option.annotation for option in written if option.kind is option.KEYWORD_ONLY}
    assert get_type_hints(OptionKeywords) == expected


@pytest.mark.parametrize("callback", [CalibrationCallback, QuantizationAwareTraining])
def test_the_docstring_of_a_callback_lists_all_its_arguments_with_types_and_defaults(callback):
    text = inspect.getdoc(callback).split("\nArgs:\n")[1].split("\nRaises:\n")[0]
    entries = dict(re.findall(r"^    (\w+) \(.+?\): (.+?)(?=^    \w|\Z)", text, flags=re.MULTILINE | re.DOTALL))
    parameters = inspect.signature(callback).parameters
    assert list(entries) == list(parameters)
    for name, parameter in parameters.items():
        default = " ".join(entries[name].split()).rpartition("Default: ")[2]
        if isinstance(parameter.default, str):
            assert default.startswith(f'``"{parameter.default}"``')
        elif parameter.default is not parameter.empty:
            assert default.startswith(str(parameter.default))


@pytest.mark.slow
def test_mypy_finds_a_wrong_option(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "user.py").write_text(
        "from lightning_obs import CalibrationCallback, QuantizationAwareTraining, mixed_precision\n"
        "CalibrationCallback('FP8', ignore=['lm_head'], evaluate=True, export_to='out')\n"
        "CalibrationCallback('FP8', export_dir='out')\n"
        "QuantizationAwareTraining('FP8', freeze_after='never')\n"
        "mixed_precision(__import__('torch').nn.Linear(1, 1), None, ['FP8'], on_missing='wran')\n"
    )
    text, _, status = api.run([str(tmp_path / "user.py"), f"--config-file={ROOT / 'pyproject.toml'}"])
    assert status == 1
    assert re.findall(r"user.py:(\d+): error: .*?(export_dir|freeze_after|on_missing)", text) == [
        ("3", "export_dir"),
        ("4", "freeze_after"),
        ("5", "on_missing"),
    ]


WRITTEN = {
    "targets": ["Linear"],
    "ignore": ["lm_head", "re:.*mlp"],
    "observers": {"input": {"name": "minmax", "averaging_constant": 0.05}},
    "on_missing": "siblings",
    "engines": "unchecked",
    "calibrate_all_experts": True,
    "fused_sets": [["a_proj", "b_proj"]],
    "join_fused_scales": True,
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"on_missing": "wran"},
            r"on_missing\. Got 'wran' \(did you mean `warn`\?\), expected 'error', 'warn', 'siblings'",
        ),
        ({"on_missing": None}, r"on_missing\. Got None"),
        ({"engines": ["vlm"]}, r"engines\. Got 'vlm' \(did you mean `vllm`\?\)"),
        ({"targets": 3}, r"targets\. Got 3, expected a name, or a list of names"),
        ({"ignore": None}, r"ignore\. Got None, expected a name, or a list of names"),
        ({"engines": ["vllm", 3]}, r"engines\. Got \['vllm', 3\], expected a name, or a list of names"),
        ({"fused_sets": [3]}, r"fused_sets\. Got \[3\], expected a list of lists of names"),
        (
            {"engines": "tgi"},
            r"engines\. Got 'tgi', expected 'transformers', 'dequantize', 'vllm', 'sglang', .*'unchecked'",
        ),
        ({"fused_sets": ["a_proj", "b_proj"]}, r"fused_sets\. Got .*expected a list of lists of names"),
        ({"fused_sets": [["a_proj"]]}, r"not a fused set"),
        (
            {"observers": {"inputs": "minmax"}},
            r"observers are given for an unknown tensor: inputs.*`input`",
        ),
        ({"observers": {"input": "minmx"}}, r"unknown observer 'minmx' \(did you mean `minmax`\?\)"),
        ({"observers": {"input": {"name": "minmax", "c": 1}}}, r"no hyperparameter 'c'"),
        ({"kv_cache": "FP9"}, r"kv_cache\. Got 'FP9' \(did you mean `FP8`\?\), expected FP8, FP8_HEAD"),
    ],
)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_typo_is_an_error_of_the_constructor(taker, options, message):
    with pytest.raises(CalibrationError, match=message):
        taker("FP8", **options)


@pytest.mark.parametrize("taker", [CalibrationCallback, QuantizationAwareTraining])
def test_options_given_whole_are_their_fields(taker):
    options = CalibrationOptions("FP8", **WRITTEN)
    assert taker("FP8", **WRITTEN).options == taker(options).options == options
    assert taker(options).label == "FP8"
    assert taker(options).options.config.ignore == ["lm_head", "re:.*mlp"]


def test_a_session_takes_options_whole():
    options = CalibrationOptions("INT8_STATIC", on_missing="warn", observers={"input": "minmax"})
    session = make_session(options)
    assert session.options is not None
    assert session.options == options
    assert type(session.observers["0", "input"]).__name__ == "MinMaxObserver"


def test_options_stay_what_they_are():
    options = CalibrationOptions("FP8", ignore=["a"])
    with pytest.raises(FrozenInstanceError):
        options.on_missing = "warn"
    ignored = ["lm_head"]
    kept = CalibrationOptions("FP8", ignore=ignored)
    ignored.append("fc1")
    assert kept.ignore == kept.config.ignore == ["lm_head"]


def test_options_can_be_changed_into_others():
    options = CalibrationOptions("FP8", ignore=["a"], on_missing="warn")
    other = CalibrationOptions.of(options, ignore=["b"], kv_cache="FP8")
    assert (other.scheme, other.on_missing, other.config.ignore) == ("FP8", "warn", ["b"])
    assert other.label == "FP8 + float8 tensor kv cache"
    assert (options.ignore, options.kv_cache) == (["a"], None)
    assert CalibrationOptions.of(options) == options
    with pytest.raises(CalibrationError, match="engines"):
        CalibrationOptions.of(options, engines="never")
    assert CalibrationCallback(options, engines="unchecked").options == CalibrationOptions.of(
        options, engines="unchecked"
    )


@pytest.mark.parametrize("taker", [CalibrationCallback, QuantizationAwareTraining, CalibrationOptions])
def test_containers_of_a_configuration_library_are_taken(taker):
    name = "CalibrationOptions" if taker is CalibrationOptions else taker.__name__
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}}
    node = OmegaConf.create({"_target_": f"lightning_obs.{name}", "scheme": scheme, **WRITTEN})
    made = instantiate(node)
    options = made if taker is CalibrationOptions else made.options
    assert options == CalibrationOptions(scheme, **WRITTEN)
    assert type(options.scheme) is dict
    assert type(options.ignore) is type(options.fused_sets[0]) is list


def test_what_was_saved_with_a_callback_has_plain_containers():
    callback = CalibrationCallback("INT8_STATIC", **OmegaConf.create({"ignore": ["1"]}))
    session = CalibrationSession(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), callback.options)
    with session:
        session.model(torch.ones(2, 4))
    assert type(session.plan.config.ignore) is list
    assert session.result.modules == ["0"]
