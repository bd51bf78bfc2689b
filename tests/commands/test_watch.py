from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batchgen.commands import watch as command
from batchgen.commands.watch import line, panel, state, watch
from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.data.ledger import Ledger
from batchgen.data.metrics_log import MetricsLog
from batchgen.errors import Interrupted, JobError, OutputUnavailable
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output
from batchgen.report.live import Live, look
from batchgen.report.prometheus import prometheus_text
from tests.pipeline.fakes import FakeWorld, interrupt_after, make_job

FILES = OutputFiles()


def interrupted_job(base: Path) -> JobConfig:
    """4 of 10 rows are committed, and a run on another machine has noted 6 rows a second ago."""
    job = make_job(base)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    log = MetricsLog(FILES, job.output_dir / "_batchgen" / "metrics", "99990101T000000-remote")
    log.add("run", {"host": "far", "started": "now"})
    for second in range(3):
        log.add(
            "point",
            {
                "at": 1000.0 + second,
                "seconds": float(second),
                "num_rows": 10,
                "num_done": 4 + second,
                "completion_tokens": 50 * second,
                "computed_tokens": 80 * second,
                "num_running": 3,
                "num_in_flight": 2,
                "kv_use": 0.5,
                "a_later_release": 1,
            },
        )
    log.close()
    return job


def seen(job: JobConfig, now: float) -> Live:
    return look(read_output(FILES, job.output_dir), now)


def test_a_run_on_another_machine_is_seen_from_its_files(tmp_path: Path) -> None:
    job = interrupted_job(tmp_path)
    live = seen(job, 1003.0)
    assert (live.is_at_work, live.num_done, live.tokens_per_second) == (True, 6, 50.0)
    assert live.prompt_tokens_per_second == 30.0
    assert live.seconds_left is not None
    assert state(live) == "at work on far"
    assert line(live).startswith("6/10 rows, at work on far, 50 tok/s, ")
    assert state(seen(job, 1014.0)) == "at work on far, silent for 12 s"


def test_a_run_that_fell_silent_is_not_at_work_and_only_committed_rows_count(tmp_path: Path) -> None:
    live = seen(interrupted_job(tmp_path), 2000.0)
    assert (live.is_at_work, live.num_done) == (False, 4)
    assert line(live) == "4/10 rows, not at work; run the job again to go on"


def test_a_finished_output_is_done_and_a_holder_is_at_work(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    assert (state(seen(job, 0.0)), seen(job, 0.0).num_done) == ("done", 10)
    ledger = Ledger.acquire(FILES, job.output_dir)
    assert state(seen(job, 0.0)).startswith("at work on ")
    ledger.close()


def test_a_run_that_has_noted_nothing_yet_is_not_shown_with_the_figures_of_an_earlier_one(tmp_path: Path) -> None:
    job = interrupted_job(tmp_path)
    ledger = Ledger.acquire(FILES, job.output_dir)
    live = seen(job, 5000.0)
    assert (live.tokens_per_second, live.seconds_left, live.silent_seconds, live.num_done) == (None, None, None, 4)
    assert line(live) == f"4/10 rows, at work on {live.host}"
    # Its clock is years behind: it is the last one all the same.
    log = MetricsLog(FILES, ledger.paths.metrics, ledger.attempt)
    for second in range(2):
        log.add(
            "point", {"at": 4999.0, "seconds": second, "num_rows": 10, "num_done": 5, "completion_tokens": 7 * second}
        )
    log.close()
    live = seen(job, 5000.0)
    assert (live.tokens_per_second, live.num_done, live.silent_seconds) == (7.0, 5, 1.0)
    ledger.close()


def test_the_panel_shows_rows_errors_speed_and_cache(tmp_path: Path) -> None:
    console = command.Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(panel(seen(interrupted_job(tmp_path), 1003.0)))
    text = console.export_text()
    assert "out: at work on far" in text
    assert "6 of 10 done, 4 committed" in text
    assert "50 tok/s, 30 prompt tok/s" in text
    assert "3 running, 0 waiting" in text
    assert "50% in use" in text
    (tmp_path / "ended").mkdir()
    console.print(panel(seen(interrupted_job(tmp_path / "ended"), 2000.0)))
    text = console.export_text()
    assert "4 of 10 done, 4 committed" in text
    assert "running" not in text
    assert "KV cache" not in text
    console.file.close()


def test_watch_ends_with_the_output_and_writes_for_prometheus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        run_job(job, services=FakeWorld().services)

    looks = command._looks(job.output_dir, 0.5, False, tmp_path / "out.prom", nap)
    assert [live.status.is_done for live in looks] == [False, True]
    assert len(naps) == 1
    assert naps[0] >= 0.5
    text = (tmp_path / "out.prom").read_text()
    samples = dict(re.findall(r'^(\w+)\{output="[^"]*"\} (\S+)$', text, re.MULTILINE))
    assert samples["batchgen_rows"] == samples["batchgen_rows_committed"] == "10"
    assert samples["batchgen_done"] == "1"
    assert text.count("# TYPE") == len(set(re.findall(r"# TYPE (\w+)", text)))

    watch(job.output_dir, interval=1.0, once=False, as_json=False, prometheus=None)
    assert capsys.readouterr().out == "10/10 rows, done\n"
    watch(job.output_dir, interval=1.0, once=True, as_json=True, prometheus=None)
    assert json.loads(capsys.readouterr().out)["rows_done"] == 10


def test_labels_of_prometheus_are_escaped(tmp_path: Path) -> None:
    job = make_job(tmp_path, output={"path": 'a"b\\c'})
    run_job(job, services=FakeWorld().services)
    assert r'a\"b\\c"} 10' in prometheus_text(seen(job, 0.0))


def test_what_cannot_be_watched_is_said(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no output of batchgen here"):
        watch(tmp_path, interval=1.0, once=True, as_json=False, prometheus=None)
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    with pytest.raises(OutputUnavailable, match="choose another file"):
        watch(job.output_dir, interval=1.0, once=True, as_json=False, prometheus=tmp_path / "none" / "a.prom")
