"""The benchmark that reloads every architecture: its verdicts, and that a fault fails it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.versions import needs_architectures

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "equality" / "architectures.py"


def verdicts(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    *lines, _ = capsys.readouterr().out.splitlines()
    return ended.value.code, {tuple(line.split()[:3]): line.split()[3] for line in lines}


@needs_architectures("dots3_note")
def test_equal_refused_and_too_large_models_are_told_apart(monkeypatch, capsys):
    code, found = verdicts(
        monkeypatch,
        capsys,
        "--task",
        "CausalLM",
        "Seq2SeqLM",
        "--only",
        "llama",
        "t5",
        "dots3_note",
        "--scheme",
        "int4",
    )
    assert found == {
        ("CausalLM", "dots3_note", "int4"): "left",
        ("CausalLM", "llama", "int4"): "equal",
        ("Seq2SeqLM", "t5", "int4"): "refused",
    }
    assert code == 0


def test_a_model_that_loads_with_other_numbers_is_a_fault(monkeypatch, capsys):
    from transformers import LlamaForCausalLM

    load = LlamaForCausalLM.from_pretrained

    def load_otherwise(*args, **options):
        model = load(*args, **options)
        model.model.norm.weight.data += hasattr(model, "hf_quantizer")
        return model

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", load_otherwise)
    code, found = verdicts(monkeypatch, capsys, "--task", "CausalLM", "--only", "llama", "--scheme", "fp8")
    assert found == {("CausalLM", "llama", "fp8"): "fault"}
    assert code == 1
