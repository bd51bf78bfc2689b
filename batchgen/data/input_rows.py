"""The records of reading: a file of the input, what the plan pass found in it, one row of it."""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from batchgen.data.file_identity import is_unchanged
from batchgen.errors import InputError
from batchgen.records import RowError, RowRange

FormatName = Literal["jsonl", "parquet", "csv", "tsv", "text", "arrow"]
Compression = Literal["gzip", "bz2", "xz", "zstd"]

OFFSET_EVERY = 1024
"""Rows between two byte offsets of a text file's index."""
TABLE_ROWS = 1024
TABLE_BYTES = 64 * 2**20
"""Of one table on its way from reading to the output, at most; but one row may be larger."""


class RowFailure(Exception):
    """What is wrong with one row; becomes that row's error, and harms no other."""

    def __init__(self, code: str, message: str) -> None:
        message = message.encode("utf-8", "backslashreplace").decode("utf-8")  # It may quote what is no character.
        super().__init__(f"{code}: {message}")
        self.error = RowError(code, message)


class UnfoldsTooFar(MemoryError):
    """What a file holds takes more memory than this process may use; the message names the file and its rows."""

    def __init__(self, path: str | Path, where: str) -> None:
        super().__init__(
            f"{path}: {where}: takes more memory than a process that reads rows may use; write it again in smaller "
            "pieces, or leave the file out"
        )


class InputFile(NamedTuple):
    """One file of the frozen, sorted list."""

    source: int
    """Index in the list."""
    path: Path
    """Where it lies, absolute."""
    name: str
    """As the job sees it, relative to the job file where it can be; what the list is sorted by."""
    format: FormatName


@dataclass(slots=True)
class InputRow:
    """One row of one file."""

    source: int
    row: int
    """0-based physical row: in text, the line; blank lines have numbers too, but are no rows."""
    values: dict[str, Any]
    """Columns for the prompt, as plain Python values; a column that the row does not have is None."""
    error: RowError | None = None
    """Why the row cannot be read; `values` is then empty."""


class BadRow(NamedTuple):
    """A row that the plan pass could not read."""

    row: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """What the plan pass found in one file."""

    source: int
    path: str
    name: str
    format: FormatName
    compression: Compression | None
    size: int
    """Bytes on disk; with `mtime_ns` and `inode`, tells whether a later run may trust this record."""
    mtime_ns: int
    inode: int
    sha256: str
    """Of the bytes on disk; of a Parquet file, of its size and footer."""
    num_rows: int
    """Physical rows: of a text file, lines."""
    columns: dict[str, Any]
    """The format's own account of columns and their types, for `InputFormat.columns_of`; JSON values."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of physical rows that are not answered: blank lines, and what `input.where` and
    `input.sample` leave out."""
    offsets: tuple[int, ...] = ()
    """Of a text file: byte offset (after decompression) of the rows 0, OFFSET_EVERY, 2 x OFFSET_EVERY ..."""
    num_bad_rows: int = 0
    bad_rows: tuple[BadRow, ...] = ()
    """The first few of them."""

    @property
    def is_appendable(self) -> bool:
        """Whether bytes at the end of the file are rows at the end; others are written anew as a whole."""
        return self.format in ("jsonl", "text") and self.compression is None

    def is_current(self) -> bool:
        """Whether the file's size, mtime and inode are still those of the plan pass."""
        return is_unchanged(Path(self.path), self.size, self.mtime_ns, self.inode)

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Half-open ranges of rows without a skipped one between them, that make up a range of physical rows."""
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        at = start
        for index in range(max(0, bisect_left(self.skipped, (start, start)) - 1), len(self.skipped)):
            first, end = self.skipped[index]
            if first >= stop:
                break
            if first > at:
                yield at, first
            at = max(at, end)
        if at < stop:
            yield at, stop

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[int]:
        """Physical numbers of the rows in a half-open range, skipped ones left out."""
        return chain.from_iterable(range(*run) for run in self.runs(start, stop))

    def count_rows(self, start: int = 0, stop: int | None = None) -> int:
        """Number of rows in a half-open range of physical rows, skipped ones left out."""
        return sum(end - first for first, end in self.runs(start, stop))

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives back an equal record."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ScannedFile:
        """Inverse of `to_json`."""
        skipped = tuple((first, end) for first, end in value["skipped"])
        bad_rows = tuple(BadRow(*bad) for bad in value["bad_rows"])
        return cls(**{**value, "skipped": skipped, "offsets": tuple(value["offsets"]), "bad_rows": bad_rows})


@dataclass(frozen=True)
class InputScan:
    """The inputs as the plan pass saw them: what the output's schema and the shards are made from."""

    files: tuple[ScannedFile, ...]
    source_schema: pa.Schema
    """Every column of the input. A field with metadata `batchgen.json` holds its values as JSON text."""
    schema: pa.Schema
    """The columns carried through to the output: those of `input.columns`, or all that Parquet can hold."""
    left_out: tuple[str, ...] = field(default=())
    """Columns that are not carried through although all were asked for, since Parquet cannot hold them."""
    selection: str | None = None
    """What chose the rows, where not all are answered."""

    @property
    def num_rows(self) -> int:
        """Rows that are answered."""
        return sum(file.count_rows() for file in self.files)

    @property
    def ranges(self) -> tuple[RowRange, ...]:
        """The whole input, one range per file."""
        return tuple(RowRange(file.source, 0, file.num_rows) for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives back an equal scan."""
        return {
            "files": [file.to_json() for file in self.files],
            "source_schema": schema_to_json(self.source_schema),
            "schema": schema_to_json(self.schema),
            "left_out": list(self.left_out),
            "selection": self.selection,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> InputScan:
        """Inverse of `to_json`."""
        return cls(
            files=tuple(ScannedFile.from_json(file) for file in value["files"]),
            source_schema=schema_from_json(value["source_schema"]),
            schema=schema_from_json(value["schema"]),
            left_out=tuple(value["left_out"]),
            selection=value.get("selection"),
        )


class RowCursor(Protocol):
    """An open file; cheap to read forward, reopened where a range lies behind."""

    def rows(self, start: int, stop: int, names: Collection[str]) -> Iterator[InputRow]:
        """The rows of a half-open range in order, with these columns; the cursor was opened for them.

        Where a file has its text column by column, it is looked at in every column that the cursor was opened for.
        """

    def tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        """The same rows as Arrow data of the cursor's schema, a piece at a time; rows with an error are nulls."""

    def close(self) -> None:
        """Give the file back."""


class InputFormat(Protocol):
    """How one kind of file is planned and read."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """The plan pass over one file; InputError where the file as a whole is wrong."""

    def columns_of(self, files: Sequence[ScannedFile]) -> pa.Schema:
        """The columns of all files of this format with their types; null where no value was seen."""

    def open(self, file: ScannedFile, schema: pa.Schema, max_row_bytes: int) -> RowCursor:
        """Open for the columns of `schema`, which are those of the whole input's that are needed."""


def refuse_names_twice(path: Path, names: Sequence[str]) -> None:
    """InputError where two columns have one name: which of them is meant cannot be told."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise InputError(f"{path}: has more than one column named {', '.join(map(repr, twice))}; rename all but one")


def schema_to_json(schema: pa.Schema) -> str:
    """An Arrow schema as text."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode("ascii")


def schema_from_json(text: str) -> pa.Schema:
    """Inverse of `schema_to_json`."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
