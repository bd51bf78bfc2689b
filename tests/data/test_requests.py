from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from batchgen.config import PromptConfig
from batchgen.data.chat_template import ChatTemplate
from batchgen.data.input_rows import RowFailure
from batchgen.data.requests import parameters_of, request_of, with_parameters
from batchgen.data.template import PromptTemplate
from batchgen.sampling_params import BeamParams, SamplingParams

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NOW = datetime.datetime(2026, 1, 2)


def template(
    chat: str | None = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[A]",
) -> PromptTemplate:
    chat_template = None if chat is None else ChatTemplate(chat, {"bos_token": "<s>"}, NOW)
    return PromptTemplate(PromptConfig(request_column="body"), chat_template, control_tokens=("<s>", "[A]"), now=NOW)


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_a_request_is_a_chat_or_a_text(form: Any) -> None:
    chat = template().render({"body": form(CHAT)})
    assert (chat.text, chat.add_special_tokens) == ("<s>[user]hi[A]", False)
    text = template().render({"body": form({"prompt": "hi", "messages": None})})
    assert (text.text, text.add_special_tokens) == ("hi", True)


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_control_tokens_of_a_request_are_text_also_where_it_is_json(form: Any) -> None:
    body = {"messages": [{"role": "user", "content": '[A]"\\'}]}
    made = template().render({"body": form(body)})
    assert made.text == '<s>[user][A]"\\[A]'
    assert [made.text[start:stop] for start, stop in made.literals] == ["[", "]"]


def test_without_a_chat_template_a_chat_is_an_error_row_and_a_text_is_not() -> None:
    assert template(None).render({"body": {"prompt": "hi"}}).text == "hi"
    with pytest.raises(RowFailure, match="bad_request: the request has messages, but the model has no chat template"):
        template(None).render({"body": CHAT})


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "null_prompt: column 'body' is null"),
        ("{", "bad_request: column 'body' holds text that is no JSON object"),
        ([1], "bad_request: column 'body' holds an array, not the body of a request"),
        ({}, "bad_request: the request must have either messages or a prompt"),
        ({**CHAT, "prompt": "x"}, "bad_request: the request must have either messages or a prompt"),
        ({"prompt": [1, 2]}, "bad_request: the prompt is an array, not a string"),
        ('{"prompt": "x", "prompt": "y"}', "duplicate_key: the key 'prompt' stands twice in one object"),
        ('{"prompt": "x", "min_p": NaN}', "bad_json: NaN is not JSON; write null"),
        ('{"prompt": "\\ud83d"}', "invalid_utf8: \\ud83d is half of a surrogate pair, which is no character"),
        (
            '{"prompt": "x", "stop": "\\ud83d"}',
            "invalid_utf8: \\ud83d is half of a surrogate pair, which is no character",
        ),
        ('{"prompt": "x", "\\udc00": 1}', "invalid_utf8: \\udc00 is half of a surrogate pair, which is no character"),
    ],
)
def test_each_fault_of_a_request_has_its_code(value: Any, error: str) -> None:
    with pytest.raises(RowFailure) as raised:
        request_of(value, "body")
    assert str(raised.value) == error


def test_what_a_request_asks_for_stands_before_the_jobs_sampling() -> None:
    base = SamplingParams(temperature=0.5, max_tokens=100, top_k=5)
    body = {
        **CHAT,
        "model": "any",
        "max_completion_tokens": 7,
        "temperature": 0,
        "stop": "\n",
        "n": 2,
        "seed": 3,
        "logit_bias": {"5": -100},
        "stream": False,
        "user": "u",
    }
    asked = parameters_of(body, base)
    assert asked == {"max_tokens": 7, "temperature": 0, "stop": ["\n"], "n": 2, "seed": 3, "logit_bias": {"5": -100}}
    params = with_parameters(base, asked)
    assert params == SamplingParams(
        temperature=0, max_tokens=7, top_k=5, stop=("\n",), n=2, seed=3, logit_bias={5: -100}
    )
    assert parameters_of(CHAT, base) == {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": -1}, "temperature: must be >= 0, got -1; use 0 for greedy"),
        ({"temperature": "0.5"}, "temperature is a string"),
        ({"n": True}, "n is a boolean"),
        ({"max_tokens": 1.5}, "max_tokens is a number"),
        ({"stream": True}, "'stream' is not read from requests; see to it in the job's sampling"),
        ({"tools": []}, "'tools' is not read from requests; see to it in the job's sampling"),
        ({"response_format": {"type": "json_object"}}, "'response_format' is not read"),
        ({"stop": ["a", 1]}, "stop[1]: must be text, got 1"),
        ({"logit_bias": {"x": 1}}, 'logit_bias: every key must be a token id, from 0 to 2147483647, got the text "x"'),
        ({"logit_bias": {"01": 1}}, "logit_bias: every key must be a token id"),
        ({"logit_bias": {"1": "a"}}, 'logit_bias.1: must be a number, got the text "a"'),
        ({"stop": [""]}, "stop and bad_words must not hold an empty string"),
    ],
)
def test_what_a_request_may_not_ask_for_is_its_error(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RowFailure) as raised:
        parameters_of({**CHAT, **body}, SamplingParams())
    assert str(raised.value).startswith(f"bad_parameters: {message}")


def test_a_request_must_go_with_the_jobs_beams() -> None:
    with pytest.raises(RowFailure, match="bad_parameters: n goes with sampling, not with beam"):
        parameters_of({**CHAT, "n": 2}, SamplingParams(beam=BeamParams(width=2)))
