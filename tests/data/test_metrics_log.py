from __future__ import annotations

import errno
from pathlib import Path

from batchgen.data.file_backend import OsBackend, WritableFile
from batchgen.data.files import OutputFiles
from batchgen.data.metrics_log import MetricsLog, read_metrics


def test_runs_are_read_oldest_first_with_their_points_in_order(tmp_path: Path) -> None:
    for attempt in ("20260102T000000-b", "20260101T000000-a"):
        log = MetricsLog(OutputFiles(), tmp_path, attempt)
        log.add("run", {"host": attempt[-1]})
        log.add("point", {"seconds": 0.0})
        log.add("point", {"seconds": 1.0})
        log.close()
        log.close()
    first, second = read_metrics(OutputFiles(), tmp_path)
    assert (first.attempt, first.run, second.run) == ("20260101T000000-a", {"host": "a"}, {"host": "b"})
    assert [point["seconds"] for point in first.points] == [0.0, 1.0]
    assert first.end == {}


def test_what_is_torn_or_of_another_form_is_passed_over(tmp_path: Path) -> None:
    lines = b'{"run":{"host":"a"}}\n[1]\n{"point":{"seconds":1}}\n\xff\n{"point":3}\n{"point":{"seco'
    (tmp_path / "x.jsonl").write_bytes(lines)
    (tmp_path / "other.txt").write_bytes(lines)
    (found,) = read_metrics(OutputFiles(), tmp_path)
    assert (found.run, found.points) == ({"host": "a"}, [{"seconds": 1}])
    assert read_metrics(OutputFiles(), tmp_path / "none") == []


class FullDisk(OsBackend):
    """Takes one line, then is full."""

    def create(self, path: Path) -> WritableFile:
        file, self.num_writes = super().create(path), 0
        write = file.write

        def write_until_full(data: bytes) -> None:
            self.num_writes += 1
            if self.num_writes > 1:
                raise OSError(errno.ENOSPC, "full")
            write(data)

        file.write = write_until_full  # type: ignore[method-assign]
        return file


def test_a_failing_write_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    backend = FullDisk()
    log = MetricsLog(OutputFiles(backend), tmp_path, "a")
    for seconds in range(3):
        log.add("point", {"seconds": seconds})
    assert backend.num_writes == 2
    (found,) = read_metrics(OutputFiles(), tmp_path)
    assert found.points == [{"seconds": 0}]


def test_a_directory_that_cannot_be_written_means_no_log(tmp_path: Path) -> None:
    log = MetricsLog(OutputFiles(), tmp_path / "none", "a")
    log.add("end", {})
    assert read_metrics(OutputFiles(), tmp_path / "none") == []
