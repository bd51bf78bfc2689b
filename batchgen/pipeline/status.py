"""How far an output is, from its plan, its records, its journal and its lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from batchgen.data.commits import Record, ShardFile, replay
from batchgen.data.journal import Journal, JournalEntries
from batchgen.data.ledger import attempt_started
from batchgen.data.lock import LockHolder, read_holder
from batchgen.data.recovery import missing_or_resized
from batchgen.errors import OutputDamaged
from batchgen.pipeline.assembly import counts
from batchgen.pipeline.plan import covered, outside
from batchgen.pipeline.session import RUN_SCOPE
from batchgen.pipeline.stored import StoredOutput


@dataclass(frozen=True)
class Status:
    """Where an output stands."""

    output: str
    num_rows: int
    """Rows of the job."""
    num_committed: int
    errors: dict[str, int]
    """Committed error rows by code."""
    num_files: int
    num_journaled: int
    """Rows that are finished, but not committed yet."""
    num_begun: int
    """Rows with tokens in the journal that are not finished."""
    rows_per_second: float
    """Of the run that last committed something, with the loading of its model; 0 where there is none."""
    holder: LockHolder | None
    """Who works on it now."""
    problems: list[str]
    """Damage that shows without reading the files; `verify` reads them."""

    @property
    def num_errors(self) -> int:
        """Committed error rows."""
        return sum(self.errors.values())

    @property
    def is_done(self) -> bool:
        """Whether every row is committed."""
        return self.num_committed == self.num_rows and not self.problems

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        holder = None if self.holder is None else self.holder._asdict()
        derived = {"num_ok": self.num_committed - self.num_errors, "num_errors": self.num_errors, "done": self.is_done}
        return {**asdict(self), "holder": holder, **derived}


def status(stored: StoredOutput, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Status:
    """Look at an output; reads no shard, takes no lock."""
    problems = list(stored.log.damaged.values())
    shards: dict[int, ShardFile] = {}
    try:
        shards = replay(stored.log.records, stored.plan.fingerprint).shards
    except OutputDamaged as error:
        problems.append(str(error))
    problems += missing_or_resized(stored.files, stored.paths, shards)
    entries = _journal(stored)
    num_committed, errors = counts(shards.values())
    is_locked = stored.files.is_locked(stored.paths.lock)
    holder = read_holder(stored.files, stored.paths.lock) if is_locked else None
    done = covered(shards.values())
    return Status(
        output=str(stored.paths.root),
        num_rows=stored.num_rows,
        num_committed=num_committed,
        errors=errors,
        num_files=len(shards),
        num_journaled=len(outside(entries.finished, done)),
        num_begun=len(outside(entries.partials, done)),
        rows_per_second=_rate(stored.log.records, holder, clock()),
        holder=holder,
        problems=problems,
    )


def _journal(stored: StoredOutput) -> JournalEntries:
    header = {"fingerprint": stored.plan.fingerprint, "scope": RUN_SCOPE}
    return Journal(stored.files, stored.paths.journal, "", header).entries


def _rate(records: list[Record], holder: LockHolder | None, now: datetime) -> float:
    """Rows a second of the run at work, or of the last one: what it committed, over the time since it began."""
    published = [record for record in records if record.kind == "shard" and record.shard is not None]
    attempts = [record.shard.summary.attempt for record in published if record.shard is not None]
    if not attempts:
        return 0.0
    attempt = holder.attempt if holder is not None else attempts[-1]
    rows = sum(each.shard.summary.rows for each in published if each.shard and each.shard.summary.attempt == attempt)
    ended = now.timestamp() if holder is not None else published[-1].at
    seconds = ended - attempt_started(attempt)
    return rows / seconds if seconds > 0 else 0.0
