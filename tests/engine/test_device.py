"""The runner as a GPU sees it, on the processor: nothing waits, little is sent, and every byte is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batchgen_kernels import copy_blocks, paged_attention, sample, store_kv, top_tokens
from batchgen_kernels.attention_plan import SPLIT_TOKENS, plan_attention, tile_shape

from batchgen.engine import loading
from batchgen.engine.attention_work import shared_prefixes
from batchgen.engine.batch import Batch
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.block_table import BlockTable
from batchgen.engine.decode_steps import DecodeSteps
from batchgen.engine.device import PROCESSOR, pack, unpack
from batchgen.engine.engine import Engine
from batchgen.engine.made_up import largest_batch
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.ops import REFERENCE, Ops, select_ops
from batchgen.engine.sample_columns import SamplingColumns
from batchgen.engine.step_inputs import BlockTables, HostInputs, host_inputs
from batchgen.records import Completion, Prompt
from batchgen.sampling_params import BeamParams, SamplingParams
from tests.engine.models import preempt_every, random_ids
from tests.engine.running import run
from tests.engine.watched import Waited, WatchedDevice, watched_engine, watched_parts, watching

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MiB", "threads": 1, "max_batch_tokens": 64}
OPTIONS["max_sequences"] = 12


def rows(count: int = 14) -> tuple[list[Prompt], list[SamplingParams]]:
    """All kinds of sampling; every third prompt begins with the same 40 tokens, 1 to 3 samples."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01},
        {"stop": ("e", "Ab"), "temperature": 1.5},
        {"min_tokens": 3, "logit_bias": {1: 30.0, 7: 1.0}},
        {"stop_token_ids": tuple(range(40, 80)), "logprobs": 0},
    ]
    shared = random_ids(40, salt=999)
    prompts = [
        Prompt(token_ids=(shared if row % 3 == 0 else []) + random_ids(1 + row * 7 % 30, row), row=row)
        for row in range(count)
    ]
    params = [
        SamplingParams(seed=row, n=1 + row % 3, max_tokens=5 + row % 9, **kinds[row % len(kinds)])
        for row in range(count)
    ]
    return prompts, params


COLOURS = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2}


def plain(tiny_llama: Path, *work: Any) -> list[Completion]:
    """What the processor makes of it, step after step."""
    engine = Engine(str(tiny_llama), device="cpu", **OPTIONS)
    completions = run(engine, *work)
    engine.close()
    return completions


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.error == other.error
        assert one.samples == other.samples
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("decode_buckets", [(), (1, 2, 4, 8, 16)])
def test_pipelined_steps_give_the_same_bytes_and_wait_once_each(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, decode_buckets: tuple[int, ...], preempts: bool
) -> None:
    device = WatchedDevice(decode_buckets)
    engine = watched_engine(tiny_llama, device, select_ops(device.where), monkeypatch, **OPTIONS)
    if preempts:
        preempt_every(engine, 5)
    assert_same(run(engine, *rows()), plain(tiny_llama, *rows()))
    assert device.num_waits == engine.metrics.num_steps
    assert (device.num_recorded > 0) == bool(decode_buckets)
    assert device.num_recorded <= len(decode_buckets)
    assert device.num_replayed > 2 * device.num_recorded or not decode_buckets


def test_a_step_that_is_as_the_one_before_sends_next_to_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = WatchedDevice(())
    parts = watched_parts(tiny_llama, device, select_ops(device.where), monkeypatch, **OPTIONS)
    engine, runner = Engine.from_parts(parts), parts.runner
    assert isinstance(runner, ModelRunner)
    for row in range(8):
        engine.add(
            Prompt(token_ids=random_ids(3, row), row=row), SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
        )
    for _ in range(3):
        engine.step()
    uploads, sent = device.num_uploads, runner.tables.num_sent
    for _ in range(10):
        engine.step()
    # A step's tokens and where they stand, and which of them are fed by the step before: no tables, no parameters.
    assert device.num_uploads == uploads + 20
    assert runner.tables.num_sent == sent
    for _ in range(16):
        engine.step()
    # Each sequence has begun one block more.
    assert runner.tables.num_sent == sent + 8


