"""Finished rows as Arrow tables, in pieces whose offsets cannot overflow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.data.rows import FinishedRow, FinishedSample
from batchgen.data.schema import SAMPLE_FIELDS, OutputLayout
from batchgen.errors import InputError

Cells = dict[str, Any]


class OutputRow(NamedTuple):
    """An input row with its answer."""

    values: Mapping[str, Any]
    """The source columns that are carried through; a missing one is null."""
    finished: FinishedRow


def tables(rows: Iterable[OutputRow], layout: OutputLayout, schema: pa.Schema, max_bytes: int) -> Iterator[pa.Table]:
    """Tables of about `max_bytes` of values each, and of one row at least: a row group each, in the order of `rows`."""
    piece: list[OutputRow] = []
    num_bytes = 0
    for row in rows:
        size = estimated_bytes(row)
        if piece and num_bytes + size > max_bytes:
            yield table(piece, layout, schema)
            piece, num_bytes = [], 0
        piece.append(row)
        num_bytes += size
    if piece:
        yield table(piece, layout, schema)


def estimated_bytes(row: OutputRow) -> int:
    """An upper estimate of what the row takes in Arrow, repeated source values of exploded samples included."""
    own = 64
    for sample in row.finished.samples:
        own += 64 + len(sample.text or "") * 4 + 4 * len(sample.token_ids or ())
        own += sum(16 * len(position) + 8 for position in sample.logprobs or ())
    copies = max(1, len(row.finished.samples))
    return own + copies * sum(_value_bytes(value) for value in row.values.values())


def _value_bytes(value: object) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value) * 4
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_value_bytes(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return 8 + sum(_value_bytes(inner) for inner in value)
    return 16


def table(rows: Sequence[OutputRow], layout: OutputLayout, schema: pa.Schema) -> pa.Table:
    """One table of these rows, in their order."""
    cells = [cell for row in rows for cell in (_exploded_cells(row) if layout.exploded else [_listed_cells(row)])]
    cell_names = {
        layout.completion_name: "completion",
        layout.struct_name: "batchgen",
        layout.prefix + "token_ids": "token_ids",
        layout.prefix + "logprobs": "logprobs",
    }
    source_names = set(layout.source_schema.names)
    arrays = []
    for field in schema:
        if field.name in source_names:
            arrays.append(column_array([cell["values"].get(field.name) for cell in cells], field))
        else:
            arrays.append(pa.array([cell[cell_names[field.name]] for cell in cells], field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def column_array(values: list[Any], field: pa.Field[pa.DataType]) -> pa.Array[Any]:
    """Source values in their declared type; in a text column a value of another type becomes JSON text."""
    try:
        array: pa.Array[Any] = pa.array(values, field.type)
        return array
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            return pa.array([_as_text(value) for value in values], field.type)
        raise InputError(
            f"column {field.name}: a value does not fit the declared type {field.type}: {error}; "
            f"declare it in input.schema, as string if nothing else fits"
        ) from error


def _as_text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _row_fields(finished: FinishedRow, sample: int | None) -> Cells:
    error = finished.error
    return {
        "source": finished.source,
        "row": finished.row,
        "sample": sample,
        "status": "ok" if error is None else "error",
        "error_code": None if error is None else error.code,
        "error_message": None if error is None else error.message,
        "prompt_tokens": finished.prompt_tokens,
    }


def _listed_cells(row: OutputRow) -> Cells:
    samples = row.finished.samples
    # Without samples the lists are null, not empty: there is no answer, rather than an answer of length 0.
    per_sample = {name: [getattr(each, name) for each in samples] if samples else None for name, _ in SAMPLE_FIELDS}
    return {
        "values": row.values,
        "completion": [sample.text for sample in samples] if samples else None,
        "token_ids": [sample.token_ids for sample in samples] if samples else None,
        "logprobs": [_logprob_cells(sample) for sample in samples] if samples else None,
        "batchgen": _row_fields(row.finished, None) | per_sample,
    }


def _exploded_cells(row: OutputRow) -> list[Cells]:
    if not row.finished.samples:
        return [_exploded_cell(row, None, None)]
    return [_exploded_cell(row, index, sample) for index, sample in enumerate(row.finished.samples)]


def _exploded_cell(row: OutputRow, index: int | None, sample: FinishedSample | None) -> Cells:
    per_sample = {name: getattr(sample, name) for name, _ in SAMPLE_FIELDS} if sample is not None else {}
    return {
        "values": row.values,
        "completion": sample and sample.text,
        "token_ids": sample and sample.token_ids,
        "logprobs": sample and _logprob_cells(sample),
        "batchgen": _row_fields(row.finished, index) | per_sample,
    }


def _logprob_cells(sample: FinishedSample) -> list[list[Cells]] | None:
    if sample.logprobs is None:
        return None
    return [
        [{"token_id": token_id, "logprob": logprob, "rank": rank} for token_id, logprob, rank in position]
        for position in sample.logprobs
    ]
