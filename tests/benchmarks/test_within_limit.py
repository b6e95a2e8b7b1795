"""The benchmark that calibrates a model within a limit of memory, on a small one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny_model import tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights of 123 MB in float32, 5 MB in each block."""
    folder, tokenizer = tmp_path_factory.mktemp("llama"), tiny_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1280, "num_hidden_layers": 24, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_is_calibrated_where_its_weights_find_no_room(model):
    small = ["--limit", "90", "--model", str(model), "--blocks", "1"]
    command = [sys.executable, "benchmarks/cost/within_limit.py", *small]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = r"no room\n.*: done\nperplexity on 256 held-out tokens: ([\d.]+) before, ([\d.]+) after"
    found = re.search(printed, done.stdout)
    before, after = map(float, found.groups())
    assert before == pytest.approx(after, rel=0.05)
