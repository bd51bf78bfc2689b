"""The table of formats."""

from __future__ import annotations

from batchgen.data.formats.jsonl import JsonlFormat
from batchgen.data.formats.parquet import ParquetFormat
from batchgen.data.input_rows import FormatName, InputFormat

FORMATS: dict[FormatName, InputFormat] = {
    "jsonl": JsonlFormat(),
    "parquet": ParquetFormat(),
}
