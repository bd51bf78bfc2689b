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


@pytest.mark.case(13)
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


@pytest.mark.case(14)
def test_a_role_that_the_template_refuses_is_a_job_error_in_the_templates_words() -> None:
    template = ChatTemplate(GEMMA_LIKE, {"bos_token": "<bos>"}, NOW)
    template.probe(["user", "assistant"])
    with pytest.raises(JobError, match=r"does not take messages by system, user: .*System role not supported"):
        template.probe(["system", "user"])


@pytest.mark.case(14)
def test_a_row_that_the_template_refuses_is_a_row_error() -> None:
    template = ChatTemplate("{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}", {}, NOW)
    with pytest.raises(RowFailure, match=r"template_error: line 1 of the template: no x"):
        template.render([{"role": "user", "content": "x"}])


def test_the_date_is_the_start_of_the_job() -> None:
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, NOW).render([]) == "02 Jan 2026"


def test_a_broken_chat_template_is_a_job_error_that_names_it() -> None:
    with pytest.raises(JobError, match=r"prompt\.chat_template: line 1 of the template"):
        ChatTemplate("{% for %}", {}, NOW, "prompt.chat_template")


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
TAKES_PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
TAKES_TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TAKES_BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.case(20)
@pytest.mark.parametrize(
    ("source", "parts", "text"),
    [(TAKES_PARTS, "[a][b]", "[a]"), (TAKES_TEXT, "a\nb", "a"), (TAKES_BOTH, "[a][b]", "a")],
)
def test_content_is_given_in_the_form_that_the_template_takes(source: str, parts: str, text: str) -> None:
    template = ChatTemplate(source, {}, NOW)
    assert template.render(PARTS) == parts
    assert template.render([{"role": "user", "content": "a"}]) == text


def test_reasoning_has_the_names_that_transformers_gives_it(reference: PreTrainedTokenizerFast) -> None:
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }}{% endfor %}"
    for name in ("thinking", "reasoning_content", "reasoning"):
        chat = [{"role": "assistant", "content": "x", name: "why"}]
        expected = reference.apply_chat_template(chat, tokenize=False, chat_template=source)
        assert ChatTemplate(source, {}, NOW).render(chat) == expected


def test_a_prefill_continues_as_transformers_continues_a_final_message(
    smollm2: Path, reference: PreTrainedTokenizerFast
) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    template = ChatTemplate(reference.chat_template, reference.special_tokens_map, NOW)
    assert template.render(chat[:1], "The answer is") == reference.apply_chat_template(
        chat, tokenize=False, continue_final_message=True
    )


def test_variables_and_tools_reach_the_template_that_reads_them() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quick {% endif %}{{ tools | tojson }}"
    template = ChatTemplate(source, {}, NOW, kwargs={"enable_thinking": False}, tools=[{"name": "é"}])
    assert template.render([]) == 'quick [{"name": "é"}]'


def test_variables_and_tools_that_the_template_does_not_read_are_refused() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{% for m in messages %}{% endfor %}"
    with pytest.raises(JobError, match="reads no 'enable_thought'; did you mean 'enable_thinking'"):
        ChatTemplate(source, {"bos_token": "<s>"}, NOW, kwargs={"enable_thought": True})
    for name in ("messages", "bos_token"):
        with pytest.raises(JobError, match=f"reads no '{name}'"):
            ChatTemplate(source, {"bos_token": "<s>"}, NOW, kwargs={name: "x"})
    with pytest.raises(JobError, match="takes no tools"):
        ChatTemplate(source, {}, NOW, tools=[])
