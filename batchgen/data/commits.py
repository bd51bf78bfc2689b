"""The manifest: numbered records, each created exclusively, which alone say what is committed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from batchgen.data.files import OutputFiles
from batchgen.data.sealed import Body, seal, unseal
from batchgen.data.writer import ShardSummary
from batchgen.errors import OutputDamaged, OutputLocked

RecordKind = Literal["shard", "intent", "replaced", "void"]
"""shard: a file was published. intent: one is about to be replaced. replaced: it was. void: lost, and repaired."""

_NAME = re.compile(r"(\d{8})\.json")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A committed file: what it holds, and the bytes that it must be."""

    summary: ShardSummary
    num_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return shard_name(self.summary.number)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives back an equal record."""
        return {"summary": self.summary.to_json(), "bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardFile:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        return cls(ShardSummary.from_json(value["summary"]), int(value["bytes"]), str(value["sha256"]))


class Record(NamedTuple):
    """One entry of the manifest."""

    number: int
    kind: RecordKind
    fingerprint: str
    shard: ShardFile | None
    """The file published or to be; None for a void record."""
    old_sha256: str | None
    """Of an intent: the file that is to be replaced; None where there is none."""
    at: float
    """When it was written, in seconds since 1970."""


def shard_name(number: int) -> str:
    """`part-00007.parquet`."""
    return f"part-{number:05d}.parquet"


def shard_number(name: str) -> int | None:
    """Inverse of `shard_name`; None for any other name."""
    match = re.fullmatch(r"part-(\d{5,})\.parquet", name)
    number = int(match.group(1)) if match else None
    return number if number is not None and shard_name(number) == name else None


def record_body(record: Record) -> Body:
    """What is sealed of a record."""
    shard = None if record.shard is None else record.shard.to_json()
    return {**record._asdict(), "shard": shard}


def record_from_body(body: Body) -> Record:
    """Inverse of `record_body`; raises KeyError, TypeError or ValueError for anything else."""
    shard = None if body["shard"] is None else ShardFile.from_json(body["shard"])
    return Record(**{**body, "shard": shard})


class ReadLog(NamedTuple):
    """The records as they were found."""

    records: list[Record]
    damaged: dict[int, str]
    """By number what is wrong with each record that is missing or not intact, and is not the newest."""
    torn: Path | None
    """The newest record, if it is not intact: it was being written when the power or the process went."""
    next_number: int
    """Above every number that is taken."""


def read_log(files: OutputFiles, directory: Path) -> ReadLog:
    """Read every record; what is wrong is reported, not raised."""
    numbers = sorted(
        int(match.group(1)) for name in files.list_directory(directory) if (match := _NAME.fullmatch(name))
    )
    records: list[Record] = []
    damaged = {lost: f"{record_path(directory, lost)}: is missing" for lost in _gaps(numbers)}
    torn: Path | None = None
    for number in numbers:
        path = record_path(directory, number)
        record = _read_record(files, path, number)
        if record is not None:
            records.append(record)
        elif number == numbers[-1]:
            torn = path
        else:
            damaged[number] = f"{path}: is not intact"
    return ReadLog(records, damaged, torn, numbers[-1] + 1 if numbers else 0)


def _gaps(numbers: list[int]) -> list[int]:
    return sorted(set(range(numbers[-1] + 1)) - set(numbers)) if numbers else []


def _read_record(files: OutputFiles, path: Path, number: int) -> Record | None:
    status = files.status(path)
    if status is None or not status.is_regular:
        return None
    body = unseal(files.read(path))
    if body is None:
        return None
    try:
        record = record_from_body(body)
    except (KeyError, TypeError, ValueError):
        return None
    return record if record.number == number else None


def record_path(directory: Path, number: int) -> Path:
    """Where a record lies."""
    return directory / f"{number:08d}.json"


class CommitLog:
    """Appends records; the number of a record is the fence: two runs cannot both take it."""

    def __init__(
        self,
        files: OutputFiles,
        directory: Path,
        fingerprint: str,
        next_number: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._files = files
        self._directory = directory
        self._fingerprint = fingerprint
        self._next_number = next_number

    def append(self, kind: RecordKind, shard: ShardFile | None, old_sha256: str | None = None) -> Record:
        """Create the next record, durably; OutputLocked where another run has taken its number."""
        record = Record(self._next_number, kind, self._fingerprint, shard, old_sha256, self._clock())
        self._write(record)
        self._next_number += 1
        return record

    def fill(self, number: int) -> None:
        """Put a void record where one was lost."""
        self._write(Record(number, "void", self._fingerprint, None, None, self._clock()))

    def _write(self, record: Record) -> None:
        path = record_path(self._directory, record.number)
        try:
            self._files.write_new(path, seal(record_body(record)))
        except FileExistsError as error:
            raise OutputLocked(f"{path}: another run has written this record; this one stops") from error
        self._files.sync_directory(self._directory)


class OutputState(NamedTuple):
    """What the records add up to."""

    shards: dict[int, ShardFile]
    """Committed files by number."""
    pending: Record | None
    """An intent that nothing followed: the replacement was begun."""


def replay(records: list[Record], fingerprint: str) -> OutputState:
    """Add up the records; raises OutputDamaged where they contradict each other or belong to another job."""
    shards: dict[int, ShardFile] = {}
    pending: Record | None = None
    for record in records:
        if record.fingerprint != fingerprint:
            raise OutputDamaged(f"commit record {record.number} belongs to another job")
        if record.kind not in get_args(RecordKind):
            raise OutputDamaged(f"commit record {record.number} is of a kind that a later batchgen wrote; use that one")
        shard = record.shard
        if record.kind == "shard" and shard is not None:
            if shard.summary.number in shards:
                raise OutputDamaged(f"commit record {record.number} commits {shard.name} a second time")
            shards[shard.summary.number] = shard
        elif record.kind == "replaced" and shard is not None:
            shards[shard.summary.number] = shard
        pending = record if record.kind == "intent" else None
    _check_overlaps(shards)
    return OutputState(shards, pending)


def _check_overlaps(shards: dict[int, ShardFile]) -> None:
    """Each input row once: no two files may hold the same rows."""
    ranges = sorted((*rows, shard.name) for shard in shards.values() for rows in shard.summary.ranges)
    for (source, _, stop, name), (next_source, start, _, next_name) in pairwise(ranges):
        if source == next_source and start < stop:
            raise OutputDamaged(f"{name} and {next_name} both hold row {start} of source {source}")
