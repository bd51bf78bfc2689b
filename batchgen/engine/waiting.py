"""Sequences that hold no blocks: newcomers in the order of admission, and the preempted, who come first."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator

from batchgen.engine.admission import admission_order
from batchgen.engine.sequence import Sequence, SequenceGroup, Status


def age(sequence: Sequence) -> tuple[int, int]:
    """Sort key: the order of first admission; the largest is the youngest."""
    return (sequence.group.age, sequence.sample)


class WaitingQueue:
    """Newcomers are ordered among those that wait with them, and never overtaken by later ones."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._window: list[SequenceGroup] = []
        self._ordered: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._window) + len(self._ordered) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._ordered
        for group in self._window:
            yield group.sequences[0]

    def add(self, group: SequenceGroup) -> None:
        """Take a newcomer."""
        self._window.append(group)

    def put_back(self, sequence: Sequence) -> None:
        """Take a sequence that ran already: it comes before all newcomers, the oldest first."""
        insort(self._preempted, sequence, key=age)

    def peek(self) -> Sequence | None:
        """The next one to admit."""
        if self._preempted:
            return self._preempted[0]
        if not self._ordered and self._window:
            for group in admission_order(self._window, self._block_size):
                self._ordered.extend(s for s in group.sequences if s.status is Status.WAITING)
            self._window.clear()
        return self._ordered[0] if self._ordered else None

    def pop(self) -> Sequence:
        """Take out what `peek` showed."""
        return self._preempted.pop(0) if self._preempted else self._ordered.popleft()

    def discard(self, groups: Collection[SequenceGroup]) -> None:
        """Forget all sequences of these groups, in one pass however many there are."""
        doomed = set(groups)
        self._window = [group for group in self._window if group not in doomed]
        self._ordered = deque(sequence for sequence in self._ordered if sequence.group not in doomed)
        self._preempted = [sequence for sequence in self._preempted if sequence.group not in doomed]

    def remove(self, sequence: Sequence) -> None:
        """Forget one sequence that was put back, if it is here."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
