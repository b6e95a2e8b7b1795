"""Guides are short and all that they show runs; pages of evidence have a claim, a command, a date and their limits."""

import ast
import re
import shlex
import shutil
from statistics import median

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationCallback
from tests.app.test_cli import ON_RANKS
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.docs import test_choosing, test_readme
from tests.support.gguf_base import write_base
from tests.support.in_process import run_command_line
from tests.support.markdown import ROOT, blocks, commands
from tests.support.moe_models import tiny_moe
from tests.support.tiny_model import save_tiny_llama, tiny_tokenizer

GUIDES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "guide").glob("*.md"))}
EVIDENCE = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "evidence").glob("*.md"))}
#: words of a guide as ``wc -w docs/guide/*.md`` counts them: those of code, tables and output, too
LONGEST, MEDIAN = 900, 450
#: guides whose code another test runs
PYTHON_ELSEWHERE = {
    "start": "test_tutorial",
    "finetune": "test_finetuning",
    "lora": "test_finetuning",
    "further": "test_tutorial",
    "further_runs": "test_tutorial",
    "images": "test_images",
    "measure": "test_choosing",
    "measure_observers": "test_choosing",
    "offloaded": "tests/app/test_offloaded.py",
    "without_trainer": "test_your_run",
    "schemes": "test_readme_python",
    "new_observer": "test_docs",
    "read_the_page": "test_docs",
    "your_run": "test_your_run",
    "gguf": "tests/gguf/test_gguf_file.py",
}
COMMANDS_ELSEWHERE = {
    "start": "test_tutorial",
    "further": "test_tutorial",
    "further_runs": "test_tutorial",
    "images": "test_images",
    "install": "test_tutorial",
    "measure": "test_choosing",
    "lora": "tests/app/test_lora.py",
    "measure_observers": "test_choosing",
    "offloaded": "tests/app/test_offloaded.py",
    "new_observer": "test_docs",
    "your_run": "test_your_run",
    "command_line": "test_readme",
    "where_it_runs": "test_readme",
    "other_models": "tests/app/test_other_models.py",
    "larger_than_memory": "tests/app: test_weights, test_layerwise, test_vision_language",
}
#: a command that other tests run, on two nodes
ON_NODES = (
    "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=node0:29500 "
    "--rdzv_id=calibration script.py"
)
RUN_ELSEWHERE = {ON_RANKS, ON_NODES, *test_readme.APPLICATION, *test_choosing.COMMANDS}
#: the guide that shows a command first, by the command
RUN = {}
for name in sorted(GUIDES.keys() - COMMANDS_ELSEWHERE.keys()):
    for command in commands(GUIDES[name]):
        if command not in RUN_ELSEWHERE:
            RUN.setdefault(command, name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of experts with a tokenizer, on disk."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = tiny_tokenizer()
    tiny_moe("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------- how pages are made


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_short(guide):
    assert len(GUIDES[guide].split()) <= LONGEST


def test_the_median_guide_is_short():
    assert median(len(text.split()) for text in GUIDES.values()) <= MEDIAN


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_has_no_long_table_of_measurements(guide):
    for table in re.findall(r"(?:^\|.*\n)+", GUIDES[guide], flags=re.MULTILINE):
        measured = [row for row in table.splitlines()[2:] if re.search(r"\| *\**\d+[.]\d+[ x%*]*\|", row)]
        assert len(measured) <= 5, table


@pytest.mark.parametrize("claim", EVIDENCE)
def test_a_page_of_evidence_has_its_claim_command_date_and_limits(claim):
    text = EVIDENCE[claim]
    for part in ("**Claim.**", "**Command", "**Versions and date.**", "**Not measured.**"):
        assert part in text, part
    assert re.search(r"\b202\d-\d\d-\d\d\b", text)
    assert re.search(r"`(?:[.]venv[\w-]*/bin/)?(?:python|make) |^ *(?:python|make) ", text, flags=re.MULTILINE)


def test_the_names_of_pages_in_the_menu_are_their_titles():
    menu = re.findall(r'^ +- "?(.+?)"?: ([\w/]+[.]md)$', (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert len(menu) > 40
    pages = [path for _, path in menu if not path.startswith("notebooks/")]  # tests/docs/test_notebooks.py
    titles = {path: (ROOT / "docs" / path).read_text().partition("\n")[0].removeprefix("# ") for path in pages}
    named = {path: name for name, path in menu if name != "Home" and path in pages}
    assert named == {path: titles[path] for path in named}


# ---------------------------------------------------------------------- what they show runs


def test_every_guide_that_shows_code_is_run():
    showing = {guide for guide, text in GUIDES.items() if blocks(text, "python")}
    assert showing - PYTHON_ELSEWHERE.keys() == set(PYTHON_HERE)
    assert all(guide in GUIDES for guide in (*PYTHON_ELSEWHERE, *COMMANDS_ELSEWHERE))


def _language_model(folder):
    batch = {"input_ids": torch.randint(3, 128, (2, 16))}
    return {
        "folder": folder,
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "batch": batch,
        "batches": [batch],
        "loader": DataLoader([batch], batch_size=None),
        "offload_folder": "offloaded",
    }


def _calibrated(_):
    calibration = CalibrationCallback("INT8_STATIC")
    trainer(calibration).validate(Plain(), loader(), verbose=False)
    return {"calibration": calibration, "batch": torch.randn(4, 8)}


def _network(_):
    return {"module": Plain(), "loader": loader(), "example": torch.randn(2, 8)}


def _fabric(_):
    fabric = Fabric(accelerator="cpu", devices=1)
    data = DataLoader([torch.randn(4, 16) for _ in range(2)], batch_size=None)
    return {"fabric": fabric, "model": nn.Sequential(nn.Linear(16, 4)), "loader": data, "torch": torch}


#: what the code of each guide finds
PYTHON_HERE = {
    "experts": _language_model,
    "faq": _calibrated,
    "fsdp": _language_model,
    "kv_cache": _language_model,
    "language_model": _language_model,
    "larger_than_memory": _language_model,
    "observers": _language_model,
    "onnx": _network,
    "program": _network,
    "quantized_metric": _language_model,
    "rounding": _language_model,
    "several_devices": _fabric,
}


@pytest.mark.slow
@pytest.mark.parametrize("guide", PYTHON_HERE)
def test_the_python_of_a_guide_runs_from_top_to_bottom(guide, tiny, mixture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known = PYTHON_HERE[guide](mixture if guide == "experts" else tiny)
    for number, code in enumerate(blocks(GUIDES[guide], "python")):
        known["out"] = f"out-{number}"
        exec(compile(code, f"docs/guide/{guide}.md", "exec"), known)
        printed = capsys.readouterr().out
        for expected in re.findall(r"^print\(.*\)  # (.+)$", code, flags=re.MULTILINE):
            assert expected in printed
    if guide == "experts":
        assert "experts.0.gate_proj" in "".join(dict(known["Model"](mixture).named_modules()))
    if guide == "language_model":
        assert (tmp_path / "my-model-fp8" / "tokenizer.json").is_file()


SMALL = ["trainer=cpu", "trainer.enable_progress_bar=false", "data.tokens=32", "data.eval_batches=1", "data.batches=2"]
#: where a command says that an earlier run has left its results, and their folder
EARLIER_RUNS = {"<report.json>": "before", "outputs/fp8": "outputs/fp8", "outputs/int8": "outputs/int8"}


@pytest.fixture(scope="module")
def earlier_run(tiny, tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("earlier")
    words = ["scheme=int8_static", f"model.path={tiny}", "export=none", "output_dir=run", *SMALL]
    done = run_command_line(*words, "report.layer_error_batches=1", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("command", "guide"), RUN.items())
def test_the_command_of_a_guide_runs(command, guide, tiny, mixture, earlier_run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {i} " * 30 for i in range(32)))
    folder = mixture if guide == "experts" else tiny
    for place, run in EARLIER_RUNS.items():
        if place in command:
            assert folder == tiny
            shutil.copytree(earlier_run, tmp_path / run)
    if "export.base=model-f16.gguf" in command:
        write_base(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "model-f16.gguf", torch.float16)
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("\n\n".join(f"other words {i} " * 30 for i in range(32)))
    places = {
        "<folder>": str(folder),
        "<texts>": str(text),
        "<held_out>": str(held_out),
        "<report.json>": str(tmp_path / "before" / "report.json"),
    }
    for place, path in places.items():
        command = command.replace(place, path)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "lightning_obs"]
    words = words[3:]
    if "task=compare" not in words:
        words += [*SMALL, "report.layer_error_batches=0"]
        words += [] if "model.path" in command else [f"model.path={folder}"]
        words += ["trainer.max_steps=4"] if "experiment=qat" in command else []
        words += [] if "export=none" in words or "--multirun" in words else ["export.verify=false"]
    done = run_command_line(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------- docs/guide/troubleshooting.md


def test_every_message_of_troubleshooting_is_one_of_the_package():
    quoted = re.findall(r"^\*\*`(.+?)`\*\*", GUIDES["troubleshooting"], flags=re.MULTILINE)
    assert len(quoted) > 30
    said = []
    for path in sorted((ROOT / "lightning_obs").rglob("*.py")):
        said += [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    assert [words for words in quoted if not any(words in text for text in said)] == []
