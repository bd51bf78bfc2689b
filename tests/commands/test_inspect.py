from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.commands.inspect import Choice, inspect
from batchgen.config import JobConfig
from batchgen.errors import JobError
from batchgen.pipeline.runner import run_job
from tests.pipeline.fakes import FakeWorld, make_job

FIRST = Choice(num_rows=3, ids=[], status=None, where=None, seed=None)


def finished_job(base: Path, samples: str = "list") -> JobConfig:
    job = make_job(base, 0, output={"path": "out", "samples": samples})
    lines = [
        json.dumps({"name": f"n{row}\x1b[31m", "prompt": "bad!" if row % 5 == 4 else f"[bold]p{row}"})
        for row in range(12)
    ]
    (base / "in.jsonl").write_text("\n".join(lines) + "\n")
    run_job(job, services=FakeWorld().services)
    return job


def shown(job: JobConfig, choice: Choice, capsys: pytest.CaptureFixture[str], *, as_json: bool = True) -> str:
    inspect(job.output_dir, choice, as_json=as_json)
    return capsys.readouterr().out


def numbers(text: str) -> list[int]:
    return [json.loads(line)["batchgen"]["row"] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("choice", "rows"),
    [
        (FIRST, [0, 1, 2]),
        (FIRST._replace(status="error"), [4, 9]),
        (FIRST._replace(status="ok", where="batchgen.row > 3"), [5, 6, 7]),
        (FIRST._replace(ids=["7", "0:4"]), [4, 7]),
        (FIRST._replace(num_rows=50), list(range(12))),
    ],
)
def test_rows_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str], choice: Choice, rows: list[int]) -> None:
    assert numbers(shown(finished_job(tmp_path), choice, capsys)) == rows


def test_random_rows_are_the_same_for_one_seed_and_differ_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path)
    draws = [numbers(shown(job, FIRST._replace(num_rows=6, seed=seed), capsys)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert all(draw == sorted(set(draw)) and len(draw) == 6 for draw in draws)
    assert numbers(shown(job, FIRST._replace(num_rows=60, seed=1), capsys)) == list(range(12))


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_the_table_has_a_line_a_row_and_nothing_that_a_terminal_obeys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, samples: str
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    job = finished_job(tmp_path, samples)
    text = shown(job, FIRST._replace(num_rows=20), capsys, as_json=False)
    heading = "completion" if samples == "explode" else "completions"
    assert text.splitlines()[0].split() == ["row", "┃", "status", "┃", "name", "┃", "prompt", "┃", heading]
    assert "\x1b" not in text
    assert "[bold]p0" in text
    assert text.count("no_allowed_token") == 2
    assert ("0:0 sample 1" in text) == (samples == "explode")


def test_a_row_by_id_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(finished_job(tmp_path), FIRST._replace(ids=["0:4", "0:0"]), capsys, as_json=False)
    assert text.startswith("0:0 ok\n  name: n0\\x1b[31m\n  prompt: [bold]p0\n")
    assert "0:4 error\n" in text
    assert "  batchgen.error_code: no_allowed_token\n" in text


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    job = finished_job(tmp_path)
    with pytest.raises(JobError, match="no committed row has the id 0:77"):
        inspect(job.output_dir, FIRST._replace(ids=["0:77"]), as_json=False)
    with pytest.raises(JobError, match="must be SOURCE:ROW such as 0:17"):
        inspect(job.output_dir, FIRST._replace(ids=["n1"]), as_json=False)
    with pytest.raises(JobError, match="no column 'rowe' in the output"):
        inspect(job.output_dir, FIRST._replace(where="rowe"), as_json=False)
    with pytest.raises(JobError, match="--random draws from all rows"):
        inspect(job.output_dir, FIRST._replace(status="ok", seed=1), as_json=False)


def test_rows_have_the_ids_of_input_id_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path, 0, input={"id_column": "name"})
    lines = [json.dumps({"name": f"n{row}", "prompt": f"p{row}"}) for row in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    run_job(job, services=FakeWorld().services)
    assert numbers(shown(job, FIRST._replace(ids=["n7", "n2"]), capsys)) == [2, 7]
    assert numbers(shown(job, FIRST._replace(ids=["0:3"]), capsys)) == [3]
    with pytest.raises(JobError, match="no committed row has the id n77"):
        inspect(job.output_dir, FIRST._replace(ids=["n77"]), as_json=False)
