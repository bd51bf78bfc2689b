"""The ledger of one output: who may write it, which job it belongs to, and what of it is committed."""

from __future__ import annotations

import contextlib
import errno
import secrets
from datetime import UTC, datetime
from pathlib import Path

from batchgen.data.commits import CommitLog, ShardFile, read_log, shard_number
from batchgen.data.files import OutputFiles
from batchgen.data.layout import OutputPaths, is_own_card
from batchgen.data.lock import OutputLock
from batchgen.data.orphans import set_aside
from batchgen.data.plan_record import FORMAT, PlanRecord
from batchgen.data.recovery import Inspect, Recovery
from batchgen.data.sealed import seal, unseal
from batchgen.data.writer import WrittenShard
from batchgen.errors import FingerprintMismatch, JobError, OutputDamaged, OutputLocked, OutputUnavailable

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EINVAL)
"""Why a directory above the output cannot be synced that another user or the system has made."""

_ATTEMPT_TIME = "%Y%m%dT%H%M%S"


def new_attempt() -> str:
    """A name for this run that no other run has: the time in UTC, and chance."""
    return f"{datetime.now(UTC).strftime(_ATTEMPT_TIME)}-{secrets.token_hex(4)}"


def attempt_started(attempt: str) -> float:
    """When the run began, in seconds since 1970."""
    return datetime.strptime(attempt.partition("-")[0], _ATTEMPT_TIME).replace(tzinfo=UTC).timestamp()


def read_plan(files: OutputFiles, paths: OutputPaths) -> PlanRecord | None:
    """The plan that the output was begun with; None where there is none.

    Raises OutputDamaged, and JobError where a later batchgen wrote it.
    """
    try:
        body = unseal(files.read(paths.plan))
    except FileNotFoundError:
        return None
    if body is not None and body.get("format", FORMAT) > FORMAT:
        raise JobError(f"{paths.root}: was written by a later batchgen; go on with that one")
    try:
        if body is not None:
            return PlanRecord.from_body(body)
    except KeyError:
        pass
    raise OutputDamaged(f"{paths.plan}: is not intact; restore it, or begin again in another output.path")


def _sync_if_allowed(files: OutputFiles, directory: Path) -> None:
    """Sync a directory, unless it is one that this process may not read, and so has made nothing in."""
    try:
        files.sync_directory(directory)
    except OutputUnavailable as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _NOT_OURS:
            raise


