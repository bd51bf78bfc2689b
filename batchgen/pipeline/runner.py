"""A whole run: open the output, generate what is missing, commit, and say what it came to."""

from __future__ import annotations

from contextlib import ExitStack

from batchgen.config import JobConfig
from batchgen.data.probe import probe_file_system
from batchgen.data.writer import WrittenShard
from batchgen.errors import BatchgenError
from batchgen.pipeline.assembly import WholeShard, counts
from batchgen.pipeline.card import card, write_card
from batchgen.pipeline.drive import Tally, check_error_rate
from batchgen.pipeline.generation import REDONE_CODES, Commit, Generation, Work
from batchgen.pipeline.generations import make_generation
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.pipeline.plan import covered, gaps, incompleteness, plan_shards
from batchgen.pipeline.ports import Services
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.redo import choose_rows, redo_shards
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.services import default_services
from batchgen.pipeline.session import RUN_SCOPE, OpenOptions, Session, Watcher, open_session
from batchgen.pipeline.stop import StopWatch
from batchgen.records import RowRange, Shard

__all__ = ["run_job"]

CAPACITY_SCOPE = "capacity"
"""Scope of the journal for rows that did not fit into a smaller KV cache."""


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
    with machine_errors(), StopWatch(job.run.max_runtime, job.run.grace) as stop, ExitStack() as stack:
        session = open_session(job, services or default_services(), Watcher(progress), stack, options)
        generation = make_generation(session, stop, stack)
        left = _left(session, generation.tally)
        if left or not session.ledger.shards:
            _generate(session, generation, left, stack)
        _retry_capacity_errors(session, generation, stack)
        return _concluded(session, generation)


def _left(session: Session, tally: Tally) -> list[RowRange]:
    """The rows that are not committed; those that are go into the tally."""
    committed = list(session.ledger.shards.values())
    tally.num_done, errors = counts(committed)
    tally.num_errors = sum(errors.values())
    return [rows for rows in gaps(session.expected, covered(committed)) if session.index.count(rows)]


def _generate(session: Session, generation: Generation, left: list[RowRange], stack: ExitStack) -> None:
    probe_file_system(session.services.files, session.ledger.temporary("probe"))
    if session.plan is None:
        # What `auto` comes to is part of the plan, and a model that is refused must leave no plan behind.
        session.begin(generation.load() if left else {})
    session.write_job()
    shards = plan_shards(left, session.job.output.shard_rows, session.ledger.next_number, session.index)
    if not shards and not session.ledger.shards:
        # A job without rows still has an output that can be read, with its full schema.
        shards = [Shard(0, ())]
    builder = session.make_builder(stack)

    def commit(whole: WholeShard) -> None:
        session.ledger.commit(builder.write(whole))

    def commit_written(written: WrittenShard) -> None:
        session.ledger.commit(written)

    committed = covered(session.ledger.shards.values())
    generation.generate(Work(shards, RUN_SCOPE, Commit(commit, commit_written), committed))


def _retry_capacity_errors(session: Session, generation: Generation, stack: ExitStack) -> None:
    """Rows that did not fit into the KV cache are generated anew where it is larger than it was for them."""
    failed = {
        number: shard.summary.kv_tokens
        for number, shard in session.ledger.shards.items()
        if not REDONE_CODES.isdisjoint(shard.summary.errors)
    }
    if not failed:
        return
    generation.load()
    numbers = [number for number, kv_tokens in failed.items() if kv_tokens < session.kv_tokens]
    struct = session.layout.struct_name
    shards = choose_rows(
        session, numbers, [struct], lambda rows: [row[struct]["error_code"] in REDONE_CODES for row in rows]
    )
    generation.tally.take_back(sum(session.index.count(rows) for shard in shards for rows in shard.ranges))
    redo_shards(session, generation, shards, CAPACITY_SCOPE, stack)


def _concluded(session: Session, generation: Generation) -> JobReport:
    """Rows in are rows out, each once, before anyone is told so."""
    shards = session.ledger.shards.values()
    problem = incompleteness(session.expected, shards, session.index)
    if problem is not None:
        raise BatchgenError(f"{session.ledger.paths.root}: {problem}; this is a bug, and nothing is lost")
    num_rows, errors = counts(shards)
    session.ledger.clear_journal()
    write_card(session.services.files, session.ledger, card(session.job, num_rows, errors, len(shards)))
    check_error_rate(Tally(num_rows, num_rows, sum(errors.values())), session.job.run.max_error_rate)
    return generation.report(num_rows, errors)
