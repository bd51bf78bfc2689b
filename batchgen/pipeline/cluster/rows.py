"""Tasks on a worker become rows: the same loop, journal and shard writer as in a run with one engine."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from batchgen.data.journal import Journal
from batchgen.data.layout import OutputPaths
from batchgen.data.rows import FinishedRow, RowKey
from batchgen.data.schema import output_layout, output_schema
from batchgen.data.writer import ParquetShardWriter, WrittenShard
from batchgen.pipeline.assembly import Assembly, ShardBuilder, WholeShard
from batchgen.pipeline.bounded_reader import BoundedReader
from batchgen.pipeline.cluster.messages import Counts, Task, WorkOrder
from batchgen.pipeline.drive import Drive, DriveOptions, Tally
from batchgen.pipeline.generation import REDONE_CODES
from batchgen.pipeline.plan import RowIndex, keys_of, ranges_of
from batchgen.pipeline.ports import EngineLike, FeedRequest, ModelFiles, Services
from batchgen.records import RowRange, Shard


class RangeQueue:
    """Ranges that the feeder is to prepare; iterating waits for the next one until it is closed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[RowRange | None] = queue.SimpleQueue()

    def put(self, rows: RowRange) -> None:
        """One more range."""
        self._queue.put(rows)

    def close(self) -> None:
        """No more will come."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[RowRange]:
        while (rows := self._queue.get()) is not None:
            yield rows


class FinishedTask(NamedTuple):
    """What came of a task."""

    task: Task
    counts: Counts
    segments: list[str]
    written: WrittenShard | None


class WorkerNames(NamedTuple):
    """Names of a worker's files: they begin with those of its run, and nobody else has them."""

    attempt: str
    worker: str
    directory: Path

    def temporary(self, name: str) -> Path:
        """A path in tmp/."""
        # A shard may be written twice by one worker: if the runner took it for lost, it drops what came late.
        return self.directory / f"{self.attempt}-{self.worker}-{secrets.token_hex(4)}-{name}"


class CountedAssembly(Assembly):
    """An assembly of tasks, numbered by their ids, that counts what each has finished."""

    def __init__(self, index: RowIndex, known: dict[RowKey, FinishedRow]) -> None:
        super().__init__([], index, known)
        self.counts: dict[int, Counts] = {}

    def finish(self, row: FinishedRow) -> WholeShard | None:
        number = self._shard_of[row.key]
        self.counts[number] = self.counts[number].plus(counts_of(row))
        return super().finish(row)


def counts_of(row: FinishedRow) -> Counts:
    """The figures of one row."""
    return Counts(1, int(row.error is not None), row.prompt_tokens or 0, row.completion_tokens)


class RowMaker:
    """Finishes tasks with an engine: what `Generation` is to a run with one engine."""

    def __init__(
        self,
        order: WorkOrder,
        services: Services,
        engine: EngineLike,
        model: ModelFiles,
        names: WorkerNames,
        paths: OutputPaths,
        kv_tokens: int,
    ) -> None:
        self._order = order
        self._engine = engine
        self._index = RowIndex(order.scan.files)
        self._names = names
        self._tasks: dict[int, Task] = {}
        self._keys: dict[int, list[RowKey]] = {}
        """Rows of tasks whose journal is still needed."""
        self._finished: list[FinishedTask] = []
        self._stack = ExitStack()
        self._known: dict[RowKey, FinishedRow] = {}
        self._assembly = CountedAssembly(self._index, self._known)
        header = {"fingerprint": order.fingerprint, "scope": order.scope}
        self._journal = Journal(services.files, paths.journal, f"{names.attempt}-{names.worker}", header, read=False)
        self._stack.enter_context(closing(self._journal))
        reader = self._stack.enter_context(closing(BoundedReader(order.scan, order.job.input, columns=[])))
        layout = output_layout(order.source_schema, order.job.output, order.job.sampling)
        writer = ParquetShardWriter(services.files, output_schema(layout))
        self._builder = ShardBuilder(names, writer, layout, order.fingerprint, reader.read_columns, lambda: kv_tokens)
        self._ranges = RangeQueue()
        started = datetime.fromisoformat(order.started)
        request = FeedRequest(order.job, order.scan, self._ranges, model.directory, engine.max_model_len, started)
        self._feeder = self._stack.enter_context(closing(services.make_feeder(request)))
        # Unwound from the last: the feeder waits for ranges while it lives.
        self._stack.callback(self._ranges.close)
        # Whether too many rows failed is for the runner to say, which sees all of them.
        options = DriveOptions(order.job.sampling, layout.kept, 1.0, order.job.run.journal_interval)
        self._drive = Drive(engine, self._assembly, self._journal, self._commit, Tally(0, 0, 0), options)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._tasks

    @property
    def counts(self) -> list[list[int]]:
        """[task id, rows, errors, prompt tokens, completion tokens] of each task at work."""
        return [[task, *self._assembly.counts[task]] for task in self._tasks]

    @property
    def task_ids(self) -> list[int]:
        """Tasks at work."""
        return list(self._tasks)

    def add(self, task: Task) -> None:
        """Begin a task; what the journal's segments know is not made again."""
        for number in task.committed:
            self._journal.forget(self._keys.pop(number, []))
        keys = list(keys_of(task.ranges, self._index))
        self._keys[task.id] = keys
        wanted = set(keys)
        entries = self._journal.read_segments(task.segments, wanted.__contains__)
        finished = {key: row for key, row in entries.finished.items() if not is_redone(row)}
        self._journal.entries.partials.update(entries.partials)
        self._tasks[task.id] = task
        own = [name for name in task.segments if name.startswith(self._names.attempt)]
        of_this_run = self._journal.read_segments(own, finished.__contains__).finished
        counts = Counts(len(finished), sum(row.error is not None for row in finished.values()))
        for row in of_this_run.values():
            counts = counts.plus(counts_of(row)._replace(rows=0, errors=0))
        self._assembly.counts[task.id] = counts
        if len(finished) == len(keys):
            self._commit(WholeShard(Shard(task.id, task.ranges), [finished[key] for key in keys]))
            return
        self._known.update(finished)
        self._assembly.add(Shard(task.id, task.ranges))
        for rows in ranges_of(key for key in keys if key not in finished):
            self._ranges.put(rows)

    def turn(self) -> list[FinishedTask]:
        """One turn of the loop; returns the tasks that it finished."""
        if self._tasks:
            self._drive.turn(self._feeder)
        finished, self._finished = self._finished, []
        return finished

    def save(self) -> None:
        """Everything so far goes to the journal."""
        self._drive.save()

    def close(self) -> None:
        """Drop what is in flight; the engine stays."""
        self._engine.close()
        self._stack.close()

    def _commit(self, whole: WholeShard) -> None:
        task = self._tasks.pop(whole.shard.number)
        for row in whole.rows:
            self._known.pop(row.key, None)
        counts = self._assembly.counts.pop(task.id)
        if task.write:
            written = self._builder.write(WholeShard(Shard(task.shard, task.ranges), whole.rows))
            self._finished.append(FinishedTask(task, counts, [], written))
        else:
            self._journal.sync()
            own = self._journal.segments_with({row.key for row in whole.rows})
            self._finished.append(FinishedTask(task, counts, [*task.segments, *own], None))


def is_redone(row: FinishedRow) -> bool:
    """Whether a row failed for the machine's reasons, so that another try is worth while."""
    return row.error is not None and row.error.code in REDONE_CODES
