"""A row's ids and log-probabilities are the same bits whatever runs beside it, and however it is cut into steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from batchgen_kernels import cpu

from batchgen.engine import aligned, linear, ops
from batchgen.engine.engine import Engine
from batchgen.records import Prompt, Sample
from batchgen.sampling_params import SamplingParams
from tests.engine.models import KINDS, Kind, preempt_every, random_ids, save_model
from tests.engine.running import run

NUM_ROWS = 16
needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="bf16 products need the C++ kernels")
DTYPES = [pytest.param("float32"), pytest.param("bfloat16", marks=needs_kernels)]
PRECISIONS = [*DTYPES, pytest.param("int8", marks=needs_kernels)]
"""int8: weights, inputs of products and KV cache."""


class Row(NamedTuple):
    """One row of the job: what it asks for does not depend on where it stands."""

    prompt: Prompt
    params: SamplingParams


def rows() -> list[Row]:
    """Prompts of 1 to 120 tokens, every third with a prefix of 70 tokens; all kinds of sampling, 1 to 3 samples."""
    shared = random_ids(70, salt=999)
    choices: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"stop": ("e", "Ab"), "temperature": 1.5},
        {"min_tokens": 3, "logit_bias": {1: 30.0, 7: 1.0}},
        {"stop_token_ids": tuple(range(40, 80))},
    ]
    made = []
    for row in range(NUM_ROWS):
        length = 1 + (row * 37) % 120
        ids = (shared if row % 3 == 0 else []) + random_ids(length % 80 + 1 if row % 3 == 0 else length, salt=row)
        params = SamplingParams(seed=row, n=1 + row % 3, max_tokens=4 + row % 6, **choices[row % len(choices)])
        made.append(Row(Prompt(token_ids=ids, row=row), params))
    return made


Results = dict[int, list[Sample]]


def results(directory: Path, chosen: list[Row], dtype: str, **options: Any) -> Results:
    """By row: ids, log-probabilities, text and reasons of all samples, from one engine that runs the rows together."""
    engine = Engine(str(directory), **engine_options(dtype, **options))
    completions = run(engine, [row.prompt for row in chosen], [row.params for row in chosen])
    assert [completion.error for completion in completions] == [None] * len(chosen)
    return {row.prompt.row or 0: completion.samples for row, completion in zip(chosen, completions, strict=True)}


def engine_options(dtype: str, **options: Any) -> dict[str, Any]:
    if dtype == "int8":
        dtype, options = "bfloat16", {"quantization": "int8", "kv_dtype": "int8", **options}
    return {"dtype": dtype, "device": "cpu", "kv_cache_memory": "16MiB", "max_batch_tokens": 512, **options}


def alone(directory: Path, dtype: str) -> Results:
    """Every row by itself, its samples in turns, without a cache: what all else is compared with."""
    engine = Engine(str(directory), **engine_options(dtype, max_sequences=1, prefix_caching=False))
    return {
        row.prompt.row or 0: completion.samples
        for row in rows()
        for completion in run(engine, [row.prompt], [row.params])
    }


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(directories: dict[str, Path]) -> dict[tuple[str, str], Results]:
    """Filled by `reference`, once per kind and dtype."""
    return {}


def reference(expected: dict[tuple[str, str], Results], directory: Path, kind: str, dtype: str) -> Results:
    if (kind, dtype) not in expected:
        expected[kind, dtype] = alone(directory, dtype)
    return expected[kind, dtype]


VARIATIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks of 16": {"max_batch_tokens": 16, "max_sequences": 8},
    "in chunks of 64": {"max_batch_tokens": 64, "max_sequences": 16},
    "without shared prefixes": {"prefix_caching": False},
    "two at a time": {"max_sequences": 2},
    "in blocks of 32": {"block_size": 32},
    "with two threads": {"threads": 2},
    "with two threads in chunks of 64": {"threads": 2, "max_batch_tokens": 64, "max_sequences": 16},
}


FAST = ("together", "in chunks of 16", "with two threads in chunks of 64")


@pytest.mark.case(40)
@pytest.mark.parametrize(
    "variation", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in VARIATIONS]
)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_plain_rows_are_the_same_bytes(
    directories: dict[str, Path], expected: dict[tuple[str, str], Results], dtype: str, variation: str
) -> None:
    options = VARIATIONS[variation]
    assert results(directories["plain"], rows(), dtype, **options) == reference(
        expected, directories["plain"], "plain", dtype
    )


@pytest.mark.parametrize(
    "kind",
    ["windowed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in ("plain", "windowed"))],
)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_windows_softcaps_experts_and_learned_positions_are_the_same_bytes(
    directories: dict[str, Path], expected: dict[tuple[str, str], Results], dtype: str, kind: Kind
) -> None:
    whole = reference(expected, directories[kind], kind, dtype)
    for variation in ("in chunks of 16", "with two threads in chunks of 64"):
        assert results(directories[kind], rows(), dtype, **VARIATIONS[variation]) == whole, variation


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_admission_changes_nothing(
    directories: dict[str, Path], expected: dict[tuple[str, str], Results], dtype: str
) -> None:
    whole = reference(expected, directories["plain"], "plain", dtype)
    shuffled = random.Random(0).sample(rows(), NUM_ROWS)
    assert results(directories["plain"], shuffled, dtype) == whole


@pytest.mark.case(40)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_among_any_number_of_neighbours(
    directories: dict[str, Path], expected: dict[tuple[str, str], Results], dtype: str
) -> None:
    whole = reference(expected, directories["plain"], "plain", dtype)
    brief = SamplingParams(max_tokens=9, seed=1)
    strangers = [
        Row(Prompt(token_ids=random_ids(1 + row * 29 % 90, salt=row), row=row), brief) for row in range(NUM_ROWS, 64)
    ]
    for count in (2, 3, 5, 7, 11, 16, 33, 64):
        chosen = random.Random(count).sample([*rows(), *strangers[: max(0, count - NUM_ROWS)]], count)
        found = results(directories["plain"], chosen, dtype, threads=1 + count % 2)
        assert {row: found[row] for row in found if row in whole} == {row: whole[row] for row in found if row in whole}


@pytest.mark.parametrize("kind", ["plain", "windowed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_that_preempts_often_changes_nothing(
    directories: dict[str, Path], expected: dict[tuple[str, str], Results], dtype: str, kind: Kind
) -> None:
    engine = Engine(
        str(directories[kind]), **engine_options(dtype, max_batch_tokens=128, max_sequences=64, block_size=4)
    )
    pool = engine._scheduler.pool
    # Blocks that nobody gives back: what is left holds the longest row, and a little more.
    for _ in range(pool.num_blocks - 48):
        pool.allocate()
    chosen = [*rows(), *rows(), *rows()]
    indexes = [engine.add(row.prompt, row.params) for row in chosen]
    done = {}
    while engine.num_unfinished:
        done.update((completion.prompt_index, completion.samples) for completion in engine.step())
    assert engine.metrics.num_preemptions > 8
    whole = reference(expected, directories[kind], kind, dtype)
    assert [done[index] for index in indexes] == [whole[row.prompt.row or 0] for row in chosen]


@pytest.mark.parametrize(
    ("kind", "variation"),
    [
        ("plain", "together"),
        pytest.param("plain", "in chunks of 64", marks=pytest.mark.slow),
        pytest.param("plain", "without shared prefixes", marks=pytest.mark.slow),
        pytest.param("windowed", "with two threads in chunks of 64", marks=pytest.mark.slow),
        pytest.param("experts", "together", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_preemption_at_every_third_step_changes_nothing(
    directories: dict[str, Path], expected: dict[tuple[str, str], Results], dtype: str, kind: Kind, variation: str
) -> None:
    engine = Engine(str(directories[kind]), **engine_options(dtype, **VARIATIONS[variation]))
    preempt_every(engine, 3)
    completions = run(engine, [row.prompt for row in rows()], [row.params for row in rows()])
    assert engine.metrics.num_preemptions >= engine.metrics.num_steps // 3
    whole = reference(expected, directories[kind], kind, dtype)
    assert {row: completion.samples for row, completion in enumerate(completions)} == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_resumed_from_its_journal_is_the_same_bytes(
    directories: dict[str, Path], expected: dict[tuple[str, str], Results], dtype: str
) -> None:
    engine = Engine(str(directories["plain"]), **engine_options(dtype))
    chosen = rows()[:10]
    for row in chosen:
        engine.add(row.prompt, row.params)
    done = {}
    for _ in range(4):
        done.update((completion.prompt_index, completion.samples) for completion in engine.step())
    partials = dict(engine.partials())
    engine.close()
    resumed = [
        Row(Prompt(**{**vars_of(row.prompt), "partial": partials.get(i, [])}), row.params)
        for i, row in enumerate(chosen)
    ]
    found = results(directories["plain"], resumed, dtype, max_batch_tokens=64, max_sequences=8)
    whole = reference(expected, directories["plain"], "plain", dtype)
    assert len(partials) > 2
    assert found == {row: whole[row] for row in found}
    assert all(done[index] == whole[index] for index in done)


def vars_of(prompt: Prompt) -> dict[str, Any]:
    return {"token_ids": prompt.token_ids, "row": prompt.row}


# ---- negative controls: without the rule, the comparison fails


def _differs(directory: Path, dtype: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    chosen = rows()[:8]
    return results(directory, chosen, dtype, **one) != results(directory, chosen, dtype, **other)


TOGETHER: dict[str, Any] = {}
IN_TURNS: dict[str, Any] = {"max_sequences": 1, "max_batch_tokens": 16}


def test_control_with_products_chosen_by_the_number_of_rows_a_lone_row_is_other_bytes(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(weight: torch.Tensor, bias: torch.Tensor | None, _: torch.dtype) -> linear.Product:
        return lambda x: (x[:, None] * weight).sum(-1) if len(x) < 8 else torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(linear, "_onednn_product", product)
    assert _differs(directories["plain"], "float32", TOGETHER, IN_TURNS)


def test_control_without_whole_registers_a_chunk_is_other_bytes(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned, "aligned_size", lambda num_elements: num_elements)
    assert _differs(directories["experts"], "float32", TOGETHER, IN_TURNS)


def _attend_in_one_piece(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_starts_S1: torch.Tensor,
    context_lens_S: torch.Tensor,
    *,
    scale: float,
    **_: Any,
) -> torch.Tensor:
    """Paged attention as it is usually written: the keys of a chunk's context in one product and one softmax."""
    out = []
    group = q_THD.shape[1] // k_cache.shape[1]
    for index, length in enumerate(context_lens_S.tolist()):
        start, end = query_starts_S1[index : index + 2].tolist()
        blocks = block_tables_SB[index, : -(-length // k_cache.shape[2])].long()
        k_KCD, v_KCD = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0)
            for cache in (k_cache, v_cache)
        )
        scores_HQC = torch.bmm(q_THD[start:end].transpose(0, 1), k_KCD.transpose(1, 2)) * scale
        positions = torch.arange(length - (end - start), length)
        scores_HQC = scores_HQC.masked_fill(torch.arange(length) > positions[:, None], float("-inf"))
        out.append(torch.bmm(scores_HQC.softmax(-1), v_KCD).transpose(0, 1))
    return torch.cat(out)


def test_control_without_segments_a_chunk_is_other_bytes(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsegmented = ops.REFERENCE._replace(paged_attention=_attend_in_one_piece)
    monkeypatch.setattr("batchgen.engine.loading.select_ops", lambda _: unsegmented)
    assert _differs(directories["plain"], "float32", TOGETHER, IN_TURNS)


def test_the_torch_reference_keeps_the_segment_rule_too(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.engine.loading.select_ops", lambda _: ops.REFERENCE)
    assert not _differs(directories["plain"], "float32", TOGETHER, IN_TURNS)
