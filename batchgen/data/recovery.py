"""What the last run left behind: torn records, files without a record, half a replacement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from batchgen.data.commits import (
    CommitLog,
    OutputState,
    ReadLog,
    Record,
    ShardFile,
    read_log,
    record_path,
    replay,
    shard_number,
)
from batchgen.data.files import OutputFiles
from batchgen.data.layout import OutputPaths
from batchgen.data.orphans import set_aside
from batchgen.data.verification import FoundShard
from batchgen.errors import OutputDamaged

Inspect = Callable[[Path], FoundShard]
"""Reads a whole shard file and says what it is."""


class Recovered(NamedTuple):
    """A consistent output, ready for more."""

    log: CommitLog
    shards: dict[int, ShardFile]
    notes: list[str]
    """One line for each thing that was put right."""
    damaged: list[int]
    """Committed files that are not what was committed; empty unless damage is to be repaired."""


class Recovery:
    """Brings an output into a consistent state; every step can be cut off and repeated."""

    def __init__(self, files: OutputFiles, paths: OutputPaths, attempt: str, inspect: Inspect) -> None:
        self._files = files
        self._paths = paths
        self._attempt = attempt
        self._inspect = inspect
        self._notes: list[str] = []

    def run(self, found: ReadLog, fingerprint: str) -> Recovered:
        """Raises OutputDamaged where records or committed files are not what they were."""
        if found.damaged:
            raise OutputDamaged("\n".join([*found.damaged.values(), repair_hint(self._paths.root)]))
        recovered = self._recover(found, fingerprint)
        problems = missing_or_resized(self._files, self._paths, recovered.shards)
        if problems:
            raise OutputDamaged("\n".join([*problems, repair_hint(self._paths.root)]))
        return recovered

    def repair(self, found: ReadLog, fingerprint: str) -> Recovered:
        """Void the records that are lost, read every file whole, and say which must be made anew.

        A file that is whole, but is another than its record says, is taken for a replacement whose record was lost.
        Raises OutputDamaged where intact records contradict each other.
        """
        log = CommitLog(self._files, self._paths.commits, fingerprint, found.next_number)
        foreign = [record.number for record in found.records if record.fingerprint != fingerprint]
        for number in sorted([*found.damaged, *foreign]):
            path = record_path(self._paths.commits, number)
            if self._files.status(path) is not None:
                self._set_aside(path, "a commit record was damaged or of another job")
            log.fill(number)
        healed = read_log(self._files, self._paths.commits)
        has_lost_records = any(record.kind == "void" for record in healed.records)
        recovered = self._recover(healed, fingerprint)
        for number, shard in sorted(recovered.shards.items()):
            inspected = self._inspect(self._paths.shard(number)).shard
            if inspected == shard:
                continue
            if inspected is not None and has_lost_records and _replaces(inspected, shard):
                recovered.log.append("replaced", inspected)
                recovered.shards[number] = inspected
                self._notes.append(f"{shard.name}: is a whole replacement whose record was lost; it is now recorded")
            else:
                recovered.damaged.append(number)
        return recovered

    def _recover(self, found: ReadLog, fingerprint: str) -> Recovered:
        state = replay(found.records, fingerprint)
        next_number = found.next_number
        if found.torn is not None:
            self._set_aside(found.torn, "a commit record was cut off while it was written")
            next_number -= 1
        if found.records:
            self._settle(found.records[-1].number)
        log = CommitLog(self._files, self._paths.commits, fingerprint, next_number)
        shards = dict(state.shards)
        self._finish_replacement(state, log, shards)
        self._adopt(log, shards, fingerprint)
        return Recovered(log, shards, self._notes, [])

    def _settle(self, number: int) -> None:
        """Write the newest record anew: a run that was killed may not have come to sync it, and more will build on it.

        All older ones were synced before the newest was begun.
        """
        path = record_path(self._paths.commits, number)
        temporary = self._paths.temporary / f"{self._attempt}-{path.name}"
        self._files.replace(path, self._files.read(path), temporary)

    def _set_aside(self, path: Path, reason: str) -> None:
        target = set_aside(self._files, self._paths, path, self._attempt)
        self._notes.append(f"{reason}: {path.name} is now {target}")

    def _finish_replacement(self, state: OutputState, log: CommitLog, shards: dict[int, ShardFile]) -> None:
        """Where a run died between renaming a replacement and recording it, record it."""
        intent = state.pending
        if intent is None or intent.shard is None:
            return
        number = intent.shard.summary.number
        if _is_intended(self._inspect(self._paths.shard(number)), intent):
            self._files.sync_directory(self._paths.data)
            log.append("replaced", intent.shard)
            shards[number] = intent.shard
            self._notes.append(f"{intent.shard.name}: its replacement was complete, and is now recorded")

    def _adopt(self, log: CommitLog, shards: dict[int, ShardFile], fingerprint: str) -> None:
        """Record whole files of this job that were published without a record; set others aside."""
        for name in self._files.list_directory(self._paths.data):
            number = shard_number(name)
            if number is None or number in shards:
                continue
            path = self._paths.data / name
            found = self._inspect(path)
            shard, problem = found.shard, found.problem
            if shard is not None:
                problem = _reason_against(shard, number, shards, fingerprint)
            if shard is None or problem is not None:
                self._set_aside(path, f"a file without a record {problem}")
                continue
            self._files.sync_directory(self._paths.data)
            log.append("shard", shard)
            shards[number] = shard
            self._notes.append(
                f"{name}: was published by a run that died before it could record it; it is now recorded"
            )


def _replaces(found: ShardFile, recorded: ShardFile) -> bool:
    """Whether a whole file holds the same rows by another run; by the same run it would have to be the same bytes."""
    mine, theirs = found.summary, recorded.summary
    is_same_shard = (mine.number, mine.ranges, mine.fingerprint) == (theirs.number, theirs.ranges, theirs.fingerprint)
    return is_same_shard and mine.attempt != theirs.attempt


def _is_intended(found: FoundShard, intent: Record) -> bool:
    return found.shard is not None and found.shard == intent.shard


def _reason_against(shard: ShardFile, number: int, shards: dict[int, ShardFile], fingerprint: str) -> str | None:
    """Why a whole file cannot be adopted; None if it can."""
    summary = shard.summary
    if summary.fingerprint != fingerprint:
        return "is of another job"
    if summary.number != number:
        return f"has the name of another ({shard.name})"
    for other in shards.values():
        for mine in summary.ranges:
            for theirs in other.summary.ranges:
                if mine.source == theirs.source and mine.start < theirs.stop and theirs.start < mine.stop:
                    return f"holds rows that {other.name} holds"
    return None


def missing_or_resized(files: OutputFiles, paths: OutputPaths, shards: dict[int, ShardFile]) -> list[str]:
    """One line for each committed file that is not there, is no regular file or has another size."""
    problems = []
    for number, shard in sorted(shards.items()):
        path = paths.shard(number)
        status = files.status(path)
        if status is None:
            problems.append(f"{path}: is missing")
        elif not status.is_regular:
            problems.append(f"{path}: is no regular file")
        elif status.size != shard.num_bytes:
            problems.append(f"{path}: has {status.size} bytes, but {shard.num_bytes} were committed")
    return problems


def repair_hint(root: Path) -> str:
    """What to do about damage."""
    return f"put the files back, or see `batchgen verify {root}` and its option --repair"
