"""Small rows and shards that the tests of batchgen.data share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import OutputFiles
from batchgen.data.rows import FinishedRow, FinishedSample
from batchgen.data.schema import OutputLayout, output_schema
from batchgen.data.table import output_tables
from batchgen.data.writer import ParquetShardWriter, ShardSummary, WrittenShard
from batchgen.records import RowError, RowRange

LAYOUT = OutputLayout(pa.schema([("id", pa.int64()), ("topic", pa.string())]), "list")


def sample(text: str | None = "yes", **fields: object) -> FinishedSample:
    """A sample that ended by itself."""
    base = {"finish_reason": "stop", "stop_reason": None, "text_complete": True, "completion_tokens": 3}
    values = {**base, "seed": 1, "cumulative_logprob": -0.5, "score": None, **fields}
    return FinishedSample(text=text, **values)  # type: ignore[arg-type]


def row(number: int, *samples: FinishedSample, error: RowError | None = None) -> FinishedRow:
    """Row `number` of source 0."""
    return FinishedRow(0, number, error=error, prompt_tokens=5, samples=list(samples))


def source(rows: Sequence[FinishedRow], topic: str = "sea") -> pa.Table:
    """The source columns of some rows."""
    return pa.table({"id": [each.row for each in rows], "topic": [topic for _ in rows]}, schema=LAYOUT.source_schema)


def summary(rows: Sequence[FinishedRow], number: int = 0, attempt: str = "first") -> ShardSummary:
    """The summary of a list-shaped shard of consecutive rows."""
    errors: dict[str, int] = {}
    for each in rows:
        if each.error is not None:
            errors[each.error.code] = errors.get(each.error.code, 0) + 1
    ranges = (RowRange(0, rows[0].row, rows[-1].row + 1),) if rows else ()
    tokens = sum(each.completion_tokens for each in rows)
    return ShardSummary(number, ranges, "f" * 64, attempt, len(rows), len(rows), errors, 5 * len(rows), tokens)


def write(path: Path, rows: Sequence[FinishedRow], row_group_bytes: int = 10**8) -> WrittenShard:
    """Write rows as one file of the operating system."""
    schema = output_schema(LAYOUT)
    writer = ParquetShardWriter(OutputFiles(), schema)
    return writer.write(path, summary(rows), output_tables([source(rows)], rows, LAYOUT, schema, row_group_bytes))


def read_rows(paths: Iterable[Path]) -> list[dict[str, object]]:
    """The rows of some files, in order."""
    return [each for path in paths for each in pq.read_table(path).to_pylist()]
