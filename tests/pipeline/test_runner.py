"""A run commits each row once, goes on where it ended, and says what it came to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.data.metrics_log import read_metrics
from batchgen.errors import (
    FingerprintMismatch,
    Interrupted,
    JobError,
    OutputDamaged,
    OutputUnavailable,
    TooManyRowErrors,
)
from batchgen.pipeline.ports import FeedRequest, NoCheck
from batchgen.pipeline.runner import run_job
from batchgen.records import RowError
from tests.pipeline.fakes import FakeEngine, FakeFeeder, FakeWorld, interrupt_after, make_job


def rows_of(job: JobConfig) -> list[dict[str, Any]]:
    """All committed rows in order of their keys."""
    rows = pq.read_table(job.output_dir / "data").to_pylist()
    return sorted(rows, key=lambda row: (row["batchgen"]["source"], row["batchgen"]["row"]))


def names(job: JobConfig) -> list[str]:
    return sorted(path.name for path in (job.output_dir / "data").iterdir())


def test_every_row_is_committed_once_in_input_order(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    report = run_job(job, services=FakeWorld().services)
    assert names(job) == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    rows = pq.read_table(job.output_dir / "data").to_pylist()
    assert [row["id"] for row in rows] == list(range(10))
    assert all(len(row["completions"]) == 2 for row in rows)
    assert (report.num_rows, report.num_ok, report.num_errors, report.num_rows_this_run) == (10, 10, 0, 10)
    assert report.completion_tokens == sum(sum(row["batchgen"]["completion_tokens"]) for row in rows)


class _Check(NoCheck):
    """Is done after it was asked a few times."""

    def __init__(self, request: FeedRequest, *, asked: int, error: Exception | None = None) -> None:
        super().__init__(FakeFeeder)
        self._left, self._error = asked, error

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        self._left -= 1
        return self._left < 0

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


def test_the_engine_is_imported_while_prompts_are_checked_and_no_longer(tmp_path: Path) -> None:
    imported = []

    def parts() -> Iterator[None]:
        for part in range(5):
            imported.append(part)
            yield

    services = replace(FakeWorld().services, check_prompts=partial(_Check, asked=2), import_engine=parts)
    assert run_job(make_job(tmp_path), services=services).num_ok == 10
    assert imported == [0, 1, 2]


def test_what_is_wrong_with_every_prompt_is_told_before_what_cannot_be_imported(tmp_path: Path) -> None:
    def parts() -> Iterator[None]:
        raise ImportError("no torch here")
        yield

    world = FakeWorld()
    check = partial(_Check, asked=2, error=JobError("prompt.template: wrong"))
    with pytest.raises(JobError, match=r"prompt\.template: wrong"):
        run_job(make_job(tmp_path), services=replace(world.services, check_prompts=check, import_engine=parts))
    assert not world.engines


def test_a_second_run_has_nothing_to_do_and_loads_no_model(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    world = FakeWorld()
    report = run_job(job, services=world.services)
    assert (report.num_rows_this_run, report.num_ok, world.engines) == (0, 10, [])


@pytest.mark.case(57)
def test_an_interrupted_run_goes_on_with_the_tokens_it_had(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    whole = FakeWorld()
    run_job(job, services=whole.services)
    expected = rows_of(job)
    other = make_job(tmp_path, output={"path": "other", "shard_rows": 4})
    worlds = []
    for num_steps in (3, 4, 5):
        worlds.append(FakeWorld(make=interrupt_after(num_steps)))
        with pytest.raises(Interrupted, match="SIGTERM"):
            run_job(other, services=worlds[-1].services)
    worlds.append(FakeWorld())
    run_job(other, services=worlds[-1].services)
    assert rows_of(other) == expected
    assert sum(world.num_tokens for world in worlds) == whole.num_tokens


@pytest.mark.case(50)
def test_what_is_whole_is_committed_while_the_run_goes_on_and_never_generated_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_rows=40)
    first = FakeWorld(make=interrupt_after(60))
    with pytest.raises(Interrupted):
        run_job(job, services=first.services)
    (engine,) = first.engines
    finished = engine.num_rows - engine.window
    committed = len(rows_of(job))
    assert 8 <= committed < 40
    # Of what was finished only rows of shards that others in flight keep open are not committed yet.
    assert committed >= finished - engine.window - 4
    second = FakeWorld()
    run_job(job, services=second.services)
    assert second.num_rows <= 40 - committed
    assert [row["id"] for row in rows_of(job)] == list(range(40))


def test_shard_size_may_change_between_runs(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    assert names(job) == ["part-00000.parquet"]
    smaller = make_job(tmp_path, output={"path": "out", "shard_rows": 3})
    run_job(smaller, services=FakeWorld().services)
    assert [row["id"] for row in rows_of(smaller)] == list(range(10))
    assert len(names(smaller)) == 3


def test_error_rows_are_rows_with_their_reason(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    lines = ['{"id": 0, "prompt": "good"}', "", '{"id": 1, "prompt": "bad!"}', '{"id": 2, "prom']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    report = run_job(job, services=FakeWorld().services)
    rows = rows_of(job)
    assert [row["batchgen"]["row"] for row in rows] == [0, 2, 3]
    assert [row["batchgen"]["error_code"] for row in rows] == [None, "no_allowed_token", "bad_json"]
    assert [row["id"] for row in rows] == [0, 1, None]
    assert report.errors_by_code == {"no_allowed_token": 1, "bad_json": 1}


@pytest.mark.case(42)
@pytest.mark.case(10)
def test_an_input_without_rows_gives_an_empty_output_with_its_schema(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_rows=0)
    world = FakeWorld()
    report = run_job(job, services=world.services)
    assert (report.num_rows, world.engines) == (0, [])
    table = pq.read_table(job.output_dir / "data")
    assert (table.num_rows, table.column_names) == (0, ["completions", "batchgen"])
    run_job(job, services=FakeWorld().services)
    assert names(job) == ["part-00000.parquet"]


def test_limit_answers_the_first_rows_only(tmp_path: Path) -> None:
    job = make_job(tmp_path, input={"path": "in.jsonl", "limit": 5})
    run_job(job, services=FakeWorld().services)
    assert [row["id"] for row in rows_of(job)] == [0, 1, 2, 3, 4]


def test_exploded_samples_are_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_rows=3, output={"path": "out", "samples": "explode"})
    run_job(job, services=FakeWorld().services)
    keys = [(row["batchgen"]["row"], row["batchgen"]["sample"]) for row in rows_of(job)]
    assert keys == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_an_unset_seed_is_drawn_once_and_kept(tmp_path: Path) -> None:
    job = make_job(tmp_path, sampling={"n": 1, "seed": None})
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(9)).services)
    report = run_job(job, services=FakeWorld().services)
    assert {seed for row in rows_of(job) for seed in row["batchgen"]["seed"]} == {report.sampling.seed}


@pytest.mark.case(51)
def test_another_job_is_refused_with_the_field_and_both_values(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(9)).services)
    other = make_job(tmp_path, sampling={"n": 2, "seed": 2})
    with pytest.raises(FingerprintMismatch, match=r"sampling\.seed: 1 in the output, 2 in the job"):
        run_job(other, services=FakeWorld().services)
    with pytest.raises(FingerprintMismatch, match=r"model\.files\.model\.safetensors"):
        run_job(job, services=FakeWorld(model="other weights").services)


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / "data" / "mine.parquet").write_text("mine")
    with pytest.raises(FingerprintMismatch, match=r"has mine\.parquet"):
        run_job(job, services=FakeWorld().services)
    assert (tmp_path / "out" / "data" / "mine.parquet").read_text() == "mine"


def test_too_many_errors_end_the_run_and_keep_what_is_committed(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_rows=0, run={"max_error_rate": 0.5, "journal_interval": 0})
    lines = [json.dumps({"prompt": "bad!" if row >= 40 else "good"}) for row in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    world = FakeWorld()
    with pytest.raises(TooManyRowErrors, match=r"of 1\d\d rows are errors"):
        run_job(job, services=world.services)
    assert world.num_rows < 150
    assert len(names(job)) >= 20


def test_the_error_rate_is_checked_at_the_end_of_a_small_job_too(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_rows=0, run={"max_error_rate": 0.4})
    (tmp_path / "in.jsonl").write_text('{"prompt": "bad!"}\n{"prompt": "good"}\n')
    for _ in range(2):
        with pytest.raises(TooManyRowErrors, match=r"1 of 2 rows are errors"):
            run_job(job, services=FakeWorld().services)
    assert len(rows_of(job)) == 2


def test_a_taken_column_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "completions": "b"}\n')
    world = FakeWorld()
    with pytest.raises(JobError, match=r"output\.prefix"):
        run_job(job, services=world.services)
    assert world.engines == []


def test_a_missing_shard_is_damage(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    (job.output_dir / "data" / "part-00001.parquet").unlink()
    with pytest.raises(OutputDamaged, match=r"part-00001\.parquet: is missing"):
        run_job(job, services=FakeWorld().services)


def test_an_output_that_vanishes_ends_the_run_with_74(tmp_path: Path) -> None:
    job = make_job(tmp_path)

    def vanish() -> None:
        shutil.rmtree(job.output_dir, ignore_errors=True)

    with pytest.raises(OutputUnavailable, match="No such file or directory") as error:
        run_job(job, services=FakeWorld(make=lambda: FakeEngine(on_step=vanish)).services)
    assert error.value.exit_code == 74


def test_capacity_errors_in_the_journal_are_tried_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_rows=4)

    class Small(FakeEngine):
        def step(self) -> Any:
            done = super().step()
            for completion in done:
                completion.error, completion.samples = RowError("kv_capacity", "the pool is full"), []
            return done

    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(4, Small)).services)
    report = run_job(job, services=FakeWorld().services)
    assert report.num_errors == 0


def capacity_failing(num_blocks: int) -> FakeEngine:
    """An engine with so many blocks, whose even rows do not fit into eight."""

    class Small(FakeEngine):
        def step(self) -> Any:
            done = super().step()
            for completion in done:
                if completion.prompt_token_ids[-1] % 2 == 0 and self.metrics.num_blocks <= 8:
                    completion.error, completion.samples = RowError("kv_capacity", "the pool is full"), []
            return done

    engine = Small()
    engine.metrics.num_blocks = num_blocks
    return engine


def test_committed_capacity_errors_are_redone_with_a_larger_pool_alone(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    report = run_job(job, services=FakeWorld(make=lambda: capacity_failing(8)).services)
    assert report.errors_by_code == {"kv_capacity": 5}
    same = FakeWorld(make=lambda: capacity_failing(8))
    assert run_job(job, services=same.services).num_rows_this_run == 0
    larger = FakeWorld(make=lambda: capacity_failing(9))
    report = run_job(job, services=larger.services)
    assert (larger.num_rows, report.num_rows_this_run, report.num_errors) == (5, 5, 0)
    nothing = FakeWorld()
    run_job(job, services=nothing.services)
    assert nothing.engines == []
    calm = make_job(tmp_path, output={"path": "calm"})
    run_job(calm, services=FakeWorld().services)
    assert rows_of(job) == rows_of(calm)


def test_the_card_describes_the_output_and_spares_a_readme_of_others(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    text = (job.output_dir / "README.md").read_text()
    assert text.startswith("---\nconfigs:\n")
    assert "10 input rows in 3 files: 10 ok, 0 error" in text
    mine = make_job(tmp_path, output={"path": "mine"})
    mine.output_dir.mkdir()
    (mine.output_dir / "README.md").write_text("mine")
    run_job(mine, services=FakeWorld().services)
    assert (mine.output_dir / "README.md").read_text() == "mine"


def test_figures_of_the_run_are_kept_beside_the_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    report = run_job(job, services=FakeWorld().services)
    (kept,) = read_metrics(OutputFiles(), job.output_dir / "_batchgen" / "metrics")
    assert (kept.end["rows_committed"], kept.end["completion_tokens"]) == (10, report.completion_tokens)
    assert kept.run["engine"]["num_blocks"] == 8
    assert [point["num_done"] for point in kept.points][-1] == 10


def test_running_needs_no_torch_until_the_engine_is_made() -> None:
    code = "import sys, batchgen.pipeline.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
