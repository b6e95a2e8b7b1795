"""A whole run on the tiny model."""

import json
import re
import shutil
import warnings
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_obs import CalibrationCallback, CalibrationError, CalibrationOptions, CalibrationWarning
from lightning_obs.app.from_config import make_options, make_trainer
from lightning_obs.app.job import Job
from lightning_obs.app.main import run
from lightning_obs.report.numbers import number


def test_a_run_calibrates_exports_verifies_and_reports(composed, tmp_path, capsys, verified_here):
    row = run(composed("scheme=int8_static", "observer=minmax", "observer.averaging_constant=0.05"))
    output = capsys.readouterr().out
    folder = tmp_path / "run" / "checkpoint"
    assert "INT8_STATIC · 14 modules · 28 observers · 2 batches" in output
    assert re.search(r" s · left in float: Embedding \d+ %, others <1 %\n", output)
    assert "SQNR [dB]" in output
    assert "lightning_obs not imported): largest difference of logits 0.0" in output  # it is so in test_readme.py
    assert f"wrote {folder}" in output
    AutoTokenizer.from_pretrained(folder)
    config = AutoModelForCausalLM.from_pretrained(folder).config.quantization_config.quantization_config
    args = config.config_groups["group_0"].input_activations
    assert (args.observer, args.observer_kwargs) == ("minmax", {"averaging_constant": 0.05})
    before, after = row["perplexity"]
    assert before != after
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert 0 < report["divergence"] < 1
    assert 0.5 < report["agreement"] < 1
    assert report["positions"] == 2 * 32
    assert re.search(r"KL \[nats\] 0\.\d+  same top-1 \[%\] \d\d\.\d\d", output)
    assert report["perplexity"] == [before, after]
    assert report["config"]["data"]["batches"] == 2
    assert len(report["layers"]) == 14
    assert all(layer["histogram"]["counts"] and layer["weight_bits"] > 4 for layer in report["layers"])
    assert f"report {tmp_path / 'run' / 'report.html'}" in output
    assert "INT8_STATIC \N{MIDDLE DOT} tiny" in (tmp_path / "run" / "report.html").read_text()


def test_one_token_is_refused_before_the_model_is_loaded(composed, monkeypatch):
    monkeypatch.setattr("lightning_obs.app.job.load_module", lambda config: pytest.fail("the model was loaded"))
    with pytest.raises(CalibrationError, match=r"data\.tokens: in a block of one token"):
        run(composed("data.tokens=1", "export=none"))


def test_a_metric_of_the_original_that_is_not_a_number_is_refused(composed, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CalibrationError, match=r"perplexity of the unquantized model.*Got nan.*evaluate=false"):
        run(composed(f"model.path={tmp_path / 'broken'}", "export=none"))


def test_a_scheme_without_data_runs_no_batch_and_says_so(composed, capsys):
    run(composed("scheme=fp8_dynamic", "export=none", "evaluate=false"))
    output = capsys.readouterr().out
    assert "FP8_DYNAMIC needs no data" in output
    assert "· 0 batches ·" in output
    assert re.search(r"· searching the weights .* model\.layers\.1\.", output)


