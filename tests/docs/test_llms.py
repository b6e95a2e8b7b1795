"""docs/llms.txt, for assistants that write code with the package: short, and everything typed in it runs."""

import re
import shlex
import shutil

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import lightning_obs
from lightning_obs.report.grade import Grade
from lightning_obs.schemes.config import preset_names
from tests.support.in_process import run_command_line
from tests.support.lightning_package import L, under_the_chosen_name
from tests.support.markdown import ROOT, blocks, commands, page
from tests.support.tiny_model import save_tiny_llama

TEXT = page("docs/llms.txt")
#: tests/docs/test_readme.py runs them
COMMANDS = commands(page("README.md"))
SMALL = ["trainer=cpu", "trainer.enable_progress_bar=false", "data.tokens=32", "data.batches=1", "data.eval_batches=1"]


class LanguageModel(L.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch, labels=batch["input_ids"]).loss)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_it_is_short_and_its_links_lead_somewhere():
    assert TEXT.startswith("# lightning_obs\n\n> ")  # as https://llmstxt.org says
    assert len(TEXT.split()) < 900
    links = re.findall(r"\]\(([\w/.]+)\)", TEXT)
    assert len(links) > 8
    assert all((ROOT / "docs" / link).is_file() for link in links)


def test_the_names_in_it_are_those_of_the_package():
    calls = set(re.findall(r"\b([A-Z]\w+(?:Callback|Session|Options|Training)|load_checkpoint)\b", TEXT))
    assert {"CalibrationCallback", "CalibrationSession", "CalibrationOptions", "load_checkpoint"} <= calls
    assert calls <= set(lightning_obs.__all__)
    schemes = set(re.findall(r'`"([A-Z0-9_]+)"', TEXT))
    assert len(schemes) > 5
    assert schemes <= set(preset_names())
    told = re.search(r'"grade"\]\)  # (.*)', TEXT)[1]
    assert set(re.split(r", | or ", told)) == set(Grade.__args__)


@pytest.mark.filterwarnings("ignore:W8A8 needs no data")
def test_the_python_runs_from_top_to_bottom(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = LanguageModel(tiny)
    batch = {"input_ids": torch.randint(3, 128, (2, 16))}
    known = {
        "module": module,
        "model": AutoModelForCausalLM.from_pretrained(tiny),
        "batch": batch,
        "loader": DataLoader([batch, batch], batch_size=None),
    }
    for code in blocks(TEXT, "python"):
        exec(compile(under_the_chosen_name(code), "docs/llms.txt", "exec"), known)
    assert {"val_loss", "val_loss_quantized"} <= known["trainer"].callback_metrics.keys()
    assert known["report"]["judgement"]["grade"] in capsys.readouterr().out
    for folder in ("model-fp8", "model-w8a8"):
        assert AutoModelForCausalLM.from_pretrained(folder) is not None


@pytest.fixture(scope="module")
def earlier_run(tiny, tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("earlier")
    words = ["scheme=fp8", f"model.path={tiny}", "export=none", "output_dir=run", *SMALL]
    assert run_command_line(*words, folder=folder).returncode == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in commands(TEXT) if command not in COMMANDS])
def test_the_command_runs(command, tiny, earlier_run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {i} " * 30 for i in range(32)))
    for place, run in (("<report.json>", "before"), ("<run>", "one"), ("<other run>", "other")):
        if place in command:
            shutil.copytree(earlier_run, tmp_path / run)
            path = f"{run}/report.json" if place == "<report.json>" else run
            command = command.replace(place, path)
    command = command.replace("<folder>", str(tiny)).replace("<texts>", str(text))
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "lightning_obs"]
    if "model.path" in command:
        words += SMALL
        words += [] if "export=none" in words else ["export.verify=false"]
    done = run_command_line(*words[3:], folder=tmp_path)
    assert done.returncode == 0, done.stderr
