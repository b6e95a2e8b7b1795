"""What the command line refuses before anything is measured, and what it says before it begins."""

import pytest

from lightning_obs import CalibrationError
from lightning_obs.__main__ import versions
from lightning_obs.app.from_config import make_options, make_trainer
from lightning_obs.app.main import run
from lightning_obs.app.quality import Quality, recovered_share
from lightning_obs.app.tasks import compare  # noqa: F401  (imports functions that tests here replace)
from lightning_obs.app.tasks.task import make_task


@pytest.fixture
def nothing_is_run(monkeypatch):
    def fail(*args, **kwargs):
        pytest.fail("the model was run")

    monkeypatch.setattr("lightning_obs.app.quality.measure_quality", fail)
    monkeypatch.setattr("lightning_obs.app.models.language.CausalLM.forward", fail)


FINETUNE = ["task=finetune", "scheme=w4a16", "group_size=32"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scheme.targets=[Linaer]"], "a target matches no module of LlamaForCausalLM: Linaer"),
        (["scheme=w4a16", "group_size=48"], "weight group size 48 does not divide the columns"),
        (["scheme=nvfp4"], "NVFP4 weights as bfloat16"),
        (["ignore=[]", "module=modle"], "CausalLM has no module 'modle'"),
        (["scheme=fp8", "group_size=64"], "group_size with a scheme whose groups are fixed"),
        ([*FINETUNE, "data.train_batches=0"], r"data\.train_batches"),
        ([*FINETUNE, "trainer.max_steps=0"], r"trainer\.max_steps=0 trains nothing"),
        ([*FINETUNE, "+trainer.max_epochs=0"], r"trainer\.max_epochs=0 trains nothing"),
        ([*FINETUNE, "trainer.precision=bf16-true"], "training needs weights in the precision"),
        (["task=plan", "+task.candidates.wide={weights: {num_bits: 4, group_size: 48}}"], "group size 48"),
        (["task=plan", "trainer.devices=2", "trainer.strategy=ddp"], "task=plan runs on one device"),
        (["task=observers", "scheme=int8_static", "task.candidates={input: [minmaxx]}"], "minmaxx"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_it_is_refused_before_anything_is_measured(composed, nothing_is_run, tmp_path, overrides, message):
    with pytest.raises(CalibrationError, match=message):
        run(composed(*overrides))
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.fixture
def data_file(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"content": "some words", "stars": 3}\n')
    return tmp_path / "data.jsonl"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=/nowhere/text.txt"], r"data\.path=/nowhere/text\.txt does not exist"),
        (["data.eval_path=/nowhere"], r"data\.eval_path=/nowhere does not exist"),
        (["data.path={}"], r"data\.jsonl:1 has no text in the field 'text'.*data\.text_field="),
        (["data.path={}", "data.text_field=contents"], r"field 'contents' \(did you mean `content`\?\)"),
        (["task=evaluate", "data.path=/nowhere"], r"data\.path=/nowhere does not exist"),
        (["task=plan", "budget=many"], r"budget\. Got 'many', expected bits per weight"),
        (["task=plan", "+task.at_most.int44=0.5"], r"names no candidate: int44 \(did you mean `int4`\?\)"),
        (["task=compare", "runs=[/nowhere]"], r"/nowhere does not exist"),
        (["ignore_from=/nowhere"], r"/nowhere does not exist"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_it_is_refused_before_a_model_is_loaded(composed, data_file, monkeypatch, overrides, message):
    for owner in ("job", "tasks.compare"):
        monkeypatch.setattr(f"lightning_obs.app.{owner}.load_module", lambda config: pytest.fail("a model was loaded"))
    with pytest.raises(CalibrationError, match=message):
        run(composed("model.path=m", *(text.format(data_file) for text in overrides), tiny=False))


def test_group_size_is_that_of_the_weights(composed):
    options = make_options(composed("scheme=w4a16", "group_size=32"))
    (group,) = options.config.config_groups.values()
    assert group.weights.group_size == 32


def test_it_is_said_which_module_is_calibrated_and_how_long_it_takes(composed, capsys):
    run(composed("data.batches=16", "export=none", "report.layer_error_batches=0"))
    output = capsys.readouterr().out
    assert "calibrating LlamaForCausalLM (`model`): 14 of 15 Linear; left out: lm_head" in output
    assert "minutes for 20 forward passes" in output


def test_of_a_few_batches_nothing_is_said(composed, capsys):
    run(composed("speed=quick", "export=none", "report.layer_error_batches=0"))
    output = capsys.readouterr().out
    assert "forward passes" not in output
    assert "· 2 batches ·" in output


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([], 2 * 16 + 16 + 1),
        (["evaluate=false"], 16 + 1),
        (["task=finetune", "trainer.max_steps=10"], 4 * 16 + 2 * 16 + 1 + 10 * 4),
        (["task=plan"], 2 * 16 + 2 * 16 + 1 + 8 * 3),
        (["speed=quick"], 2 * 2 + 2 + 1),
        (["speed=quick", "scheme=int8_static", "smooth=true"], 2 * 2 + 2 + 1 + 2 + 8),
        (["speed=quick", "experiment=qat_w4a16"], 4 * 2 + 2 * 2 + 1 + 4 * 4),
    ],
)
def test_forward_passes_are_counted(composed, overrides, passes):
    task = make_task(composed(*overrides, tiny=False))
    task.job.trainer = make_trainer(task.config)
    assert task.passes(needs_data=True) == passes


@pytest.mark.parametrize(
    ("full", "calibrated", "tuned", "higher_is_better", "share"),
    [
        (20.0, 30.0, 25.0, False, 0.5),
        (20.0, 30.0, 19.0, False, 1.0),
        (20.0, 30.0, 31.0, False, 0.0),
        (20.0, 20.01, 25.0, False, None),
        (20.0, 19.0, 18.0, False, None),
        (0.9, 0.7, 0.85, True, 0.75),
        (0.7, 0.9, 0.85, True, None),
        (0.9, 0.7, 0.85, None, None),
    ],
)
def test_what_fine_tuning_brought_back_is_a_share(full, calibrated, tuned, higher_is_better, share):
    measured = [Quality("metric", value, higher_is_better) for value in (full, calibrated, tuned)]
    assert recovered_share(*measured) == (None if share is None else pytest.approx(share))


def test_what_was_not_measured_is_no_share():
    assert recovered_share(None, Quality("metric", 30.0, False), None) is None


def test_version_is_the_package_s_own(command_line):
    done = command_line("--version", tiny=False)
    assert done.returncode == 0
    assert done.stdout.strip() == versions()
    assert "lightning_obs 0.1.0 (torch 2." in done.stdout
