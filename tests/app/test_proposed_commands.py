"""The next steps that a page proposes: the command line takes each of them for the model of the run."""

import shlex

import pytest
from hydra import compose, initialize_config_dir

from lightning_obs.__main__ import config_dir
from lightning_obs.app.tasks.task import make_task
from lightning_obs.report.judgement import judge
from tests.report.test_judgement import layer, run

SCHEMES = {
    "INT8_STATIC": ["scheme=int8_static", "observer=minmax"],
    "INT8_STATIC_ASYM": ["scheme=int8_static_asym"],
    "FP8": ["scheme=fp8", "observer=mse", "kv_cache=fp8"],
    "W4A16": ["scheme=w4a16", "group_size=32"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["INT8_STATIC", pytest.param("INT8_STATIC_ASYM", marks=pytest.mark.nightly), "FP8", "W4A16"]
)
def test_the_task_of_each_proposed_command_is_ready_to_run(scheme, tiny_overrides, tmp_path):
    low = [layer(f"layers.{i}.down_proj", 2.0, 4.0, 3.0) for i in range(4)]
    errors = [*low, *(layer(f"layers.{i}.up_proj", 40.0) for i in range(18))]
    (tmp_path / "report.json").write_text('{"ignore": ["re:.*down_proj"]}')
    words = [*tiny_overrides, *SCHEMES[scheme], f"output_dir={tmp_path / 'run'}"]
    steps = judge(run(scheme, words, errors), tmp_path).steps
    assert steps
    for step in steps:
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            config = compose("config", overrides=shlex.split(step.command)[3:])
        assert config.output_dir == f"{tmp_path / 'run'}-{step.key}"
        make_task(config).check()
