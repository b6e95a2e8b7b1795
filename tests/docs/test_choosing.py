"""The pages about choosing schemes and observers: their Python and their commands run."""

import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.in_process import run_command_line
from tests.support.markdown import blocks, commands, page
from tests.support.tiny_model import save_tiny_llama

PAGE = page("docs/guide/measure.md") + page("docs/guide/measure_observers.md")
COMMANDS = commands(PAGE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_the_python_runs_from_top_to_bottom(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    known = {"model": model, "batches": [{"input_ids": torch.randint(3, 128, (2, 16))} for _ in range(2)]}
    for code in blocks(PAGE, "python"):
        exec(compile(code, "docs/guide/measure", "exec"), known)
    assert known["plan"].counts == {"int8": 14}
    assert set(known["choice"].losses) == {"input", "weight"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command, tiny, tmp_path):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "lightning_obs"]
    small = ["data.tokens=16", "data.batches=2", "evaluate=false", "export=none", "report.layer_error_batches=0"]
    done = run_command_line(*words[3:], f"model.path={tiny}", "trainer=cpu", *small, "output_dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    task = next(word.removeprefix("task=") for word in words if word.startswith("task="))
    assert (tmp_path / "out" / "configs" / "scheme" / f"{task}.yaml").is_file()
