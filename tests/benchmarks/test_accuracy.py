"""benchmarks/accuracy/accuracy.py on a tiny model: a row for each observer and rounding, on three held-out texts."""

import math
import re
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch

from lightning_obs.app.data.module import TextData
from lightning_obs.app.data.overlap import HeldOutRuns
from tests.support.in_process import run_script
from tests.support.tiny_model import save_tiny_llama

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accuracy"
TEXTS = ["same kind", "descriptions", "questions"]


@pytest.fixture
def scripts(monkeypatch):
    """The modules of the benchmark, by name."""
    pytest.importorskip("sklearn")
    pytest.importorskip("lm_eval")
    monkeypatch.syspath_prepend(FOLDER)
    import accuracy
    import held_out_texts
    import measured_models

    return {"accuracy": accuracy, "held_out_texts": held_out_texts, "measured_models": measured_models}


def divergences_by(tmp_path, *options, rows):
    """KL divergence on each of the texts, by row."""
    tiny = tmp_path / "tiny"
    if not tiny.exists():
        save_tiny_llama(tiny)
    small = ("--model", str(tiny), "--group", "16", "--batches", "2", "--eval-batches", "2")
    done = run_script(FOLDER / "accuracy.py", *small, *options, "--rows", *rows, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    divergences = {}
    for row, cells in re.findall(r"^\| `(.+?)` \| (.*) \|$", done.stdout, flags=re.MULTILINE):
        divergences[row] = [float(number) for number in re.findall(r"/ (\d\.\d{4}) ± \d\.\d{4}", cells)]
        assert len(divergences[row]) == len(TEXTS)
    return divergences


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
def test_fewer_bits_lose_more_and_rounding_loses_less_on_every_text(tmp_path):
    nearest, rounded = "memoryless_minmax", "hessian(signed=True) + gptq(damping=0.1)"
    two = divergences_by(tmp_path, "--bits", "2", rows=[nearest, rounded])
    four = divergences_by(tmp_path, "--bits", "4", rows=[nearest])
    for index in range(len(TEXTS)):
        assert four[nearest][index] < two[nearest][index]
        assert two[rounded][index] < two[nearest][index]


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
def test_block_by_block_on_inputs_in_full_precision_loses_what_a_session_in_memory_loses(tmp_path):
    rows = ["hessian + gptq"]
    in_memory, as_before, quantized = (
        divergences_by(tmp_path, "--bits", "2", *inputs, rows=rows)
        for inputs in ([], ["--inputs", "full_precision"], ["--inputs", "quantized"])
    )
    assert as_before == in_memory
    assert quantized != in_memory


def test_the_error_of_a_mean_is_the_deviation_of_its_blocks_over_the_root_of_their_number(scripts):
    estimate = scripts["measured_models"].Estimate.of([1.0, 2.0, 4.0, 5.0])
    assert estimate.mean == 3.0
    assert estimate.error == pytest.approx(math.sqrt((4 + 1 + 1 + 4) / 3 / 4))


def test_a_row_names_an_observer_a_rounding_or_a_recipe(scripts):
    options_of = scripts["accuracy"].options_of
    assert options_of("hessian(signed=True) + gptq(damping=0.1)") == {
        "observers": {"weight": {"name": "hessian", "signed": True}},
        "rounding": {"name": "gptq", "damping": 0.1},
    }
    assert options_of("input: histogram") == {"observers": {"input": {"name": "histogram"}}}
    assert options_of("recipe=fast") == {"recipe": "fast"}
    assert options_of("scheme") == {}


class WordTokenizer:
    """Words, spaces and marks as tokens: of real text, 32 in a row are some ten words."""

    def __init__(self):
        self._ids = {}

    def __call__(self, texts, **options):
        if isinstance(texts, str):
            return SimpleNamespace(input_ids=self._encoded(texts))
        return SimpleNamespace(input_ids=[self._encoded(text) for text in texts])

    def _encoded(self, text):
        return [self._ids.setdefault(word, len(self._ids)) for word in re.findall(r"\w+|\s+|[^\w\s]+", text)]


def test_held_out_blocks_share_no_run_with_the_text_to_calibrate_and_to_train_on(scripts):
    tokenizer = WordTokenizer()
    texts = scripts["held_out_texts"].BlockTexts(tokenizer, batches=16, eval_batches=16)
    training = TextData(tokenizer, batches=16, train_batches=80, eval_batches=90).training
    used = torch.cat([*texts.calibration, *(block["input_ids"] for block in training)])
    assert list(texts.held_out)[: len(TEXTS)] == TEXTS
    for name, blocks in texts.held_out.items():
        assert len(blocks) == 16
        assert not HeldOutRuns([torch.cat(blocks)]).shares(used), name


def test_what_the_calibration_text_holds_is_cut_out_of_text_of_other_kinds(scripts, monkeypatch):
    module = scripts["held_out_texts"]
    repeated = sorted(topics.items())[0][1]  # the first topic is calibrated on
    monkeypatch.setattr(module, "other_kinds", lambda: {"other": [repeated, *module.descriptions()]})
    tokenizer = WordTokenizer()
    texts = module.BlockTexts(tokenizer, batches=4, eval_batches=2)
    runs = HeldOutRuns([torch.cat(texts.calibration)])
    assert runs.shares(tokenizer(repeated).input_ids)
    assert len(texts.held_out["other"]) == 2
    assert not runs.shares(torch.cat(texts.held_out["other"]))


def test_held_out_paragraphs_share_no_run_with_those_to_calibrate_on(scripts):
    tokenizer = WordTokenizer()
    texts = scripts["held_out_texts"].SentenceTexts(tokenizer, count=64)
    assert list(texts.held_out)[: len(TEXTS)] == TEXTS
    assert len(texts.calibration) == 64
    for paragraphs in texts.held_out.values():
        runs = HeldOutRuns(tokenizer(paragraphs).input_ids)
        assert not any(runs.shares(ids) for ids in tokenizer(texts.calibration).input_ids)


def test_more_paragraphs_to_calibrate_on_than_there_are_end_the_program(scripts):
    with pytest.raises(SystemExit, match="lower --batches"):
        scripts["held_out_texts"].SentenceTexts(WordTokenizer(), count=10_000)