def test_what_needs_the_host_runs_on_the_device_too(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = rows(9)
    kinds = [
        SamplingParams(max_tokens=6, seed=1, beam=BeamParams(width=3), logprobs=1),
        SamplingParams(max_tokens=8, seed=2, n=2, repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingParams(max_tokens=4, seed=3, prompt_logprobs=2),
        SamplingParams(max_tokens=30, seed=4, response_format={"type": "json_schema", "schema": COLOURS}),
    ]
    params[1:8:2] = kinds
    device = WatchedDevice()
    engine = watched_engine(tiny_llama, device, select_ops(device.where), monkeypatch, **OPTIONS)
    ours = run(engine, prompts, params)
    engine.close()
    assert_same(ours, plain(tiny_llama, prompts, params))
    text = ours[7].samples[0].text
    assert text is not None
    assert set(json.loads(text)) <= {"red", "blue"}


@pytest.mark.slow
def test_the_kernels_of_a_gpu_draw_the_same_tokens(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter in place of a GPU: plans, shared prefixes, padded steps and all.
    prompts = [
        Prompt(token_ids=random_ids(SPLIT_TOKENS + 6, 99) + random_ids(1 + row, row), row=row) for row in range(3)
    ]
    params = [SamplingParams(temperature=row % 2, max_tokens=3, seed=1, logprobs=1) for row in range(3)]
    triton = Ops(
        store_kv.store_kv_triton,
        copy_blocks.copy_blocks_triton,
        paged_attention.paged_attention_triton,
        sample.SampleSteps,
        top_tokens.top_tokens_triton,
        top_tokens.token_ranks_triton,
        takes_plan=True,
    )
    options = {**OPTIONS, "max_batch_tokens": 512, "kv_cache_memory": "8MiB"}
    monkeypatch.setattr(sample, "sample", sample.sample_triton)
    # The model as it comes: the fused layers of a processor would not ask for these kernels.
    monkeypatch.setattr(loading, "make_rows_independent", lambda *_: None)
    ours = run(watched_engine(tiny_llama, WatchedDevice((2, 4)), triton, monkeypatch, **options), prompts, params)
    theirs = run(Engine(str(tiny_llama), device="cpu", **options), prompts, params)
    assert [each.samples[0].token_ids for each in ours] == [each.samples[0].token_ids for each in theirs]


def test_who_waits_is_noticed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = WatchedDevice()
    parts = watched_parts(tiny_llama, device, select_ops(device.where), monkeypatch, **OPTIONS)
    engine = Engine.from_parts(parts)
    sampler = parts.sampler
    inner = sampler._ops  # type: ignore[attr-defined]
    for peek in (torch.Tensor.item, torch.Tensor.tolist, lambda x: bool(x > 3), lambda x: x[x > 3]):

        def sampling(*columns: Any, peek: Any = peek) -> Any:
            draw = inner.sample_steps(*columns)

            def peeking(logits_RV: torch.Tensor) -> Any:
                result = draw(logits_RV)
                peek(result.token_ids_R[0])
                return result

            return peeking

        sampler._columns = SamplingColumns(inner._replace(sample_steps=sampling), device)  # type: ignore[attr-defined]
        engine.add(Prompt(token_ids=[5, 6]))
        with pytest.raises(Waited):
            engine.step()
        engine.close()
    with watching(device), pytest.raises(Waited):
        torch.zeros(3).cpu()


def test_the_cache_takes_what_the_largest_step_leaves(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = WatchedDevice(memory=1 << 20)
    options = {**OPTIONS, "kv_cache_memory": "auto", "max_sequences": 64}
    batches: list[Batch] = []
    execute = ModelRunner.execute

    def noted(runner: ModelRunner, batch: Batch, *drawn: torch.Tensor) -> torch.Tensor:
        batches.append(batch)
        return execute(runner, batch, *drawn)

    monkeypatch.setattr(ModelRunner, "execute", noted)
    parts = watched_parts(tiny_llama, device, select_ops(device.where), monkeypatch, **options)
    assert (device.num_largest_steps, len(batches)) == (1, 1)
    assert (batches[0].num_tokens, len(batches[0].samples)) == (64, 64)
    assert 0.9 * (1 << 20) < parts.kv_cache_bytes <= 1 << 20


def test_the_largest_step_needs_few_blocks() -> None:
    batch = largest_batch(8192, 1000, 500, 16)
    assert batch.num_tokens == 8192
    tables = [chunk.sequence.table for chunk in batch.chunks]
    assert {tuple(table.block_ids) for table in tables if table is not None} == {(0,)}


def test_packed_arrays_are_aligned_and_come_out_as_they_went_in() -> None:
    arrays = (
        np.arange(3),
        np.zeros((0, 2), np.int64),
        np.arange(5, dtype=np.int32),
        np.ones((2, 3), np.float32)[:, ::2],
    )
    packed, places = pack(arrays)
    assert all(place % 16 == 0 for place in places)
    for array, tensor in zip(arrays, unpack(torch.from_numpy(packed), arrays, places), strict=True):
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))


def table_of(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    table.append_slots(num_tokens)
    return table


def test_only_rows_that_changed_are_sent() -> None:
    pool = BlockPool(200, 4)
    tables = BlockTables(PROCESSOR, 2, 2)
    rows = [table_of(pool, 6), table_of(pool, 7), table_of(pool, 3)]

    def update() -> int:
        before = tables.num_sent
        tables.update(rows)
        for row, table in enumerate(rows):
            assert tables.on_device[row, : len(table.block_ids)].tolist() == table.block_ids.tolist()
        return tables.num_sent - before

    assert update() == 3
    assert update() == 0
    rows[1].append_slots(2)  # A new block, past the width so far: everything is sent to larger tables.
    assert update() == 3
    twin = rows[1].fork()
    copy = rows[1].append_slots(1)  # Copied on write: as many blocks as before, the last one another.
    assert copy is not None
    assert update() == 1
    rows.append(twin)
    assert update() == 1
    del rows[0]
    assert update() == 3
    rows[0].free()
    rows[0] = table_of(pool, 7)  # Preempted and back, perhaps in the same blocks.
    assert update() == 1


def test_rows_that_left_are_sent_anew_after_the_tables_grew() -> None:
    pool = BlockPool(200, 4)
    tables = BlockTables(PROCESSOR, 2, 2)
    rows = [table_of(pool, 4), table_of(pool, 5)]
    tables.update(rows)
    long = table_of(pool, 40)
    tables.update([long])
    tables.update(rows)
    assert tables.on_device[1, :2].tolist() == rows[1].block_ids.tolist()


def test_padding_reads_one_slot_and_writes_nowhere() -> None:
    batch = largest_batch(3, 3, 50, 4)
    padded = host_inputs(batch, BlockTables(PROCESSOR), 4).padded(8)
    assert padded.slots_T.tolist() == [0, 0, 0, -1, -1, -1, -1, -1]
    assert padded.context_lens_S.tolist() == [1] * 8
    assert padded.query_starts_S1.tolist() == list(range(9))
    assert padded.is_decode


def test_a_step_whose_logits_are_wanted_in_another_order_is_no_decode() -> None:
    inputs = host_inputs(largest_batch(2, 2, 50, 4), BlockTables(PROCESSOR), 4)
    assert inputs.is_decode
    # As where one sequence's token is scored and not sampled.
    assert not inputs._replace(wanted_R=np.array([1, 0])).is_decode
    assert not host_inputs(largest_batch(3, 2, 50, 4), BlockTables(PROCESSOR), 4).is_decode


def test_contexts_too_long_for_a_recorded_step_are_left_to_others() -> None:
    device = WatchedDevice((4,))
    decodes = DecodeSteps(device, BlockTables(device, 4, 4), lambda tokens, step: tokens.input_ids_T.float()[:, None])
    inputs = host_inputs(largest_batch(3, 3, 50, 4), BlockTables(PROCESSOR), 4)
    size = decodes.size_for(inputs)
    assert size == 4
    shape = tile_shape(4, 2, 16)
    for most, is_run in ((32 * SPLIT_TOKENS, True), (64 * SPLIT_TOKENS, False)):
        plan = plan_attention([0, 1, 2, 3, 4], [most] * 4, shape)
        assert (decodes.run(inputs.padded(size), {shape: plan}, lambda ids_T: None) is not None) == is_run


def inputs_of(contexts: list[int], counts: list[int]) -> HostInputs:
    starts = np.cumsum([0, *counts]).astype(np.int32)
    none = np.zeros(0, np.int64)
    return HostInputs(none, none, none, none, starts, np.array(contexts, np.int32), none, none)


def test_decodes_over_the_same_first_blocks_are_a_group() -> None:
    block_size, split = 16, SPLIT_TOKENS // 16
    tables = np.arange(6 * 4 * split, dtype=np.int32).reshape(6, 4 * split)
    tables[2, : 2 * split] = tables[0, : 2 * split]
    tables[4, : split + 3] = tables[0, : split + 3]
    tables[3] = tables[1]
    contexts = [3 * SPLIT_TOKENS, 4 * SPLIT_TOKENS, 3 * SPLIT_TOKENS, SPLIT_TOKENS, 2 * SPLIT_TOKENS, 900]
    # Row 3 has no whole split before its query; row 5 is a chunk.
    shared = shared_prefixes(inputs_of(contexts, [1, 1, 1, 1, 1, 7]), tables, block_size)
    assert shared is not None
    assert shared.members_M.tolist() == [0, 2, 4]
    assert shared.member_starts_G1.tolist() == [0, 3]
    assert shared.prefix_lens_G.tolist() == [SPLIT_TOKENS]
    assert shared_prefixes(inputs_of([900, 800], [1, 1]), tables[:2], block_size) is None


def test_a_group_shares_all_whole_splits_before_the_query_of_each() -> None:
    tables = np.zeros((3, 3 * SPLIT_TOKENS // 16), np.int32)
    contexts = [3 * SPLIT_TOKENS, 2 * SPLIT_TOKENS + 1, 3 * SPLIT_TOKENS]
    shared = shared_prefixes(inputs_of(contexts, [1, 1, 1]), tables, 16)
    assert shared is not None
    assert shared.prefix_lens_G.tolist() == [2 * SPLIT_TOKENS]


def test_the_processor_sends_and_keeps_nothing_twice() -> None:
    array = np.arange(4)
    (tensor,) = PROCESSOR.upload(array)
    array[1] = 9
    assert tensor.tolist() == [0, 9, 2, 3]
    assert PROCESSOR.fetch(tensor)()[0] is tensor
    assert not REFERENCE.takes_plan
