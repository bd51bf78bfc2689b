"""A whole run: open the output, generate what is missing, commit, and say what it came to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from batchgen.config import JobConfig
from batchgen.data.journal import Journal
from batchgen.data.probe import probe_file_system
from batchgen.errors import BatchgenError
from batchgen.pipeline.assembly import Assembly, ShardBuilder, WholeShard, counts, known_shards
from batchgen.pipeline.card import card, write_card
from batchgen.pipeline.drive import Drive, DriveOptions, Tally, check_error_rate
from batchgen.pipeline.plan import covered, gaps, incompleteness, plan_shards
from batchgen.pipeline.ports import EngineLike, Services
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.services import default_services
from batchgen.pipeline.session import RUN_SCOPE, OpenOptions, Session, Watcher, open_session
from batchgen.pipeline.stop import StopWatch
from batchgen.records import RowRange, Shard

__all__ = ["run_job"]

REDONE_CODES = frozenset({"kv_capacity"})
"""Errors of the machine rather than of the row: a later run tries again what is not committed."""


def run_job(
    job: JobConfig,
    *,
    progress: Progress | None = None,
    services: Services | None = None,
    options: OpenOptions = OpenOptions(),  # noqa: B008 (immutable)
) -> JobReport:
    """Run a job to its end, going on where an earlier run of it ended.

    Raises JobError, TooManyRowErrors, OutputLocked, FingerprintMismatch, OutputDamaged, OutputUnavailable and
    Interrupted, each with its exit code; in every case what is committed is intact, and running again goes on.
    """
    with StopWatch(job.run.max_runtime, job.run.grace) as stop, ExitStack() as stack:
        session = open_session(job, services or default_services(), Watcher(progress), stack, options)
        work = _Work(session, stop)
        work.run(stack)
        return work.report()


class _Work:
    """What a run does with an open session."""

    def __init__(self, session: Session, stop: StopWatch) -> None:
        self._session = session
        self._stop = stop
        self._tally = Tally(session.num_rows, 0, 0)
        self._engine: EngineLike | None = None
        self._seconds = 0.0

    def run(self, stack: ExitStack) -> None:
        """Commit everything that is not committed yet."""
        session = self._session
        done = list(session.ledger.shards.values())
        left = [rows for rows in gaps(session.expected, covered(done)) if session.index.count(rows)]
        num_committed, errors = counts(done)
        self._tally.num_done, self._tally.num_errors = num_committed, sum(errors.values())
        if left or session.plan is None or not done:
            probe_file_system(session.services.files, session.ledger.temporary("probe"))
            self._generate(left, stack)
        self._check()

    def _generate(self, left: Sequence[RowRange], stack: ExitStack) -> None:
        session = self._session
        if session.plan is None:
            if left:
                self._engine = stack.enter_context(closing(session.make_engine()))
            session.begin(self._engine)
        session.write_job()
        journal = stack.enter_context(closing(session.open_journal(RUN_SCOPE)))
        known = journal.entries.finished
        for key in [key for key, row in known.items() if row.error is not None and row.error.code in REDONE_CODES]:
            del known[key]
        shards = plan_shards(left, session.job.output.shard_rows, session.ledger.next_number, session.index)
        if not shards and not session.ledger.shards:
            # A job without rows still has an output that can be read, with its full schema.
            shards = [Shard(0, ())]
        whole, rest, missing = known_shards(shards, session.index, known)
        builder = session.make_builder(stack)
        for each in whole:
            self._commit_known(builder, journal, each)
        if rest:
            self._drive(builder, journal, rest, missing, stack)
        journal.close()

    def _commit_known(self, builder: ShardBuilder, journal: Journal, whole: WholeShard) -> None:
        self._session.ledger.commit(builder.write(whole))
        journal.forget(row.key for row in whole.rows)
        self._tally.num_done += len(whole.rows)
        self._tally.num_errors += sum(row.error is not None for row in whole.rows)
        self._tally.num_rows_this_run += len(whole.rows)

    def _drive(
        self,
        builder: ShardBuilder,
        journal: Journal,
        rest: list[Shard],
        missing: list[RowRange],
        stack: ExitStack,
    ) -> None:
        session = self._session
        engine = self._engine or stack.enter_context(closing(session.make_engine()))
        self._engine = engine
        job = session.job
        known = journal.entries.finished
        self._tally.num_done += len(known)
        self._tally.num_errors += sum(row.error is not None for row in known.values())
        feeder = stack.enter_context(closing(session.make_feeder(missing, engine.max_model_len)))
        options = DriveOptions(job.sampling, session.layout.kept, job.run.max_error_rate, job.run.journal_interval)
        assembly = Assembly(rest, session.index, known)
        drive = Drive(engine, assembly, builder, session.ledger, journal, self._tally, options)
        session.watcher.phase("generating")
        started = time.monotonic()
        drive.run(feeder, self._stop, session.watcher.progress)
        self._seconds = time.monotonic() - started

    def _check(self) -> None:
        """Rows in are rows out, each once, before anyone is told so."""
        session = self._session
        shards = session.ledger.shards.values()
        problem = incompleteness(session.expected, shards, session.index)
        if problem is not None:
            raise BatchgenError(f"{session.ledger.paths.root}: {problem}; this is a bug, and nothing is lost")
        num_rows, errors = counts(shards)
        session.ledger.clear_journal()
        write_card(session.services.files, session.ledger, card(session.job, num_rows, errors, len(shards)))
        check_error_rate(Tally(num_rows, num_rows, sum(errors.values())), session.job.run.max_error_rate)

    def report(self) -> JobReport:
        """The figures of the run."""
        ledger, tally = self._session.ledger, self._tally
        num_rows, errors = counts(ledger.shards.values())
        metrics = None if self._engine is None else self._engine.metrics
        return JobReport(
            data_dir=ledger.paths.data,
            data_files=tuple(ledger.paths.shard(number) for number in sorted(ledger.shards)),
            num_rows=num_rows,
            num_ok=num_rows - sum(errors.values()),
            num_errors=sum(errors.values()),
            errors_by_code=errors,
            num_rows_this_run=tally.num_rows_this_run,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=0 if metrics is None else metrics.num_cached_tokens,
            completion_tokens=tally.completion_tokens,
            seconds=self._seconds,
            kv_cache_bytes=0 if metrics is None else metrics.kv_cache_bytes,
            kv_peak=0.0 if metrics is None else metrics.peak_kv_share,
            sampling=self._session.job.sampling,
        )
