"""Real worker processes with a fake engine: the same rows with any number of them, whatever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.data.metrics_log import read_metrics
from batchgen.errors import Interrupted
from batchgen.pipeline.runner import run_job
from tests.pipeline.cluster.running import (
    FILES,
    NUM_ROWS,
    Watching,
    calm,
    check,
    children,
    job_of,
    kill,
    listening,
    pids,
    rows_of,
    start,
    wait_until,
)
from tests.pipeline.kills import is_alive
from tests.pipeline.worker_fakes import services

pytestmark = pytest.mark.usefixtures("importable")


def data_bytes(path: Path) -> bytes:
    """A shard without its footer, which names the run."""
    content = path.read_bytes()
    return content[: -8 - int.from_bytes(content[-8:-4], "little")]


@pytest.mark.case(21)
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_files_are_the_same_bytes_as_those_of_one_engine(tmp_path: Path, workers: int) -> None:
    expected = calm(tmp_path)
    files = sorted((tmp_path / "calm" / "data").iterdir())
    watching = Watching()
    job = job_of(tmp_path, f"out{workers}", workers)
    report = run_job(job, services=services(), progress=watching)
    check(job, expected)
    made = sorted((job.output_dir / "data").iterdir())
    assert [path.name for path in made] == [path.name for path in files]
    assert [data_bytes(path) for path in made] == [data_bytes(path) for path in files]
    assert (report.num_ok, report.num_rows_this_run) == (NUM_ROWS, NUM_ROWS)
    assert report.completion_tokens == sum(sum(row["batchgen"]["completion_tokens"]) for row in expected)
    last = watching.snapshots[-1]
    assert (last.num_done, last.num_rows, last.finished_tokens) == (NUM_ROWS, NUM_ROWS, report.completion_tokens)
    (metrics,) = read_metrics(FILES, job.output_dir / "_batchgen" / "metrics")
    assert metrics.end["rows_committed"] == NUM_ROWS
    assert len(metrics.end["workers"]) >= 1


@pytest.mark.slow
def test_rows_that_kill_their_worker_become_errors_and_their_neighbours_are_saved(tmp_path: Path) -> None:
    expected = {row["id"]: row for row in calm(tmp_path)}
    bad = {11: "please exit", 30: "please segfault"}
    job = job_of(tmp_path, "out", 2, bad)
    report = run_job(job, services=services())
    rows = rows_of(job)
    assert [row["id"] for row in rows] == list(range(NUM_ROWS))
    assert report.errors_by_code == {"worker_crash": 2}
    for row in rows:
        if row["id"] in bad:
            assert row["batchgen"]["error_code"] == "worker_crash"
        else:
            assert row == expected[row["id"]]


@pytest.mark.slow
def test_only_loopback_is_listened_on_and_a_killed_client_takes_all_with_it(tmp_path: Path) -> None:
    expected = calm(tmp_path)
    job = job_of(tmp_path, "out", 2)
    client = start(job, step_seconds=0.05)
    wait_until(lambda: any((job.output_dir / "_batchgen" / "journal").glob("*.log")))
    family = children(client.pid)
    assert len([command for command in family.values() if "cluster.worker_process" in command]) == 2
    ours = listening(family)
    assert len(ours) >= 3
    assert all(address.startswith("127.0.0.1:") for address in ours)
    kill(client.pid)
    client.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in family), 30)
    run_job(job, services=services())
    check(job, expected)


@pytest.mark.case(55)
@pytest.mark.slow
def test_a_dead_scheduler_ends_the_run_with_75_and_no_process_stays(tmp_path: Path) -> None:
    expected = calm(tmp_path)
    job = job_of(tmp_path, "out", 2)
    client = start(job, step_seconds=0.05)
    wait_until(lambda: any((job.output_dir / "_batchgen" / "journal").glob("*.log")))
    family = children(client.pid)
    kill(pids("scheduler", client.pid)[0])
    assert client.wait(timeout=60) == 75
    assert not any(is_alive(pid) for pid in family)
    run_job(job, services=services())
    check(job, expected)


@pytest.mark.slow
def test_sigterm_of_the_run_stops_in_good_order(tmp_path: Path) -> None:
    expected = calm(tmp_path)
    job = job_of(tmp_path, "out", 2, journal_interval=1000)
    client = start(job, step_seconds=0.05)
    wait_until(lambda: any((job.output_dir / "data").glob("*.parquet")))
    family = children(client.pid)
    kill(client.pid, signal.SIGTERM)
    assert client.wait(timeout=60) == 75
    assert not any(is_alive(pid) for pid in family)
    # Nothing was noted before the signal, so what is there was noted because of it.
    assert any((job.output_dir / "_batchgen" / "journal").glob("*.log"))
    run_job(job, services=services())
    check(job, expected)


@pytest.mark.case(54)
@pytest.mark.case(52)
@pytest.mark.slow
def test_workers_that_die_stop_or_leave_cost_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.03")
    expected = calm(tmp_path)
    harm = [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]
    harmed: list[int] = []

    def on_update(snapshot: object) -> None:
        # One after another, each time on a worker that has begun to work.
        if harm and len(getattr(snapshot, "workers", ())) == 2 and getattr(snapshot, "num_running", 0):
            target = next(pid for pid in pids("worker") if pid not in harmed)
            harmed.append(target)
            os.kill(target, harm.pop(0))

    watching = Watching(on_update)
    job = job_of(tmp_path, "out", 2, worker_timeout=3.0)
    run_job(job, services=services(), progress=watching)
    check(job, expected)
    assert len(harmed) >= 2
    assert not any(is_alive(pid) for pid in harmed)


@pytest.mark.slow
def test_a_row_that_never_ends_is_found_by_the_heartbeat(tmp_path: Path) -> None:
    expected = {row["id"]: row for row in calm(tmp_path)}
    job = job_of(tmp_path, "out", 2, {20: "please hang"}, worker_timeout=3.0)
    report = run_job(job, services=services())
    assert report.errors_by_code == {"worker_crash": 1}
    assert [row for row in rows_of(job) if row["id"] != 20] == [row for at, row in expected.items() if at != 20]


@pytest.mark.slow
def test_an_exception_of_the_engine_costs_the_worker_and_not_the_run(tmp_path: Path) -> None:
    job = job_of(tmp_path, "out", 2, {7: "please raise"})
    assert run_job(job, services=services()).errors_by_code == {"worker_crash": 1}


def test_an_output_with_nothing_to_do_starts_no_process(tmp_path: Path) -> None:
    calm(tmp_path, "out")
    watching = Watching()
    report = run_job(job_of(tmp_path, "out", 2), services=services(), progress=watching)
    assert report.num_rows_this_run == 0
    assert not any("workers" in line for line in watching.messages)


def test_a_job_without_rows_has_an_output_all_the_same(tmp_path: Path) -> None:
    job = job_of(tmp_path, "out", 2)
    (tmp_path / "in.jsonl").write_text("")
    run_job(job, services=services())
    assert pq.read_table(job.output_dir / "data").num_rows == 0


def test_stopping_before_a_worker_is_ready_ends_with_75(tmp_path: Path) -> None:
    job = job_of(tmp_path, "out", 2, max_runtime=0.0)
    with pytest.raises(Interrupted):
        run_job(job, services=services())
