"""Chats that rows hold are checked before a chat template sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen.data.chat_messages import chat_of, joined_parts
from batchgen.data.input_rows import RowFailure

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("value", [CHAT, json.dumps(CHAT)])
def test_a_chat_is_a_list_or_its_json(value: Any) -> None:
    assert chat_of(value, "chat") == CHAT


def test_other_fields_of_a_message_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert chat_of([call, {"role": "tool", "content": "1", "name": "f"}], "chat") == [
        call,
        {"role": "tool", "content": "1", "name": "f"},
    ]


def test_parts_of_text_are_kept_without_what_a_struct_adds() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    (message,) = chat_of([{"role": "user", "content": parts}], "chat")
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert joined_parts(message["content"]) == "a\nb"


@pytest.mark.case(20)
@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        (None, "null_prompt", "column 'chat' is null"),
        ([], "empty_prompt", "holds no messages"),
        ({}, "bad_messages", "holds an object, not a list"),
        (7, "bad_messages", "holds a number, not a list"),
        ("hello", "bad_messages", "text that is no JSON list"),
        ("[" * 100_000, "bad_messages", "text that is no JSON list"),
        ('"hello"', "bad_messages", "holds a string, not a list"),
        ('[{"role": "user", "content": "\\ud83d"}]', "invalid_utf8", "half of a surrogate pair"),
        (["hi"], "bad_messages", "message 0 is a string, not an object"),
        ([*CHAT, {"content": "x"}], "bad_messages", "message 1 has no role"),
        ([{"role": "user", "content": None}], "bad_messages", "message 0 has no content"),
        ([{"role": "user", "content": 7}], "bad_messages", "content of message 0 is a number"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "unknown_content_part", "of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "unknown_content_part", "without a type"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "unknown_content_part", "of type 'text'"),
    ],
)
def test_each_fault_of_a_chat_has_its_code(value: Any, code: str, message: str) -> None:
    with pytest.raises(RowFailure, match=message) as caught:
        chat_of(value, "chat")
    assert caught.value.error.code == code
