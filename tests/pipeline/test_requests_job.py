"""A job of OpenAI requests from JSON lines to JSON lines, over a fake engine and the real child that renders."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.commands.convert import convert
from batchgen.config import JobConfig
from batchgen.errors import JobError, OutputUnavailable
from batchgen.pipeline.ports import FeederLike, FeedRequest, ModelFiles, Services
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import make_feeder
from batchgen.records import Prompt
from tests.data.reading import write_jsonl
from tests.pipeline.fakes import FakeEngine
from tests.pipeline.prompts import model_directory

USER = {"role": "user", "content": "hi"}


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


class NotingEngine(FakeEngine):
    """Keeps the prompts that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Prompt] = []

    def add(self, prompt: Prompt) -> int:
        self.prompts.append(prompt)
        # The fake one fails prompts with token 0, which is the BOS of these tests.
        return super().add(replace(prompt, token_ids=[token_id + 1 for token_id in prompt.token_ids or ()]))


def run(base: Path, rows: list[Any], id_column: str | None = "custom_id", **output: Any) -> NotingEngine:
    write_jsonl(base / "in.jsonl", rows)
    model = model_directory(base)
    engine = NotingEngine()

    def feeder(asked: FeedRequest) -> FeederLike:
        return make_feeder(asked._replace(model_directory=model))

    job = JobConfig.model_validate(
        {
            "version": 1,
            "model": {"path": "org/model"},
            "input": {"path": "in.jsonl", "id_column": id_column},
            "prompt": {"request_column": "body"},
            "sampling": {"max_tokens": 50, "seed": 1},
            "output": {"path": "out", "shard_rows": 2, **output},
        }
    ).model_copy(update={"base_dir": base})
    services = Services(
        find_model=lambda job, known: ModelFiles(model, {}), make_engine=lambda job, path: engine, make_feeder=feeder
    )
    run_job(job, services=services)
    return engine


def exported(base: Path) -> tuple[list[Any], list[Any]]:
    answers, errors = base / "answers.jsonl", base / "errors.jsonl"
    convert(base / "out", answers, "openai-batch", errors=errors, overwrite=True)
    answer_lines, error_lines = (path.read_text().splitlines() for path in (answers, errors))
    return [json.loads(line) for line in answer_lines], [json.loads(line) for line in error_lines]


ROWS = [
    request("a", messages=[USER], max_tokens=5, temperature=0),
    request("b", prompt="hi", n=2),
    request("c", messages=[USER], stream=True),
    request("d", messages=[]),
    request("e", messages=[USER]),
]


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_requests_become_answers_and_errors_in_the_same_form(tmp_path: Path, samples: str) -> None:
    engine = run(tmp_path, ROWS, samples=samples)
    params = {prompt.row: prompt.params for prompt in engine.prompts}
    assert {row: (each.max_tokens, each.temperature, each.n) for row, each in params.items() if each} == {
        0: (5, 0.0, 1),
        1: (50, 1.0, 2),
        4: (50, 1.0, 1),
    }
    answers, errors = exported(tmp_path)
    assert [line["custom_id"] for line in answers] == ["a", "b", "e"]
    first, second, _ = (line["response"]["body"] for line in answers)
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in answers)
    assert (first["object"], second["object"], first["model"]) == ("chat.completion", "text_completion", "org/model")
    assert first["choices"][0]["message"]["role"] == "assistant"
    assert first["choices"][0]["finish_reason"] == "stop"
    assert [choice["index"] for choice in second["choices"]] == [0, 1]
    texts = [choice["text"] for choice in second["choices"]]
    assert second["usage"]["completion_tokens"] == sum(len(text.split()) for text in texts)
    assert second["usage"]["total_tokens"] == second["usage"]["completion_tokens"] + 3  # <s>, h, i
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in errors] == [
        ("c", None, "bad_parameters"),
        ("d", None, "empty_prompt"),
    ]


def test_the_same_output_gives_the_same_bytes_and_half_a_file_is_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, ROWS)
    exported(tmp_path)
    before = (tmp_path / "answers.jsonl").read_bytes()
    exported(tmp_path)
    assert (tmp_path / "answers.jsonl").read_bytes() == before

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "answers.jsonl"))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputUnavailable, match="cannot be written: No space left on device; choose another file"):
        exported(tmp_path)
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert not list(tmp_path.glob(".*jsonl*"))


def test_rows_without_ids_are_named_by_their_place(tmp_path: Path) -> None:
    run(tmp_path, [{"body": {"prompt": "hi"}}, {"body": {"prompt": []}}], id_column=None)
    answers, errors = exported(tmp_path)
    assert [line["custom_id"] for line in (*answers, *errors)] == ["row-0-0", "row-0-1"]
    with pytest.raises(JobError, match="no output of batchgen here"):
        convert(tmp_path, tmp_path / "a", "openai-batch", overwrite=True)
