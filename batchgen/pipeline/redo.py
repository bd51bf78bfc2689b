"""Committed rows are made anew, a shard at a time: `rerun` for chosen rows, `--repair` for damaged files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq

from batchgen.config import JobConfig
from batchgen.data.probe import probe_file_system
from batchgen.data.recovery import repair_hint
from batchgen.data.rows import RowKey
from batchgen.data.verification import file_sha256
from batchgen.data.writer import WrittenShard
from batchgen.errors import OutputDamaged
from batchgen.pipeline.assembly import ShardBuilder, WholeShard, counts
from batchgen.pipeline.card import card, write_card
from batchgen.pipeline.generation import Commit, Generation, Work
from batchgen.pipeline.generations import make_generation
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.pipeline.plan import ranges_of
from batchgen.pipeline.ports import Services
from batchgen.pipeline.progress import Progress
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.services import default_services
from batchgen.pipeline.session import OpenOptions, Session, Watcher, open_session
from batchgen.pipeline.stop import StopWatch
from batchgen.records import Shard

_BATCH_ROWS = 1024

Choose = Callable[[Session], list[Shard]]
"""The shards to make anew, each with the ranges of the rows to generate."""


def rerun(
    job: JobConfig,
    where: str,
    *,
    progress: Progress | None = None,
    services: Services | None = None,
    options: OpenOptions = OpenOptions(),  # noqa: B008 (immutable)
) -> JobReport:
    """Generate the committed rows anew of which an expression is true, and replace their shards one by one.

    Raises what `run_job` raises, and JobError for a wrong expression.
    """
    return _redo(job, lambda session: chosen_rows(session, where), f"rerun {where}", progress, services, options)


def repair(
    job: JobConfig,
    *,
    progress: Progress | None = None,
    services: Services | None = None,
    options: OpenOptions = OpenOptions(),  # noqa: B008 (immutable)
) -> JobReport:
    """Put damaged records right and make damaged or missing files anew; what was damaged is kept in orphans/.

    Raises what `run_job` raises; OutputDamaged where intact records contradict each other.
    """
    return _redo(job, damaged_shards, "repair", progress, services, options._replace(repair=True))


def chosen_rows(session: Session, where: str) -> list[Shard]:
    """Of each shard the rows for which an expression is true."""
    with closing(session.services.make_filter(where, session.schema.names)) as row_filter:
        return choose_rows(session, session.ledger.shards, row_filter.columns, row_filter.choose)


def choose_rows(
    session: Session,
    numbers: Iterable[int],
    columns: Iterable[str],
    choose: Callable[[list[dict[str, Any]]], list[bool]],
) -> list[Shard]:
    """Of these shards the rows that are chosen by their columns; a row with a chosen sample is chosen."""
    struct = session.layout.struct_name
    shards = []
    for number in sorted(numbers):
        keys: list[RowKey] = []
        with session.services.files.open_read(session.ledger.paths.shard(number)) as file:
            for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=sorted({*columns, struct})):
                rows = batch.to_pylist()
                for row, is_chosen in zip(rows, choose(rows), strict=True):
                    key = (row[struct]["source"], row[struct]["row"])
                    if is_chosen and keys[-1:] != [key]:
                        keys.append(key)
        if keys:
            shards.append(Shard(number, tuple(ranges_of(keys))))
    return shards


def damaged_shards(session: Session) -> list[Shard]:
    """The files that are not what was committed, whole; what lies in their place is set aside."""
    shards = []
    for number in session.damaged:
        session.ledger.set_aside(number)
        shards.append(Shard(number, session.ledger.shards[number].summary.ranges))
    return shards


def _redo(
    job: JobConfig,
    choose: Choose,
    scope: str,
    progress: Progress | None,
    services: Services | None,
    options: OpenOptions,
) -> JobReport:
    with machine_errors(), StopWatch(job.run.max_runtime, job.run.grace) as stop, ExitStack() as stack:
        session = open_session(job, services or default_services(), Watcher(progress), stack, options)
        generation = make_generation(session, stop, stack)
        shards = choose(session)
        generation.tally.num_rows = sum(session.index.count(rows) for shard in shards for rows in shard.ranges)
        redo_shards(session, generation, shards, scope, stack)
        num_rows, errors = counts(session.ledger.shards.values())
        text = card(session.job, num_rows, errors, len(session.ledger.shards))
        write_card(session.services.files, session.ledger, text)
        return generation.report(num_rows, errors)


def redo_shards(
    session: Session, generation: Generation, shards: Sequence[Shard], scope: str, stack: ExitStack
) -> None:
    """Generate the rows of these shards, and replace the committed files of the same numbers."""
    if not shards:
        return
    probe_file_system(session.services.files, session.ledger.temporary("probe"))
    # The rows that are chosen are likely to be errors: their share says nothing about the job.
    session.job = session.job.model_copy(update={"run": session.job.run.model_copy(update={"max_error_rate": 1.0})})
    builder = session.make_builder(stack)

    def commit(whole: WholeShard) -> None:
        session.ledger.replace(_written(session, builder, whole))

    generation.generate(Work(shards, scope, Commit(commit), remove_journal=True))


def _written(session: Session, builder: ShardBuilder, whole: WholeShard) -> WrittenShard:
    """The new file of a shard: all rows new, or merged with those of the old file."""
    ledger = session.ledger
    committed = ledger.shards[whole.shard.number]
    if whole.shard.ranges == committed.summary.ranges:
        return builder.write(whole)
    path = ledger.paths.shard(whole.shard.number)
    # The rows that are kept get new checksums: they must be those that were committed.
    if file_sha256(ledger.files, path) != committed.sha256:
        raise OutputDamaged(f"{path}: is not the file that was committed; {repair_hint(ledger.paths.root)}")
    with ledger.files.open_read(path) as file:
        return builder.write_merged(whole, replace(committed.summary, attempt=ledger.attempt), pq.read_table(file))
