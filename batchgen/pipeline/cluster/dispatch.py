"""Which rows go to which worker, and what becomes of them when it dies: decisions only, no processes and no network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batchgen.data.rows import RowKey
from batchgen.errors import BatchgenError
from batchgen.pipeline.cluster.messages import Task
from batchgen.pipeline.plan import RowIndex, keys_of
from batchgen.records import RowRange, Shard

SLOTS = 2
"""Tasks of one worker: the second one's rows are admitted while the first one's tail is running."""
MAX_DEATHS = 3
"""A row that is alone on a worker that dies, and has seen so many die, is what kills them."""
MAX_DEATHS_IN_A_ROW = 40
"""More than it takes to find one row of a million; with more, it is the machines and not the rows."""


@dataclass
class Piece:
    """Rows that travel together: a whole shard, or a part of one that has killed its worker more than once."""

    shard: int
    ranges: tuple[RowRange, ...]
    is_whole: bool
    deaths: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it must run alone, so that nobody else is blamed and nobody else is harmed."""
        return self.deaths >= MAX_DEATHS - 1


@dataclass
class _OpenShard:
    shard: Shard
    segments: set[str] = field(default_factory=set)
    num_pieces: int = 0
    """Pieces that are not finished; 0 where the shard is not cut."""


@dataclass
class _Worker:
    stretch: deque[Piece] = field(default_factory=deque)
    """Neighbouring shards are likely to share their prefixes."""
    running: dict[int, Piece] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)
    is_leaving: bool = False

    @property
    def has_suspect(self) -> bool:
        return any(piece.is_suspect for piece in self.running.values())


class Assignment(NamedTuple):
    """A task and the worker that it is for."""

    worker: str
    task: Task


class Lost(NamedTuple):
    """What follows from the loss of a worker."""

    tasks: list[int]
    crashing: list[tuple[int, RowKey]]
    """(shard, row) of rows that are given up as `worker_crash`; each must be journaled and told by `add_segment`."""


