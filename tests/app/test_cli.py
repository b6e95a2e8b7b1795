"""The command line: messages, comparison table, installation."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from lightning_obs.app.config_files import config_dir
from lightning_obs.app.typed_words import refuse_unread
from tests.support.lightning_ranks import run_command_line_on_ranks

ROOT = Path(__file__).parents[2]
#: docs/guide/command_line.md shows it
ON_RANKS = "python -m lightning_obs trainer.devices=2 trainer.strategy=ddp"


def test_help_lists_groups_and_examples(command_line):
    done = command_line("--help", tiny=False, new_process=True)
    assert done.returncode == 0
    assert "scheme: fp8, " in done.stdout
    assert "calibrate               Find the ranges in one pass over the data; no weight changes\n" in done.stdout
    assert "reads all keys but scheme, group_size, smooth, data.train_batches\n" in done.stdout
    assert "static_minmax           The range of everything observed: no value is clipped\n" in done.stdout
    assert "python -m lightning_obs --multirun" in done.stdout


def test_a_shell_completes_what_is_typed(command_line, monkeypatch):
    typed = "lightning-obs scheme=fp8_"
    monkeypatch.setenv("COMP_LINE", typed)
    monkeypatch.setenv("COMP_POINT", str(len(typed)))
    done = command_line("-sc", "query=bash", tiny=False, new_process=True)
    assert done.stdout.split() == ["scheme=fp8_block", "scheme=fp8_dynamic"]


def test_a_run_makes_the_folder_of_its_results(command_line, tmp_path, verified_here):
    quick = "evaluate=false", "report.layer_error_batches=0"
    done = command_line("scheme=fp8_dynamic", *quick, "export.folder=out", "output_dir=new/run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new/run/report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["task=plan", "scheme=w4a16"], "scheme"),
        (["task=plan", "+scheme.weights.num_bits=4", "data.batches=2"], "scheme.weights.num_bits"),
        (["task=compare", "runs=[a]", "data.batches=2", "observer=minmax"], "data.batches, observer"),
        (["task=evaluate", "ignore=[lm_head]"], "ignore"),
        (["data.train_batches=2"], "data.train_batches"),
    ],
)
def test_what_a_task_does_not_read_is_refused(command_line, arguments, keys):
    done = command_line(*arguments, tiny=False)
    assert done.returncode == 1
    assert f"does not read what was given: {keys}. Remedy: leave it out" in done.stderr


def test_an_added_key_that_no_task_reads_is_refused(command_line):
    done = command_line("+schem=fp8", tiny=False)
    assert done.returncode == 1
    assert "no task reads an added key: schem. Remedy: --help" in done.stderr


def test_what_a_plan_reads_of_a_scheme_is_taken():
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        task = compose("config", overrides=["task=plan"]).task
    refuse_unread(task, ["task=plan", "scheme.targets=[Linear]", "budget=4.5", "~task.candidates.int4"])
    refuse_unread(task, ["task=plan", "task._target_=my.Task", "scheme=w4a16"])  # who knows what it reads


def test_a_typo_gets_one_message_with_the_valid_options(command_line):
    done = command_line("scheme=fp9", new_process=True)  # others: test_typing_mistakes.py
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "unknown option scheme=fp9 (did you mean `fp8`?). Options of scheme: fp8," in done.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is a place that nobody can write to")
def test_an_output_folder_that_cannot_be_made_is_told_without_a_traceback(command_line):
    for words, key in (
        (["hydra.run.dir=/proc/a"], "hydra.run.dir"),
        (["--multirun", "hydra.sweep.dir=/proc/a"], "sweep.dir"),
    ):
        done = command_line(*words)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "CalibrationError: the output folder cannot be made. Got " in done.stderr
        assert f"{key}=<folder>." in done.stderr


@pytest.mark.slow
def test_multirun_prints_one_table(command_line, tmp_path):
    done = command_line(
        "--multirun", "scheme=int8_static", "observer=static_minmax,minmax", "export=none", "hydra.sweep.dir=sweep"
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("comparison") :]
    assert "scheme=int8_static" not in table  # what all runs have
    assert "observer=static_minmax" in table
    assert "observer=minmax" in table
    assert "perplexity" in table
    assert (tmp_path / "sweep" / "1" / "report.json").is_file()
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "observer=minmax" in page
    assert '<a href="1/report.html">' in page
    assert page.count('<td data-title="verdict" class="verdict ') == 2
    runs_again = command_line("task=compare", "runs=sweep", tiny=False)
    assert "sweep/report.json is the comparison of several runs" in runs_again.stderr
    assert "Remedy: runs=[sweep/0,sweep/1], the folders of its runs." in runs_again.stderr
    made = json.loads((tmp_path / "sweep" / "report.json").read_text())["provenance"]["command"]
    assert made.startswith("python -m lightning_obs --multirun ")
    assert "scheme=int8_static observer=static_minmax,minmax" in made


@pytest.mark.slow
def test_the_number_of_a_run_in_its_folder_is_a_number_in_its_commands(command_line, tmp_path):
    runs = ("--multirun", "scheme=w8a8,fp8_dynamic", "export.folder=out/${hydra:job.num}", "hydra.sweep.dir=sweep")
    done = command_line(*runs, "evaluate=false", "export.verify=false")
    assert done.returncode == 0, done.stderr
    assert "scheme=fp8_dynamic" in done.stdout[done.stdout.index("comparison") :]
    commands = [line for line in done.stdout.splitlines() if "evaluate=true" in line]
    assert [shlex.split(command)[-1] for command in commands] == [
        "export.folder=out/0-measure",
        "export.folder=out/1-measure",
    ]
    provenance = json.loads((tmp_path / "sweep" / "report.json").read_text())["provenance"]
    assert "'export.folder=out/${hydra:job.num}'" in provenance["command"]


@pytest.mark.slow
def test_a_run_of_a_multirun_that_fails_is_named_beside_those_that_worked(command_line, tmp_path):
    runs = ("--multirun", "scheme=w4a16,w8a8,mxfp4", "hydra.sweep.dir=sweep")
    done = command_line(*runs, "evaluate=false", "export=none")
    assert done.returncode == 1
    assert "scheme=w4a16 (failed)" in done.stdout[done.stdout.index("comparison") :]
    assert "scheme=w4a16 failed: weight group size 128 does not divide" in done.stdout
    assert "CalibrationError: weight group size 128 does not divide" in done.stderr
    assert (
        "load the model in bfloat16 (model.dtype=bfloat16)" in done.stdout[done.stdout.index("scheme=mxfp4 failed:") :]
    )
    failed, worked, _ = json.loads((tmp_path / "sweep" / "report.json").read_text())["runs"]
    assert (failed["run"], failed["seconds"]) == ("scheme=w4a16 (failed)", None)
    assert worked["run"] == "scheme=w8a8"
    assert worked["seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_static", pytest.param("w8a8", marks=pytest.mark.nightly)])
def test_two_ranks_of_ddp_print_and_write_once_and_give_the_scales_of_one(command_line, tmp_path, scheme):
    common = [f"scheme={scheme}", "weight_observer=memoryless_mse", "export.verify=false"]
    if scheme == "int8_static":
        common.append("observer=static_minmax")
    two = [*ON_RANKS.split()[3:], "export.folder=two", "output_dir=run"]
    ranks = command_line(*common, *two, new_process=True)
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout.count(f"· calibrating {scheme.upper()}") == 1
    assert ranks.stdout.count("wrote two") == 1
    assert " x 2 ranks" in ranks.stdout
    assert (tmp_path / "run" / "report.json").is_file()
    one = command_line(*common, "evaluate=false", "report.layer_error_batches=0", "export.folder=one")
    assert one.returncode == 0, one.stderr
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert files[0].keys() == files[1].keys()
    for name, value in files[0].items():
        if name.endswith("input_scale"):  # the forward's own rounding depends on how many rows a batch has
            torch.testing.assert_close(value, files[1][name], rtol=1e-5, atol=0)
        else:
            assert torch.equal(value, files[1][name]), name


@pytest.mark.slow
def test_two_ranks_of_ddp_fine_tune_and_measure_the_reloaded_checkpoint(tiny_overrides, tmp_path):
    ranks = run_command_line_on_ranks(
        2, *tiny_overrides, "task=finetune", "scheme=w4a16", "group_size=32", "trainer.devices=2",
        "trainer.strategy=ddp", "trainer.max_steps=4", "data.train_batches=8", "export.folder=two",
        "export.verify=false", "output_dir=run", folder=tmp_path,
    )  # fmt: skip
    assert [done.returncode for done in ranks] == [0, 0], ranks
    assert "".join(done.stdout for done in ranks).count("wrote two") == 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["perplexity_reloaded"] == report["perplexity"][1] != report["perplexity_calibrated"]
    assert report["divergence_reloaded"] == report["divergence"] != report["divergence_calibrated"]
    assert report["positions"] == 2 * 32  # of both ranks


@pytest.mark.slow
def test_it_works_when_installed_from_a_wheel_into_another_folder(tiny_overrides, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    site = tmp_path / "site"
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    where = subprocess.run(
        [sys.executable, "-c", "import lightning_obs; print(lightning_obs.__file__)"],
        cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": ""}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert where.stdout.strip().startswith(str(site))
    assert (site / "lightning_obs" / "py.typed").is_file()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lightning_obs", *tiny_overrides, "export=none"],
        cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "FP8 · 14 modules" in done.stdout
