"""Text to calibrate on, and other text to measure on."""

import json

import pytest
import torch

from lightning_obs import CalibrationError
from lightning_obs.app.text_data import TextData, read_documents


class Letters:
    """One token per character."""

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})()


def text_of(dataset):
    return "".join(chr(i) for row in dataset for i in row["input_ids"].tolist())


def test_every_second_document_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(letter * 20 for letter in "abcdef"))
    data = TextData(Letters(), tmp_path / "a.txt", batches=2, tokens=16, eval_batches=2)
    assert set(text_of(data.calibration)) - {"\n"} == {"a", "c"}
    assert set(text_of(data.held_out)) - {"\n"} == {"b", "d"}
    assert next(iter(data.val_dataloader()))["input_ids"].shape == (1, 16)


def test_one_document_is_cut_in_two(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 40 + "b" * 40)
    data = TextData(Letters(), tmp_path / "a.txt", batches=1, tokens=16, eval_batches=1)
    assert (set(text_of(data.calibration)), set(text_of(data.held_out))) == ({"a"}, {"b"})


def test_another_text_is_measured_on(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(letter * 20 for letter in "abcdef"))
    (tmp_path / "b.txt").write_text("\n\n".join(letter * 20 for letter in "uvwxyz"))
    data = TextData(Letters(), tmp_path / "a.txt", batches=8, tokens=16, eval_batches=8, eval_path=tmp_path / "b.txt")
    assert set(text_of(data.calibration)) - {"\n"} == set("abcdef")
    assert set(text_of(data.held_out)) - {"\n"} == set("uvwxyz")
    with pytest.raises(CalibrationError, match=r"data\.eval_path=.*absent\.txt does not exist"):
        TextData(Letters(), tmp_path / "a.txt", batches=1, tokens=16, eval_path=tmp_path / "absent.txt")


def test_jsonl_takes_a_field(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": letter}) for letter in "abc"))
    assert list(read_documents(tmp_path / "a.jsonl", "body")) == ["a", "b", "c"]
    with pytest.raises(CalibrationError, match=r"a\.jsonl:1 has no field 'text'.*data\.text_field"):
        list(read_documents(tmp_path / "a.jsonl"))


def test_a_folder_is_read_in_a_fixed_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_text("not text")
    assert list(read_documents(tmp_path)) == ["first", "second"]


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"holds nothing to read.*\.jsonl"):
        list(read_documents(tmp_path))


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match="does not exist"):
        list(read_documents(tmp_path / "absent.txt"))


def test_too_little_text_says_how_much_there_is(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa\n\nbbbb")
    with pytest.raises(CalibrationError, match=r"too little calibration text.*Got 4 tokens, expected 2 blocks of 16"):
        TextData(Letters(), tmp_path / "a.txt", batches=2, tokens=16, eval_batches=1)


@pytest.mark.parametrize("name", ["batches", "batch_size", "tokens", "eval_batches"])
@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True])
def test_sizes_are_positive_whole_numbers(name, value):
    with pytest.raises(CalibrationError, match=rf"data\.{name}"):
        TextData(Letters(), **{name: value})


def test_the_default_text_comes_with_python():
    data = TextData(Letters())
    assert data.calibration.tokens.shape == data.held_out.tokens.shape == (16, 512)
    assert not torch.equal(data.calibration.tokens, data.held_out.tokens)
