"""lm-evaluation-harness, by its own HFLM, reads a model inside ``quantized`` as it reads the exported checkpoint."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_obs import CalibrationSession, export_checkpoint, quantized
from tests.support.rank_processes import run_apart
from tests.support.tiny_model import save_tiny_llama


def log_likelihoods_of_each(source, out):
    """In a process of its own: the harness configures logging and datasets for the whole process."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

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
    return {"full": full, "inside": inside, "after": log_likelihoods(model), "reloaded": reloaded}


@pytest.mark.slow
def test_the_harness_reads_the_quantized_model_as_the_exported_one(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    found = run_apart(log_likelihoods_of_each, save_tiny_llama(tmp_path / "tiny"), tmp_path / "out", timeout=300)
    assert found["inside"] == found["reloaded"]
    assert found["after"] == found["full"]
    assert all(one != other for one, other in zip(found["inside"], found["full"], strict=True))