def test_the_layers_that_a_report_names_can_be_left_out(composed, tmp_path):
    (tmp_path / "earlier.json").write_text(json.dumps({"ignore": ["model.layers.0.mlp.down_proj"]}))
    run(composed("export=none", "evaluate=false", f"ignore_from={tmp_path / 'earlier.json'}"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert "model.layers.0.mlp.down_proj" not in {layer["name"] for layer in report["layers"]}
    assert report["ignore"][:2] == ["lm_head", "model.layers.0.mlp.down_proj"]


def test_a_report_that_is_none_is_refused(composed, tmp_path):
    with pytest.raises(CalibrationError, match=r"(does not exist|cannot be read).*xpected ignore_from="):
        run(composed(f"ignore_from={tmp_path / 'absent.json'}"))


def test_an_existing_folder_is_refused_before_the_model_is_loaded(composed, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("")
    with pytest.raises(CalibrationError, match="there is already there"):
        run(composed(f"export.folder={tmp_path / 'there'}", "model.path=/nowhere"))


def test_a_remedy_is_said_in_words_of_the_command_line(command_line, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("")
    done = command_line("export.folder=there", "model.path=/nowhere")
    assert "export.overwrite=true" in done.stderr


def test_a_size_of_files_that_is_none_is_refused_before_the_model_is_loaded(composed):
    with pytest.raises(CalibrationError, match=r"max_shard_size\. Got 'much', expected a whole number of bytes"):
        run(composed("export.max_shard_size=much", "model.path=/nowhere"))


@pytest.mark.slow
def test_weights_are_written_to_files_of_the_size_that_is_asked_for(composed, tmp_path, verified_here):
    small = ("scheme=w8a8", "evaluate=false", "report.layer_error_batches=0")
    run(composed(*small, "export.max_shard_size=20KB"))
    assert len(list((tmp_path / "run" / "checkpoint").glob("model-*.safetensors"))) > 1


def test_what_cannot_be_loaded_back_is_refused_before_anything_is_written(composed, tmp_path):
    with pytest.raises(CalibrationError, match=r"NVFP4 weights as bfloat16.*dtype=torch\.bfloat16"):
        run(composed("scheme=nvfp4", "evaluate=false"))
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_kv_cache_alone_is_verified(composed, capsys, verified_here):
    run(composed("scheme=none", "kv_cache=fp8", "evaluate=false"))
    output = capsys.readouterr().out
    assert "float8 tensor kv cache · 2 modules · 4 observers · 2 batches" in output
    assert "largest difference of logits 0.0" in output


def test_nvfp4_in_bfloat16_is_verified(composed, capsys, verified_here):
    run(composed("scheme=nvfp4", "model.dtype=bfloat16", "evaluate=false"))
    assert "largest difference of logits 0.0" in capsys.readouterr().out


def test_a_checkpoint_with_other_logits_is_an_error(composed, tmp_path, monkeypatch, verified_here):
    export = CalibrationCallback.export

    def damage(self, folder, **kwargs):
        export(self, folder, **kwargs)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight_scale"] *= 2
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(CalibrationCallback, "export", damage)
    with pytest.raises(CalibrationError, match=r"gives other outputs.*a difference of [1-9\d.]+, expected 0\.0"):
        run(composed("evaluate=false"))


def test_a_module_that_cannot_be_imported_is_named(composed):
    with pytest.raises(CalibrationError, match=r"imports needs the package no_such_module.*PYTHONPATH"):
        run(composed("imports=[no_such_module]"))


class Shown(Callback):
    """What the progress bar says of a training step."""

    def on_train_batch_end(self, trainer, *_):
        self.texts = [task.description for task in trainer.progress_bar_callback.progress.tasks]


def test_the_bar_of_a_fit_that_steps_end_names_no_last_epoch(composed):
    shown = Shown()
    for end, text in (("max_steps=3", "Epoch 0"), ("max_epochs=1", "Epoch 0/0")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few workers
            make_trainer(composed("trainer.enable_progress_bar=true", f"+trainer.{end}"), shown).fit(BoringModel())
        plain = [re.sub(r"\[\w+\]", "", shown_text).strip() for shown_text in shown.texts]  # Lightning 2.4 colours it
        assert [shown_text for shown_text in plain if "Epoch" in shown_text] == [text]


def test_callbacks_of_the_config_stay_beside_those_of_the_task(composed):
    timer = "+trainer.callbacks=[{_target_: lightning.pytorch.callbacks.Timer}]"
    callbacks = make_trainer(composed(timer), Shown()).callbacks
    assert [type(callback) for callback in callbacks if isinstance(callback, (Shown, Timer))] == [Shown, Timer]


def test_a_bar_of_the_config_replaces_the_bar_of_the_steps(composed):
    bar = "+trainer.callbacks=[{_target_: lightning.pytorch.callbacks.TQDMProgressBar}]"
    trainer = make_trainer(composed("trainer.enable_progress_bar=true", bar))
    assert type(trainer.progress_bar_callback) is TQDMProgressBar


def test_each_of_two_devices_gets_half_of_the_batches(composed):
    job = Job(composed("data.batches=3"))
    job.trainer = SimpleNamespace(world_size=2)
    assert (job.batches("batches"), job.batches("eval_batches"), job.batches("no_batches")) == (2, 1, 0)


def test_fine_tuning_prints_four_perplexities_of_which_the_last_two_are_one(composed, tmp_path, capsys, verified_here):
    row = run(
        composed(
            "task=finetune",
            "scheme=w4a8",
            "group_size=32",
            "data.train_batches=4",
            "trainer.max_steps=6",
            "model.learning_rate=1e-3",
        )
    )
    output = capsys.readouterr().out
    assert "perplexity on held-out data: full precision" in output
    assert "largest difference of logits 0.0" in output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    before, after = report["perplexity"]
    assert report["perplexity_reloaded"] == after == row["perplexity"][1]
    assert len({before, after, report["perplexity_calibrated"]}) == 3
    assert re.search(r"fine-tuning took \d+[.]\d minutes, and brought back \d+% of what calibration lost", output)
    share = (report["perplexity_calibrated"] - after) / (report["perplexity_calibrated"] - before)
    assert report["recovered"] == min(1.0, max(0.0, share))
    assert report["seconds_trained"] > 0
    tuned = {0: report["perplexity_calibrated"], 6: after}
    assert [(one["step"], one["perplexity"], one["perplexity_quantized"]) for one in report["curves"]] == [
        (step, before, value) for step, value in tuned.items()
    ]
    assert any(line.startswith("fine-tuning took") for line in report["lines"])
    assert ", fine-tuned \N{MIDDLE DOT} " in report["title"]


@pytest.mark.slow
def test_scales_alone_are_fine_tuned_from_a_named_experiment(composed, tmp_path, capsys, verified_here):
    run(
        composed(
            "experiment=qat_nvfp4_scales",
            "data.tokens=32",
            "data.train_batches=4",
            "trainer.max_steps=8",
            "model.learning_rate=0.05",
        )
    )
    assert "largest difference of logits 0.0" in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["divergence_reloaded"] == report["divergence"] != report["divergence_calibrated"]


def test_too_low_a_learning_rate_changes_no_scale(composed):
    small = ("data.tokens=32", "data.train_batches=4", "trainer.max_steps=4", "export=none", "evaluate=false")
    with pytest.warns(CalibrationWarning, match="no scale has changed in 4 steps"):
        run(composed("experiment=qat_nvfp4_scales", *small, "model.learning_rate=1e-5"))


@pytest.mark.slow
def test_a_run_that_exports_nothing_has_the_size_that_its_tensors_would_have(composed, tmp_path):
    small = ("scheme=w8a8", "evaluate=false", "export.verify=false")
    run(composed(*small))
    stored = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    row = run(composed(*small[:2], "export=none", f"output_dir={tmp_path / 'again'}"))
    assert row["size"] == sum(tensor.nbytes for tensor in stored.values())
    assert json.loads((tmp_path / "again" / "report.json").read_text())["size"] == row["size"]


@pytest.mark.slow
def test_fine_tuning_twice_gives_the_same_numbers(composed):
    small = ("task=finetune", "scheme=w8a8", "data.train_batches=4", "trainer.max_steps=4", "model.learning_rate=1e-3")
    first, second = (run(composed(*small, "export=none")) for _ in range(2))
    assert first["perplexity"] == second["perplexity"]


def test_fine_tuning_without_text_to_train_on_is_refused(composed):
    with pytest.raises(CalibrationError, match=r"data\.train_batches. Got 0"):
        run(composed("experiment=qat_w4a16", "group_size=32", "data.train_batches=0", "evaluate=false"))


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_to_the_perplexity_of_the_run_that_wrote_it(
    composed, tmp_path, capsys, verified_here
):
    written = run(composed("scheme=int8_static"))
    folder = tmp_path / "run" / "checkpoint"
    row = run(composed("task=evaluate", f"model.path={folder}", f"output_dir={tmp_path / 'again'}"))
    assert row["perplexity"] == (None, written["perplexity"][1])
    assert row["size"] == written["size"]
    assert f"perplexity {number(row['perplexity'][1], 5)}" in capsys.readouterr().out
    report = json.loads((tmp_path / "again" / "report.json").read_text())
    assert report["perplexity"] == [None, written["perplexity"][1]]
    compare = composed(
        "task=compare", f"runs=[{tmp_path / 'run'},{tmp_path / 'again'}]", f"output_dir={tmp_path / 'c'}"
    )
    rows = run(compare)["runs"]
    assert [one["run"] for one in rows] == ["INT8_STATIC (run)", f"{folder} (again)"]
    output = capsys.readouterr().out
    assert "comparison" in output
    assert "KL [nats]" in output
    page = (tmp_path / "c" / "report.html").read_text()
    assert '"quality": ["perplexity"' in page
    assert page.count("INT8_STATIC (run)") >= 2  # in the picture and in the table


@pytest.mark.slow
def test_a_run_is_compared_with_the_run_before_and_says_where_it_comes_from(composed, tmp_path):
    quick = ("evaluate=false", "export=none")
    run(composed("scheme=int8_static", *quick))
    run(composed(*quick, f"against={tmp_path / 'run'}", f"output_dir={tmp_path / 'fp8'}"))
    report = json.loads((tmp_path / "fp8" / "report.json").read_text())
    assert report["earlier"]["title"].startswith("INT8_STATIC")
    assert len(report["earlier"]["better"] + report["earlier"]["worse"]) + report["earlier"]["same"] == 14
    assert "batches=2" in report["provenance"]["data"]


def test_an_earlier_run_that_is_not_there_is_named_before_anything_is_loaded(composed, monkeypatch):
    monkeypatch.setattr("lightning_obs.app.job.Job.load", lambda job: pytest.fail("the model was loaded"))
    with pytest.raises(CalibrationError, match="/nowhere does not exist"):
        run(composed("against=/nowhere"))


@pytest.mark.parametrize(("runs", "match"), [("[]", "runs. Got none"), ("[/nowhere]", "/nowhere does not exist")])
def test_runs_that_cannot_be_compared_are_named(composed, runs, match):
    with pytest.raises(CalibrationError, match=match):
        run(composed("task=compare", f"runs={runs}"))


def test_one_name_is_a_name_and_not_its_letters(composed, tmp_path):
    (tmp_path / "earlier.json").write_text(json.dumps({"ignore": "lm_head"}))
    from_report = make_options(composed("ignore=q_proj", f"ignore_from={tmp_path / 'earlier.json'}"))
    assert from_report.config.ignore == ["q_proj", "lm_head"]
    assert CalibrationOptions("FP8", ignore="lm_head", targets="Linear").ignore == ["lm_head"]
    targeted = make_options(composed("scheme.targets=Linear", "ignore=lm_head"))
    assert targeted.config.config_groups["group_0"].targets == ["Linear"]
    groups = CalibrationOptions({"only": {"targets": "fc1", "weights": {"num_bits": 8}}}).config.config_groups
    assert groups["only"].targets == ["fc1"]
    with pytest.raises(CalibrationError, match="imports needs the package no_such_module"):
        run(composed("imports=no_such_module"))
    with pytest.raises(CalibrationError, match="/nowhere does not exist"):
        run(composed("task=compare", "runs=/nowhere"))


@pytest.mark.parametrize("names", ["3", "[1]", '{"a": 1}', "null"])
def test_an_ignore_of_a_report_that_is_not_names_is_refused(composed, tmp_path, names):
    (tmp_path / "earlier.json").write_text(f'{{"ignore": {names}}}')
    with pytest.raises(CalibrationError, match=r"json cannot be read.*expected ignore_from="):
        make_options(composed(f"ignore_from={tmp_path / 'earlier.json'}"))
