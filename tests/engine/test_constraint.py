from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchgen.engine.constraint import Constraint
from batchgen.engine.engine import Engine
from batchgen.errors import JobError
from batchgen.grammar import Grammar, allowed_ids, token_trie
from batchgen.records import Completion, PartialSample, Prompt
from batchgen.response_format import ResponseFormat
from batchgen.sampling_params import SamplingParams
from batchgen.tokenizer import Tokenizer
from tests.engine.models import random_ids, save_model
from tests.engine.running import run

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["animal", "plant"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 4},
    },
    "required": ["name", "kind", "sizes"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "plain")


def engine(directory: Path, num_blocks: int = 512, **options: Any) -> Engine:
    block_bytes = 2 * 2 * 2 * 4 * 18 * 4
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "threads": 1, **options}
    return Engine(str(directory), kv_cache_memory=num_blocks * block_bytes, **settings)


def json_params(schema: Any = SCHEMA, **controls: Any) -> SamplingParams:
    settings = {"max_tokens": 160, "seed": 3, **controls}
    return SamplingParams(response_format={"type": "json_schema", "schema": schema}, **settings)


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(token_ids=random_ids(3 + row % 9, row), row=row) for row in range(count)]


def generate(engine: Engine, count: int, params: SamplingParams) -> list[Completion]:
    done = run(engine, prompts_of(count), [params] * count)
    engine.close()
    return done


def texts(completions: list[Completion]) -> list[list[str | None]]:
    return [[sample.text for sample in completion.samples] for completion in completions]


def ids(completions: list[Completion]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in completion.samples] for completion in completions]


def assert_all_valid(completions: list[Completion], schema: Any = SCHEMA) -> None:
    for completion in completions:
        assert completion.error is None
        for sample in completion.samples:
            assert sample.text is not None
            assert sample.finish_reason == "stop"
            jsonschema.validate(json.loads(sample.text), schema)


def test_every_text_is_a_value_of_the_schema(directory: Path) -> None:
    completions = generate(engine(directory), 12, json_params(n=4))
    assert_all_valid(completions)
    assert len({text for row in texts(completions) for text in row}) > 40


def test_controls_act_beside_the_grammar(directory: Path) -> None:
    controls = {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "presence_penalty": 0.5, "temperature": 1.3}
    assert_all_valid(generate(engine(directory), 8, json_params(n=2, logit_bias={40: 2.0}, **controls)))
    assert_all_valid(generate(engine(directory), 8, json_params(temperature=0)))


def test_rows_without_a_grammar_are_not_touched_by_their_neighbours(directory: Path) -> None:
    free = SamplingParams(max_tokens=20, seed=3)
    alone = run(engine(directory), prompts_of(6), [free] * 6)
    mixed = run(engine(directory), prompts_of(6), [free if row % 2 else json_params() for row in range(6)])
    for row in (1, 3, 5):
        assert mixed[row].samples[0].token_ids == alone[row].samples[0].token_ids
        assert mixed[row].samples[0].cumulative_logprob == alone[row].samples[0].cumulative_logprob


def test_the_bytes_are_the_same_under_preemption_small_budgets_and_alone(directory: Path) -> None:
    params = json_params(n=3)
    calm = generate(engine(directory), 10, params)
    tight = engine(directory, num_blocks=100)
    pressed = run(tight, prompts_of(10), [params] * 10)
    assert tight.metrics.num_preemptions > 3
    assert ids(pressed) == ids(calm)
    small = generate(engine(directory, max_batch_tokens=5, max_sequences=4), 10, params)
    assert ids(small) == ids(calm)
    lone = engine(directory)
    assert ids([run(lone, [prompt], [params])[0] for prompt in prompts_of(10)]) == ids(calm)
    for one, other in zip(pressed, calm, strict=True):
        assert [s.cumulative_logprob for s in one.samples] == [s.cumulative_logprob for s in other.samples]


def test_resumed_from_any_step_the_ids_are_the_same(directory: Path) -> None:
    params = json_params(n=2)
    calm = generate(engine(directory), 3, params)
    broken = engine(directory)
    for prompt in prompts_of(3):
        broken.add(prompt, params)
    noted: list[dict[int, list[PartialSample]]] = []
    while broken.num_unfinished:
        broken.step()
        noted.append(dict(broken.partials()))
    for partials in noted[3::25]:
        rest = prompts_of(3)
        for index, samples in partials.items():
            rest[index].partial = samples
        again = run(engine(directory), rest, [params] * 3)
        assert ids(again) == ids(calm)
        assert [s.cumulative_logprob for c in again for s in c.samples] == [
            s.cumulative_logprob for c in calm for s in c.samples
        ]


def test_what_the_grammar_forces_takes_no_steps_of_its_own(directory: Path) -> None:
    schema = {"type": "object", "properties": {"a_long_property_name": {"enum": ["one", "two"]}}, "required": []}
    schema["required"] = ["a_long_property_name"]
    fast = engine(directory)
    (completion,) = run(fast, prompts_of(1), [json_params(schema)])
    assert_all_valid([completion], schema)
    num_tokens = len(completion.samples[0].token_ids)
    assert fast.metrics.num_forced_tokens == num_tokens - 1
    assert fast.metrics.num_steps == 1


