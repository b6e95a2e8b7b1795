"""What SECURITY.md promises: no pickle is read that could run code, and no code that comes with a checkpoint is run."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    calibrate_layerwise,
    export_checkpoint,
    load_checkpoint,
    quantize_checkpoint,
)
from lightning_obs.files.unfinished import Unfinished
from lightning_obs.files.write import CONTENTS_FILE
from tests.support.markdown import ROOT
from tests.support.tiny_model import save_tiny_llama

FILES = sorted((ROOT / "lightning_obs").rglob("*.py"))
#: functions that run what they read
RUNS_WHAT_IT_READS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "eval",
    "exec",
    "yaml.load",
    "yaml.unsafe_load",
}


def dangers(source: str) -> list[str]:
    """The calls of a file that run what they read, or could."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in RUNS_WHAT_IT_READS or keywords.get("trust_remote_code") == "True":
            names.append(ast.unparse(node))
        if name == "torch.load" and keywords.get("weights_only") != "True":
            names.append(ast.unparse(node))
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_file_of_the_package_runs_what_it_reads(file):
    assert dangers(file.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.loads(x)",
        "eval(x)",
        "f(trust_remote_code=True)",
    ],
)
def test_a_call_that_runs_what_it_reads_would_be_noticed(source):
    assert len(dangers(source)) == 1


def test_no_config_trusts_the_code_of_a_model():
    texts = [path.read_text() for path in (ROOT / "configs").rglob("*.yaml")]
    assert any("trust_remote_code: false" in text for text in texts)
    assert not any("trust_remote_code: true" in text for text in texts)


class WritesAFile:
    """Its pickle makes a file when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_state_that_would_run_code_is_refused_before_it_does(tmp_path):
    proof = tmp_path / "code was run"
    unfinished = Unfinished(tmp_path / "out", rank=0, ranks=1)
    unfinished.save(1, {"value": 1})
    torch.save({"value": WritesAFile(proof)}, unfinished.folder / "state-1-0.pt")
    with pytest.raises(CalibrationError, match=r"state-1-0\.pt"):
        unfinished.load(1)
    assert not proof.exists()
    pickle.loads(pickle.dumps(WritesAFile(proof)))
    assert proof.exists()  # the pickle does run code where nobody takes care


def add_code(folder: Path) -> Path:
    """Let a folder's config ask for a class of its own; the file that its code makes if it is run."""
    proof = folder / "code was run"
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    path.write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n\nclass Own: pass\n")
    return proof


def test_load_checkpoint_does_not_run_the_code_of_a_folder(tmp_path):
    x = torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 4))
    with CalibrationSession(model, "INT8_STATIC"):
        model(x)
    export_checkpoint(model, tmp_path / "out")
    proof = add_code(tmp_path / "out")
    (tmp_path / "out" / CONTENTS_FILE).unlink()  # with it the changed config is refused as damage
    load_checkpoint(nn.Sequential(nn.Linear(8, 4)), tmp_path / "out")(x)
    assert not proof.exists()


def test_quantize_checkpoint_does_not_run_the_code_of_a_folder(tmp_path):
    source = Path(save_tiny_llama(tmp_path / "model"))
    proof = add_code(source)
    quantize_checkpoint(source, tmp_path / "out", "FP8_DYNAMIC")
    assert (tmp_path / "out" / "config.json").exists()
    assert not proof.exists()


def test_calibrate_layerwise_does_not_run_the_code_of_a_folder(tmp_path):
    source = Path(save_tiny_llama(tmp_path / "model"))
    proof = add_code(source)
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    calibrate_layerwise(source, [batch], "FP8", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert not proof.exists()
