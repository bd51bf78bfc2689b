"""The shards of one piece of work: which are out at workers, what came back, and what is committed of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from batchgen.data.journal import Journal
from batchgen.data.rows import FinishedRow
from batchgen.errors import BatchgenError
from batchgen.pipeline.assembly import WholeShard
from batchgen.pipeline.cluster.dispatch import Dispatcher, Lost
from batchgen.pipeline.cluster.journals import JournalIndex
from batchgen.pipeline.cluster.messages import Counts, Done, WorkOrder, written_from_wire
from batchgen.pipeline.drive import Tally
from batchgen.pipeline.generation import Work
from batchgen.pipeline.plan import keys_of
from batchgen.pipeline.session import Session
from batchgen.records import RowError

WORKER_CRASH = "worker_crash"


class ShardsAtWorkers:
    """Hands nothing out by itself: whoever owns it asks the dispatcher, and tells what became of the tasks."""

    def __init__(self, session: Session, work: Work, number: int, expected_workers: int, tally: Tally) -> None:
        """`number`: of the order, which no other work of this run has. `tally` counts what is committed."""
        assert session.plan is not None
        self._session = session
        self._work = work
        self._tally = tally
        ledger = session.ledger
        header = {"fingerprint": session.plan.fingerprint, "scope": work.scope}
        name = f"{ledger.attempt}-runner-{number}"
        self._journal = Journal(session.services.files, ledger.paths.journal, name, header, read=False)
        """The runner's own: rows that are given up."""
        index = JournalIndex(self._journal)
        writes = work.commit.written is not None
        self.dispatcher = Dispatcher(work.shards, session.index, expected_workers, number, write=writes)
        for shard in work.shards:
            self.dispatcher.add_segment(shard.number, index.segments_of(shard.ranges))
        self._pieces: dict[int, Counts] = {}
        """Counts of finished pieces of shards that are not whole, by shard."""
        self.order = WorkOrder(
            number=number,
            job=session.job.model_copy(update={"base_dir": session.job.base_dir.absolute()}),
            scan=session.scan,
            source_schema=session.layout.source_schema,
            fingerprint=session.plan.fingerprint,
            scope=work.scope,
            started=session.plan.started,
        )

    def take_done(self, done: Done) -> None:
        """Commit a shard that is whole; what nobody waits for any more is dropped."""
        piece = self.dispatcher.done(done.task)
        if piece is None:
            return
        counts = Counts(*done.counts)
        if not piece.is_whole:
            self.dispatcher.add_segment(piece.shard, done.segments)
            self._pieces[piece.shard] = self._pieces.get(piece.shard, Counts()).plus(counts)
            return
        self._pieces.pop(piece.shard, None)
        if done.written is not None and self._work.commit.written is not None:
            self._work.commit.written(written_from_wire(done.written))
        else:
            self._work.commit.rows(self._whole(piece.shard, done.segments))
        self._tally.num_committed += counts.rows
        _add(self._tally, counts)

    def lose(self, worker: str, segments: Sequence[str]) -> Lost:
        """A worker is lost, with what it journaled in `segments`; rows that only ever kill workers become errors."""
        lost = self.dispatcher.lose(worker, segments)
        for shard, key in lost.crashing:
            message = "every worker that generated this row died; its neighbours are not concerned"
            self._journal.add_finished(FinishedRow(*key, error=RowError(WORKER_CRASH, message)))
            self._journal.sync()
            self.dispatcher.add_segment(shard, self._journal.segments_with({key}))
        return lost

    def live_tally(self, at_work: Iterable[Counts]) -> Tally:
        """What is committed, and what workers have said of the tasks that they have."""
        tally = replace(self._tally)
        for counts in (*at_work, *self._pieces.values()):
            _add(tally, counts)
        return tally

    def finish(self) -> None:
        """All is committed."""
        if self._work.remove_journal:
            for name in JournalIndex(self._journal).names:
                self._session.services.files.unlink(self._session.ledger.paths.journal / name)

    def close(self) -> None:
        """Give the journal back."""
        self._journal.close()

    def _whole(self, number: int, segments: list[str]) -> WholeShard:
        """A shard from the journal, where the worker has put its rows."""
        shard = next(shard for shard in self._work.shards if shard.number == number)
        keys = list(keys_of(shard.ranges, self._session.index))
        found = self._journal.read_segments(segments, set(keys).__contains__).finished
        missing = [key for key in keys if key not in found]
        if missing:
            raise BatchgenError(f"row {missing[0]} is in none of {segments}, where a worker has put it; this is a bug")
        return WholeShard(shard, [found[key] for key in keys])


def _add(tally: Tally, counts: Counts) -> None:
    tally.num_done += counts.rows
    tally.num_errors += counts.errors
    tally.prompt_tokens += counts.prompt_tokens
    tally.completion_tokens += counts.completion_tokens
