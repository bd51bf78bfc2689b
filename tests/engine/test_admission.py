from __future__ import annotations

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.admission import admission_order
from batchgen.engine.sequence import SequenceGroup
from batchgen.sampling_params import SamplingParams

SIZE = 4


def group(index: int, ids: list[int], max_tokens: int = 8) -> SequenceGroup:
    return SequenceGroup(index, array("i", ids), SamplingParams(), 0, index, 1, max_tokens)


def order(groups: list[SequenceGroup]) -> list[int]:
    return [each.prompt_index for each in admission_order(groups, SIZE)]


def test_rows_with_a_common_prefix_are_neighbours() -> None:
    few_shot, other = [1, 2, 3, 4], [9, 9, 9, 9]
    groups = [group(0, [*few_shot, 7]), group(1, [*other, 1]), group(2, [*few_shot, 5]), group(3, [*other, 0])]
    assert order(groups) == [2, 0, 3, 1]


def test_every_shared_prefix_is_a_contiguous_run() -> None:
    deep = [1, 2, 3, 4, 5, 6, 7, 8]
    groups = [
        group(0, [*deep, 1]),
        group(1, [1, 2, 3, 4, 0, 0, 0, 0, 1]),
        group(2, [*deep, 0]),
        group(3, [1, 2, 3, 4, 9, 9, 9, 9, 1]),
        group(4, [*deep, 300]),
    ]
    assert order(groups) == [1, 2, 0, 4, 3]


def test_token_ids_are_compared_as_numbers_not_as_bytes() -> None:
    groups = [group(0, [1, 2, 3, 4, 256]), group(1, [1, 2, 3, 4, 255]), group(2, [1, 2, 3, 4, 65536])]
    assert order(groups) == [1, 0, 2]


def test_rows_with_longer_answers_start_earlier() -> None:
    groups = [group(0, [1, 1, 1, 1, 1], 8), group(1, [2, 2, 2, 2, 2], 64), group(2, [3, 3, 3, 3, 3], 8)]
    assert order(groups) == [1, 0, 2]


def test_a_run_is_as_early_as_its_longest_answer() -> None:
    groups = [group(0, [5] * 5, 32), group(1, [1, 1, 1, 1, 1], 8), group(2, [1, 1, 1, 1, 2], 64)]
    assert order(groups) == [1, 2, 0]


def test_rows_that_differ_in_nothing_keep_their_order() -> None:
    assert order([group(index, [3, 3, 3, 3, 3]) for index in range(5)]) == [0, 1, 2, 3, 4]
    assert order([group(index, [9 - index]) for index in range(5)]) == [0, 1, 2, 3, 4]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 3)), max_size=20))
def test_every_row_is_there_once_and_equal_first_blocks_stand_together(rows: list[tuple[list[int], int]]) -> None:
    groups = [group(index, ids, max_tokens) for index, (ids, max_tokens) in enumerate(rows)]
    ordered = order(groups)
    assert sorted(ordered) == list(range(len(rows)))
    firsts = [tuple(rows[index][0][:SIZE]) for index in ordered if len(rows[index][0]) > SIZE]
    changes = sum(left != right for left, right in pairwise(firsts))
    assert changes == max(0, len(set(firsts)) - 1)
