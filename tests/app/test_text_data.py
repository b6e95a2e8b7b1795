"""Text to calibrate on, and other text to measure on."""

import json
import sys

import pytest
import torch

from lightning_obs import CalibrationError
from lightning_obs.app.data.files import read_rows, value_of
from lightning_obs.app.data.module import TextData
from lightning_obs.app.data.text_blocks import cut_into_blocks


class Letters:
    """One token per character."""

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})()


class LettersAfterMark(Letters):
    """One token per character, and the token 1 at the beginning of every text, as Gemma and Llama have it."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens=True, **_):
        encoding = super().__call__(text)
        if add_special_tokens:
            encoding.input_ids = [self.bos_token_id, *encoding.input_ids]
        return encoding


def texts_in(path, field="text"):
    return [value_of(place, row, field) for place, row in read_rows(path, field)]


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


def test_blocks_of_one_token_have_no_perplexity(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 80)
    remedy = r"data\.tokens: in a block of one token there is nothing to predict.*expected at least 2.*data\.tokens=512"
    with pytest.raises(CalibrationError, match=remedy):
        TextData.check({"path": str(tmp_path / "a.txt"), "tokens": 1})
    with pytest.raises(CalibrationError, match=remedy):
        TextData(Letters(), tmp_path / "a.txt", batches=1, tokens=1, eval_batches=1)


@pytest.mark.parametrize("name", ["train_batches", "num_workers"])
def test_a_negative_number_of_batches_or_processes_is_refused_before_anything_is_read(name):
    message = rf"data\.{name}\. Got -1, expected a whole number, 0 or more"
    with pytest.raises(CalibrationError, match=message):
        TextData.check({name: -1})
    with pytest.raises(CalibrationError, match=message):
        TextData(Letters(), None, **{name: -1})


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
    assert texts_in(tmp_path / "a.jsonl", "body") == ["a", "b", "c"]
    with pytest.raises(CalibrationError, match=r"a\.jsonl:1 has no text in the field 'text'.*data\.text_field"):
        texts_in(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one\u2028two"}\r\n\n{"text": "three"}\r\n'),
        ("a.json", '[{"text": "one\u2028two"},\n {"text": "three", "other": 1}]'),
        ("a.json", '{"text": "one\u2028two"}\n{"text": "three"}'),
        ("a.csv", 'id,text\n1,one\u2028two\n2,"three"\n'),
        ("a.CSV", '\ufeffid,text\r\n1,one\u2028two\r\n2,"three"\r\n'),
        ("a.txt", "one\u2028two\r\n\r\nthree"),
    ],
)
def test_every_kind_of_file_is_read_for_what_it_is(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert texts_in(tmp_path / name) == ["one\u2028two", "three"]


def test_parquet_is_read_by_pyarrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two"], "other": [1, 2]}), tmp_path / "a.parquet")
    assert texts_in(tmp_path / "a.parquet") == ["one", "two"]
    with pytest.raises(CalibrationError, match=r"a\.parquet\[0\] has no text in the field 'other'"):
        texts_in(tmp_path / "a.parquet", "other")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:50])
    with pytest.raises(CalibrationError, match=r"a\.parquet is not valid Parquet"):
        texts_in(tmp_path / "a.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(CalibrationError, match=r"a\.parquet needs the package pyarrow.*pip install pyarrow"):
        texts_in(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "one\ncafé".encode("latin-1"), r"a\.txt:2 is not valid UTF-8. Got byte 0xe9.*iconv"),
        ("a.txt", bytes(range(256)) * 80, r"a\.txt:2 is not valid UTF-8"),
        ("a.bin", b"some\ntext\n\0\0\0", r"a\.bin:3 is not valid UTF-8. Got byte 0x00. Remedy: give a text"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt:1 is not valid UTF-8. Got byte 0xff. Remedy.*iconv -f utf-16 -t"),
        ("a.jsonl", '{"text": "café"}'.encode("latin-1"), r"a\.jsonl:1 is not valid UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b', r"a\.jsonl:2 is not valid JSON. Got Unterminated string"),
        ("a.jsonl", b'{"text": "a"}\n["b"]', r"a\.jsonl:2 has no text in the field 'text'. Got \['b'\]"),
        ("a.jsonl", b'{"text": null}', r"a\.jsonl:1 has no text in the field 'text'. Got {'text': None}"),
        ("a.jsonl", rb'{"text": "a \ud800 b"}', r"a\.jsonl:1 has a lone surrogate in the field 'text'.*Got '.ud800'"),
        ("a.json", rb'[{"text": "\udc00"}]', r"a\.json\[0\] has a lone surrogate in the field 'text'"),
        ("a.json", b'[{"text": "a"},\n{"text": ]', r"a\.json:2 is not valid JSON. Got Expecting value"),
        ("a.json", b'[{"text": "a"}, {"body": "b"}]', r"a\.json\[1\] has no text in the field 'text'"),
        ("a.json", b"[" * 100_000, r"a\.json:1 is not valid JSON"),
        ("a.csv", b"id,body\n1,b\n", r"a\.csv:2 has no text in the field 'text'. Got {'id': '1', 'body': 'b'}"),
        ("a.csv", b"id,text\n1,a\n2\n", r"a\.csv:3 has no text in the field 'text'"),
        ("a.csv", b'id,text\n1,"a\n', r"a\.csv:2 is not valid CSV. Got unexpected end of data"),
    ],
)
def test_what_cannot_be_read_is_named_by_line_and_reason(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message) as error:
        texts_in(tmp_path / name)
    assert len(str(error.value)) < 500


def test_a_folder_is_read_in_a_fixed_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_text("not text")
    assert texts_in(tmp_path) == ["first", "second"]


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"holds nothing to read.*\.jsonl"):
        texts_in(tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match="does not exist"):
        texts_in(tmp_path / "absent.txt")


def test_too_little_text_says_how_much_there_is(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa\n\nbbbbbbbbbbbbbbbb")
    with pytest.raises(CalibrationError, match=r"too few calibration blocks of text.*Got 0, expected 2.*data\.tokens"):
        TextData(Letters(), tmp_path / "a.txt", batches=2, tokens=16, eval_batches=1)


@pytest.mark.parametrize("name", ["batches", "batch_size", "tokens", "eval_batches"])
@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True])
def test_sizes_are_positive_whole_numbers(name, value):
    with pytest.raises(CalibrationError, match=rf"data\.{name}"):
        TextData(Letters(), **{name: value})


class CountedLetters(Letters):
    """Counts the characters that it is given."""

    def __init__(self):
        self.characters = 0

    def __call__(self, text, **options):
        self.characters += len(text)
        return super().__call__(text, **options)


def test_no_more_text_is_tokenized_than_is_needed(tmp_path):
    texts = [letter * 20 for letter in "abcdefghij" * 200]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    tokenizer = CountedLetters()
    data = TextData(tokenizer, tmp_path / "a.txt", batches=3, tokens=32, eval_batches=2)
    assert tokenizer.characters < 2000
    assert text_of(data.held_out) == "\n\n".join(texts[1::2])[:64]
    assert text_of(data.calibration) == "\n\n".join(texts[0::2])[:96]


def test_the_default_text_comes_with_python():
    data = TextData(Letters())
    calibration, held_out = ([block["input_ids"] for block in blocks] for blocks in (data.calibration, data.held_out))
    assert torch.stack(calibration).shape == torch.stack(held_out).shape == (16, 512)
    assert not torch.equal(torch.stack(calibration), torch.stack(held_out))


def test_every_block_begins_with_the_token_that_begins_a_text(tmp_path):
    texts = [letter * 20 for letter in "abcdef"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    sizes = {"batches": 3, "tokens": 8, "eval_batches": 2, "train_batches": 1}
    data = TextData(LettersAfterMark(), tmp_path / "a.txt", **sizes)
    blocks = [block["input_ids"] for block in (*data.held_out, *data.calibration, *data.training)]
    assert [block[0].item() for block in blocks] == [1] * 6
    assert all(1 not in block[1:] and len(block) == 8 for block in blocks)
    held_out = [block["input_ids"][1:] for block in data.held_out]
    assert "".join(chr(token) for token in torch.cat(held_out)) == "\n\n".join(texts[1::2])[:14]
    read = [block["input_ids"][1:] for block in (*data.calibration, *data.training)]
    assert "".join(chr(token) for token in torch.cat(read)) == "\n\n".join(texts[0::2])[:28]


def test_a_block_of_a_chat_that_brings_the_token_gets_no_second_one():
    ids = torch.tensor([1, 5, 6, 7, 8, 9, 10, 1, 11, 12])
    blocks = cut_into_blocks(ids, 9, 4, opening=1)
    assert [block.tolist() for block in blocks] == [[1, 5, 6, 7], [1, 8, 9, 10]]
    assert [block.tolist() for block in cut_into_blocks(ids, 9, 3, opening=None)] == [[1, 5, 6], [7, 8, 9], [10, 1, 11]]


def test_text_that_is_held_out_over_the_end_of_a_block_is_not_calibrated_on(tmp_path):
    """The token between the two parts belongs to the blocks, not to the text."""
    repeated = "".join(chr(200 + index) for index in range(40))
    held_out = "x" * 20 + repeated + "y" * 40  # the block of 32 ends inside
    (tmp_path / "a.txt").write_text("\n\n".join([repeated + "z" * 100, held_out]))
    data = TextData(LettersAfterMark(), tmp_path / "a.txt", batches=1, tokens=32, eval_batches=3)
    assert text_of(data.calibration)[1:] == "z" * 31
