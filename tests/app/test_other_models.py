"""The modules in examples/other_models: each runs by the command in its docstring, on a tiny model.

timm and torchvision are in a folder of their own, ``<environment>/timm``, which only one process of this file sees:
torchvision's wheels are built for torch with CUDA, so importing them fails on a machine without it, and other packages
import torchvision as soon as they find it. timm's models use none of torchvision's operators, which cannot be loaded.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from tests.support.in_process import Done, run_command_line
from tests.support.markdown import ROOT, page
from tests.support.tiny_model import save_tiny_bert, save_tiny_t5

EXAMPLES = ROOT / "examples" / "other_models"
SMALL = ["trainer=cpu", "trainer.enable_progress_bar=false", "output_dir=run"]


def example(name):
    """The command in the docstring of an example."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    [command] = re.findall(r"python -m lightning_obs (.*?)\n\n", text, flags=re.DOTALL)
    return command.replace("\\\n", " ")


def words(name, **values):
    """The arguments of an example's command, with values in place of its placeholders."""
    command = example(name)
    for placeholder, value in values.items():
        command = command.replace(f"<{placeholder.replace('_', ' ')}>", str(value))
    return [*shlex.split(command), *SMALL]


@pytest.fixture
def folder(tmp_path):
    """A user's folder with a copy of the examples."""
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


def lines_of(rows):
    return "\n".join(json.dumps(row) for row in rows)


MOODS = ("bad", "good")


@pytest.fixture
def classifier(folder):
    """A tiny classifier, beside 48 texts of several lengths and two classes."""
    rows = []
    for index in range(48):
        mood = MOODS[index // 2 % 2]
        rows.append({"text": f"number {index}, " + "very " * (index % 5) + mood, "label": mood})
    (folder / "reviews.jsonl").write_text(lines_of(rows))
    return save_tiny_bert(folder / "classifier", MOODS)


@pytest.mark.usefixtures("verified_here")
def test_a_classifier_of_texts_is_judged_by_its_accuracy(classifier, folder):
    done = run_command_line(*words("sentence_classifier", folder_or_hub_name=classifier), folder=folder)
    assert done.returncode == 0, done.stderr
    assert "12 of 14 Linear; left out: bert.pooler.dense, classifier" in done.stdout
    assert "largest difference of logits 0.0" in done.stdout
    report = json.loads((folder / "run" / "report.json").read_text())
    assert all(0 <= value <= 1 for value in report["accuracy"])
    checkpoint = folder / "run" / "checkpoint"
    assert AutoModelForSequenceClassification.from_pretrained(checkpoint).config.label2id == {"bad": 0, "good": 1}
    again = words("sentence_classifier", folder_or_hub_name=checkpoint)
    read_by_evaluate = [word for word in again if not word.startswith(("token_mask", "ignore", "scheme", "output_dir"))]
    done = run_command_line(*read_by_evaluate, "task=evaluate", "output_dir=again", folder=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "again" / "report.json").read_text())["accuracy"] == [None, report["accuracy"][1]]


@pytest.mark.usefixtures("verified_here")
def test_a_classifier_is_fine_tuned_and_its_checkpoint_has_the_same_accuracy(classifier, folder):
    command = words("sentence_classifier", folder_or_hub_name=classifier)
    training = ["task=finetune", "scheme=w4a16", "group_size=32", "trainer.max_steps=4", "+data.batch_size=2"]
    done = run_command_line(*command, *training, folder=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "run" / "report.json").read_text())
    assert report["accuracy_reloaded"] == report["accuracy"][1]
    assert report["accuracy_calibrated"] is not None


def test_padding_of_a_classifiers_batch_is_not_observed(classifier, folder):
    scales = []
    for batch_size in (1, 8):
        command = words("sentence_classifier", folder_or_hub_name=classifier)
        more = ["observer=static_minmax", "export=none", f"+data.batch_size={batch_size}", "evaluate=false"]
        done = run_command_line(*command, *more, folder=folder)
        assert done.returncode == 0, done.stderr
        report = json.loads((folder / "run" / "report.json").read_text())
        scales.append({layer["name"]: layer["chosen_high"] for layer in report["layers"]})
    assert scales[0] == pytest.approx(scales[1], rel=1e-4)


