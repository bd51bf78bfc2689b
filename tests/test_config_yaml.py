from __future__ import annotations

import pytest

from batchgen.config_yaml import MAX_VALUES, key_name, read_yaml, resolve_plain

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)


def problem_of(text: str) -> str:
    (problem,) = read_yaml(text, "job.yaml").problems
    return str(problem)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("", None), ("~", None), ("null", None), ("true", True), ("False", False)),
        *(("yes", "yes"), ("no", "no"), ("on", "on"), ("12", 12), ("-3", -3), ("007", 7), ("0o17", 15), ("0x1F", 31)),
        *(("1_000", "1_000"), ("1:30", "1:30"), ("2026-01-01", "2026-01-01")),
        *(("1e-4", 1e-4), (".5", 0.5), ("3.", 3.0), ("-1.5E+3", -1500.0), (".inf", float("inf")), ("1.2.3", "1.2.3")),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert resolve_plain(text) == value
    assert type(resolve_plain(text)) is type(value)


def test_quotes_and_blocks_make_text() -> None:
    document = read_yaml("a: '1'\nb: |\n  true\nc: !!str 12\n", "job.yaml")
    assert document.data == {"a": "1", "b": "true\n", "c": "12"}


def test_keys_are_text_as_written() -> None:
    assert read_yaml("1: a\nnull: b\non: c\n", "job.yaml").data == {"1": "a", "null": "b", "on": "c"}


def test_every_key_and_value_has_its_place() -> None:
    places = read_yaml("a:\n  b: [x, y]\n", "job.yaml").places
    assert places[("a", "b")].key.text == "job.yaml:2:3: "
    assert places[("a", "b")].value.text == "job.yaml:2:6: "
    assert places[("a", "b", 1)].value.text == "job.yaml:2:10: "


def test_all_duplicates_are_found_in_one_pass() -> None:
    problems = read_yaml("a: 1\na: 2\nb: {c: 1, c: 2}\na: 3\n", "job.yaml").problems
    assert [str(problem).split(";")[0] for problem in problems] == [
        "job.yaml:2:1: a: given twice, first in line 1",
        "job.yaml:3:11: b.c: given twice, first in line 3",
        "job.yaml:4:1: a: given twice, first in line 1",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\tb: 1\n", "job.yaml:2:1: a tab cannot indent or begin a value in YAML; use spaces"),
        ("a: 1\n---\nb: 2\n", "job.yaml:2:1: a second document begins here; a job file holds one, so remove the `---`"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "job.yaml:3:3: merge keys (<<) are not read; write the keys out"),
        ("a: &x\n  b: *x\n", "job.yaml:2:6: *x refers to what it stands in"),
        ("a: *x\n", "job.yaml:1:4: *x has no anchor &x before it"),
        ("a: !!python/object:os.system x\n", "job.yaml:1:4: the tag !!python/object:os.system is not read; remove it"),
        ("a: !env HOME\n", "job.yaml:1:4: the tag !env is not read; remove it"),
        ("? [a]\n: b\n", "job.yaml:1:3: a key must be a word; text that begins with {, [ or * needs quotes"),
        ("a: " + "[" * 40 + "]" * 40, "job.yaml:1:36: nested deeper than 32 levels"),
        ("[" * 200_000, "job.yaml:1:34: nested deeper than 32 levels"),
        (BOMB, f"job.yaml:4:29: more than {MAX_VALUES} values (aliases count in full)"),
        ('a: "\x07"\n', "job.yaml:1:5: the character U+0007 may not stand in YAML; write it as an escape"),
        ('a: "\\ud800"\n', "job.yaml:1:4: half of a surrogate pair is no character; write the character itself"),
        (
            "a: b: c\n",
            "job.yaml:1:5: not valid YAML: a colon where no key can stand; put text that contains `: ` in quotes",
        ),
        ("a: 1\nb\nc: 2\n", "job.yaml:3:1: not valid YAML: a key without a colon, or a wrong indentation, just above"),
        (
            'a: "b\nc: 1\n',
            "job.yaml:1:4: not valid YAML: while scanning a quoted scalar, found unexpected end of stream",
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, problem: str) -> None:
    assert problem_of(text) == problem


def test_an_alias_is_read_as_a_copy_of_what_it_names() -> None:
    document = read_yaml("a: &x [1, {b: 2}]\nc: *x\n", "job.yaml")
    assert document.data == {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}
    assert not document.problems


def test_key_name_writes_paths_as_people_do() -> None:
    assert key_name(("prompt", "messages", 0, "role")) == "prompt.messages[0].role"
