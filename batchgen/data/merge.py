"""A shard made anew for some of its rows: the others are taken over as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.rows import RowKey

_TAKEN_ROWS = 1024
"""Rows gathered at once: the strings of one piece stay far below what 32-bit offsets reach."""


class Merged(NamedTuple):
    """All rows of a shard in input order, and the counts of its summary."""

    tables: list[pa.Table]
    rows_out: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int


def merge_rows(
    old: pa.Table, new: Iterable[pa.Table], replaced: Set[RowKey], struct_name: str, max_bytes: int
) -> Merged:
    """Put `new` in the place of the rows of `old` whose keys are in `replaced`; a table each for about `max_bytes`."""
    keys = _fields(old, struct_name, "source", "row")
    kept = old.filter(pa.array([key not in replaced for key in zip(*keys, strict=True)], pa.bool_()))
    both = pa.concat_tables([kept, *new])
    order = _order(both, struct_name)
    tables = [
        piece
        for start in range(0, len(order), _TAKEN_ROWS)
        for piece in _split(both.take(order.slice(start, _TAKEN_ROWS)), max_bytes)
    ]
    return _counted(both, struct_name, tables)


def _order(table: pa.Table, struct_name: str) -> pa.Array[pa.UInt64Scalar]:
    names = ("source", "row", "sample")
    columns = dict(zip(names, _fields(table, struct_name, *names), strict=True))
    keys = pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})
    return cast("pa.Array[pa.UInt64Scalar]", pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in names]))


def _split(table: pa.Table, max_bytes: int) -> Iterator[pa.Table]:
    if len(table) <= 1 or table.nbytes <= max_bytes:
        yield table
        return
    middle = len(table) // 2
    yield from _split(table.slice(0, middle), max_bytes)
    yield from _split(table.slice(middle), max_bytes)


def _counted(table: pa.Table, struct_name: str, tables: list[pa.Table]) -> Merged:
    names = ("source", "row", "error_code", "prompt_tokens", "completion_tokens")
    errors: dict[str, int] = {}
    prompt_tokens = completion_tokens = 0
    seen: set[RowKey] = set()
    for source, row, code, prompt, completion in zip(*_fields(table, struct_name, *names), strict=True):
        completion_tokens += sum(completion) if isinstance(completion, list) else completion or 0
        if (source, row) in seen:
            continue
        seen.add((source, row))
        prompt_tokens += prompt or 0
        if code is not None:
            errors[code] = errors.get(code, 0) + 1
    return Merged(tables, len(table), errors, prompt_tokens, completion_tokens)


def _fields(table: pa.Table, struct_name: str, *names: str) -> list[list[Any]]:
    struct = table[struct_name]
    return [pc.struct_field(struct, name).to_pylist() for name in names]