@pytest.mark.parametrize("label", [2, 0.5, "best"])
def test_a_label_without_a_class_is_an_error(classifier, folder, label):
    (folder / "reviews.jsonl").write_text(lines_of([{"text": f"text {i}", "label": label} for i in range(32)]))
    done = run_command_line(*words("sentence_classifier", folder_or_hub_name=classifier), folder=folder)
    assert done.returncode == 1
    assert f"a label in reviews.jsonl. Got {label!r}, expected a number, or one of bad, good" in done.stderr


@pytest.mark.usefixtures("verified_here")
def test_a_model_with_encoder_and_decoder_is_judged_by_the_perplexity_of_its_targets(folder):
    rows = [{"text": f"a text of number {index}", "target": f"{index} it is"} for index in range(16)]
    (folder / "pairs.jsonl").write_text(lines_of(rows))
    model = save_tiny_t5(folder / "t5")
    done = run_command_line(*words("text_pairs", folder_or_hub_name=model), folder=folder)
    assert done.returncode == 0, done.stderr
    assert "calibrating T5ForConditionalGeneration (`model`): 32 of 33 Linear; left out: lm_head" in done.stdout
    assert "largest difference of logits 0.0" in done.stdout
    assert "not loaded by vLLM" in done.stdout
    before, after = json.loads((folder / "run" / "report.json").read_text())["perplexity"]
    assert before != after
    assert AutoModelForSeq2SeqLM.from_pretrained(folder / "run" / "checkpoint").config.is_encoder_decoder


TIMM = Path(sys.prefix) / "timm"
MODEL = "test_efficientnet"
#: makes timm importable, saves weights, and runs each command line, all in one process; prints their outputs
RUN = f"""
import json, sys
from pathlib import Path
import torch

timm_folder, weights, commands = sys.argv[1:]
sys.path.append(timm_folder)
try:
    torch.ops.load_library(timm_folder + "/torchvision/_C.so")
except OSError:  # torchvision's Python files register a fake of these operators
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm
from tests.support.in_process import run_command_line

torch.manual_seed(0)
torch.save(timm.create_model("{MODEL}", num_classes=10).state_dict(), weights)
outputs = []
for words in json.loads(commands):
    outputs.append(vars(run_command_line(*words, folder=Path.cwd())))
print(json.dumps(outputs))
"""


@pytest.mark.slow
@pytest.mark.skipif(not TIMM.is_dir(), reason="make test installs timm and torchvision in .venv/timm")
def test_an_image_model_with_convolutions_is_calibrated_exported_and_loaded_again(folder):
    images = folder / "digits"
    digits = load_digits()
    for index, (pixels, digit) in enumerate(zip(digits.images[:40], digits.target[:40], strict=True)):
        (images / str(digit)).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 15).astype("uint8")).convert("RGB")
        image.save(images / str(digit) / f"{index}.png")
    weights = folder / "weights.pth"
    command = words("timm_images", folder_of_images=images)
    command = [word.replace("resnet18.a1_in1k", MODEL) for word in command] + ["+model.num_classes=10"]
    calibrate = [*command, f"+model.path={weights}"]
    read_by_evaluate = [word for word in command if word.startswith(("~", "+", "trainer"))]
    evaluate = [*read_by_evaluate, "task=evaluate", "+model.path=run/checkpoint", "output_dir=again"]
    process = [sys.executable, "-W", "ignore", "-c", RUN, str(TIMM), str(weights), json.dumps([calibrate, evaluate])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        process, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    calibrated, evaluated = (Done(**output) for output in json.loads(done.stdout.splitlines()[-1]))
    assert calibrated.returncode == 0, calibrated.stderr
    assert "left out" not in calibrated.stdout
    assert "loaded by load_checkpoint into a new model: largest difference of outputs 0.0" in calibrated.stdout
    before, after = json.loads((folder / "run" / "report.json").read_text())["accuracy"]
    assert 0 <= before <= 1
    checkpoint_bytes = sum(path.stat().st_size for path in (folder / "run" / "checkpoint").iterdir())
    assert checkpoint_bytes < 0.5 * weights.stat().st_size
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads((folder / "again" / "report.json").read_text())["accuracy"] == [None, after]


def test_the_page_shows_the_commands_of_the_examples():
    text = page("docs/guide/other_models.md").replace("\\\n", " ")
    shown = [line.split() for line in text.splitlines()]
    for file in EXAMPLES.glob("*.py"):
        assert ["python", "-m", "lightning_obs", *example(file.stem).split()] in shown, file.stem
