"""Every config composes, can be instantiated, and opens with a command that works."""

import inspect
import shlex

import pytest
from compressed_tensors.quantization import QuantizationArgs
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

from lightning_obs import CalibrationOptions
from lightning_obs.app.config_files import config_dir
from lightning_obs.app.from_config import make_options
from lightning_obs.observers import Observer
from lightning_obs.schemes.config import preset_names

FILES = sorted(path.relative_to(config_dir()) for path in config_dir().rglob("*.yaml"))
GROUPS = [path for path in FILES if len(path.parts) == 2]


def opening_commands(path):
    """The commands in the comment that a config opens with."""
    lines = (config_dir() / path).read_text().splitlines()
    return [line[1:].strip() for line in lines if line.startswith("#   python -m lightning_obs")]


def select(*overrides):
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        return compose("config", overrides=["output_dir=/nowhere", *overrides])


def test_every_option_is_a_default_or_named_in_the_command_that_its_config_opens_with():
    options = {f"{path.parts[0]}={path.stem}": opening_commands(path) for path in GROUPS}
    unnamed = {option for option, commands in options.items() if option not in " ".join(commands).split()}
    assert unnamed == {"data=text", "export=checkpoint", "model=causal_lm", "trainer=default"}


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_a_scheme_of_the_command_line(preset):
    groups = make_options(select(f"scheme={preset.lower()}")).config.config_groups
    expected = CalibrationOptions(preset).config.config_groups
    assert groups["group_0"].model_dump(exclude={"format"}) == expected["group_0"].model_dump(exclude={"format"})


@pytest.mark.parametrize("path", [path for path in GROUPS if path.parts[0].endswith("observer")], ids=str)
def test_the_config_of_an_observer_says_the_defaults_of_its_class(path):
    config = OmegaConf.load(config_dir() / path)
    if "defaults" in config:  # it builds on another
        config = select(f"{path.parts[0]}={path.stem}")[path.parts[0]]
    said = {key: value for key, value in config.items() if value is not None}
    if (name := said.pop("name", None)) is not None:
        base_name = "weight" if path.parts[0] == "weight_observer" else "input"
        observer = Observer.load_from_registry(name, base_name=base_name, args=QuantizationArgs(num_bits=8))
        assert {key: getattr(observer, key) for key in said} == said


@pytest.mark.parametrize(("option", "label"), [("fp8", "FP8 + float8 tensor"), ("fp8_head", "FP8 + float8 attn_head")])
def test_a_kv_cache_is_quantized_beside_any_scheme(option, label):
    options = make_options(select("scheme=fp8", f"kv_cache={option}", "kv_cache.observer=histogram"))
    assert options.label == f"{label} kv cache"
    assert options.config.kv_cache_scheme.observer == "histogram"


def test_every_target_is_a_class():
    config = select()
    nodes = [node for node in OmegaConf.to_container(config).values() if isinstance(node, dict)]
    targets = [node["_target_"] for node in nodes if "_target_" in node]
    assert len(targets) == 4
    for target in targets:
        get_class(target)


@pytest.mark.parametrize("path", [path for path in GROUPS if path.parts[0] in ("model", "data")], ids=str)
def test_every_model_and_all_data_name_a_class_that_takes_what_the_config_sets(path):
    config = OmegaConf.to_container(select(f"{path.parts[0]}={path.stem}"))[path.parts[0]]
    parameters = inspect.signature(get_class(config.pop("_target_"))).parameters
    assert set(config) <= {*parameters, "layerwise"}  # which the task reads


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({command for path in FILES for command in opening_commands(path)}))
def test_the_command_that_a_config_opens_with_composes_and_makes_a_callback(command):
    for placeholder in ("<folder or hub name>", "<text file, jsonl, or folder>"):
        command = command.replace(placeholder, "folder")
    words = shlex.split(command)
    overrides = [word for word in words[3:] if not word.startswith("--")]
    if "--multirun" in words:
        overrides = [f"{key}={value.split(',')[0]}" for key, value in (word.split("=", 1) for word in overrides)]
    assert make_options(select(*(word.replace("<folder>", "folder") for word in overrides))).label


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_config_opens_with_what_it_is_for(path):
    lines = [line for line in (config_dir() / path).read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ")
    assert "python -m lightning_obs" in "\n".join(lines[:6])


def test_keys_beside_a_preset_replace_its_own():
    options = make_options(select("scheme=int8_static", "+scheme.input_activations.num_bits=4"))
    assert options.config.config_groups["group_0"].input_activations.num_bits == 4
    assert options.label == "int8 channel weights, int4 tensor inputs"