class Dispatcher:
    """Shards in, tasks out. A worker is known by its name; names are never used twice."""

    def __init__(
        self, shards: Iterable[Shard], index: RowIndex, expected_workers: int, order: int, *, write: bool = True
    ) -> None:
        """`write`: whole shards become files of the workers; else their rows go to the journal only."""
        self._index = index
        self._order = order
        self._write = write
        self._expected = expected_workers
        self._shards = {shard.number: _OpenShard(shard) for shard in shards}
        self._fresh = deque(Piece(number, each.shard.ranges, True) for number, each in self._shards.items())
        self._num_fresh = len(self._fresh)
        """Shards that no worker has had yet, those in the workers' stretches among them."""
        self._urgent: deque[Piece] = deque()
        self._workers: dict[str, _Worker] = {}
        self._worker_of: dict[int, str] = {}
        self._next_task = 0
        self._deaths_in_a_row = 0

    @property
    def is_done(self) -> bool:
        """Whether every shard is finished."""
        return not self._shards

    @property
    def workers(self) -> list[str]:
        """Workers that may have tasks."""
        return list(self._workers)

    def running(self, worker: str) -> list[int]:
        """Tasks of a worker."""
        return list(self._workers[worker].running) if worker in self._workers else []

    def shard(self, number: int) -> Shard:
        """An unfinished shard."""
        return self._shards[number].shard

    def segments(self, number: int) -> tuple[str, ...]:
        """Segments of the journal that know something of an unfinished shard."""
        return tuple(sorted(self._shards[number].segments))

    def add_segment(self, number: int, names: Iterable[str]) -> None:
        """The journal has rows of a shard in these segments; a shard that is finished does not mind."""
        if number in self._shards:
            self._shards[number].segments.update(names)

    def add_worker(self, name: str) -> None:
        """A worker is ready for tasks."""
        self._workers.setdefault(name, _Worker())

    def leave(self, worker: str) -> None:
        """A worker takes no more tasks; those that it has come back one by one."""
        if worker in self._workers:
            self._workers[worker].is_leaving = True
            self._give_stretch_back(self._workers[worker])

    def assignments(self) -> list[Assignment]:
        """The tasks to hand out now: first one for each worker, then the second ones."""
        found = []
        for load in range(SLOTS):
            # Those that are still to come count: they need it more than somebody who has something to do.
            num_busy = sum(bool(worker.running) for worker in self._workers.values())
            num_idle = max(self._expected, len(self._workers)) - num_busy
            for name, worker in self._workers.items():
                if len(worker.running) == load and not worker.is_leaving and not worker.has_suspect:
                    piece = self._next_piece(worker, load, num_idle if load > 0 else 0)
                    if piece is not None:
                        found.append(Assignment(name, self._begin(name, worker, piece)))
        return found

    def done(self, task: int) -> Piece | None:
        """A task is finished; returns its piece, or None where nobody waits for it any more."""
        worker = self._worker_of.pop(task, None)
        if worker is None:
            return None
        self._deaths_in_a_row = 0
        piece = self._workers[worker].running.pop(task)
        if piece.is_whole:
            del self._shards[piece.shard]
            self._workers[worker].committed.append(task)
        else:
            self._finish_piece(piece)
        return piece

    def handed_back(self, task: int, segments: Iterable[str]) -> None:
        """A worker gave a task up in good order: that is held against nobody."""
        worker = self._worker_of.pop(task, None)
        if worker is not None:
            piece = self._workers[worker].running.pop(task)
            self.add_segment(piece.shard, segments)
            self._urgent.append(piece)

    def lose(self, worker: str, segments: Sequence[str]) -> Lost:
        """A worker died or hangs; `segments` are what it journaled. Raises BatchgenError where all of them die."""
        lost = self._workers.pop(worker, None)
        if lost is None:
            return Lost([], [])
        self._give_stretch_back(lost)
        if lost.running:
            self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            raise BatchgenError(
                f"{MAX_DEATHS_IN_A_ROW} workers died one after another and nothing was finished; see to the machines, "
                "then run again"
            )
        crashing = []
        for task, piece in lost.running.items():
            del self._worker_of[task]
            self.add_segment(piece.shard, segments)
            was_alone = piece.is_suspect or len(lost.running) == 1
            piece.deaths += 1
            row = self._only_row(piece)
            if row is not None and was_alone and piece.deaths >= MAX_DEATHS:
                crashing.append((piece.shard, row))
                self._give_up(piece)
            else:
                self._try_again(piece)
        return Lost(list(lost.running), crashing)

    def _begin(self, name: str, worker: _Worker, piece: Piece) -> Task:
        task = Task(
            id=self._next_task,
            order=self._order,
            shard=piece.shard,
            ranges=piece.ranges,
            write=self._write and piece.is_whole,
            segments=self.segments(piece.shard),
            committed=tuple(worker.committed),
        )
        self._next_task += 1
        worker.committed.clear()
        worker.running[task.id] = piece
        self._worker_of[task.id] = name
        return task

    def _next_piece(self, worker: _Worker, load: int, num_reserved: int) -> Piece | None:
        """The next rows for a worker that has `load` tasks; the last `num_reserved` shards are for others."""
        for at, piece in enumerate(self._urgent):
            if load == 0 or not piece.is_suspect:
                del self._urgent[at]
                return piece
        if self._num_fresh <= num_reserved:
            return None
        if not worker.stretch:
            self._take_stretch(worker)
        self._num_fresh -= 1
        return worker.stretch.popleft()

    def _take_stretch(self, worker: _Worker) -> None:
        """A run of neighbouring shards: of those that nobody has, or the back half of the longest stretch."""
        if self._fresh:
            num_owners = sum(bool(each.stretch) for each in self._workers.values())
            num_left = max(1, max(self._expected, len(self._workers)) - num_owners)
            for _ in range(-(-len(self._fresh) // num_left)):
                worker.stretch.append(self._fresh.popleft())
            return
        longest = max((each.stretch for each in self._workers.values()), key=len)
        taken = [longest.pop() for _ in range((len(longest) + 1) // 2)]
        worker.stretch.extend(reversed(taken))

    def _give_stretch_back(self, worker: _Worker) -> None:
        self._fresh.extendleft(reversed(worker.stretch))
        worker.stretch.clear()

    def _only_row(self, piece: Piece) -> RowKey | None:
        """The row of a piece that has only one."""
        first_two = [key for key, _ in zip(keys_of(piece.ranges, self._index), range(2), strict=False)]
        return first_two[0] if len(first_two) == 1 else None

    def _try_again(self, piece: Piece) -> None:
        """Once as it was; from the second death on in halves, alone, until the row is found."""
        halves = self._halves(piece) if piece.is_suspect else [piece]
        if piece.is_suspect and (len(halves) > 1 or not piece.is_whole):
            open_shard = self._shards[piece.shard]
            open_shard.num_pieces += len(halves) - (0 if piece.is_whole else 1)
        self._urgent.extend(halves)

    def _halves(self, piece: Piece) -> list[Piece]:
        count = sum(self._index.count(rows) for rows in piece.ranges)
        if count < 2:
            return [piece]
        first: list[RowRange] = []
        second: list[RowRange] = []
        room = count // 2
        for rows in piece.ranges:
            held = self._index.count(rows)
            if held <= room:
                first.append(rows)
            elif room == 0:
                second.append(rows)
            else:
                cut = self._index.first(rows, room)._replace(start=rows.start)
                first.append(cut)
                second.append(rows._replace(start=cut.stop))
            room -= min(room, held)
        return [Piece(piece.shard, tuple(half), False, piece.deaths) for half in (first, second)]

    def _give_up(self, piece: Piece) -> None:
        """The row of this piece is answered by an error."""
        if piece.is_whole:
            self._urgent.append(Piece(piece.shard, piece.ranges, True))
        else:
            self._finish_piece(piece)

    def _finish_piece(self, piece: Piece) -> None:
        """After its last piece, a shard is put together from the journal: a task like any other."""
        open_shard = self._shards[piece.shard]
        open_shard.num_pieces -= 1
        if open_shard.num_pieces == 0:
            self._urgent.append(Piece(piece.shard, open_shard.shard.ranges, True))