def test_with_logprobs_the_ids_are_the_same_and_every_token_has_its_own(directory: Path) -> None:
    plain = generate(engine(directory), 2, json_params(n=2))
    asked = generate(engine(directory), 2, json_params(n=2, logprobs=2))
    assert ids(asked) == ids(plain)
    for completion, other in zip(asked, plain, strict=True):
        for sample, twin in zip(completion.samples, other.samples, strict=True):
            assert sample.logprobs is not None
            assert [entries[0].token_id for entries in sample.logprobs] == sample.token_ids
            assert all(len(entries) >= 2 for entries in sample.logprobs)
            assert sample.cumulative_logprob == pytest.approx(twin.cumulative_logprob, abs=1e-4)
            assert sample.cumulative_logprob >= sum(entries[0].logprob for entries in sample.logprobs)


def test_a_value_without_a_choice_is_written_without_a_step(directory: Path) -> None:
    ready = engine(directory)
    completions = run(ready, prompts_of(2), [json_params({"const": {"a": [1, None]}}, n=2)] * 2)
    assert texts(completions) == [['{"a": [1, null]}'] * 2] * 2
    assert ready.metrics.num_steps == 0


def test_a_text_that_is_cut_is_an_error_and_is_kept(directory: Path) -> None:
    (completion,) = generate(engine(directory), 1, json_params(max_tokens=20))
    assert completion.error is not None
    assert completion.error.code == "incomplete_json"
    assert "20 tokens" in completion.error.message
    text = completion.samples[0].text
    assert text is not None
    assert text.startswith('{"name": "')
    assert completion.samples[0].finish_reason == "length"
    (longer,) = generate(engine(directory), 1, json_params(max_tokens=20, on_incomplete="retry"))
    assert len(longer.samples[0].token_ids) == 40
    assert str(longer.samples[0].text).startswith(text)


def test_a_retry_has_room_to_become_whole(directory: Path) -> None:
    whole = generate(engine(directory), 6, json_params())
    longest = max(len(completion.samples[0].token_ids) for completion in whole)
    half = json_params(max_tokens=-(-longest // 2), on_incomplete="retry")
    assert ids(generate(engine(directory), 6, half)) == ids(whole)


@pytest.mark.parametrize(
    ("form", "check"),
    [
        ({"type": "regex", "regex": "[a-c]{2}-[0-9]+"}, lambda text: text[2] == "-" and text[3:].isdigit()),
        ({"type": "choice", "choice": ["yes", "no", 'it"s'] }, lambda text: text in ("yes", "no", 'it"s')),
        ({"type": "grammar", "grammar": 'start: "(" start ")" | "x"'}, lambda text: text.strip("()") == "x"),
    ],
    ids=["regex", "choice", "grammar"],
)  # fmt: skip
def test_other_forms(directory: Path, form: dict[str, Any], check: Any) -> None:
    params = SamplingParams(response_format=form, max_tokens=60, seed=1, n=2)
    for completion in generate(engine(directory), 6, params):
        if completion.error is None:
            assert all(check(sample.text) for sample in completion.samples)
        else:
            assert completion.error.code == "incomplete_text"


def test_what_ends_by_choice_ends_with_an_end_of_sequence_id(directory: Path) -> None:
    params = SamplingParams(response_format={"type": "regex", "regex": "a+"}, max_tokens=400, seed=1)
    for completion in generate(engine(directory), 4, params):
        (sample,) = completion.samples
        assert completion.error is None
        assert sample.text == "a" * (len(sample.token_ids) - 1)
        assert sample.token_ids[-1] == 1


def test_best_of_prefers_whole_texts(directory: Path) -> None:
    for completion in generate(engine(directory), 4, json_params(n=1, best_of=4, max_tokens=60)):
        if completion.error is not None:
            assert all(sample.finish_reason == "length" for sample in completion.samples)


def test_a_grammar_that_cannot_be_compiled_is_refused(directory: Path) -> None:
    none = {"allOf": [{"type": "string"}, {"type": "null"}]}
    with pytest.raises(JobError, match=r"sampling\.response_format\.schema: /properties/a: Unsatisfiable"):
        engine(directory).check_params(json_params({"type": "object", "properties": {"a": none}, "required": ["a"]}))


def test_a_matcher_that_met_its_limits_is_replaced_before_the_row_is_an_error(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    form = ResponseFormat(type="regex", regex="[ab]+c")
    grammar = Grammar(form, token_trie(tokenizer.to_json(), None, [1]))
    worn = grammar.take()
    grammar.give_back(worn)
    constraint = Constraint(grammar)
    assert constraint.matcher is worn
    first, second = (int(allowed_ids(grammar.take(fresh=True))[place]) for place in (0, 1))
    constraint.accept([first])
    allowed = allowed_ids(constraint.matcher).tolist()
    worn.consume_token(1)
    assert worn.is_error()
    constraint.recover()
    assert constraint.error is None
    assert allowed_ids(constraint.matcher).tolist() == allowed
    constraint.accept([1])
    assert constraint.error is not None
    assert constraint.error.code == "grammar_limit"
    assert second in allowed
