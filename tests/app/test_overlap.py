"""No run of 32 tokens that is measured on was calibrated or trained on."""

import json

import pytest
import torch

from lightning_obs import CalibrationError
from lightning_obs.app.data.module import TextData
from lightning_obs.app.data.overlap import RUN, HeldOutRuns, run_hashes
from tests.support.tiny_model import tiny_tokenizer


class Words:
    """One token per word."""

    def __init__(self):
        self.numbers = {}

    def __call__(self, text, **_):
        ids = [self.numbers.setdefault(word, len(self.numbers)) for word in text.split()]
        return type("Encoding", (), {"input_ids": ids})()


def runs_of(tokens):
    return {tuple(tokens[at : at + RUN]) for at in range(len(tokens) - RUN + 1)}


def text_of(blocks):
    """The tokens of blocks, one after the other: runs across two blocks count."""
    return [token for block in blocks for token in block["input_ids"].tolist()]


def words(start, count):
    return " ".join(f"w{number}" for number in range(start, start + count))


@pytest.mark.parametrize("train_batches", [0, 60, 110])
def test_the_default_text_measured_on_is_neither_calibrated_nor_trained_on(train_batches):
    data = TextData(Words(), tokens=256, batches=16, train_batches=train_batches, eval_batches=32)
    held_out = runs_of(text_of(data.held_out))
    assert len(held_out) > 7_000
    assert not held_out & runs_of(text_of(data.calibration) + text_of(data.training))


def test_all_of_the_default_text_can_be_trained_on_and_nothing_of_it_is_measured_on():
    with pytest.raises(CalibrationError, match=r"too few calibration.*left out: [\d,]+ of [\d,]+ tokens") as error:
        TextData(Words(), train_batches=1000)
    blocks = int(str(error.value).split("Got ")[1].split(",")[0])
    data = TextData(Words(), train_batches=blocks - 16)
    assert not runs_of(text_of(data.held_out)) & runs_of(text_of(data.calibration) + text_of(data.training))


def test_the_tokens_left_out_are_counted_and_the_others_stay_in_order(tmp_path, capsys):
    rows = [words(0, 100), words(1000, 200), words(100, 50) + " " + words(1040, 60) + " " + words(150, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    tokenizer = Words()
    data = TextData(tokenizer, tmp_path / "a.jsonl", batches=4, tokens=50, eval_batches=4)
    assert text_of(data.calibration) == tokenizer(words(0, 200)).input_ids
    assert text_of(data.held_out) == tokenizer(words(1000, 200)).input_ids
    assert (
        "neither calibrated nor trained on: 60 of 260 tokens, which the held-out text repeats, 32 or more in a row\n"
        in capsys.readouterr().out
    )


def test_31_equal_words_are_no_run(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join([words(0, 20) + " " + words(1000, RUN - 1), words(1000, 200)]))
    tokenizer = Words()
    data = TextData(tokenizer, tmp_path / "a.txt", batches=1, tokens=50, eval_batches=1)
    assert text_of(data.calibration) == tokenizer(words(0, 20) + " " + words(1000, 30)).input_ids
    assert "neither" not in capsys.readouterr().out


def test_what_is_left_out_after_the_last_sample_is_not_counted(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join([words(0, 100), words(1000, 200), words(1000, 200)]))
    TextData(Words(), tmp_path / "a.txt", batches=1, tokens=50, eval_batches=4)
    assert "neither" not in capsys.readouterr().out


def test_a_text_measured_on_can_be_another_file_that_holds_the_same(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join([words(0, 100), words(1000, 100), words(2000, 100)]))
    (tmp_path / "b.txt").write_text(words(1000, 100))
    sizes = {"tokens": 50, "eval_batches": 2, "eval_path": tmp_path / "b.txt"}
    tokenizer = Words()
    data = TextData(tokenizer, tmp_path / "a.txt", batches=4, **sizes)
    assert text_of(data.calibration) == tokenizer(words(0, 100) + " " + words(2000, 100)).input_ids
    with pytest.raises(CalibrationError, match=r"too few calibration.*left out: 100 of 300 tokens.*Got 4, expected 5"):
        TextData(Words(), tmp_path / "a.txt", batches=5, **sizes)
    with pytest.raises(
        CalibrationError, match=r"left out: 100 of 100 tokens, which the held-out text repeats.*Got 0, expected 1"
    ):
        TextData(Words(), tmp_path / "b.txt", batches=1, **sizes)


CHATS = "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}</s>{% endfor %}"


def test_a_chat_that_a_held_out_chat_repeats_is_left_out_whole_and_prompts_do_not_count(tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATS
    prompt = f"You are told: {words(900, 20)} "
    questions = [words(0, 20), words(100, 20), words(200, 20), words(0, 20), words(300, 20), words(400, 20)]
    rows = []
    for number, question in enumerate(questions):
        answer = {"role": "assistant", "content": f"answer {number}"}
        rows.append(
            {"messages": [{"role": "system", "content": prompt}, {"role": "user", "content": question}, answer]}
        )
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = TextData(tokenizer, tmp_path / "a.jsonl", batches=6, tokens=64, eval_batches=8)
    seen = tokenizer.decode(text_of(data.calibration))
    start = f"<s>[system]{prompt.strip()}</s>[user]"
    kept = [f"{start}{questions[number]}</s>[assistant]answer {number}</s>" for number in (2, 4)]
    assert "".join(kept).startswith(seen)
    assert "trained on: 1 of 3 chats, which a held-out chat repeats, 32 tokens or more" in capsys.readouterr().out


def test_ends_that_meet_where_a_run_was_cut_out_make_no_new_run():
    held_out = HeldOutRuns([range(100, 140), range(0, 60)])
    tokens = torch.tensor([*range(0, 30), *range(100, 140), *range(30, 60), 7, 8, 9])
    kept = tokens[held_out.positions_apart(tokens)]
    assert kept.tolist() == [7, 8, 9]


def test_equal_runs_have_equal_hashes_and_others_do_not():
    torch.manual_seed(0)
    tokens = torch.randint(0, 3, (4000,))
    hashes = run_hashes(tokens).tolist()
    runs = [tuple(run) for run in tokens.unfold(0, RUN, 1).tolist()]
    assert len(set(hashes)) == len(set(runs)) == len(set(zip(hashes, runs, strict=True)))
    assert run_hashes(tokens[: RUN - 1]).tolist() == []
