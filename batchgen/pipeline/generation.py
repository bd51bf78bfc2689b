"""Shards are generated: what a run, a rerun and a repair have in common, whoever computes."""

from __future__ import annotations

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from batchgen.data.journal import Journal
from batchgen.data.metrics_log import MetricsLog
from batchgen.data.writer import WrittenShard
from batchgen.pipeline.assembly import Assembly, WholeShard, known_shards
from batchgen.pipeline.drive import Drive, DriveOptions, Tally
from batchgen.pipeline.identity import recorded_facts
from batchgen.pipeline.plan import outside
from batchgen.pipeline.ports import EngineLike, PromptCheck
from batchgen.pipeline.progress import Progress, Several
from batchgen.pipeline.recorder import Recorder
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.session import Session
from batchgen.pipeline.stop import StopWatch
from batchgen.records import RowRange, Shard

REDONE_CODES = frozenset({"kv_capacity"})
"""Errors of the machine rather than of the row: a later run tries again."""


class Commit(NamedTuple):
    """Makes a whole shard durable."""

    rows: Callable[[WholeShard], None]
    """Of its rows."""
    written: Callable[[WrittenShard], None] | None = None
    """Of a file that another process wrote; None where that is not wanted."""


class Figures(NamedTuple):
    """What engines did, for the report and the metrics."""

    cached_tokens: int
    kv_cache_bytes: int
    kv_peak: float
    details: Mapping[str, Any]


class Work(NamedTuple):
    """Shards to generate."""

    shards: Sequence[Shard]
    scope: str
    """Of the journal, which an interrupted run of the same scope has begun."""
    commit: Commit
    committed: Sequence[RowRange] = ()
    """Rows that the journal may know, but nobody needs any more."""
    remove_journal: bool = False
    """Whether nothing of the scope is of use when all is committed."""


class Generation(ABC):
    """Generates the rows of shards; engines are loaded when the first row needs them."""

    def __init__(self, session: Session, stop: StopWatch, stack: ExitStack) -> None:
        self._session = session
        self._stop = stop
        self._stack = stack
        self.tally = Tally(session.num_rows, 0, 0)
        self.seconds = 0.0
        self._log: MetricsLog | None = None
        self._recorder: Recorder | None = None
        stack.callback(self._end_log)

    @abstractmethod
    def load(self) -> Mapping[str, Any]:
        """Load what computes, if it is not yet; returns what `auto` came to."""

    @abstractmethod
    def generate(self, work: Work) -> None:
        """Finish every row of the shards that the journal does not know, and commit each shard that is whole."""

    @property
    @abstractmethod
    def figures(self) -> Figures | None:
        """What engines did in this run; None where none was loaded."""

    def _begin_log(self, load_seconds: float) -> None:
        """Start this run's record of figures: what depends on luck and neighbours, and so is in no row."""
        ledger, engines = self._session.ledger, self.figures
        self._log = MetricsLog(ledger.files, ledger.paths.metrics, ledger.attempt)
        self._log.add(
            "run",
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "host": platform.node(),
                "load_seconds": round(load_seconds, 3),
                "facts": recorded_facts(),
                "settings": self._session.job.engine.model_dump(mode="json"),
                **({} if engines is None else engines.details),
            },
        )
        self._recorder = Recorder(self._log)

    def _end_log(self) -> None:
        engines = self.figures
        if engines is None or self._log is None or self._recorder is None:
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
                **engines.details,
                "slowest": [slow._asdict() for slow in sorted(tally.slowest, reverse=True)],
            },
        )
        self._log.close()

    @property
    def _watched(self) -> Progress:
        """Whoever watches, and the record."""
        assert self._recorder is not None
        progress = self._session.watcher.progress
        return self._recorder if progress is None else Several(progress, self._recorder)

    def report(self, num_rows: int, errors: dict[str, int]) -> JobReport:
        """The figures of the run, over an output with these rows and errors."""
        ledger, tally, engines = self._session.ledger, self.tally, self.figures
        return JobReport(
            data_dir=ledger.paths.data,
            data_files=tuple(ledger.paths.shard(number) for number in sorted(ledger.shards)),
            num_rows=num_rows,
            num_ok=num_rows - sum(errors.values()),
            num_errors=sum(errors.values()),
            errors_by_code=errors,
            num_rows_this_run=tally.num_committed,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=0 if engines is None else engines.cached_tokens,
            completion_tokens=tally.completion_tokens,
            seconds=self.seconds,
            kv_cache_bytes=0 if engines is None else engines.kv_cache_bytes,
            kv_peak=0.0 if engines is None else engines.kv_peak,
            sampling=self._session.job.sampling,
            eos_token_ids=tuple(self._session.eos_token_ids),
            unused_generation_config=self._session.unused_generation_config,
            notes=tuple(self._session.notes),
        )

    def open_journal(self, scope: str, committed: Sequence[RowRange] = ()) -> Journal:
        """The journal of a scope, without the rows that are committed already and those that are tried again."""
        journal = self._stack.enter_context(closing(self._session.open_journal(scope)))
        known = journal.entries.finished
        noted = known.keys() | journal.entries.partials.keys()
        journal.forget(noted.difference(outside(noted, committed)))
        for key in [key for key, row in known.items() if row.error is not None and row.error.code in REDONE_CODES]:
            del known[key]
        return journal


