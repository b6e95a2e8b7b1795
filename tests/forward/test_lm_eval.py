"""lm-evaluation-harness, by its own HFLM, reads a model inside ``quantized`` as it reads the exported checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_model import save_tiny_llama

#: in a process of its own: the harness configures logging and datasets for the whole process
SCRIPT = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from lightning_obs import CalibrationSession, export_checkpoint, quantized

source, out = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)

def log_likelihoods(model):
    pairs = [("The capital of France is", " Paris"), ("Bees make", " honey"), ("Two plus two is", " four")]
    questions = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    harness = HFLM(pretrained=model, tokenizer=tokenizer)
    return [value for value, _ in harness.loglikelihood(questions, disable_tqdm=True)]

full = log_likelihoods(model)
with CalibrationSession(model, "W8A8", ignore=["lm_head"]):
    pass
with quantized(model):
    inside = log_likelihoods(model)
export_checkpoint(model, out, tokenizer=tokenizer)
reloaded = log_likelihoods(AutoModelForCausalLM.from_pretrained(out).eval())
print(json.dumps({"full": full, "inside": inside, "after": log_likelihoods(model), "reloaded": reloaded}))
"""


@pytest.mark.slow
def test_the_harness_reads_the_quantized_model_as_the_exported_one(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    command = [sys.executable, "-c", SCRIPT, str(save_tiny_llama(tmp_path / "tiny")), str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["inside"] == found["reloaded"]
    assert found["after"] == found["full"]
    assert all(one != other for one, other in zip(found["inside"], found["full"], strict=True))
