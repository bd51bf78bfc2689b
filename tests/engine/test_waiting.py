"""The order in which what holds no blocks is admitted."""

from __future__ import annotations

from array import array

from batchgen.engine.sequence import Sequence, SequenceGroup, Status
from batchgen.engine.waiting import WaitingQueue
from batchgen.sampling_params import SamplingParams

SIZE = 4
ONE, OTHER = [1] * SIZE, [2] * SIZE


def group(index: int, ids: list[int], num_samples: int = 1, age: int = -1, max_tokens: int = 8) -> SequenceGroup:
    made = SequenceGroup(index, array("i", ids), SamplingParams(), 0, index, 1, max_tokens, age=age)
    made.sequences += [made.new_sequence(sample) for sample in range(num_samples)]
    return made


def queue_of(*groups: SequenceGroup) -> WaitingQueue:
    queue = WaitingQueue(SIZE)
    for each in groups:
        queue.add(each)
    return queue


def drain(queue: WaitingQueue) -> list[tuple[int, int]]:
    """(prompt, sample) in the order of admission."""
    taken = []
    while (shown := queue.peek()) is not None:
        assert queue.pop() is shown
        taken.append((shown.group.prompt_index, shown.sample))
    assert len(queue) == 0
    return taken


def test_an_empty_queue_shows_nothing() -> None:
    assert queue_of().peek() is None
    assert not queue_of()


def test_newcomers_that_wait_together_are_ordered_by_prefix() -> None:
    queue = queue_of(group(0, [*ONE, 7]), group(1, [*OTHER, 7]), group(2, [*ONE, 8]))
    assert drain(queue) == [(0, 0), (2, 0), (1, 0)]


def test_a_later_newcomer_never_overtakes() -> None:
    queue = queue_of(group(0, [*ONE, 7]), group(1, [*OTHER, 7]))
    queue.peek()
    queue.add(group(2, [*ONE, 8], max_tokens=99))
    assert drain(queue) == [(0, 0), (1, 0), (2, 0)]


def test_what_ran_already_comes_first_the_oldest_before_the_younger() -> None:
    queue = queue_of(group(0, ONE))
    first, second = group(1, ONE, 2, age=3), group(2, ONE, age=5)
    for sequence in (second.sequences[0], first.sequences[1], first.sequences[0]):
        queue.put_back(sequence)
    assert [s.group.prompt_index for s in queue] == [1, 1, 2, 0]
    assert drain(queue) == [(1, 0), (1, 1), (2, 0), (0, 0)]


def test_only_samples_that_wait_are_admitted() -> None:
    resumed = group(0, ONE, 4)
    resumed.sequences[0].status = Status.FINISHED
    resumed.sequences[2].status = Status.UNBORN
    assert drain(queue_of(resumed)) == [(0, 1), (0, 3)]


def test_a_group_is_forgotten_wherever_its_samples_stand() -> None:
    ordered, late, put_back = group(0, ONE, 2), group(1, ONE), group(2, ONE, 2, age=1)
    kept = [group(3, ONE), group(4, ONE), group(5, ONE, age=2)]
    queue = queue_of(ordered, kept[0])
    queue.peek()
    for each in (late, kept[1]):
        queue.add(each)
    for sequence in (*put_back.sequences, *kept[2].sequences):
        queue.put_back(sequence)
    assert len(queue) == 8
    queue.discard([ordered, late, put_back])
    assert drain(queue) == [(5, 0), (3, 0), (4, 0)]


def test_one_sample_that_was_put_back_is_taken_out_again() -> None:
    queue = queue_of()
    put_back: list[Sequence] = group(0, ONE, 3, age=0).sequences
    for sequence in put_back:
        queue.put_back(sequence)
    queue.remove(put_back[1])
    queue.remove(put_back[1])
    assert drain(queue) == [(0, 0), (0, 2)]