class Ledger:
    """Everything durable about one output, held under its lock.

    `acquire`, then `begin` for a new output or `recover` for one that has a plan, then `commit` as shards are written.
    """

    def __init__(self, files: OutputFiles, paths: OutputPaths, lock: OutputLock) -> None:
        self.files = files
        self.paths = paths
        self.attempt = lock.holder.attempt
        self.shards: dict[int, ShardFile] = {}
        """Committed files by number."""
        self.notes: list[str] = []
        """What recovery put right, a line each."""
        self._lock = lock
        self._log: CommitLog | None = None

    @classmethod
    def acquire(cls, files: OutputFiles, root: Path, *, wait_seconds: float = 0.0) -> Ledger:
        """Make the directories and take the lock; raises OutputLocked, OutputUnavailable."""
        paths = OutputPaths(root)
        for parent in (*reversed(root.parents), *paths.directories):
            if files.status(parent) is None:
                files.make_directory(parent)
                files.sync_directory(parent.parent)
        if files.status(paths.plan) is None:
            for parent in root.parents:
                _sync_if_allowed(files, parent)
        lock = OutputLock.acquire(files, paths.lock, new_attempt(), wait_seconds)
        try:
            # As above: a run that made directories may have died before it could sync their names.
            files.sync_directory(root)
            files.sync_directory(paths.state)
            ledger = cls(files, paths, lock)
            ledger._finish_overwriting()
        except BaseException:
            lock.release()
            raise
        return ledger

    def begin(self, plan: PlanRecord) -> None:
        """Start an output that has no plan yet; FingerprintMismatch where its directory holds other things."""
        strangers = [name for name in self.files.list_directory(self.paths.data) if not name.startswith(".")]
        if strangers or self.files.list_directory(self.paths.commits):
            found = strangers[0] if strangers else self.paths.commits.name
            raise FingerprintMismatch(
                f"{self.paths.root}: has {found}, but no plan of batchgen that it could belong to; choose another "
                f"output.path, or remove it"
            )
        self.clear_temporaries()
        self.write_plan(plan)
        self._log = CommitLog(self.files, self.paths.commits, plan.fingerprint, 0)

    def write_plan(self, plan: PlanRecord) -> None:
        """Write plan.json, atomically."""
        self._lock.check()
        self.files.replace(self.paths.plan, seal(plan.to_body()), self.temporary("plan.json"))

    def recover(self, plan: PlanRecord, inspect: Inspect, *, repair: bool = False) -> list[int]:
        """Go on with an output that was begun: read its records, and put right what the last run left half done.

        Raises OutputDamaged; with `repair` it returns the numbers of the files that must be made anew instead.
        """
        recovery = Recovery(self.files, self.paths, self.attempt, inspect)
        found = read_log(self.files, self.paths.commits)
        recovered = (recovery.repair if repair else recovery.run)(found, plan.fingerprint)
        self._log, self.shards, self.notes = recovered.log, recovered.shards, recovered.notes
        self.clear_temporaries()
        return recovered.damaged

    def set_aside(self, number: int) -> None:
        """Move what lies under a shard's name out of the way, if anything does."""
        path = self.paths.shard(number)
        if self.files.status(path) is not None:
            set_aside(self.files, self.paths, path, self.attempt)

    @property
    def next_number(self) -> int:
        """The next free number of a shard."""
        return max(self.shards, default=-1) + 1

    def temporary(self, name: str) -> Path:
        """A path in tmp/ that belongs to this run."""
        return self.paths.temporary / f"{self.attempt}-{name}"

    def commit(self, written: WrittenShard) -> ShardFile:
        """Publish a written shard under its final name and record it: the one point at which rows are committed."""
        self._lock.check()
        final = self.paths.shard(written.summary.number)
        try:
            self.files.link(written.path, final)
        except FileExistsError as error:
            raise OutputLocked(f"{final}: another run has published this file; this one stops") from error
        try:
            self.files.unlink(written.path)
            self.files.sync_directory(self.paths.data)
        except OutputUnavailable:
            # After a failed sync nobody knows whether the name is on the disk: it must not be taken for published.
            with contextlib.suppress(OutputUnavailable):
                self.files.unlink(final)
            raise
        shard = ShardFile(written.summary, written.num_bytes, written.sha256)
        self._open_log().append("shard", shard)
        self.shards[written.summary.number] = shard
        return shard

    def replace(self, written: WrittenShard) -> ShardFile:
        """Put a written shard in the place of the committed one of its number: intent, rename, record."""
        self._lock.check()
        number = written.summary.number
        shard = ShardFile(written.summary, written.num_bytes, written.sha256)
        # The name of the new file must be durable before the intent speaks of it.
        self.files.sync_directory(self.paths.temporary)
        self._open_log().append("intent", shard, self.shards[number].sha256 if number in self.shards else None)
        self.files.rename(written.path, self.paths.shard(number))
        self.files.sync_directory(self.paths.data)
        self._open_log().append("replaced", shard)
        self.shards[number] = shard
        return shard

    def overwrite(self) -> None:
        """Remove what the old records name, and our own records, so that the output can begin anew.

        A marker is written first: once begun, the removal is finished by whichever run comes next.
        """
        self._lock.check()
        found = read_log(self.files, self.paths.commits)
        named = {record.shard.name for record in found.records if record.shard is not None}
        for name in self.files.list_directory(self.paths.data):
            if shard_number(name) is not None and name not in named:
                set_aside(self.files, self.paths, self.paths.data / name, self.attempt)
        removed = [f"{self.paths.data.name}/{name}" for name in sorted(named)]
        if is_own_card(self.files, self.paths.card):
            removed.append(self.paths.card.name)
        self.files.write_new(self.paths.overwriting, seal({"files": removed}))
        self.files.sync_directory(self.paths.state)
        self._finish_overwriting()
        self._log, self.shards = None, {}

    def clear_journal(self) -> None:
        """Everything is committed: no segment of the journal is of use any more."""
        for name in self.files.list_directory(self.paths.journal):
            self.files.unlink(self.paths.journal / name)

    def clear_temporaries(self) -> None:
        """Remove what dead runs left in tmp/; we hold the lock, so none of it is of a living one."""
        for name in self.files.list_directory(self.paths.temporary):
            self.files.unlink(self.paths.temporary / name)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _open_log(self) -> CommitLog:
        assert self._log is not None, "begin or recover first"
        return self._log

    def _finish_overwriting(self) -> None:
        try:
            marker = unseal(self.files.read(self.paths.overwriting))
        except FileNotFoundError:
            return
        if marker is not None:
            # Written anew: a run that was killed may not have come to sync it, and what it names goes now.
            self.files.replace(self.paths.overwriting, seal(marker), self.temporary("overwriting.json"))
            self._remove_old(marker["files"])
        self.files.unlink(self.paths.overwriting)
        self.files.sync_directory(self.paths.state)

    def _remove_old(self, names: list[str]) -> None:
        paths = self.paths
        for name in names:
            self.files.unlink(paths.root / name)
        self.files.sync_directory(paths.data)
        self.files.sync_directory(paths.root)
        # From the newest: what is left of the records must never have a gap.
        for directory in (paths.commits, paths.journal, paths.temporary, paths.metrics):
            for name in reversed(self.files.list_directory(directory)):
                self.files.unlink(directory / name)
            self.files.sync_directory(directory)
        for path in (paths.plan, paths.job, paths.report):
            self.files.unlink(path)
        self.files.sync_directory(paths.state)
