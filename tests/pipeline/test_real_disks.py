"""Real file systems that are full, read-only or gone: exit code 74, and afterwards the job goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.errors import Interrupted, OutputUnavailable
from batchgen.pipeline.runner import run_job
from tests.pipeline.crashes import Rows, check_output, committed_rows, committed_shards
from tests.pipeline.fakes import FakeWorld, interrupt_after, make_job
from tests.pipeline.mounts import SmallDisk

FILES = OutputFiles()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "mnt").mkdir()
    with SmallDisk(tmp_path / "mnt", size=1 << 20) as disk:
        yield disk


def run(job: JobConfig) -> None:
    run_job(job, services=FakeWorld().services)


@pytest.fixture
def expected(tmp_path: Path) -> Rows:
    calm = make_job(tmp_path, output={"path": "calm"})
    run(calm)
    return committed_rows(FILES, calm.output_dir)


def fill(path: Path, leave: int) -> None:
    """Take all of the space but some bytes."""
    free = shutil.disk_usage(path.parent).free
    path.write_bytes(bytes(free - leave))


@pytest.mark.case(47)
@pytest.mark.parametrize("leave", [0, 8192, 20480, 32768])
def test_a_full_disk_ends_the_run_and_a_freed_one_lets_it_go_on(
    tmp_path: Path, disk: SmallDisk, expected: Rows, leave: int
) -> None:
    job = make_job(tmp_path, output={"path": str(disk.path / "out")})
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    before = committed_shards(FILES, job.output_dir)
    assert before
    fill(disk.path / "filler", leave)
    with pytest.raises(OutputUnavailable, match=r"/out/.*cannot .*: No space left on device; free some space") as error:
        run(job)
    assert error.value.exit_code == 74
    after = committed_shards(FILES, job.output_dir)
    assert {number: after[number] for number in before} == before
    (disk.path / "filler").unlink()
    run(job)
    check_output(FILES, job.output_dir, expected)


@pytest.mark.case(47)
def test_what_could_not_be_written_is_named_with_its_bytes(tmp_path: Path, disk: SmallDisk) -> None:
    job = make_job(tmp_path, 300, output={"path": str(disk.path / "out"), "shard_rows": 300}, sampling={"n": 64})
    fill(disk.path / "filler", 100_000)
    with pytest.raises(OutputUnavailable, match=r"cannot write \d+ bytes after \d+: No space left on device"):
        run(job)


def test_a_disk_that_turns_read_only_ends_the_run(tmp_path: Path, disk: SmallDisk, expected: Rows) -> None:
    job = make_job(tmp_path, output={"path": str(disk.path / "out")})
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    disk.remount("ro")
    with pytest.raises(OutputUnavailable, match="Read-only file system"):
        run(job)
    disk.remount("rw")
    run(job)
    check_output(FILES, job.output_dir, expected)
