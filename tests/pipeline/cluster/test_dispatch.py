"""Which worker gets which rows, and what becomes of them when it dies: no processes."""

from __future__ import annotations

import pytest

from batchgen.data.rows import RowKey
from batchgen.errors import BatchgenError
from batchgen.pipeline.cluster.dispatch import MAX_DEATHS, MAX_DEATHS_IN_A_ROW, Assignment, Dispatcher
from batchgen.pipeline.cluster.messages import Task
from batchgen.pipeline.plan import RowIndex, keys_of
from batchgen.records import RowRange, Shard
from tests.pipeline.test_plan import scanned


def shards(count: int, rows: int = 4) -> list[Shard]:
    return [Shard(number, (RowRange(0, number * rows, (number + 1) * rows),)) for number in range(count)]


def index(count: int, rows: int = 4) -> RowIndex:
    return RowIndex([scanned(0, count * rows, set())])


def dispatcher(count: int, workers: int, rows: int = 4) -> Dispatcher:
    made = Dispatcher(shards(count, rows), index(count, rows), workers, order=1)
    for number in range(workers):
        made.add_worker(f"w{number}")
    return made


def of(assignments: list[Assignment], worker: str) -> list[int]:
    return [task.shard for name, task in assignments if name == worker]


def test_every_worker_gets_a_task_before_anyone_gets_a_second() -> None:
    two = dispatcher(2, 2).assignments()
    assert (of(two, "w0"), of(two, "w1")) == ([0], [1])
    eight = dispatcher(8, 2).assignments()
    assert (of(eight, "w0"), of(eight, "w1")) == ([0, 1], [4, 5])


def test_a_second_task_is_not_given_while_a_worker_is_still_expected() -> None:
    one = Dispatcher(shards(2), index(2), 2, order=1)
    one.add_worker("w0")
    assert of(one.assignments(), "w0") == [0]
    one.add_worker("w1")
    assert of(one.assignments(), "w1") == [1]


def test_neighbouring_shards_stay_with_a_worker_until_another_has_nothing() -> None:
    made = dispatcher(12, 2)
    given: dict[str, list[int]] = {"w0": [], "w1": []}
    while not made.is_done:
        for worker, task in made.assignments():
            given[worker].append(task.shard)
        for task_id in made.running("w0"):
            made.done(task_id)
        if not made.running("w0") and len(given["w0"]) >= 8:
            for task_id in made.running("w1"):
                made.done(task_id)
    assert given["w0"][:6] == [0, 1, 2, 3, 4, 5]
    assert sorted(given["w0"] + given["w1"]) == list(range(12))


def test_a_task_tells_what_of_its_worker_is_committed() -> None:
    made = dispatcher(3, 1)
    first, _ = made.assignments()
    assert made.done(first.task.id) is not None
    (third,) = made.assignments()
    assert third.task.committed == (first.task.id,)


@pytest.mark.case(54)
@pytest.mark.case(49)
def test_what_comes_late_is_nobodys() -> None:
    made = dispatcher(1, 2)
    (first,) = made.assignments()
    assert made.lose(first.worker, ["segment"]).tasks == [first.task.id]
    assert made.done(first.task.id) is None
    (again,) = made.assignments()
    assert again.worker != first.worker
    assert again.task.segments == ("segment",)
    assert made.done(again.task.id) is not None
    assert made.is_done


def test_what_is_handed_back_is_held_against_nobody() -> None:
    made = dispatcher(1, 1)
    for _ in range(2 * MAX_DEATHS):
        (given,) = made.assignments()
        assert given.task.ranges == shards(1)[0].ranges
        made.handed_back(given.task.id, [])


def test_a_worker_that_leaves_gets_nothing_more() -> None:
    made = dispatcher(4, 2)
    made.assignments()
    made.leave("w0")
    for task in made.running("w0"):
        made.handed_back(task, [])
    for task in made.running("w1"):
        made.done(task)
    assert of(made.assignments(), "w0") == []


def isolate(num_rows: int, poison: set[RowKey], workers: int) -> tuple[list[RowKey], set[RowKey], int]:
    """Workers die of some rows: (rows given up, rows generated, deaths)."""
    made = dispatcher(3, workers, num_rows)
    rows = index(3, num_rows)
    given_up: list[RowKey] = []
    generated: set[RowKey] = set()
    known: set[RowKey] = set()
    deaths, names = 0, workers

    def keys(task: Task) -> set[RowKey]:
        return set(keys_of(task.ranges, rows)) - known

    while not made.is_done:
        made.assignments()
        for name in made.workers:
            tasks = [made._workers[name].running[task] for task in made.running(name)]
            if any(poison & (set(keys_of(piece.ranges, rows)) - known) for piece in tasks):
                deaths += 1
                lost = made.lose(name, [f"segment-{name}"])
                for shard, key in lost.crashing:
                    given_up.append(key)
                    known.add(key)
                    made.add_segment(shard, ["runner"])
                made.add_worker(f"w{names}")
                names += 1
                continue
            for task, piece in zip(made.running(name), tasks, strict=True):
                found = set(keys_of(piece.ranges, rows)) - known
                generated |= found
                known |= found
                made.done(task)
    return given_up, generated, deaths


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("poison", [{(0, 0)}, {(0, 63)}, {(0, 70), (0, 71)}, {(0, 5), (0, 100), (0, 191)}])
def test_rows_that_kill_are_found_and_their_neighbours_are_saved(poison: set[RowKey], workers: int) -> None:
    given_up, generated, deaths = isolate(64, poison, workers)
    assert sorted(given_up) == sorted(poison)
    assert generated == {(0, row) for row in range(192)} - poison
    # Two for the suspicion, one for each halving, one for the row alone; as much again for who ran beside it.
    assert deaths <= len(poison) * 2 * (MAX_DEATHS + 6)


def test_a_shard_of_one_row_can_be_given_up_too() -> None:
    assert isolate(1, {(0, 1)}, 1)[0] == [(0, 1)]


def test_machines_that_die_without_end_are_not_taken_for_rows() -> None:
    made = dispatcher(2, 1, rows=2**60)

    def die(name: str) -> None:
        made.assignments()
        made.lose(made.workers[0], [])
        made.add_worker(name)

    for number in range(MAX_DEATHS_IN_A_ROW - 1):
        die(f"next{number}")
    with pytest.raises(BatchgenError, match="see to the machines"):
        die("last")
