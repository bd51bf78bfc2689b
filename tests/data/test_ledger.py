"""The ledger: published files, their records, and what is put right after a run that died in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from batchgen.data.commits import CommitLog, ShardFile, read_log, record_path
from batchgen.data.file_backend import OsBackend
from batchgen.data.files import OutputFiles
from batchgen.data.ledger import Ledger, read_plan
from batchgen.data.plan_record import PlanRecord
from batchgen.data.rows import FinishedRow
from batchgen.data.schema import output_schema
from batchgen.data.table import output_tables
from batchgen.data.verification import inspect_shard
from batchgen.data.writer import ParquetShardWriter, WrittenShard
from batchgen.errors import FingerprintMismatch, OutputDamaged, OutputLocked, OutputUnavailable
from batchgen.records import RowRange
from tests.data.shards import LAYOUT, read_rows, row, sample, source, summary

PLAN = PlanRecord("f" * 64, {}, {}, {}, "/jobs", "2026-01-01T00:00:00", {}, {})
SCHEMA = output_schema(LAYOUT)


def numbers(rows: RowRange) -> range:
    return range(rows.start, rows.stop)


def some_rows(start: int, stop: int, text: str = "text") -> list[FinishedRow]:
    return [row(number, sample(f"{text} {number}")) for number in range(start, stop)]


def write(
    ledger: Ledger, number: int, rows: Sequence[FinishedRow], changes: dict[str, object] | None = None
) -> WrittenShard:
    writer = ParquetShardWriter(ledger.files, SCHEMA)
    facts = replace(summary(rows, number, ledger.attempt), **(changes or {}))  # type: ignore[arg-type]
    return writer.write(
        ledger.temporary(f"part-{number}"), facts, output_tables([source(rows)], rows, LAYOUT, SCHEMA, 10**8)
    )


def begun(root: Path, backend: OsBackend | None = None) -> Ledger:
    ledger = Ledger.acquire(OutputFiles(backend), root)
    ledger.begin(PLAN)
    return ledger


def reopened(root: Path) -> Ledger:
    """The ledger as the next run finds it; the caller closes it."""
    files = OutputFiles()
    ledger = Ledger.acquire(files, root)
    try:
        plan = read_plan(files, ledger.paths)
        assert plan is not None
        inspect = partial(inspect_shard, files, schema=SCHEMA, struct_name="batchgen", rows_of=numbers)
        ledger.recover(plan, inspect)
    except BaseException:
        ledger.close()
        raise
    return ledger


def committed(root: Path, *spans: tuple[int, int]) -> None:
    """An output with one shard for each span of rows."""
    ledger = begun(root)
    for number, span in enumerate(spans):
        ledger.commit(write(ledger, number, some_rows(*span)))
    ledger.close()


def test_a_committed_shard_is_there_for_the_next_run(tmp_path: Path) -> None:
    committed(tmp_path, (0, 3), (3, 5))
    ledger = reopened(tmp_path)
    assert sorted(ledger.shards) == [0, 1]
    assert (ledger.next_number, ledger.notes) == (2, [])
    assert [cells["id"] for cells in read_rows(map(ledger.paths.shard, (0, 1)))] == [0, 1, 2, 3, 4]
    assert list(ledger.paths.temporary.iterdir()) == []
    ledger.close()


def test_two_ledgers_cannot_be_open_at_once(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    with pytest.raises(OutputLocked):
        Ledger.acquire(OutputFiles(), tmp_path)
    ledger.close()
    Ledger.acquire(OutputFiles(), tmp_path).close()


def test_missing_parents_of_the_output_are_made(tmp_path: Path) -> None:
    begun(tmp_path / "a" / "b" / "c").close()
    assert (tmp_path / "a" / "b" / "c" / "_batchgen" / "plan.json").exists()


def test_a_published_name_is_never_overwritten(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    written = write(ledger, 0, some_rows(0, 2))
    ledger.paths.shard(0).write_text("of another run")
    with pytest.raises(OutputLocked, match=r"another run has published this file"):
        ledger.commit(written)
    assert ledger.paths.shard(0).read_text() == "of another run"
    ledger.close()


def test_a_removed_lock_stops_the_commit(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    written = write(ledger, 0, some_rows(0, 2))
    ledger.paths.lock.unlink()
    with pytest.raises(OutputLocked, match="removed or replaced"):
        ledger.commit(written)
    assert list(ledger.paths.data.iterdir()) == []
    ledger.close()


def without_last_record(root: Path) -> None:
    """As if the last run had died between publishing its last file and recording it."""
    directory = root / "_batchgen" / "commits"
    record_path(directory, len(list(directory.iterdir())) - 1).unlink()


def test_a_file_without_a_record_is_adopted(tmp_path: Path) -> None:
    committed(tmp_path, (0, 3), (3, 5))
    without_last_record(tmp_path)
    ledger = reopened(tmp_path)
    assert sorted(ledger.shards) == [0, 1]
    assert len(read_log(ledger.files, ledger.paths.commits).records) == 2
    assert "is now recorded" in ledger.notes[0]
    ledger.close()


def test_a_torn_record_is_cut_and_its_file_adopted(tmp_path: Path) -> None:
    committed(tmp_path, (0, 3), (3, 5))
    torn = record_path(tmp_path / "_batchgen" / "commits", 1)
    torn.write_bytes(torn.read_bytes()[:40])
    ledger = reopened(tmp_path)
    assert sorted(ledger.shards) == [0, 1]
    assert [path.name.split(".")[0] for path in ledger.paths.orphans.iterdir()] == ["00000001"]
    ledger.close()
    assert reopened(tmp_path).shards == ledger.shards


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(bytes(content))


def to_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("harm", [cut, flip, to_link, lambda path: path.write_text("foreign")])
def test_a_harmed_file_without_a_record_is_set_aside(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    committed(tmp_path, (0, 3), (3, 5))
    without_last_record(tmp_path)
    harm(tmp_path / "data" / "part-00001.parquet")
    ledger = reopened(tmp_path)
    assert sorted(ledger.shards) == [0]
    assert [path.name[:18] for path in ledger.paths.orphans.iterdir()] == ["part-00001.parquet"]
    assert ledger.next_number == 1
    ledger.close()


@pytest.mark.parametrize(
    ("changes", "start"), [({"fingerprint": "0" * 64}, 3), ({"number": 7}, 3), ({}, 2)], ids=["job", "name", "rows"]
)
def test_a_whole_file_that_does_not_fit_is_set_aside(tmp_path: Path, changes: dict[str, object], start: int) -> None:
    committed(tmp_path, (0, 3))
    ledger = reopened(tmp_path)
    write(ledger, 1, some_rows(start, 5), changes).path.rename(ledger.paths.shard(1))
    ledger.close()
    ledger = reopened(tmp_path)
    assert sorted(ledger.shards) == [0]
    assert len(list(ledger.paths.orphans.iterdir())) == 1
    ledger.close()


def test_files_with_other_names_are_left_alone(tmp_path: Path) -> None:
    committed(tmp_path, (0, 3))
    (tmp_path / "data" / "notes.txt").write_text("mine")
    reopened(tmp_path).close()
    assert (tmp_path / "data" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("harm", [cut, to_link, Path.unlink])
def test_a_committed_file_that_changed_is_damage(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    committed(tmp_path, (0, 3))
    harm(tmp_path / "data" / "part-00000.parquet")
    with pytest.raises(OutputDamaged, match=r"part-00000\.parquet.*\n.*batchgen verify .*--repair"):
        reopened(tmp_path)


def test_a_gap_in_the_records_is_damage(tmp_path: Path) -> None:
    committed(tmp_path, (0, 1), (1, 2), (2, 3))
    record_path(tmp_path / "_batchgen" / "commits", 1).unlink()
    with pytest.raises(OutputDamaged, match=r"00000001\.json: is missing"):
        reopened(tmp_path)


def test_a_plan_that_is_not_intact_is_damage(tmp_path: Path) -> None:
    committed(tmp_path, (0, 1))
    cut(tmp_path / "_batchgen" / "plan.json")
    with pytest.raises(OutputDamaged, match=r"plan\.json: is not intact"):
        reopened(tmp_path)


def test_records_without_a_plan_are_not_begun_again(tmp_path: Path) -> None:
    committed(tmp_path, (0, 1))
    (tmp_path / "_batchgen" / "plan.json").unlink()
    ledger = Ledger.acquire(OutputFiles(), tmp_path)
    with pytest.raises(FingerprintMismatch, match="no plan of batchgen"):
        ledger.begin(PLAN)
    ledger.close()


def test_a_replacement_takes_the_place_of_the_file(tmp_path: Path) -> None:
    committed(tmp_path, (0, 3))
    ledger = reopened(tmp_path)
    ledger.replace(write(ledger, 0, some_rows(0, 3, "new")))
    ledger.close()
    ledger = reopened(tmp_path)
    assert [cells["completions"] for cells in read_rows([ledger.paths.shard(0)])] == [[f"new {n}"] for n in range(3)]
    assert [record.kind for record in read_log(ledger.files, ledger.paths.commits).records] == [
        "shard",
        "intent",
        "replaced",
    ]
    ledger.close()


class _FailsAt(OsBackend):
    """Refuses one kind of operation."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def rename(self, source: Path, target: Path) -> None:
        if self.kind == "rename" and target.suffix == ".parquet":
            raise OSError(5, "I/O error")
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        if self.kind == "sync" and path.name == "data" and any(path.iterdir()):
            raise OSError(5, "I/O error")
        super().sync_directory(path)


