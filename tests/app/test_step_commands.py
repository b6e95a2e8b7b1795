"""The next steps of a report as commands: Hydra composes each, and its task takes it for the model of the run."""

import json
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_obs.app.config_files import config_dir
from lightning_obs.app.from_config import make_options
from lightning_obs.app.step_commands import is_possible, step_command
from lightning_obs.app.tasks.task import make_task
from lightning_obs.app.typed_words import refuse_unread
from lightning_obs.report.judgement import judge
from lightning_obs.report.step import Step
from tests.report.runs import layer, run
from tests.support.in_process import run_command_line

WORDS = {
    "INT8_STATIC": ["scheme=int8_static", "observer=minmax", "observer.averaging_constant=0.05", "output_dir=out/a"],
    "INT8_STATIC_ASYM": ["scheme=int8_static_asym", "export.folder=out/b", "ignore_from=old/report.json"],
    "FP8": ["++trainer.accelerator=cpu", "data.batches=2"],
    "W4A16": ["scheme=w4a16", "group_size=64", "weight_observer=memoryless_mse"],
    "W4A8": ["experiment=qat_w4a8", "data.train_batches=2"],
}


def spoilt():
    low = [layer(f"layers.{i}.down_proj", 2.0, 4.0, 3.0) for i in range(4)]
    return [*low, *(layer(f"layers.{i}.up_proj", 40.0) for i in range(18))]


def composed(words):
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        return compose("config", overrides=words)


UNMEASURED, TRAINED = {"metrics": {}}, {"was_trained": True, "calibrated": {"perplexity": 20.0}}
PARTS = [("INT8_STATIC", UNMEASURED), ("FP8", UNMEASURED), ("INT8_STATIC_ASYM", TRAINED), ("W4A8", TRAINED)]


@pytest.mark.parametrize(("scheme", "parts"), [*((scheme, {}) for scheme in WORDS), *PARTS])
def test_every_proposed_command_composes_and_its_task_reads_it(scheme, parts, tmp_path):
    folder = tmp_path / "a folder with 'quotes'"
    steps = judge(run(scheme, spoilt(), **parts), folder).steps
    assert steps
    for step in steps:
        command = shlex.split(step_command(step, WORDS[scheme], folder))
        head, words = command[:3], command[3:]
        assert head == ["python", "-m", "lightning_obs"]
        config = composed(words)
        refuse_unread(config.task, words)
        assert str(config.get("ignore_from")) in ("None", "old/report.json", str(folder / "report.json"))
        assert "out/a" not in words
        assert "export.folder=out/b" not in words


def command_of(name, *words, **changes):
    step = Step(name, "", "", "", changes)
    return step_command(step, words, Path("out")).removeprefix("python -m lightning_obs ")


def test_a_command_changes_the_words_of_its_step_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_of("export", "scheme=fp8", "export=none", "export.engines=vllm") == (
        "scheme=fp8 export.engines=vllm export=checkpoint"
    )
    assert command_of("measure", "evaluate=false", "output_dir=out") == "evaluate=true output_dir=out-measure"
    assert command_of("smooth", "export=onnx", "export.file=out/m.onnx") == (
        "export=onnx smooth=true export.file=out/m-smooth.onnx"
    )
    assert shlex.split(command_of("measure", "output_dir='a=b/'")) == ["evaluate=true", "output_dir='a=b-measure'"]
    assert command_of("token_scales", "+scheme.input_activations.num_bits=4", "observer=mse", scheme="W8A8") == (
        "scheme=w8a8"
    )
    assert command_of("token_scales", "task=observers", "task.candidates={}", scheme="W8A8") == "scheme=w8a8"
    assert command_of("token_scales", "task=finetune", scheme="W8A8") == "task=finetune scheme=w8a8"
    assert command_of("leave_out", "--config-dir=mine", "ignore_from=a") == (
        "--config-dir=mine ignore_from=out/report.json"
    )
    assert command_of("rounding", "weight_observer=mse", "weight_observer.norm=2") == ("recipe=accurate")
    assert command_of("smooth", "scheme=int8_static", "smooth=false") == "scheme=int8_static smooth=true"
    assert command_of("without_data", "weight_observer=imatrix_mse", "rounding=gptq") == "recipe=fast"
    assert command_of("budget", "task=plan", "budget=5", budget=5.5) == "task=plan budget=5.50"
    assert command_of("untrained", "task=finetune", "task.callback.distill=0", "data.train_batches=9") == (
        "task=calibrate"
    )


def test_a_model_for_a_gguf_file_is_fine_tuned_into_a_checkpoint():
    words = ["scheme=q4_0", "export=gguf", "export.base=base.gguf", "export.file=m.gguf"]
    assert command_of("fine_tune", *words) == "scheme=q4_0 task=finetune"


@pytest.mark.parametrize("folder", ["größe", "it\\'s", "a b=c"])
def test_hydra_reads_the_report_of_any_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = step_command(Step("leave_out", "", "", "", {}), [], Path(folder))
    (override,) = OverridesParser.create().parse_overrides(shlex.split(command)[3:])
    assert override.value() == f"{folder}/report.json"


def test_only_python_uses_a_step_that_no_run_is():
    assert step_command(Step("load", "", "", "", {}), [], Path("out")) is None
    serve = Step("serve", "", "", "", {"checkpoint": "a run"})
    assert step_command(serve, [], Path("out")) == "vllm serve 'a run'"


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
    (tmp_path / "report.json").write_text('{"ignore": ["re:.*down_proj"]}')
    words = [*tiny_overrides, *SCHEMES[scheme], f"output_dir={tmp_path / 'run'}"]
    steps = judge(run(scheme, spoilt()), tmp_path).steps
    assert steps
    for step in steps:
        config = composed(shlex.split(step_command(step, words, tmp_path))[3:])
        assert config.output_dir == f"{tmp_path / 'run'}-{step.name}"
        make_task(config).check()


@pytest.mark.slow
def test_a_command_that_cannot_run_is_not_proposed(tiny_overrides, tmp_path):
    words = [*tiny_overrides, "scheme=w4a16", "group_size=32", f"output_dir={tmp_path / 'run'}"]
    task = make_task(composed(words))
    task.check()

    def is_proposed(step, *more):
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            return is_possible(step, [*words, *more], tmp_path, task.job.module, task.job.model)

    assert is_proposed(Step("rounding", "", "", ""))
    assert not is_proposed(Step("rounding", "", "", ""), "+weight_observer.norm=2.0", "no_such_key=1")
    assert is_proposed(Step("fine_tune", "", "", ""), "data.train_batches=2")
    assert not is_proposed(Step("fine_tune", "", "", ""), "data.train_batches=1000000")
    assert make_options(task.config).label in task.job.callback.label


@pytest.mark.slow
def test_the_page_and_the_closing_lines_have_the_same_verdict_and_commands(tiny_overrides, tmp_path):
    words = [*tiny_overrides, "scheme=fp8", "export=none", "evaluate=false", f"output_dir={tmp_path / 'run'}"]
    done = run_command_line(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    judgement = json.loads((tmp_path / "run" / "report.json").read_text())["judgement"]
    assert judgement["grade"] == "not measured"
    assert judgement["headline"] in done.stdout
    (measure, *_) = judgement["steps"]
    assert measure["name"] == "measure"
    assert measure["command"].endswith(f"evaluate=true output_dir={tmp_path / 'run'}-measure")
    assert f"Measure the quantized model: {measure['command']}" in done.stdout
    again = run_command_line(*shlex.split(measure["command"])[3:], folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "run-measure" / "report.json").read_text())["judgement"]["grade"] != "not measured"
