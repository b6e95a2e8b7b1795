"""Chats, the most common data to calibrate a chat model on, as the text that the model sees.

A row holds its messages in a list, ``{"messages": [{"role": "user", "content": "Hello"}, ...]}``; the tokenizer's
template writes them with the model's own marks of roles and turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_obs.app.data.files import Row, value_of
from lightning_obs.app.data.overlap import HeldOutRuns
from lightning_obs.errors import CalibrationError

#: the field in which data sets hold chats
MESSAGES = "messages"
#: roles of whoever sets the chat up
_SYSTEM = ("system", "developer")
#: between documents that are not chats
_BETWEEN = "\n\n"


class Chat(str):
    """A chat as the template writes it, with its special tokens."""

    #: characters before the first message that is not the system's: marks, date, tools, the system's prompt
    opening: int = 0


def holds_chat(row: Any, text_field: str) -> bool:
    """Whether a row has no text in its field, but messages there or in ``messages``."""
    return messages_of(row, text_field) is not None


def messages_of(row: Any, text_field: str) -> list[Any] | None:
    """The messages of a row; None for a row that is no chat."""
    if not isinstance(row, dict):
        return None
    value = row.get(text_field)
    if value is None:
        value = row.get(MESSAGES)
    return list(value) if isinstance(value, list) else None


def text_of(place: str, row: Any, text_field: str, tokenizer: Any) -> str:
    """The text of a row: what its field holds, or its chat by the tokenizer's template.

    Raises:
        CalibrationError: neither is there; the tokenizer has no template, or the template refuses the messages.
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
    require_messages(place, messages)
    try:
        chat = Chat(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program of its own, which raises anything
        raise CalibrationError(
            f"{place}: the tokenizer's chat template refuses the messages",
            got=f"{type(error).__name__}: {error}"[:300],
            remedy="mend or leave out that chat.",
        ) from error
    chat.opening = _opening(chat, messages)
    return chat


def _opening(chat: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """The length of a chat's opening; 0 where the template writes a message in other words."""
    end = 0
    for message in messages:
        content = message["content"].strip() if isinstance(message["content"], str) else ""
        start = chat.find(content, end)
        if not content or start < 0:
            return 0
        if message["role"] not in _SYSTEM:
            return start
        end = start + len(content)
    return 0


def require_messages(place: str, messages: Sequence[Any]) -> None:
    """Refuse a list that is empty, or holds anything but messages with a role and a content."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise CalibrationError(
                f"{place} is not a chat", got=repr(message)[:80], expected='messages {"role": "user", "content": "..."}'
            )
    if not messages:
        raise CalibrationError(f"{place} is a chat without messages", remedy="leave it out.")


def read_texts(rows: Sequence[Row], text_field: str, tokenizer: Any) -> list[str]:
    """:func:`text_of` of each row."""
    return [text_of(place, row, text_field, tokenizer) for place, row in rows]


def apart_from(held_out: HeldOutRuns, chats: Sequence[Any], tokenizer: Any, tokens: int) -> tuple[list[Chat], int]:
    """The first chats that no held-out chat repeats, and how many were passed over.

    A chat is left out whole, since one with a hole is no chat. Openings are not compared: many chats have the same, and
    a model that is calibrated without its system's prompt has not seen how its chats begin.

    Args:
        held_out: the runs that a chat may not have behind its opening.
        chats: in their order.
        tokenizer: counts their tokens.
        tokens: how many are enough.
    """
    apart: list[Chat] = []
    passed_over = 0
    length = 0
    for chat in chats:
        if length >= tokens:
            break
        ids = tokenizer(chat[chat.opening :], verbose=False, add_special_tokens=False).input_ids
        if held_out.shares(ids):
            passed_over += 1
        else:
            apart.append(chat)
            length += len(ids)
    return apart, passed_over


def token_ids(documents: Sequence[str], tokenizer: Any) -> list[int]:
    """The tokens of all documents, one after the other.

    Chats follow each other directly, and begin as their template says; other documents have an empty line between
    them, and the first begins as the tokenizer says.
    """
    if documents and all(isinstance(document, Chat) for document in documents):
        ids: list[int] = tokenizer("".join(documents), verbose=False, add_special_tokens=False).input_ids
    else:
        ids = tokenizer(_BETWEEN.join(documents), verbose=False).input_ids
    return ids
