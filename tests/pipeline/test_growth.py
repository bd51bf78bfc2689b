"""Inputs that grow: what was frozen must be as it was, what is new is appended or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.errors import FingerprintMismatch, Interrupted
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.redo import rerun
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.verify import verify
from tests.pipeline.crashes import committed_rows
from tests.pipeline.fakes import FakeWorld, interrupt_after, make_job

FILES = OutputFiles()


def lines(*numbers: int) -> str:
    return "".join(f'{{"id": {number}, "prompt": "prompt {number}"}}\n' for number in numbers)


def started(root: Path, **options: Any) -> JobConfig:
    """A job over a directory of one file with four rows, run to its end."""
    (root / "inputs").mkdir()
    (root / "inputs" / "b.jsonl").write_text(lines(0, 1, 2, 3))
    job = make_job(root, 0, input={"path": "inputs", "on_growth": "append", **options})
    run_job(job, services=FakeWorld().services)
    return job


def ids(job: JobConfig) -> list[tuple[int, int, int]]:
    rows = committed_rows(FILES, job.output_dir)
    return [(row["batchgen"]["source"], row["batchgen"]["row"], row["id"]) for row in rows]


def test_rows_at_the_end_of_a_file_are_appended(tmp_path: Path) -> None:
    job = started(tmp_path)
    before = committed_rows(FILES, job.output_dir)
    with (tmp_path / "inputs" / "b.jsonl").open("a") as file:
        file.write(lines(4, 5))
    world = FakeWorld()
    report = run_job(job, services=world.services)
    assert (world.num_rows, report.num_rows, report.num_rows_this_run) == (2, 6, 2)
    assert ids(job) == [(0, number, number) for number in range(6)]
    assert committed_rows(FILES, job.output_dir)[:4] == before
    assert run_job(job, services=world.services).num_rows_this_run == 0


def test_a_file_whose_name_sorts_before_the_frozen_ones_comes_behind_them(tmp_path: Path) -> None:
    job = started(tmp_path)
    (tmp_path / "inputs" / "a.jsonl").write_text(lines(7))
    run_job(job, services=FakeWorld().services)
    (tmp_path / "inputs" / "c.jsonl").write_text(lines(8))
    run_job(job, services=FakeWorld().services)
    assert ids(job) == [(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 0, 7), (2, 0, 8)]
    assert verify(read_output(FILES, job.output_dir)).problems == []


def test_growth_during_an_interrupted_run_is_taken_in(tmp_path: Path) -> None:
    job = started(tmp_path)
    path = tmp_path / "inputs" / "b.jsonl"
    path.write_text(lines(*range(12)))
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(9)).services)
    path.write_text(lines(*range(20)))
    run_job(job, services=FakeWorld().services)
    assert ids(job) == [(0, number, number) for number in range(20)]


def test_appended_rows_can_be_rerun(tmp_path: Path) -> None:
    job = started(tmp_path)
    (tmp_path / "inputs" / "c.jsonl").write_text(lines(4, 5))
    run_job(job, services=FakeWorld().services)
    assert rerun(job, "id == 5", services=FakeWorld().services).num_rows_this_run == 1


def test_growth_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    job = started(tmp_path)
    with (tmp_path / "inputs" / "b.jsonl").open("a") as file:
        file.write(lines(4))
    (tmp_path / "inputs" / "c.jsonl").write_text(lines(5))
    refusing = make_job(tmp_path, 0, input={"path": "inputs"})
    with pytest.raises(FingerprintMismatch) as error:
        run_job(refusing, services=FakeWorld().services)
    assert "b.jsonl): grew from 4 to 5 rows; set input.on_growth to append" in str(error.value)
    assert "inputs/c.jsonl is new" in str(error.value)
    run_job(job, services=FakeWorld().services)
    assert len(ids(job)) == 6


def rewrite(path: Path) -> None:
    path.write_text(lines(0, 1, 9, 3, 4))


def shorten(path: Path) -> None:
    path.write_text(lines(0, 1))


def change_type(path: Path) -> None:
    path.write_text(lines(0, 1, 2, 3) + '{"id": "x", "prompt": "p"}\n')


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (rewrite, r"b\.jsonl\): its content changed"),
        (shorten, r"b\.jsonl\): its content changed"),
        (Path.unlink, r"b\.jsonl\): is gone"),
        (change_type, "the column 'id' is JSON text, of values of several kinds, but it was int64"),
    ],
)
def test_frozen_rows_must_stay_as_they_are(tmp_path: Path, harm: Callable[[Path], None], message: str) -> None:
    job = started(tmp_path)
    (tmp_path / "inputs" / "c.jsonl").write_text(lines(8))
    harm(tmp_path / "inputs" / "b.jsonl")
    with pytest.raises(FingerprintMismatch, match=message):
        run_job(job, services=FakeWorld().services)
    assert len(ids(job)) == 4


def test_half_a_line_that_was_completed_is_a_changed_row(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    path = tmp_path / "inputs" / "b.jsonl"
    path.write_text(lines(0) + '{"id": 1, "prom')
    job = make_job(tmp_path, 0, input={"path": "inputs", "on_growth": "append"})
    run_job(job, services=FakeWorld().services)
    path.write_text(lines(0, 1))
    with pytest.raises(FingerprintMismatch, match="its content changed"):
        run_job(job, services=FakeWorld().services)


def test_a_last_line_without_its_end_may_be_followed_by_more(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    path = tmp_path / "inputs" / "b.jsonl"
    path.write_text(lines(0, 1).rstrip("\n"))
    job = make_job(tmp_path, 0, input={"path": "inputs", "on_growth": "append"})
    run_job(job, services=FakeWorld().services)
    path.write_text(lines(0, 1, 2))
    run_job(job, services=FakeWorld().services)
    assert [number for _, _, number in ids(job)] == [0, 1, 2]


def test_new_columns_of_new_rows_are_not_carried(tmp_path: Path) -> None:
    job = started(tmp_path)
    (tmp_path / "inputs" / "c.jsonl").write_text('{"id": 9, "prompt": "p", "extra": true}\n')
    run_job(job, services=FakeWorld().services)
    assert all("extra" not in row for row in committed_rows(FILES, job.output_dir))
    assert len(ids(job)) == 5


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    job = started(tmp_path)
    (tmp_path / "inputs" / "c.jsonl").write_text('{"id": 9, "prompt": "p", "new": 1}\n')
    watcher = Mock(spec=Progress)
    run_job(job, services=FakeWorld().services, progress=watcher)
    said = [call.args[0] for call in watcher.message.call_args_list]
    assert "the inputs grew: 1 row is appended; the output has no column 'new', so these are left out" in said


def test_rows_of_an_input_that_had_none_are_refused_since_no_column_is_declared(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "b.jsonl").write_text("")
    job = make_job(tmp_path, 0, input={"path": "inputs", "on_growth": "append"})
    run_job(job, services=FakeWorld().services)
    (tmp_path / "inputs" / "b.jsonl").write_text(lines(0))
    with pytest.raises(FingerprintMismatch, match="it had no rows, and so no columns, when the output was begun"):
        run_job(job, services=FakeWorld().services)


def test_a_sample_of_the_rows_cannot_be_appended_to(tmp_path: Path) -> None:
    job = started(tmp_path, sample=2)
    (tmp_path / "inputs" / "c.jsonl").write_text(lines(4, 5))
    with pytest.raises(FingerprintMismatch, match=r"input\.sample"):
        run_job(job, services=FakeWorld().services)


def test_the_limit_holds_for_appended_rows_too(tmp_path: Path) -> None:
    job = started(tmp_path, limit=5)
    (tmp_path / "inputs" / "c.jsonl").write_text(lines(4, 5, 6))
    run_job(job, services=FakeWorld().services)
    assert [number for _, _, number in ids(job)] == [0, 1, 2, 3, 4]


def test_inputs_that_moved_as_they_are_go_on(tmp_path: Path) -> None:
    job = started(tmp_path)
    (tmp_path / "inputs" / "b.jsonl").rename(tmp_path / "inputs" / "renamed.jsonl")
    assert run_job(job, services=FakeWorld().services).num_rows_this_run == 0
