"""Chats as text: the tokenizer's template writes the messages with the model's marks of roles and turns.

A row of data holds a chat as ``{"messages": [{"role": "user", "content": "Hello"}, ...]}``. ``TextData``
(``module.py``) reads rows, chats or not, by :func:`read_texts` and tokenizes them by :func:`chat_token_ids` or
:func:`text_token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_obs.app.data.files import Row, value_of
from lightning_obs.app.data.overlap import HeldOutRuns
from lightning_obs.errors import CalibrationError

#: the field in which data sets hold chats
MESSAGES = "messages"
#: roles of messages that set the chat up
_SYSTEM_ROLES = ("system", "developer")
#: between documents that are not chats
_EMPTY_LINE = "\n\n"


class Chat(str):
    """The text of a chat as the tokenizer's template writes it, with the special tokens.

    :func:`text_of` makes it. ``TextData`` recognizes chats among texts by this class.
    """

    #: characters before the first message that is no system message: marks, date, tools, the system's prompt
    opening: int = 0


def holds_chat(row: Any, text_field: str) -> bool:
    """Whether a row of data holds a list of messages where :func:`messages_of` looks for it.

    ``TextData.check`` calls it with the first row, before the model and its tokenizer are loaded.
    """
    return messages_of(row, text_field) is not None


def messages_of(row: Any, text_field: str) -> list[Any] | None:
    """Return the messages of a row of data, which may be an empty list; None for a row without a chat.

    :func:`text_of` and :func:`holds_chat` call it. The messages are a list in ``text_field``, or in ``messages`` if the
    row has no ``text_field`` or has null there.

    Args:
        row: an object of a file.
        text_field: the field of the text.
    """
    if not isinstance(row, dict):
        return None
    value = row.get(text_field)
    if value is None:
        value = row.get(MESSAGES)
    return list(value) if isinstance(value, list) else None


def text_of(place: str, row: Any, text_field: str, tokenizer: Any) -> str:
    """Return the text of a row of data: the content of its field, or its chat as the tokenizer's template writes it.

    :func:`read_texts` calls it for each row.

    Args:
        place: file and line of the row, for errors.
        row: an object of a file.
        text_field: the field that holds the text.
        tokenizer: a transformers tokenizer.

    Raises:
        CalibrationError: a row without text and messages; a tokenizer without a template; a template that refuses the
            messages.
    """
    messages = messages_of(row, text_field)
    if messages is None:
        text: str = value_of(place, row, text_field)
        return text
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(
            f"{place} is a chat, and the tokenizer has no chat template to write it with",
            expected="the tokenizer of a chat model: chat_template.jinja beside it, or chat_template in its "
            "tokenizer_config.json",
            remedy="calibrate the chat model, add its template to the tokenizer's folder, or write the chats as text "
            "and name their field: data.text_field=...",
        )
    _refuse_wrong_messages(place, messages)
    try:
        chat = Chat(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program, which may raise any exception
        raise CalibrationError(
            f"{place}: the tokenizer's chat template refuses the messages",
            got=f"{type(error).__name__}: {error}"[:300],
            remedy="mend or leave out that chat.",
        ) from error
    chat.opening = _opening(chat, messages)
    return chat


def _opening(chat: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """The length of a chat's opening in characters: the position of the first message that is no system message.

    Args:
        chat: the text that the template made.
        messages: the messages of the chat.

    Returns:
        0 if a message's text is empty or not found in the chat, because the template changes it, or if all are the
        system's.
    """
    end = 0
    for message in messages:
        content = message["content"]
        text = content.strip() if isinstance(content, str) else ""
        start = chat.find(text, end)
        if not text or start < 0:
            return 0
        if message["role"] not in _SYSTEM_ROLES:
            return start
        end = start + len(text)
    return 0


def _refuse_wrong_messages(place: str, messages: Sequence[Any]) -> None:
    """Raise for an empty list, and for messages without a role or a content."""
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        if not is_message:
            raise CalibrationError(
                f"{place} is not a chat", got=repr(message)[:80], expected='messages {"role": "user", "content": "..."}'
            )
    if not messages:
        raise CalibrationError(f"{place} is a chat without messages", remedy="leave it out.")


def read_texts(rows: Sequence[Row], text_field: str, tokenizer: Any) -> list[str]:
    """Return the text of each row of data; ``TextData`` calls it with the rows of a file, before it makes tokens.

    Args:
        rows: each with its place.
        text_field, tokenizer: as for :func:`text_of`.
    """
    return [text_of(place, row, text_field, tokenizer) for place, row in rows]


def chats_apart_from(
    held_out: HeldOutRuns, chats: Sequence[Chat], tokenizer: Any, enough_tokens: int
) -> tuple[list[Chat], int]:
    """Choose chats to calibrate or train on: the first that share no run of tokens with the held-out chats.

    ``TextData`` calls this for chats. A chat is left out whole, since half a chat is not a chat. Openings are not
    compared: many chats have the same opening (date, tools, system prompt), and a model that is calibrated without
    openings would not see how its chats begin.

    Args:
        held_out: runs of the held-out chats.
        chats: the chats in their order.
        tokenizer: the tokenizer of the model.
        enough_tokens: the number of tokens at which enough chats are chosen; the chats after them are not looked at.

    Returns:
        The chosen chats, and how many of the chats that were looked at were left out.
    """
    usable: list[Chat] = []
    repeated = 0
    tokens = 0
    for chat in chats:
        if tokens >= enough_tokens:
            break
        ids = tokenizer(chat[chat.opening :], verbose=False, add_special_tokens=False).input_ids
        if held_out.shares(ids):
            repeated += 1
        else:
            usable.append(chat)
            tokens += len(ids)
    return usable, repeated


def chat_token_ids(chats: Sequence[Chat], tokenizer: Any) -> list[int]:
    """The token ids of chats as one sequence, which ``TextData`` cuts into blocks.

    Called if all documents are chats. The chats follow each other directly; their special tokens are those of the
    template.
    """
    ids: list[int] = tokenizer("".join(chats), verbose=False, add_special_tokens=False).input_ids
    return ids


def text_token_ids(documents: Sequence[str], tokenizer: Any) -> list[int]:
    """The token ids of texts, and chats among them, as one sequence, which ``TextData`` cuts into blocks.

    Called unless all documents are chats. An empty line separates documents. The tokenizer adds no special tokens:
    :func:`~.text_blocks.cut_into_blocks` begins each block with the one that the model expects.
    """
    ids: list[int] = tokenizer(_EMPTY_LINE.join(documents), verbose=False, add_special_tokens=False).input_ids
    return ids