class OneEngine(Generation):
    """Generates with one engine in this process."""

    def __init__(self, session: Session, stop: StopWatch, stack: ExitStack) -> None:
        super().__init__(session, stop, stack)
        self._engine: EngineLike | None = None
        self._check: PromptCheck | None = None
        """Until the first rows are prepared with what it has started."""

    def load(self) -> Mapping[str, Any]:
        """Load the engine if it is not yet."""
        return self._load_engine().resolved

    def _load_engine(self) -> EngineLike:
        if self._engine is None:
            # Loading can take minutes: who asked to stop before it does not wait for it.
            self._stop.check()
            began = time.monotonic()
            self._check = self._stack.enter_context(closing(self._session.start_check()))
            self._engine = self._stack.enter_context(closing(self._session.make_engine(self._check)))
            self._begin_log(time.monotonic() - began)
        return self._engine

    def generate(self, work: Work) -> None:
        """Row by row, in one loop."""
        journal = self.open_journal(work.scope, work.committed)

        def commit_and_count(whole: WholeShard) -> None:
            work.commit.rows(whole)
            journal.forget(row.key for row in whole.rows)
            self.tally.num_committed += len(whole.rows)

        known = journal.entries.finished
        complete, rest, missing = known_shards(work.shards, self._session.index, known)
        for row in known.values():
            self.tally.add_known(row)
        for each in complete:
            commit_and_count(each)
        if rest:
            self._drive(rest, missing, journal, commit_and_count)
        if work.remove_journal:
            journal.remove()
        journal.close()

    def _drive(
        self, rest: list[Shard], missing: list[RowRange], journal: Journal, commit: Callable[[WholeShard], None]
    ) -> None:
        session, job = self._session, self._session.job
        engine = self._load_engine()
        check, self._check = self._check, None
        feeder = self._stack.enter_context(closing(session.make_feeder(missing, engine.max_model_len, check)))
        options = DriveOptions(job.sampling, session.layout.kept, job.run.max_error_rate, job.run.journal_interval)
        drive = Drive(
            engine, Assembly(rest, session.index, journal.entries.finished), journal, commit, self.tally, options
        )
        session.watcher.phase("generating")
        started = time.monotonic()
        try:
            drive.run(feeder, self._stop, self._watched)
        finally:
            self.seconds += time.monotonic() - started

    @property
    def figures(self) -> Figures | None:
        """Of the engine."""
        if self._engine is None:
            return None
        metrics = self._engine.metrics
        details = asdict(metrics) if is_dataclass(metrics) and not isinstance(metrics, type) else {}
        return Figures(metrics.num_cached_tokens, metrics.kv_cache_bytes, metrics.peak_kv_share, {"engine": details})
