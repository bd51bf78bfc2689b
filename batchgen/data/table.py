"""Source columns and finished rows joined to Arrow tables, in pieces whose offsets cannot overflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from batchgen.data.rows import FinishedRow, FinishedSample
from batchgen.data.schema import SAMPLE_FIELDS, OutputLayout
from batchgen.data.typed_columns import TypedColumn, value_of

Cells = dict[Any, Any]
"""Contents of our columns by name, those of typed columns by (_TYPED, name)."""

_TYPED = "typed"


def output_tables(
    source: Iterable[pa.Table],
    finished: Sequence[FinishedRow],
    layout: OutputLayout,
    schema: pa.Schema,
    max_bytes: int,
) -> Iterator[pa.Table]:
    """Join source columns, a table at a time, with the finished rows, which are the same rows in the same order.

    Each table has about `max_bytes` at most, but one input row at least: it is to be one row group.
    """
    rest = iter(finished)
    for piece in source if len(layout.source_schema) else _rows_without_columns(finished):
        rows = list(islice(rest, len(piece)))
        assert len(rows) == len(piece), "fewer finished rows than source rows"
        for part, part_rows in _split(piece, rows, max_bytes, bool(layout.typed)):
            yield output_table(part, part_rows, layout, schema)
    assert next(rest, None) is None, "more finished rows than source rows"


def _rows_without_columns(finished: Sequence[FinishedRow]) -> Iterator[pa.Table]:
    # An Arrow table without columns cannot say how many rows it has; a column that nobody asks for can.
    yield pa.table({"": pa.nulls(len(finished))})


def _split(
    source: pa.Table, rows: Sequence[FinishedRow], max_bytes: int, is_typed: bool
) -> Iterator[tuple[pa.Table, Sequence[FinishedRow]]]:
    """Halves, until each is small enough or a single row."""
    if not rows:
        return
    if len(rows) == 1 or estimated_bytes(source, rows, is_typed) <= max_bytes:
        yield source, rows
        return
    middle = len(rows) // 2
    yield from _split(source.slice(0, middle), rows[:middle], max_bytes, is_typed)
    yield from _split(source.slice(middle), rows[middle:], max_bytes, is_typed)


def estimated_bytes(source: pa.Table, rows: Sequence[FinishedRow], is_typed: bool = False) -> int:
    """An upper estimate of what the joined rows take, source values repeated for every sample included.

    Typed columns hold much the same as the text: eight bytes for a number of one digit at worst.
    """
    copies = max(max(1, len(row.samples)) for row in rows)
    samples = sum(_own_bytes(sample) for row in rows for sample in row.samples) * (5 if is_typed else 1)
    prompts = sum(_position_bytes(row.prompt_logprobs or ()) * max(1, len(row.samples)) for row in rows)
    return source.nbytes * copies + samples + prompts + 64 * len(rows)


def _own_bytes(sample: FinishedSample) -> int:
    text = sample.text or ""
    reasoning = 4 * len(sample.reasoning or "")
    num_bytes = 64 + reasoning + (len(text) if text.isascii() else 4 * len(text)) + 4 * len(sample.token_ids or ())
    return num_bytes + _position_bytes(sample.logprobs or ())


def _position_bytes(positions: Iterable[Sequence[Any] | None]) -> int:
    return sum(16 * len(position or ()) + 8 for position in positions)


def output_table(source: pa.Table, rows: Sequence[FinishedRow], layout: OutputLayout, schema: pa.Schema) -> pa.Table:
    """One table of these rows, in their order; where samples are exploded, source values are repeated."""
    if layout.exploded:
        cells = [cell for row in rows for cell in _exploded_cells(row, layout.typed)]
        repeats = [index for index, row in enumerate(rows) for _ in range(max(1, len(row.samples)))]
        source = source.take(pa.array(repeats, pa.int64()))
    else:
        cells = [_listed_cells(row, layout.typed) for row in rows]
    cell_names = {
        layout.completion_name: "completion",
        layout.struct_name: "batchgen",
        layout.prefix + "reasoning": "reasoning",
        layout.prefix + "token_ids": "token_ids",
        layout.prefix + "logprobs": "logprobs",
        layout.prefix + "prompt_logprobs": "prompt_logprobs",
        **{layout.prefix + column.name: (_TYPED, column.name) for column in layout.typed},
    }
    source_names = set(source.column_names)
    columns = [
        source[field.name].cast(field.type)
        if field.name in source_names
        else pa.array([cell[cell_names[field.name]] for cell in cells], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def rows_out(rows: Iterable[FinishedRow], layout: OutputLayout) -> int:
    """Rows of the output that these input rows become."""
    return sum(max(1, len(row.samples)) if layout.exploded else 1 for row in rows)


def _row_fields(row: FinishedRow, sample: int | None) -> Cells:
    error = row.error
    return {
        "source": row.source,
        "row": row.row,
        "sample": sample,
        "status": "ok" if error is None else "error",
        "error_code": None if error is None else error.code,
        "error_message": None if error is None else error.message,
        "prompt_tokens": row.prompt_tokens,
    }


def _listed_cells(row: FinishedRow, typed: Sequence[TypedColumn]) -> Cells:
    samples = row.samples
    values = [_value(sample) for sample in samples] if typed else []
    # Without samples the lists are null, not empty: there is no answer, rather than an answer of length 0.
    per_sample = {name: [getattr(each, name) for each in samples] if samples else None for name, _ in SAMPLE_FIELDS}
    return {
        "completion": [sample.text for sample in samples] if samples else None,
        "reasoning": [sample.reasoning for sample in samples] if samples else None,
        "token_ids": [sample.token_ids for sample in samples] if samples else None,
        "logprobs": [_position_cells(sample.logprobs) for sample in samples] if samples else None,
        "prompt_logprobs": _position_cells(row.prompt_logprobs),
        "batchgen": _row_fields(row, None) | per_sample,
        **{(_TYPED, each.name): [each.of(value) for value in values] if samples else None for each in typed},
    }


def _value(sample: FinishedSample) -> Any:
    """What the text of a whole sample stands for; None where there is no such text."""
    return value_of(sample.text) if sample.text is not None and sample.finish_reason == "stop" else None


def _exploded_cells(row: FinishedRow, typed: Sequence[TypedColumn]) -> list[Cells]:
    if not row.samples:
        return [_exploded_cell(row, None, None, typed)]
    return [_exploded_cell(row, index, sample, typed) for index, sample in enumerate(row.samples)]


def _exploded_cell(
    row: FinishedRow, index: int | None, sample: FinishedSample | None, typed: Sequence[TypedColumn]
) -> Cells:
    value = _value(sample) if typed and sample is not None else None
    per_sample = {name: getattr(sample, name) for name, _ in SAMPLE_FIELDS} if sample is not None else {}
    return {
        "completion": sample and sample.text,
        "reasoning": sample and sample.reasoning,
        "token_ids": sample and sample.token_ids,
        "logprobs": sample and _position_cells(sample.logprobs),
        "prompt_logprobs": _position_cells(row.prompt_logprobs),
        "batchgen": _row_fields(row, index) | per_sample,
        **{(_TYPED, each.name): each.of(value) for each in typed},
    }


def _position_cells(positions: Sequence[list[tuple[int, float | None, int]] | None] | None) -> list[Any] | None:
    if positions is None:
        return None
    return [
        position and [{"token_id": token_id, "logprob": logprob, "rank": rank} for token_id, logprob, rank in position]
        for position in positions
    ]
