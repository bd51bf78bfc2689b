from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.commands.init import init
from batchgen.config import JobConfig, load_job
from batchgen.data.schema import output_layout, output_schema
from batchgen.errors import BatchgenError, JobError


def made(base: Path, rows: list[dict[str, object]], name: str = "in.jsonl") -> JobConfig:
    path = base / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    init([path], model="some/model", job=base / "job.yaml")
    return load_job(base / "job.yaml")


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_the_job_reads_the_data_and_asks_for_its_likeliest_column(tmp_path: Path, name: str) -> None:
    job = made(tmp_path, [{"id": "a", "answer": "x", "Question": "Why?"}], name)
    assert job.prompt.messages is not None
    assert job.prompt.messages[0].content == "{{ Question }}"
    assert job.input.path == str(tmp_path / name)
    text = (tmp_path / "job.yaml").read_text()
    assert f"{name}: 1 row. Its columns:\n#   id: string\n#   answer: string\n#   Question: string\n" in text
    assert '# columns: ["id"]' in text


def test_a_column_of_chats_is_used_as_it_is(tmp_path: Path) -> None:
    job = made(tmp_path, [{"messages": [{"role": "user", "content": "hi"}]}])
    assert job.prompt.messages_column == "messages"


@pytest.mark.parametrize("name", ["a b", 'q"uote', "fünf # {{", "line\nbreak"])
def test_a_column_name_of_any_form_makes_a_valid_job(tmp_path: Path, name: str) -> None:
    job = made(tmp_path, [{"id": 1, name: "text"}])
    assert job.prompt.messages is not None
    assert "row[" in job.prompt.messages[0].content


def test_the_path_and_the_next_steps_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, [{"a": "x"}])
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'job.yaml'}\n"
    assert "batchgen preview" in captured.err


def test_a_job_file_is_never_replaced(tmp_path: Path) -> None:
    made(tmp_path, [{"a": "x"}])
    with pytest.raises(JobError, match="is there already"):
        made(tmp_path, [{"b": "x"}])


def test_data_of_an_earlier_job_gets_a_prefix_and_an_output_of_its_own(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "Why?", "completions": ["x"], "batchgen": {"row": 0}}]
    for attempt, (out, prefix) in enumerate([("out/job", "run2_"), ("out/job-2", "run3_"), ("out/job-3", "run4_")]):
        job = made(tmp_path, rows, f"{attempt}.parquet")
        assert (job.output.path, job.output.prefix) == (out, prefix)
        data = pa.Table.from_pylist(rows).schema
        for samples in ("list", "explode"):
            again = job.output.model_copy(update={"samples": samples})
            names = output_schema(output_layout(data, again, job.sampling)).names
            assert len(set(names)) == len(names)
        rows = [{**rows[0], f"{prefix}completion": "y", f"{prefix}batchgen": {"row": 0}}]
        (tmp_path / out).mkdir(parents=True)
        (tmp_path / "job.yaml").unlink()


def test_data_that_is_not_there_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(BatchgenError):
        init([tmp_path / "none.jsonl"], model="m", job=tmp_path / "job.yaml")
    assert not (tmp_path / "job.yaml").exists()
