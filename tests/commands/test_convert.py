from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from batchgen.commands.convert import convert
from batchgen.config import JobConfig
from batchgen.errors import InputError, JobError, OutputUnavailable
from batchgen.pipeline.convert import json_value
from batchgen.pipeline.runner import run_job
from tests.pipeline.fakes import FakeWorld, make_job

CHAT = {
    "column": None,
    "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "{{ prompt }}?"}],
    "assistant_prefill": "Well, ",
}


def finished_job(base: Path, *, samples: str = "list", **sections: Any) -> JobConfig:
    job = make_job(base, 0, output={"path": "out", "samples": samples}, **sections)
    rows = [{"custom_id": f"c{row}", "prompt": "bad!" if row == 3 else f"p{row}", "x": 0.5} for row in range(6)]
    (base / "in.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    run_job(job, services=FakeWorld().services)
    return job


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_every_row_with_all_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished_job(tmp_path)
    convert(job.output_dir, tmp_path / "a.jsonl", "jsonl", overwrite=False)
    rows = lines_of(tmp_path / "a.jsonl")
    assert [row["custom_id"] for row in rows] == [f"c{row}" for row in range(6)]
    assert [row["batchgen"]["status"] for row in rows].count("error") == 1
    assert len(rows[0]["completions"]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'a.jsonl'}: 6 lines\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "in.jsonl", "out"]


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_chat_has_the_messages_and_an_answer_for_each_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], samples: str
) -> None:
    job = finished_job(tmp_path, samples=samples, prompt=CHAT)
    convert(job.output_dir, tmp_path / "a.jsonl", "chat", overwrite=False)
    chats = lines_of(tmp_path / "a.jsonl")
    assert len(chats) == 10
    assert chats[0]["messages"][:2] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "p0?"},
    ]
    answers = [chat["messages"][2] for chat in chats[:2]]
    assert all(answer["role"] == "assistant" and answer["content"].startswith("Well, ") for answer in answers)
    assert answers[0] != answers[1]
    assert {chat["messages"][1]["content"] for chat in chats} == {"p0?", "p1?", "p2?", "p4?", "p5?"}
    assert capsys.readouterr().err.endswith("1 row with an error left out\n")


def test_chat_of_plain_prompts_is_one_turn_of_the_user(tmp_path: Path) -> None:
    job = finished_job(tmp_path)
    convert(job.output_dir, tmp_path / "a.jsonl", "chat", overwrite=False)
    first = lines_of(tmp_path / "a.jsonl")[0]["messages"]
    assert [message["role"] for message in first] == ["user", "assistant"]
    assert first[0]["content"] == "p0"


def test_chat_of_requests_that_are_texts_is_one_turn_of_the_user(tmp_path: Path) -> None:
    job = make_job(tmp_path, 0, output={"path": "out"}, prompt={"column": None, "request_column": "body"})
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    rows = [{"prompt": "of the fake engine", "body": body} for body in ({"prompt": "p"}, chat)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_job(job, services=FakeWorld().services)
    convert(job.output_dir, tmp_path / "a.jsonl", "chat", overwrite=False)
    turns = [[each["content"] for each in line["messages"][:-1]] for line in lines_of(tmp_path / "a.jsonl")]
    assert {tuple(each) for each in turns} == {("p",), ("s", "u")}


def test_chat_refuses_an_input_that_changed(tmp_path: Path) -> None:
    job = finished_job(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "other"}\n')
    with pytest.raises(InputError, match="its content changed"):
        convert(job.output_dir, tmp_path / "a.jsonl", "chat", overwrite=False)
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_openai_batch_answers_each_custom_id_and_keeps_errors_apart(tmp_path: Path, samples: str) -> None:
    job = finished_job(tmp_path, samples=samples, prompt=CHAT)
    convert(job.output_dir, tmp_path / "a.jsonl", "openai-batch", overwrite=False)
    answers = lines_of(tmp_path / "a.jsonl")
    assert [answer["custom_id"] for answer in answers] == ["c0", "c1", "c2", "c4", "c5"]
    body = answers[0]["response"]["body"]
    assert (answers[0]["error"], answers[0]["response"]["status_code"]) == (None, 200)
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["message"]["role"] == "assistant" for choice in body["choices"])
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    (error,) = lines_of(tmp_path / "a.errors.jsonl")
    assert (error["custom_id"], error["response"]) == ("c3", None)
    assert error["error"]["code"] == "no_allowed_token"


def test_a_file_that_is_there_is_only_replaced_when_asked(tmp_path: Path) -> None:
    job = finished_job(tmp_path)
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(JobError, match="is there already"):
        convert(job.output_dir, tmp_path / "a.jsonl", "jsonl", overwrite=False)
    assert (tmp_path / "a.jsonl").read_text() == "mine"
    convert(job.output_dir, tmp_path / "a.jsonl", "jsonl", overwrite=True)
    assert len(lines_of(tmp_path / "a.jsonl")) == 6
    with pytest.raises(OutputUnavailable, match="choose another file"):
        convert(job.output_dir, tmp_path / "none" / "a.jsonl", "jsonl", overwrite=False)


def test_only_answers_of_a_batch_have_a_file_of_errors(tmp_path: Path) -> None:
    job = finished_job(tmp_path, prompt=CHAT)
    mine = tmp_path / "a.errors.jsonl"
    mine.write_text("mine")
    convert(job.output_dir, tmp_path / "a.jsonl", "jsonl", overwrite=False)
    assert mine.read_text() == "mine"
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(JobError, match=r"a\.errors\.jsonl: is there already"):
        convert(job.output_dir, tmp_path / "a.jsonl", "openai-batch", overwrite=False)
    convert(job.output_dir, tmp_path / "b.jsonl", "openai-batch", errors=tmp_path / "wrong.jsonl", overwrite=False)
    assert [line["custom_id"] for line in lines_of(tmp_path / "wrong.jsonl")] == ["c3"]


def test_a_dash_is_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(finished_job(tmp_path).output_dir, Path("-"), "jsonl", overwrite=False)
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_rows_that_stdout_has_no_place_for_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(finished_job(tmp_path, prompt=CHAT).output_dir, Path("-"), "openai-batch", overwrite=False)
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 5
    assert captured.err == "1 row with an error left out; name a file to have them too\n"


@pytest.mark.case(30)
def test_values_that_json_lacks_are_written_by_rule() -> None:
    day = datetime.date(2026, 1, 2)
    value = {"a": [math.nan, 1.5, b"\x00\xff"], "b": day, "c": Decimal("1.10"), "d": datetime.timedelta(seconds=3)}
    assert json_value(value) == {"a": [None, 1.5, "AP8="], "b": "2026-01-02", "c": "1.10", "d": "0:00:03"}
