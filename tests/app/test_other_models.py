"""Encoders, models with encoder and decoder, and modules of one's own on the command line."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from lightning_obs import CalibrationError
from lightning_obs.app.data.module import DocumentData
from lightning_obs.app.main import run
from tests.support.tiny_model import save_tiny_bert, save_tiny_t5, tiny_tokenizer

SMALL = ["trainer=cpu", "trainer.enable_progress_bar=false", "data.batches=2", "data.eval_batches=2"]
MOODS = ("bad", "good")


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """48 texts of several lengths, of two classes, with a shorter text beside each."""
    path = tmp_path_factory.mktemp("data") / "reviews.jsonl"
    rows = [
        {"text": f"number {i}, " + "very " * (i % 5) + mood, "mood": mood, "stars": i % 2, "short": f"{i} it is"}
        for i, mood in enumerate(MOODS[i // 2 % 2] for i in range(48))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("classifier"), MOODS)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def other(composed, reviews):
    """Compose for another model than a causal one, on the reviews."""

    def make(kind, folder, *overrides):
        model = [f"model={kind}", f"model.path={folder}"]
        return composed(*SMALL, *model, f"data.path={reviews}", "data.tokens=24", *overrides, tiny=False)

    return make


LABELLED = ["data.batch_size=4", "data.label_field=mood"]


@pytest.mark.usefixtures("verified_here")
def test_a_classifier_of_texts_is_judged_by_its_accuracy(other, classifier, tmp_path, capsys):
    row = run(other("encoder", classifier, *LABELLED, "scheme=int8_static"))
    assert row["metric"] == "accuracy"
    assert all(0 <= value <= 1 for value in row["accuracy"])
    output = capsys.readouterr().out
    assert (
        "calibrating BertForSequenceClassification (`model`): 12 of 14 Linear; left out: bert.pooler.dense, classifier"
        in output
    )
    assert "largest difference of logits 0.0" in output
    assert f"accuracy {row['accuracy'][0]:.4g}"[:12] in output
    folder = tmp_path / "run" / "checkpoint"
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.label2id == {"bad": 0, "good": 1}
    assert run(other("encoder", folder, *LABELLED, "task=evaluate"))["accuracy"] == (None, row["accuracy"][1])


@pytest.mark.usefixtures("verified_here")
def test_without_labels_an_encoder_is_held_against_the_unquantized_one(other, encoder, capsys):
    row = run(other("encoder", encoder, "data.batch_size=4", "scheme=w4a16", "group_size=32"))
    before, after = row["similarity"]
    assert before == pytest.approx(1.0, abs=1e-6)
    assert 0.5 < after < 0.9999
    assert "largest difference of hidden states 0.0" in capsys.readouterr().out


def test_similarity_judges_no_model_by_itself(other, encoder):
    with pytest.raises(CalibrationError, match=r"nothing judges a single model.*data\.label_field"):
        run(other("encoder", encoder, "data.batch_size=4", "task=evaluate"))


@pytest.mark.usefixtures("verified_here")
def test_padding_of_an_encoders_batch_is_not_observed(other, encoder):
    narrow = ["data.batch_size=1", "data.batches=8", "data.eval_batches=8"]
    wide = ["data.batch_size=8", "data.batches=1", "data.eval_batches=1"]
    scales = []
    for sizes in (narrow, wide):
        config = other("encoder", encoder, "scheme=int8_static", "observer=static_minmax", "export=none", *sizes)
        run(config)
        report = json.loads(Path(config.output_dir, "report.json").read_text())
        scales.append({layer["name"]: layer["chosen_high"] for layer in report["layers"]})
    assert scales[0] == pytest.approx(scales[1], rel=1e-4)


@pytest.mark.usefixtures("verified_here")
def test_a_model_with_encoder_and_decoder_is_judged_by_the_perplexity_of_its_targets(other, tmp_path, capsys):
    folder = save_tiny_t5(tmp_path / "t5")
    row = run(other("seq2seq", folder, "data.target_field=short", "scheme=int8_static"))
    assert row["metric"] == "perplexity"
    assert row["perplexity"][0] != row["perplexity"][1]
    output = capsys.readouterr().out
    assert "calibrating T5ForConditionalGeneration (`model`): 32 of 33 Linear; left out: lm_head" in output
    assert "largest difference of logits 0.0" in output
    assert "not loaded by vLLM" in output
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "checkpoint").config.is_encoder_decoder


FINE_TUNE = ["task=finetune", "scheme=w4a16", "group_size=32", "data.train_batches=4", "trainer.max_steps=4"]


@pytest.mark.usefixtures("verified_here")
def test_a_classifier_is_fine_tuned_and_its_checkpoint_has_the_same_accuracy(other, classifier):
    row = run(other("encoder", classifier, *LABELLED, *FINE_TUNE, "data.batch_size=2"))
    assert row["accuracy_reloaded"] == row["accuracy"][1]
    assert row["accuracy_calibrated"] is not None


def test_training_without_labels_is_an_error(other, encoder):
    with pytest.raises(CalibrationError, match=r"training needs labels.*data\.label_field"):
        run(other("encoder", encoder, *FINE_TUNE, "data.batch_size=2", "export=none"))


def test_labels_for_a_model_without_a_head_are_an_error(other, encoder):
    with pytest.raises(CalibrationError, match=r"the model has no head.*BertModel"):
        run(other("encoder", encoder, "data.batch_size=4", "data.label_field=stars", "export=none"))


@pytest.mark.parametrize("label", [2, 0.5, -1])
def test_a_label_without_a_class_is_an_error(other, classifier, tmp_path, label):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"text {i}", "n": label}) for i in range(32)))
    labelled = ["data.batch_size=4", "data.label_field=n", f"data.path={path}", "export=none"]
    with pytest.raises(CalibrationError, match=rf"no class for.*\[{label}\].*from 0 to 1"):
        run(other("encoder", classifier, *labelled))


def test_an_unknown_label_is_named_with_its_place(other, classifier, reviews):
    unknown = (
        r"reviews\.jsonl:2: the model does not know the label in the field 'short'. Got '1 it is', .*'bad' \(0\), "
    )
    with pytest.raises(CalibrationError, match=rf"{unknown}'good' \(1\).*label2id"):
        run(other("encoder", classifier, "data.batch_size=4", "data.label_field=short"))
    with pytest.raises(
        CalibrationError, match=r"has no field 'party'. Got the fields text, mood, .*data\.label_field="
    ):
        run(other("encoder", classifier, "data.batch_size=4", "data.label_field=party"))


def test_too_few_texts_are_refused(other, classifier):
    with pytest.raises(CalibrationError, match=r"too few calibration texts.*24.*expected 80"):
        run(other("encoder", classifier, "data.batch_size=4", "data.batches=20"))


def test_a_model_without_a_path_says_so(command_line):
    done = command_line("model=encoder", *SMALL, tiny=False)
    assert done.returncode == 1
    assert "model.path has to be given" in done.stderr


def test_the_default_text_has_paragraphs_enough_and_its_data_can_be_pickled():
    data = pickle.loads(pickle.dumps(DocumentData(tiny_tokenizer(), batches=64, eval_batches=64, batch_size=8)))
    assert next(iter(data.val_dataloader()))["input_ids"].shape[0] == 8
    assert all(len(row["input_ids"]) > 30 for row in data.calibration)


def test_without_a_target_text_the_second_half_of_a_text_is_the_target(tmp_path):
    (tmp_path / "a.txt").write_text("one two three four\n\nfive six seven eight")
    sizes = {"batches": 1, "tokens": 64, "eval_batches": 1}
    data = DocumentData(tiny_tokenizer(), path=tmp_path / "a.txt", targets=True, **sizes)
    (batch,) = data.test_dataloader()
    assert tiny_tokenizer().decode(batch["input_ids"][0]) == "five six"
    assert tiny_tokenizer().decode(batch["labels"][0]) == "seven eight"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "one two", "summary": ""}, r"a.jsonl:2 has an empty target. Got ''.*leave such rows out"),
        ({"text": "", "summary": "one"}, r"a.jsonl:2 has an empty text"),
    ],
)
def test_an_empty_text_is_named(row, message, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    options = {"batches": 1, "eval_batches": 1, "target_field": "summary", "targets": True}
    with pytest.raises(CalibrationError, match=message):
        DocumentData(tiny_tokenizer(), path=tmp_path / "a.jsonl", **options)


# ---------------------------------------------------------------------- a module of one's own


class Two(LightningModule):
    """Logs two values, and says which one counts."""

    metric = "accuracy"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
        self.accuracy = MulticlassAccuracy(3)

    def model_inputs(self, batch):
        return {"input": batch[0]}

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    def test_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("accuracy", self.accuracy)


class Silent(Two):
    """Does not say which one."""

    metric = None


class Points(LightningDataModule):
    """Knows nothing of tokenizers."""

    def __init__(self, batches=2):
        super().__init__()
        torch.manual_seed(1)
        self.rows = TensorDataset(torch.randn(4 * batches, 32), torch.randint(0, 3, (4 * batches,)))

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=4)

    test_dataloader = val_dataloader


def own(composed, name, *overrides):
    return composed(
        *("~model", f"+model._target_={__name__}.{name}", "~data", f"+data._target_={__name__}.Points", "module=net"),
        *("trainer=cpu", "trainer.enable_progress_bar=false", "scheme=int8_static", "ignore=[]", *overrides),
        tiny=False,
    )


def test_a_module_of_ones_own_is_judged_by_the_value_that_it_names(composed, capsys):
    row = run(own(composed, "Two"))
    assert row["metric"] == "accuracy"
    assert "loaded by load_checkpoint into a new model: largest difference of outputs 0.0" in capsys.readouterr().out


def test_of_several_values_one_has_to_be_named(composed):
    with pytest.raises(CalibrationError, match=r"Silent\.test_step logs loss, accuracy.*metric = 'loss'"):
        run(own(composed, "Silent", "export=none"))


METRICS = ("perplexity", "accuracy")


def test_runs_with_different_metrics_stand_side_by_side(composed, tmp_path, capsys):
    for name, metric in zip("ab", METRICS, strict=True):
        (tmp_path / name).mkdir()
        found = {"run": name, "metric": metric, metric: [0.5, 0.25], "size": 2**20}
        (tmp_path / name / "report.json").write_text(json.dumps(found))
    run(composed("task=compare", f"runs=[{tmp_path / 'a'},{tmp_path / 'b'}]"))
    table = capsys.readouterr().out
    assert "perplexity 0.25000" in table
    assert "accuracy 0.25000" in table
    assert (tmp_path / "run" / "report.html").is_file()
    shown = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert [(row["metric"], row[row["metric"]]) for row in shown] == [(name, [0.5, 0.25]) for name in METRICS]
