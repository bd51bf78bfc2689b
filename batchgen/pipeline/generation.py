"""Shards are generated: what a run, a rerun and a repair have in common."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime

from batchgen.data.journal import Journal
from batchgen.data.metrics_log import MetricsLog
from batchgen.pipeline.assembly import Assembly, WholeShard, known_shards
from batchgen.pipeline.drive import Drive, DriveOptions, Tally
from batchgen.pipeline.identity import recorded_facts
from batchgen.pipeline.plan import outside
from batchgen.pipeline.ports import EngineLike
from batchgen.pipeline.progress import Several
from batchgen.pipeline.recorder import Recorder
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.session import Session
from batchgen.pipeline.stop import StopWatch
from batchgen.records import RowRange, Shard

REDONE_CODES = frozenset({"kv_capacity"})
"""Errors of the machine rather than of the row: a later run tries again."""

Commit = Callable[[WholeShard], None]
"""Makes a whole shard durable."""


class Generation:
    """Generates the rows of shards with one engine, which is loaded when the first row needs it."""

    def __init__(self, session: Session, stop: StopWatch, stack: ExitStack) -> None:
        self._session = session
        self._stop = stop
        self._stack = stack
        self.engine: EngineLike | None = None
        self.tally = Tally(session.num_rows, 0, 0)
        self.seconds = 0.0
        self._log: MetricsLog | None = None
        self._recorder: Recorder | None = None
        stack.callback(self._end_log)

    def load_engine(self) -> EngineLike:
        """The engine, loaded if it is not yet; raises Interrupted where there is a reason to stop."""
        if self.engine is None:
            # Loading can take minutes: who asked to stop before it does not wait for it.
            self._stop.check()
            began = time.monotonic()
            self.engine = self._stack.enter_context(closing(self._session.make_engine()))
            self._begin_log(self.engine, time.monotonic() - began)
        return self.engine

    def open_journal(self, scope: str, committed: Sequence[RowRange] = ()) -> Journal:
        """The journal of a scope, without the rows that are committed already and those that are tried again."""
        journal = self._stack.enter_context(closing(self._session.open_journal(scope)))
        known = journal.entries.finished
        noted = known.keys() | journal.entries.partials.keys()
        journal.forget(noted.difference(outside(noted, committed)))
        for key in [key for key, row in known.items() if row.error is not None and row.error.code in REDONE_CODES]:
            del known[key]
        return journal

    def generate(self, shards: Sequence[Shard], journal: Journal, commit: Commit) -> None:
        """Finish every row of the shards that the journal does not know, and commit each shard that is whole."""

        def commit_and_count(whole: WholeShard) -> None:
            commit(whole)
            journal.forget(row.key for row in whole.rows)
            self.tally.num_committed += len(whole.rows)

        known = journal.entries.finished
        complete, rest, missing = known_shards(shards, self._session.index, known)
        for row in known.values():
            self.tally.add_known(row)
        for each in complete:
            commit_and_count(each)
        if rest:
            self._drive(rest, missing, journal, commit_and_count)
        journal.close()

    def _drive(self, rest: list[Shard], missing: list[RowRange], journal: Journal, commit: Commit) -> None:
        session, job = self._session, self._session.job
        engine = self.load_engine()
        feeder = self._stack.enter_context(closing(session.make_feeder(missing, engine.max_model_len)))
        options = DriveOptions(job.sampling, session.layout.kept, job.run.max_error_rate, job.run.journal_interval)
        drive = Drive(
            engine, Assembly(rest, session.index, journal.entries.finished), journal, commit, self.tally, options
        )
        session.watcher.phase("generating")
        assert self._recorder is not None
        watched = session.watcher.progress
        started = time.monotonic()
        try:
            drive.run(feeder, self._stop, self._recorder if watched is None else Several(watched, self._recorder))
        finally:
            self.seconds += time.monotonic() - started

    def _begin_log(self, engine: EngineLike, load_seconds: float) -> None:
        """Start this run's record of figures: what depends on luck and neighbours, and so is in no row."""
        ledger = self._session.ledger
        self._log = MetricsLog(ledger.files, ledger.paths.metrics, ledger.attempt)
        self._log.add(
            "run",
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "host": platform.node(),
                "load_seconds": round(load_seconds, 3),
                "facts": recorded_facts(),
                "settings": self._session.job.engine.model_dump(mode="json"),
                "engine": _figures(engine.metrics),
            },
        )
        self._recorder = Recorder(self._log)

    def _end_log(self) -> None:
        if self.engine is None or self._log is None or self._recorder is None:
            return
        self._recorder.close()
        tally = self.tally
        self._log.add(
            "end",
            {
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": self.seconds,
                "rows_committed": tally.num_committed,
                "prompt_tokens": tally.prompt_tokens,
                "completion_tokens": tally.completion_tokens,
                "engine": _figures(self.engine.metrics),
                "slowest": [slow._asdict() for slow in sorted(tally.slowest, reverse=True)],
            },
        )
        self._log.close()

    def report(self, num_rows: int, errors: dict[str, int]) -> JobReport:
        """The figures of the run, over an output with these rows and errors."""
        ledger, tally = self._session.ledger, self.tally
        metrics = None if self.engine is None else self.engine.metrics
        return JobReport(
            data_dir=ledger.paths.data,
            data_files=tuple(ledger.paths.shard(number) for number in sorted(ledger.shards)),
            num_rows=num_rows,
            num_ok=num_rows - sum(errors.values()),
            num_errors=sum(errors.values()),
            errors_by_code=errors,
            num_rows_this_run=tally.num_committed,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=0 if metrics is None else metrics.num_cached_tokens,
            completion_tokens=tally.completion_tokens,
            seconds=self.seconds,
            kv_cache_bytes=0 if metrics is None else metrics.kv_cache_bytes,
            kv_peak=0.0 if metrics is None else metrics.peak_kv_share,
            sampling=self._session.job.sampling,
            eos_token_ids=tuple(self._session.eos_token_ids),
            unused_generation_config=self._session.unused_generation_config,
        )


def _figures(metrics: object) -> dict[str, object]:
    return asdict(metrics) if is_dataclass(metrics) and not isinstance(metrics, type) else {}
