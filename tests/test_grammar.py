from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchgen.grammar import Grammar, GrammarError, LLTokenizer, allowed_ids, token_trie
from batchgen.json_schema import problems
from batchgen.response_format import ResponseFormat
from tests import tokenizers
from tests.schema_suite import ACCEPTED, IMPOSSIBLE, REFUSED, Accepted, Refused

FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
"""Those that jsonschema checks without other packages."""


@pytest.fixture(scope="module")
def trie(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    directory = tokenizers.save(tokenizers.byte_level(), tmp_path_factory.mktemp("tokenizer"), bos=False)
    return token_trie(tokenizers.load(directory).to_json(), None, [1])


def grammar(trie: LLTokenizer, **fields: Any) -> Grammar:
    return Grammar(ResponseFormat(**fields), trie)


def is_valid(validator: jsonschema.Draft202012Validator, text: str) -> bool:
    """Whether a text is JSON that the schema lets through."""
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def test_the_suite_is_large_enough() -> None:
    assert len(ACCEPTED) + len(REFUSED) + len(IMPOSSIBLE) >= 60


@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_supported_schema_lets_through_what_is_valid_alone(trie: LLTokenizer, case: Accepted) -> None:
    made = grammar(trie, type="json_schema", schema=case.schema)
    validator = jsonschema.Draft202012Validator(case.schema, format_checker=FORMATS)
    for text in case.valid:
        assert made.accepts(text), text
        validator.validate(json.loads(text))
    for text in case.invalid:
        assert not made.accepts(text), text
        assert "format" in case.schema or not is_valid(validator, text), text
    for text in case.stricter:
        assert not made.accepts(text), text
        validator.validate(json.loads(text))


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_an_unsupported_schema_is_refused_with_its_path(case: Refused) -> None:
    with pytest.raises(ValueError, match="schema") as caught:
        ResponseFormat(type="json_schema", schema=case.schema)
    assert case.message in str(caught.value)


@pytest.mark.parametrize("case", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_schema_that_nothing_matches_is_refused_with_its_path(trie: LLTokenizer, case: Refused) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar(trie, type="json_schema", schema=case.schema)
    assert f"sampling.response_format.schema: {case.message}" in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    schema = {"type": "object", "properties": {"a": {"foo": 1}, "b": {"type": "int"}}}
    assert [problem.path for problem in problems(schema)] == ["/properties/a/foo", "/properties/b/type"]


def test_whole_numbers_without_bounds_may_be_kept_as_text(trie: LLTokenizer) -> None:
    made = grammar(trie, type="json_schema", schema={"type": "integer"}, integers="string")
    assert made.accepts("123456789012345678901234567890")


def test_the_order_of_properties_is_that_of_the_schema(trie: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "b"]}
    stored = ResponseFormat(type="json_schema", schema=schema).model_dump(mode="json", by_alias=True)
    made = Grammar(ResponseFormat.model_validate(json.loads(json.dumps(stored, sort_keys=True))), trie)
    assert made.accepts('{"b": null, "a": null}')
    assert not made.accepts('{"a": null, "b": null}')


def test_regex_choice_and_grammar(trie: LLTokenizer) -> None:
    assert grammar(trie, type="regex", regex="a(b|c)+").accepts("abcb")
    assert not grammar(trie, type="regex", regex="a(b|c)+").accepts("abd")
    choice = grammar(trie, type="choice", choice=("yes", 'n"o\\', "я"))
    assert all(choice.accepts(text) for text in ("yes", 'n"o\\', "я"))
    assert not choice.accepts("ye")
    balanced = grammar(trie, type="grammar", grammar='start: "(" start ")" | ""')
    assert balanced.accepts("((()))")
    assert not balanced.accepts("(()")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "regex", "regex": "(a"}, "sampling.response_format.regex: "),
        ({"type": "regex", "regex": "a(?!b)"}, "look-around"),
        ({"type": "grammar", "grammar": "start: foo"}, 'unknown name: "foo"'),
    ],
)
def test_what_cannot_be_compiled_is_refused(trie: LLTokenizer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar(trie, **fields)
    assert message in str(caught.value)


def test_a_matcher_that_comes_back_starts_anew(trie: LLTokenizer) -> None:
    made = grammar(trie, type="regex", regex="ab|cd")
    first = made.take()
    start = allowed_ids(first).tolist()
    first.consume_token(start[0])
    made.give_back(first)
    again = made.take()
    assert again is first
    assert allowed_ids(again).tolist() == start


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    directory = tokenizers.save(tokenizers.byte_level(), tmp_path)
    with pytest.raises(GrammarError, match="no end-of-sequence id"):
        token_trie(tokenizers.load(directory).to_json(), None, [])


def test_sentence_piece_works_and_word_piece_is_refused(tmp_path: Path) -> None:
    sentences = tokenizers.load(tokenizers.save(tokenizers.sentence_piece(), tmp_path / "sentences", bos=False))
    trie = token_trie(sentences.to_json(), None, [1])
    made = grammar(trie, type="json_schema", schema={"enum": ["hello world", "hello é"]})
    assert made.accepts('"hello é"')
    assert sentences.decode_completion([5], made.prefix) == ('"hello', True)
    words = tokenizers.load(tokenizers.save(tokenizers.word_piece(), tmp_path / "words", bos=False))
    with pytest.raises(GrammarError, match="grammars do not work with this tokenizer"):
        token_trie(words.to_json(), None, [1])
