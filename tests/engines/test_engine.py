"""Engines of one's own, as CONTRIBUTING shows them: one class each, found by ``engines="name"``."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint
from lightning_obs.engines.engine import ENGINES
from tests.support.markdown import blocks, page


def shown_code(mark):
    """The one piece of CONTRIBUTING's code about engines that has ``mark`` in it."""
    section = page("CONTRIBUTING.md").partition("### An engine")[2].partition("\n### ")[0]
    (shown,) = [code for code in blocks(section, "python") if mark in code]
    return shown


def add_engine(monkeypatch, name):
    """Run the piece of CONTRIBUTING that registers an engine of a name, for one test."""
    shown = shown_code(f'@Engine.register("{name}")')
    assert len(shown.splitlines()) <= 20
    monkeypatch.setitem(ENGINES, name, None)  # which also takes it out at the end
    exec(shown, {})


@pytest.fixture
def tiny_engine(monkeypatch):
    """The engine that answers the questions itself."""
    add_engine(monkeypatch, "tiny")


@pytest.fixture
def aurora_engine(monkeypatch):
    """The engine that is a table of families."""
    add_engine(monkeypatch, "aurora")


def test_a_table_of_families_is_an_engine_s_verdict_in_a_session(aurora_engine, tiny_llama):
    verdict = CalibrationSession(tiny_llama(), "W8A8", ignore=["lm_head"]).engines["Aurora"]
    assert (verdict.loads, verdict.text, verdict.what) == (True, "CUDA capability 8.9 or newer", "")
    verdict = CalibrationSession(tiny_llama(), "W4A16", ignore=["lm_head"]).engines["Aurora"]
    assert (verdict.loads, "Aurora 1.0 has nothing that loads modules" in verdict.what) == (False, True)
    with pytest.raises(CalibrationError, match=r"Aurora 1\.0 does not load a quantized kv cache"):
        CalibrationSession(tiny_llama(), "W8A8", ignore=["lm_head"], kv_cache="FP8", engines="aurora")


def test_every_engine_has_a_row_in_the_docs():
    rows = [line for line in page("docs/reference/engines.md").splitlines() if line.startswith("|")]
    for name in ENGINES:
        assert any(f'`"{name}"`' in row.split("|")[1] for row in rows), (
            f"docs/reference/engines.md has no row for {name}"
        )


def test_an_engine_refuses_the_scheme_that_it_lacks_before_data_are_read(tiny_engine, tiny_llama):
    with pytest.raises(CalibrationError, match=r"Tiny has no kernel for 4 bits: .*q_proj\. Remedy: use W8A8"):
        CalibrationSession(tiny_llama(), "W4A16", ignore=["lm_head"], engines="tiny")
    verdict = CalibrationSession(tiny_llama(), "W4A16", ignore=["lm_head"]).engines["Tiny"]
    assert (verdict.loads, "no kernel for 4 bits" in verdict.text) == (False, True)


def test_the_test_that_contributing_shows_of_an_engine_passes(tiny_engine, tiny_llama):
    names = {"pytest": pytest, "CalibrationError": CalibrationError, "CalibrationSession": CalibrationSession}
    exec(shown_code("def test_"), names)
    names["test_four_bits_are_refused_before_data"](tiny_llama)


def test_an_engine_that_judges_weights_is_asked_about_modules_without_one(tiny_engine, tiny_llama):
    session = CalibrationSession(tiny_llama(), "W8A8", ignore=["lm_head"], kv_cache="FP8")
    assert session.engines["Tiny"].loads


def test_an_engine_s_verdict_names_and_fused_sets_are_those_of_the_run(tiny_engine, tiny_llama, batches, tmp_path):
    model = tiny_llama()
    options = {"targets": ["re:.*mlp.*_proj", "re:.*(q|k|v)_proj"], "ignore": ["re:.*down_proj"], "engines": "tiny"}
    with CalibrationSession(model, "INT8_STATIC", **options) as session, torch.no_grad():
        model(**batches[0])
    assert session.result.plan.engines["Tiny"].text == "CPU"
    assert ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"] in session.result.plan.fused
    export_checkpoint(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.feed_forward.down_proj" in config["ignore"]
    assert "model.layers.0.mlp.down_proj" in config["ignore"]


def test_a_module_that_an_engine_looks_up_by_another_name_is_targeted_by_it(tiny_engine, tiny_llama, tmp_path):
    model, name = tiny_llama(), "model.layers.0.mlp.down_proj"
    with CalibrationSession(model, "W8A8", targets=[name], engines="tiny"):
        pass
    export_checkpoint(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == [name, "model.layers.0.feed_forward.down_proj"]


def test_an_engine_is_asked_once(tiny_engine, tiny_llama, monkeypatch):
    asked = []
    for each in ENGINES.values():
        check = type(each).check
        monkeypatch.setattr(each, "check", lambda *a, e=each, c=check: asked.append(e.name) or c(e, *a), raising=False)
    CalibrationSession(tiny_llama(), "W8A8", ignore=["lm_head"], engines="vllm")
    assert sorted(asked) == sorted({engine.name for engine in ENGINES.values() if engine.listed})


def test_an_unknown_engine_is_refused_with_the_names_of_all(tiny_engine, tiny_llama):
    with pytest.raises(
        CalibrationError, match=r"Got 'other', expected 'transformers', 'dequantize', 'vllm', .*'tiny', 'unch"
    ):
        CalibrationSession(tiny_llama(), "W8A8", engines="other")


def test_of_a_model_that_is_not_of_transformers_no_other_engine_says_anything():
    names = ("q_proj", "k_proj", "v_proj")
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
    session = CalibrationSession(model, "W8A8", targets=["q_proj"])  # vLLM fuses all three; a warning would be an error
    assert session.engines == {}
