"""Ways for tests to plan and read an input."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.config import InputConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import InputRow, InputScan, PromptReader, scan_inputs

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"
"""Public prompt sets beside the checkout; tests on them are skipped where they are not."""


class Reading(NamedTuple):
    """An input, read whole."""

    scan: InputScan
    rows: list[InputRow]
    table: pa.Table

    @property
    def errors(self) -> dict[int, str]:
        """Row number to error code."""
        return {row.row: row.error.code for row in self.rows if row.error}

    @property
    def values(self) -> list[dict[str, Any]]:
        return [row.values for row in self.rows if not row.error]


def read_all(base_dir: Path, path: str | list[str], **config: Any) -> Reading:
    """Plan and read every row, and every column that is carried through."""
    given = InputConfig.model_validate({"path": path, **config})
    scan = scan_inputs(list_inputs(given, base_dir), given)
    scan = InputScan.from_json(json.loads(json.dumps(scan.to_json())))
    reader = PromptReader(scan, given)
    rows = [row for part in scan.ranges for row in reader.read(part)]
    tables = [table for part in scan.ranges for table in reader.read_columns(part)]
    reader.close()
    return Reading(scan, rows, pa.concat_tables(tables) if tables else scan.schema.empty_table())


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write one JSON value a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
