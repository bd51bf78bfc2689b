"""The items that attention is cut into."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels.attention_plan import SPLIT_TOKENS, plan_attention, reserve_plan, tile_shape, update_plan
from batchgen_kernels.segments import SEGMENT_TOKENS, SharedPrefixes

SHAPE = tile_shape(8, 2, 64)


def test_tiles_hold_whole_groups_of_heads() -> None:
    assert SHAPE.queries_per_tile == 32
    assert SHAPE.members_per_tile == 16
    assert tile_shape(71, 1, 64).decode_rows == 128
    assert tile_shape(8, 2, 256).prefill_rows == 64
    assert SPLIT_TOKENS % SEGMENT_TOKENS == 0


def test_decodes_are_split_by_their_own_context_alone() -> None:
    plan = plan_attention([0, 1, 1, 2, 5], [257, 9, 256, 40], SHAPE)
    assert plan.decode_items_W2.tolist() == [[0, 0], [0, 1], [2, 0]]
    assert plan.decode_sequences_C.tolist() == [0, 2]
    assert plan.slot_starts_S.tolist()[0::2] == [0, 2]
    assert plan.num_slots == 3
    assert plan.counts_4.tolist() == [3, 2, 1, 0]


def test_tiles_of_prompt_chunks_cover_all_queries_longest_context_first() -> None:
    plan = plan_attention([0, 33, 34, 134], [33, 7, 400], SHAPE)
    assert plan.prefill_items_X2.tolist() == [[2, 96], [2, 64], [2, 32], [2, 0], [0, 32], [0, 0]]


def test_whole_splits_of_a_shared_prefix_are_computed_once() -> None:
    prefixes = SharedPrefixes(
        torch.tensor([0, 4, 5, 7]), torch.tensor([0, 1, 2, 3, 4, 5, 6]), torch.tensor([576, 512, 128])
    )
    contexts = [600, 700, 800, 900, 600, 200, 200]
    plan = plan_attention([0, 1, 2, 3, 5, 6, 7, 8], contexts, SHAPE, prefixes=prefixes)
    # Sequence 3 has two queries, sequence 4 no company, and 128 tokens are no whole split.
    assert plan.members_M.tolist() == [0, 1, 2]
    assert plan.prefix_items_Y3.tolist() == [[0, 3, 0], [0, 3, 1]]
    own = [item for item in plan.decode_items_W2.tolist() if item[0] < 3]
    assert own == [[0, 2], [1, 2], [2, 2], [2, 3]]


def test_large_groups_take_several_tiles() -> None:
    members = torch.arange(20)
    prefixes = SharedPrefixes(torch.tensor([0, 20]), members, torch.tensor([256]))
    plan = plan_attention(list(range(21)), [300] * 20, SHAPE, prefixes=prefixes)
    assert plan.prefix_items_Y3.tolist() == [[0, 20, 0], [16, 20, 0]]


def test_a_reserved_plan_takes_what_fits_and_refuses_the_rest() -> None:
    reserved = reserve_plan(SHAPE, num_sequences=3, num_splits=5, device=torch.device("cpu"))
    update_plan(reserved, plan_attention([0, 1, 2], [600, 9], SHAPE))
    assert reserved.counts_4.tolist() == [4, 2, 0, 0]
    assert reserved.decode_items_W2.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [0, 0]]
    with pytest.raises(ValueError, match="6 splits do not fit into a plan of 5"):
        update_plan(reserved, plan_attention([0, 1], [1500], SHAPE))
    with pytest.raises(ValueError, match="more sequences, prefix items or prompt chunks"):
        update_plan(reserved, plan_attention([0, 2], [20], SHAPE))
    with pytest.raises(ValueError, match="its tiles differ"):
        update_plan(reserved, plan_attention([0, 1], [20], tile_shape(8, 1, 64)))
