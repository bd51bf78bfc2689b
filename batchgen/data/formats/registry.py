"""The table of formats."""

from __future__ import annotations

from batchgen.data.formats.arrow import ArrowFormat
from batchgen.data.formats.csv import CsvFormat
from batchgen.data.formats.jsonl import JsonlFormat
from batchgen.data.formats.parquet import ParquetFormat
from batchgen.data.formats.text import TextFormat
from batchgen.data.input_rows import FormatName, InputFormat

FORMATS: dict[FormatName, InputFormat] = {
    "jsonl": JsonlFormat(),
    "parquet": ParquetFormat(),
    "csv": CsvFormat(","),
    "tsv": CsvFormat("\t"),
    "text": TextFormat(),
    "arrow": ArrowFormat(),
}
