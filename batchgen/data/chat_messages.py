"""Chats that rows hold: lists of messages, checked before a chat template sees them."""

from __future__ import annotations

from typing import Any

from batchgen.data.input_rows import RowFailure
from batchgen.data.json_text import parsed

ChatMessage = dict[str, Any]
"""`role`, `content` and what else the template reads."""

_TYPE_NAMES = {
    type(None): "null",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}


def chat_of(value: Any, column: str) -> list[ChatMessage]:
    """The messages of a row; RowFailure `null_prompt`, `empty_prompt`, `bad_messages` or `unknown_content_part`.

    A content is text, or a list of parts of type text; other fields of a message are kept as they are.
    """
    if value is None:
        raise RowFailure("null_prompt", f"column {column!r} is null")
    if isinstance(value, str):
        value = messages_of(value, column)
    if not isinstance(value, list):
        raise RowFailure("bad_messages", f"column {column!r} holds {type_name(value)}, not a list of messages")
    if not value:
        raise RowFailure("empty_prompt", f"column {column!r} holds no messages")
    return [_message(message, index) for index, message in enumerate(value)]


def messages_of(text: str, column: str) -> Any:
    """What JSON text stands for; RowFailure `bad_messages` where it is no JSON."""
    try:
        return parsed(text)
    except (ValueError, RecursionError) as error:
        raise RowFailure("bad_messages", f"column {column!r} holds text that is no JSON list") from error


def _message(message: Any, index: int) -> ChatMessage:
    if not isinstance(message, dict):
        raise RowFailure("bad_messages", f"message {index} is {type_name(message)}, not an object")
    if not isinstance(message.get("role"), str):
        raise RowFailure("bad_messages", f"message {index} has no role")
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise RowFailure("bad_messages", f"message {index} has no content")
    elif isinstance(content, list):
        content = [_part(part, index) for part in content]
    elif not isinstance(content, str):
        raise RowFailure("bad_messages", f"the content of message {index} is {type_name(content)}, not text")
    return {**message, "content": content}


def _part(part: Any, index: int) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        what = f"of type {kind!r}" if isinstance(kind, str) else "without a type"
        raise RowFailure(
            "unknown_content_part", f"message {index} has a part {what}; only parts of type 'text' are read"
        )
    return {"type": "text", "text": part["text"]}


def joined_parts(parts: list[dict[str, str]]) -> str:
    """The parts of a content as one text, a line break between them."""
    return "\n".join(part["text"] for part in parts)


def type_name(value: Any) -> str:
    """A value's type in JSON's words where it has one."""
    return _TYPE_NAMES.get(type(value), f"a value of type {type(value).__name__}")
