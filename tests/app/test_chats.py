"""Chats as calibration data: each is the text that the tokenizer's template makes of its messages."""

import json

import pytest

from lightning_obs import CalibrationError
from lightning_obs.app.data.module import TextData
from tests.support.tiny_model import tiny_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' ~ message.role) }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}</s>{% endfor %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat(number):
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]


def written(number):
    return f"<s>[user]question {number}</s>[assistant]answer {number}</s>"


def save(file, rows):
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def text_of(samples, tokenizer):
    return "".join(tokenizer.decode(sample["input_ids"]) for sample in samples)


def sizes(tokens=16):
    return {"batches": 2, "eval_batches": 2, "tokens": tokens}


@pytest.mark.parametrize("field", ["text", "messages"])
def test_a_chat_is_read_through_the_template_of_the_tokenizer(tmp_path, tokenizer, field):
    file = save(tmp_path / "chats.jsonl", [{"messages": chat(number)} for number in range(6)])
    data = TextData(tokenizer, file, text_field=field, **sizes())
    # one follows the other as the template writes it, and there is no second <s> at the beginning
    assert (written(0) + written(2)).startswith(text_of(data.calibration, tokenizer))
    assert (written(1) + written(3)).startswith(text_of(data.held_out, tokenizer))


def test_chats_are_measured_on_other_chats_or_text(tmp_path, tokenizer):
    file = save(tmp_path / "chats.jsonl", [{"messages": chat(number)} for number in range(6)])
    other = save(tmp_path / "other.json", [{"messages": chat(number)} for number in range(7, 9)])
    data = TextData(tokenizer, file, eval_path=other, **sizes())
    assert (written(7) + written(8)).startswith(text_of(data.held_out, tokenizer))
    (tmp_path / "text.txt").write_text("one two three four\n\nfive six seven eight nine ten")
    data = TextData(tokenizer, file, eval_path=tmp_path / "text.txt", **sizes())
    assert text_of(data.held_out, tokenizer).startswith("one two three four\n\nfive")


def test_a_saved_data_set_of_chats_is_read(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"messages": chat(number)} for number in range(6)]).save_to_disk(tmp_path / "saved")
    data = TextData(tokenizer, tmp_path / "saved", **sizes())
    assert (written(0) + written(2)).startswith(text_of(data.calibration, tokenizer))


def test_text_beside_messages_is_text(tmp_path, tokenizer):
    file = save(
        tmp_path / "both.jsonl", [{"text": f"text {number} " * 20, "messages": chat(number)} for number in range(4)]
    )
    assert text_of(TextData(tokenizer, file, **sizes()).calibration, tokenizer).startswith("text 0 text 0")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], r"chats\.jsonl:1 is not a chat\. Got {'role': 'user'}"),
        (["hello"], r"chats\.jsonl:1 is not a chat\. Got 'hello'"),
        ([], r"chats\.jsonl:1 is a chat without messages"),
        ([{"role": "tool", "content": "x"}], r"chats\.jsonl:1: .*template refuses the messages\. Got .*no role tool"),
        ("hello", r"chats\.jsonl:1 has no text in the field 'text'"),
    ],
)
def test_a_chat_that_cannot_be_written_is_named_by_its_line(tmp_path, tokenizer, messages, message):
    file = save(tmp_path / "chats.jsonl", [{"messages": messages}, {"messages": chat(1)}])
    with pytest.raises(CalibrationError, match=message):
        TextData(tokenizer, file, **sizes())


def test_a_tokenizer_without_a_template_is_named_with_the_remedy(tmp_path):
    file = save(tmp_path / "chats.jsonl", [{"messages": chat(number)} for number in range(6)])
    with pytest.raises(CalibrationError, match=r"chats\.jsonl:1 is a chat, .* no chat template.*chat_template\.jinja"):
        TextData(tiny_tokenizer(), file, **sizes())


def test_the_remedy_works(tmp_path, tokenizer):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    file = save(tmp_path / "chats.jsonl", [{"messages": chat(number)} for number in range(6)])
    loaded = type(tokenizer).from_pretrained(tmp_path / "tokenizer")
    assert (written(0) + written(2)).startswith(text_of(TextData(loaded, file, **sizes()).calibration, tokenizer))


def test_before_the_model_is_loaded_messages_pass_for_text(tmp_path):
    file = save(tmp_path / "chats.jsonl", [{"messages": chat(0)}])
    TextData.check({"path": file, "text_field": "text"})
