"""Templates run without reach into Python, and what they write is what they say."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from batchgen.data.input_rows import RowFailure
from batchgen.data.sandbox import chat_environment, compile_template, render, row_environment
from batchgen.errors import JobError

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)


def written(source: str, **values: Any) -> str:
    return render(compile_template(row_environment(NOW), source, "prompt.template"), values)


def failure(source: str, **values: Any) -> str:
    with pytest.raises(RowFailure) as caught:
        written(source, **values)
    assert caught.value.error.code == "template_error"
    return caught.value.error.message


@pytest.mark.parametrize(
    ("source", "values", "text"),
    [
        ("Q: {{ q }}\nA:\n", {"q": "<b>&"}, "Q: <b>&\nA:\n"),
        ("{{ d.items }}|{{ d.keys() | list }}", {"d": {"items": 3}}, '3|["items"]'),
        ("{{ l }} {{ d }}", {"l": ["é", None], "d": {"a": True}}, '["é", null] {"a": true}'),
        ("{{ d | tojson }}", {"d": {"a": "<é>"}}, '{"a": "<é>"}'),
        ("{% for x in l %}{% if x > 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", {"l": [1, 2, 3]}, "12"),
        ("{{ strftime_now('%Y-%m-%d') }}", {}, "2026-01-02"),
        ("{{ n or 'none' }}{% if n %}x{% endif %}", {"n": None}, "none"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}", {}, "2"),
        ("{{ 1.5 }} {{ true }} {{ 7 }}", {}, "1.5 True 7"),
    ],
)
def test_a_template_writes_what_it_says(source: str, values: dict[str, Any], text: str) -> None:
    assert written(source, **values) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ missing }}", "line 2 of the template: 'missing' is undefined"),
        ("{{ null }}", "line 1 of the template: prints a value that is null"),
        ("{{ text.upper }}", "prints a function"),
        ("{{ data }}", "prints bytes"),
        ("{{ 1 / zero }}", "line 1 of the template: ZeroDivisionError: division by zero"),
        ("{{ raise_exception('not today') }}", "line 1 of the template: not today"),
        ("{{ text.__class__ }}", "unsafe"),
        ("{{ text.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ ''.format.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__}'.format(text) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{{ values.append(1) }}", "unsafe|not safely callable"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_what_a_template_may_not_do_is_a_row_error(source: str, message: str) -> None:
    with pytest.raises(RowFailure, match=message) as caught:
        written(source, text="x", data=b"x", zero=0, values=[], null=None)
    assert caught.value.error.code == "template_error"


def test_no_address_of_memory_reaches_a_message() -> None:
    assert "0x" not in failure("{{ f | tojson }}", f=object())


def test_what_a_template_writes_is_bounded() -> None:
    template = compile_template(row_environment(NOW), "{% for i in range(100) %}{{ text }}{% endfor %}", "key")
    assert len(render(template, {"text": "x"}, limit=100)) == 100
    with pytest.raises(RowFailure, match="writes more than 99 characters"):
        render(template, {"text": "x"}, limit=99)


@pytest.mark.parametrize("source", ["a\n\n{% if %}", "\n\n{{ x | nofilter }}", "\n\n{% unknown %}"])
def test_a_template_that_does_not_compile_is_a_job_error_with_its_line(source: str) -> None:
    with pytest.raises(JobError, match=r"prompt\.template: line 3 of the template: "):
        compile_template(row_environment(NOW), source, "prompt.template")


@pytest.mark.parametrize("source", ["{{ 'ab' | random }}", "{{ lipsum() }}"])
def test_nothing_draws_at_random_since_a_run_that_goes_on_must_make_the_same_prompt(source: str) -> None:
    with pytest.raises((JobError, RowFailure), match=r"random|lipsum"):
        written(source)


def test_chat_templates_get_what_transformers_gives_them() -> None:
    source = "{% for m in messages %}\n  {% generation %}\n[{{ m }}]\n  {% endgeneration %}\n{% endfor %}\n"
    text = render(compile_template(chat_environment(NOW), source, "key"), {"messages": ["a", None]})
    assert text == "[a]\n[None]\n"
    assert render(compile_template(chat_environment(NOW), "{{ undefined_name }}", "key"), {}) == ""
    indented = render(compile_template(chat_environment(NOW), "{{ m | tojson(indent=2) }}", "key"), {"m": {"a": [1]}})
    assert indented == json.dumps({"a": [1]}, indent=2)
