"""Committed rows made anew: chosen ones by an expression, damaged files whole; all others stay as they are."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.config import JobConfig, load_job
from batchgen.data.commits import record_path
from batchgen.data.files import OutputFiles
from batchgen.errors import Interrupted, JobError, OutputDamaged
from batchgen.pipeline.redo import repair, rerun
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output, stored_job
from batchgen.pipeline.verify import verify
from batchgen.records import RowError
from tests.pipeline.crashes import Rows, check_output, committed_rows
from tests.pipeline.fakes import FakeEngine, FakeWorld, interrupt_after, make_job

FILES = OutputFiles()
ERRORS = "batchgen.status == 'error'"


class Failing(FakeEngine):
    """Fails every third row for want of memory."""

    def step(self) -> Any:
        done = super().step()
        for completion in done:
            if completion.prompt_index % 3 == 0:
                completion.error, completion.samples = RowError("kv_capacity", "the pool is full"), []
        return done


def rows_of(job: JobConfig) -> Rows:
    return committed_rows(FILES, job.output_dir)


def committed(root: Path, make: Callable[[], FakeEngine] = FakeEngine, **sections: dict[str, Any]) -> JobConfig:
    """A job of ten rows in three shards that has been run."""
    job = make_job(root, 10, **sections)
    run_job(job, services=FakeWorld(make=make).services)
    return job


def files_of(job: JobConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (job.output_dir / "data").iterdir()}


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_only_chosen_rows_are_generated_anew(tmp_path: Path, samples: str) -> None:
    calm = committed(tmp_path, output={"path": "calm", "samples": samples})
    job = committed(tmp_path, make=Failing, output={"path": "out", "samples": samples, "shard_rows": 4})
    assert {row["id"] for row in rows_of(job) if row["batchgen"]["status"] == "error"} == {0, 3, 6, 9}
    world = FakeWorld()
    report = rerun(job, ERRORS, services=world.services)
    assert (world.num_rows, report.num_errors, report.num_rows, report.num_rows_this_run) == (4, 0, 10, 4)
    check_output(FILES, job.output_dir, rows_of(calm))
    assert verify(read_output(FILES, job.output_dir)).problems == []


def test_shards_without_a_chosen_row_are_not_touched(tmp_path: Path) -> None:
    job = committed(tmp_path)
    before = files_of(job)
    rerun(job, "id == 5", services=FakeWorld().services)
    after = files_of(job)
    assert [name for name in before if before[name] != after[name]] == ["part-00001.parquet"]


def test_an_expression_that_chooses_nothing_loads_no_model(tmp_path: Path) -> None:
    job = committed(tmp_path)
    world = FakeWorld()
    report = rerun(job, ERRORS, services=world.services)
    assert (world.engines, report.num_rows_this_run) == ([], 0)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("batchgn.status == 'error'", "no column 'batchgn' in the output; did you mean 'batchgen'"),
        ("batchgen.status ==", "--where: "),
        ("().__class__", "--where: "),
        ("id > 'a'", "--where: .*not supported"),
    ],
)
def test_a_wrong_expression_is_refused(tmp_path: Path, where: str, message: str) -> None:
    job = committed(tmp_path)
    with pytest.raises(JobError, match=message):
        rerun(job, where, services=FakeWorld().services)


def test_a_rerun_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    calm = committed(tmp_path, output={"path": "calm"})
    job = committed(tmp_path, make=Failing)
    worlds = [FakeWorld(make=interrupt_after(4))]
    with pytest.raises(Interrupted):
        rerun(job, ERRORS, services=worlds[0].services)
    worlds.append(FakeWorld())
    rerun(job, ERRORS, services=worlds[1].services)
    check_output(FILES, job.output_dir, rows_of(calm))
    undisturbed = FakeWorld()
    rerun(committed(tmp_path, make=Failing, output={"path": "other"}), ERRORS, services=undisturbed.services)
    assert sum(world.num_tokens for world in worlds) == undisturbed.num_tokens


def test_rows_to_keep_are_checked_before_they_are_taken_over(tmp_path: Path) -> None:
    job = committed(tmp_path)
    path = job.output_dir / "data" / "part-00001.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(OutputDamaged, match=r"is not the file that was committed"):
        rerun(job, "id == 5", services=FakeWorld().services)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(bytes(content))


def to_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def to_foreign(path: Path) -> None:
    other = path.with_name("part-00000.parquet") if "00001" in path.name else path.with_name("part-00001.parquet")
    path.write_bytes(other.read_bytes())


HARMS = [cut, flip, to_link, to_foreign, Path.unlink, lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_is_found_and_made_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    job = committed(tmp_path)
    expected = rows_of(job)
    harm(job.output_dir / "data" / "part-00001.parquet")
    (problem,) = verify(read_output(FILES, job.output_dir)).problems
    assert "part-00001.parquet: " in problem
    world = FakeWorld()
    report = repair(job, services=world.services)
    assert (world.num_rows, report.num_rows_this_run) == (4, 4)
    check_output(FILES, job.output_dir, expected)
    assert verify(read_output(FILES, job.output_dir)).problems == []
    is_kept = harm is not Path.unlink
    assert len(list((job.output_dir / "_batchgen" / "orphans").iterdir())) == is_kept


@pytest.mark.parametrize("harm", [*HARMS[:3], Path.unlink])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_record_is_voided_and_its_file_taken_up_again(
    tmp_path: Path, harm: Callable[[Path], None], number: int
) -> None:
    job = committed(tmp_path)
    expected, before = rows_of(job), files_of(job)
    harm(record_path(job.output_dir / "_batchgen" / "commits", number))
    world = FakeWorld()
    repair(job, services=world.services)
    assert (world.num_rows, files_of(job)) == (0, before)
    check_output(FILES, job.output_dir, expected)
    assert verify(read_output(FILES, job.output_dir)).problems == []


def test_a_record_of_another_job_is_voided(tmp_path: Path) -> None:
    job = committed(tmp_path)
    other = committed(tmp_path, output={"path": "other"}, sampling={"n": 1, "seed": 3})
    expected = rows_of(job)
    record = record_path(job.output_dir / "_batchgen" / "commits", 1)
    record.write_bytes(record_path(other.output_dir / "_batchgen" / "commits", 1).read_bytes())
    with pytest.raises(OutputDamaged, match="belongs to another job"):
        run_job(job, services=FakeWorld().services)
    repair(job, services=FakeWorld().services)
    check_output(FILES, job.output_dir, expected)


def test_a_lost_record_of_a_replacement_is_written_again(tmp_path: Path) -> None:
    job = committed(tmp_path)
    expected = rows_of(job)
    rerun(job, "id == 5", services=FakeWorld().services)
    rerun(job, "id == 0", services=FakeWorld().services)
    record_path(job.output_dir / "_batchgen" / "commits", 4).unlink()
    world = FakeWorld()
    repair(job, services=world.services)
    assert world.num_rows == 0
    check_output(FILES, job.output_dir, expected)
    assert verify(read_output(FILES, job.output_dir)).problems == []


def test_a_repair_keeps_the_journal_of_an_interrupted_run(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    journal = job.output_dir / "_batchgen" / "journal"
    before = sorted(path.name for path in journal.iterdir())
    (job.output_dir / "data" / "part-00000.parquet").unlink()
    repair(job, services=FakeWorld().services)
    assert sorted(path.name for path in journal.iterdir()) == before
    run_job(job, services=FakeWorld().services)
    assert [row["id"] for row in rows_of(job)] == list(range(10))


def test_the_stored_job_goes_on_with_its_own_output(tmp_path: Path) -> None:
    job = committed(tmp_path)
    moved = tmp_path / "moved"
    job.output_dir.rename(moved)
    stored = stored_job(FILES, moved, ["engine.kv_cache_memory=1GiB"])
    assert (stored.output_dir, stored.engine.kv_cache_memory) == (moved, 2**30)
    world = FakeWorld()
    assert run_job(stored, services=world.services).num_rows_this_run == 0
    assert rerun(stored, "id == 1", services=world.services).num_rows_this_run == 1


def test_variables_of_the_output_path_are_stored_nowhere(tmp_path: Path) -> None:
    secret = "hunter2"
    make_job(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "version: 1\nmodel: {path: fake}\ninput: {path: in.jsonl}\nprompt: {column: prompt}\n"
        "output: {path: 'out-${env:KEY}/${run_date}'}\n"
    )
    job = load_job(tmp_path / "job.yaml", environ={"KEY": secret}, today=datetime.date(2026, 2, 3))
    run_job(job, services=FakeWorld().services)
    output = tmp_path / f"out-{secret}" / "2026-02-03"
    assert "out-${env:KEY}/${run_date}" in (output / "_batchgen" / "job.yaml").read_text()
    assert [path for path in output.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()] == []
    # The variable is not set here: the output knows where it lies.
    assert rerun(stored_job(FILES, output, []), "id == 1", services=FakeWorld().services).num_rows_this_run == 1


def test_there_is_no_stored_job_where_there_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no output of batchgen here"):
        stored_job(FILES, tmp_path, [])


def test_verify_tells_an_unfinished_output_from_a_damaged_one(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    (job.output_dir / "data" / "notes.txt").write_text("mine")
    found = verify(read_output(FILES, job.output_dir))
    assert (found.problems, found.num_rows, found.num_committed, found.num_files) == ([], 10, 4, 1)
    assert any("run the job again" in note for note in found.notes)
    assert any("notes.txt: is not batchgen's" in note for note in found.notes)


def test_the_records_say_when_they_were_written(tmp_path: Path) -> None:
    job = committed(tmp_path)
    body = json.loads(record_path(job.output_dir / "_batchgen" / "commits", 0).read_text())["body"]
    assert body["at"] > 1.6e9
