"""Chat templates give the text that transformers gives."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from batchgen.data.chat_template import ChatTemplate
from batchgen.data.input_rows import RowFailure
from batchgen.errors import JobError
from batchgen.tokenizer import RenderedPrompt, Tokenizer

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
GEMMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ message['role'] }}\n{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA_LIKE = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Name three primes."}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "é\n"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "tool_calls": None},
        {"role": "user", "content": ""},
    ],
]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(smollm2))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [None, GEMMA_LIKE, LLAMA_LIKE], ids=["the model's", "gemma", "llama"])
def test_text_and_ids_equal_those_of_transformers(
    smollm2: Path, reference: PreTrainedTokenizerFast, source: str | None, chat: list[dict[str, Any]]
) -> None:
    if source == GEMMA_LIKE and chat[0]["role"] == "system":
        return
    tokenizer = Tokenizer.from_directory(smollm2)
    assert tokenizer is not None
    template = ChatTemplate(source or tokenizer.chat_template or "", tokenizer.special_tokens_map, NOW)
    asked = {"chat_template": source, "add_generation_prompt": True}
    text = template.render(chat)
    assert text == reference.apply_chat_template(chat, tokenize=False, **asked)
    ids = tokenizer.encode_batch([RenderedPrompt(text, (), add_special_tokens=False)])[0]
    assert ids == reference.apply_chat_template(chat, tokenize=True, return_dict=False, **asked)


def test_a_role_that_the_template_refuses_is_a_job_error_in_the_templates_words() -> None:
    template = ChatTemplate(GEMMA_LIKE, {"bos_token": "<bos>"}, NOW)
    template.probe(["user", "assistant"])
    with pytest.raises(JobError, match=r"does not take messages by system, user: .*System role not supported"):
        template.probe(["system", "user"])


def test_a_row_that_the_template_refuses_is_a_row_error() -> None:
    template = ChatTemplate("{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}", {}, NOW)
    with pytest.raises(RowFailure, match=r"template_error: line 1 of the template: no x"):
        template.render([{"role": "user", "content": "x"}])


def test_the_date_is_the_start_of_the_job() -> None:
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, NOW).render([]) == "02 Jan 2026"


def test_a_broken_chat_template_is_a_job_error_that_names_it() -> None:
    with pytest.raises(JobError, match=r"prompt\.chat_template: line 1 of the template"):
        ChatTemplate("{% for %}", {}, NOW, "prompt.chat_template")