@pytest.mark.parametrize(("kind", "text"), [("rename", "text"), ("sync", "new")])
def test_half_a_replacement_is_finished_or_given_up(tmp_path: Path, kind: str, text: str) -> None:
    committed(tmp_path, (0, 3))
    ledger = reopened(tmp_path)
    ledger.files = OutputFiles(_FailsAt(kind))
    with pytest.raises(OutputUnavailable):
        ledger.replace(write(ledger, 0, some_rows(0, 3, "new")))
    ledger.close()
    ledger = reopened(tmp_path)
    assert [cells["completions"] for cells in read_rows([ledger.paths.shard(0)])] == [[f"{text} {n}"] for n in range(3)]
    assert ledger.shards[0].num_bytes == ledger.paths.shard(0).stat().st_size
    ledger.close()


def test_a_name_whose_sync_failed_is_taken_back(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    ledger.files = OutputFiles(_FailsAt("sync"))
    with pytest.raises(OutputUnavailable):
        ledger.commit(write(ledger, 0, some_rows(0, 2)))
    assert list(ledger.paths.data.iterdir()) == []
    ledger.close()
    assert reopened(tmp_path).shards == {}


def test_no_journal_is_kept_when_everything_is_committed(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    (ledger.paths.journal / "a-000001.log").write_text("x")
    ledger.clear_journal()
    assert list(ledger.paths.journal.iterdir()) == []
    ledger.close()


@pytest.mark.case(46)
def test_overwrite_removes_only_what_the_records_name(tmp_path: Path) -> None:
    committed(tmp_path, (0, 1), (1, 2))
    (tmp_path / "data" / "mine.parquet").write_text("mine")
    ledger = Ledger.acquire(OutputFiles(), tmp_path)
    ledger.overwrite()
    assert [path.name for path in ledger.paths.data.iterdir()] == ["mine.parquet"]
    assert list(ledger.paths.commits.iterdir()) == []
    assert not ledger.paths.plan.exists()
    with pytest.raises(FingerprintMismatch, match=r"has mine\.parquet"):
        ledger.begin(PLAN)
    ledger.close()


def test_files_without_a_record_are_set_aside_before_an_overwrite(tmp_path: Path) -> None:
    committed(tmp_path, (0, 1), (1, 2))
    without_last_record(tmp_path)
    ledger = Ledger.acquire(OutputFiles(), tmp_path)
    ledger.overwrite()
    assert list(ledger.paths.data.iterdir()) == []
    assert len(list(ledger.paths.orphans.iterdir())) == 1
    ledger.begin(PLAN)
    ledger.close()


def test_an_overwrite_that_was_cut_off_is_finished_by_the_next_run(tmp_path: Path) -> None:
    committed(tmp_path, (0, 1), (1, 2), (2, 3))
    paths = Ledger.acquire(OutputFiles(), tmp_path)

    class Cut(OsBackend):
        left = 3

        def unlink(self, path: Path) -> None:
            Cut.left -= 1
            if Cut.left == 0:
                raise OSError(5, "I/O error")
            super().unlink(path)

    paths.files = OutputFiles(Cut())
    with pytest.raises(OutputUnavailable):
        paths.overwrite()
    paths.close()
    ledger = Ledger.acquire(OutputFiles(), tmp_path)
    assert list(ledger.paths.data.iterdir()) == []
    assert read_plan(ledger.files, ledger.paths) is None
    ledger.begin(PLAN)
    ledger.close()


def test_adoption_never_takes_a_number_twice(tmp_path: Path) -> None:
    committed(tmp_path, (0, 1))
    log = CommitLog(OutputFiles(), tmp_path / "_batchgen" / "commits", PLAN.fingerprint, 0)
    with pytest.raises(OutputLocked):
        log.append("shard", ShardFile(summary(some_rows(0, 1)), 1, ""))
