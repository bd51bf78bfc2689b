"""Rows of the input: planned once, then read by range, in order, in flat memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config import InputConfig
from batchgen.data.arrow_types import concrete, fits, holds_text, unify
from batchgen.data.chat_messages import type_name
from batchgen.data.formats.registry import FORMATS
from batchgen.data.input_growth import has_grown
from batchgen.data.input_rows import (
    TABLE_BYTES,
    TABLE_ROWS,
    InputFile,
    InputRow,
    InputScan,
    RowCursor,
    RowFailure,
    ScannedFile,
)
from batchgen.data.names import near_names
from batchgen.data.row_ids import RowId, as_written, refuse_repeated_ids
from batchgen.data.selection import RowFilter, select, selection_of
from batchgen.errors import InputError
from batchgen.records import RowError, RowRange

__all__ = [
    "InputFile",
    "InputRow",
    "InputScan",
    "PromptReader",
    "RowFailure",
    "ScannedFile",
    "scan_inputs",
]


class Decoding(Protocol):
    """Where the plan pass decodes files and evaluates expressions, and within which limits."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """The plan pass over one file."""
        ...

    def chosen(self, scan: InputScan, config: InputConfig) -> Iterable[Iterable[int]]:
        """The rows of each file that `input.where` keeps, in order."""
        ...

    def values(self, scan: InputScan, config: InputConfig, column: str) -> Iterable[InputRow]:
        """All rows, with one column."""
        ...


class DecodingHere:
    """In this process, without limits."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """The plan pass over one file."""
        return FORMATS[file.format].scan(file, max_row_bytes)

    def chosen(self, scan: InputScan, config: InputConfig) -> Iterator[list[int]]:
        """The rows of each file that `input.where` keeps, in order."""
        assert config.where is not None
        chosen = RowFilter(config.where, scan.source_schema.names)
        with closing(PromptReader(scan, config, chosen.names)) as reader:
            for rows, file in zip(scan.ranges, scan.files, strict=True):
                yield [row.row for row in reader.read(rows) if chosen.keeps(row, file.path)]

    def values(self, scan: InputScan, config: InputConfig, column: str) -> Iterator[InputRow]:
        """All rows, with one column."""
        with closing(PromptReader(scan, config, [column])) as reader:
            for rows in scan.ranges:
                yield from reader.read(rows)


def scan_inputs(
    files: Sequence[InputFile],
    config: InputConfig,
    known: InputScan | None = None,
    *,
    decoding: Decoding = DecodingHere(),  # noqa: B008 (it has no state)
) -> InputScan:
    """The plan pass: rows, hashes, offsets and column types of all files, and which rows are answered.

    Files that `known`, an earlier scan, saw with the same size, mtime and inode are not read again. Raises InputError
    for a file that is wrong as a whole, for a column in `input.columns` or `input.schema` that no file has, and, with
    `input.on_error: fail`, for the first row that cannot be read.
    """
    selection = selection_of(config)
    if known is not None and not _is_reusable(known, files, selection):
        known = None
    earlier = {file.path: file for file in known.files} if known else {}
    scanned = tuple(_scan_file(file, earlier.get(str(file.path)), config.max_row_bytes, decoding) for file in files)
    if config.on_error == "fail":
        _refuse_bad_rows(scanned)
    source_schema = _source_schema(scanned, config)
    schema, left_out = _carried(source_schema, config)
    scan = InputScan(scanned, source_schema, schema, left_out, selection)
    if selection is not None and known is None:
        answered = [file.rows() for file in scan.files]
        scan = select(scan, config, answered if config.where is None else decoding.chosen(scan, config))
    if config.unique_ids and scanned != (known.files if known else None):
        refuse_repeated_ids(str(config.id_column), partial(_row_ids, scan, config, decoding))
    return scan


def _row_ids(scan: InputScan, config: InputConfig, decoding: Decoding) -> Iterator[RowId]:
    """The ids of all rows that can be read, as the output will hold them."""
    column = str(config.id_column)
    rows = (row for row in decoding.values(scan, config, column) if row.error is None)
    ids = (RowId(scan.files[row.source].path, row.row, row.values[column]) for row in rows)
    yield from as_written(ids, scan.source_schema.field(column))


def _is_reusable(known: InputScan, files: Sequence[InputFile], selection: str | None) -> bool:
    """Whether an earlier scan's files say what was found in them; a selection from all files is of use as a whole."""
    if known.selection != selection:
        return False
    if selection is None:
        return True
    same = [(str(file.path), file.format) for file in files] == [(file.path, file.format) for file in known.files]
    return same and all(file.is_current() for file in known.files)


def _scan_file(file: InputFile, earlier: ScannedFile | None, max_row_bytes: int, decoding: Decoding) -> ScannedFile:
    if earlier and earlier.format == file.format and earlier.is_current():
        return ScannedFile.from_json({**earlier.to_json(), "source": file.source, "name": file.name})
    try:
        return decoding.scan(file, max_row_bytes)
    except OSError as error:
        raise InputError(f"{file.path}: cannot be read: {error.strerror or error}") from error


def _refuse_bad_rows(files: Iterable[ScannedFile]) -> None:
    for file in files:
        if file.bad_rows:
            bad = file.bad_rows[0]
            place = f":{bad.row + 1}" if file.format in ("jsonl", "text") else f": row {bad.row}"
            more = f" ({file.num_bad_rows} such rows in this file)" if file.num_bad_rows > 1 else ""
            raise InputError(f"{file.path}{place}: {bad.code}: {bad.message}{more}; input.on_error is fail")


def _source_schema(files: Sequence[ScannedFile], config: InputConfig) -> pa.Schema:
    by_format = [reader.columns_of([file for file in files if file.format == name]) for name, reader in FORMATS.items()]
    fields = {field.name: field.with_type(concrete(field.type)) for field in unify(by_format)}
    # Without a single readable row nothing is known about columns, and nothing can be missing.
    asked = [*_asked_columns(config), *(config.schema_ or {})]
    for name in asked:
        if name not in fields:
            if fields and any(file.num_rows > file.num_bad_rows for file in files):
                raise InputError(f"input: no column {name!r} in the input{near_names(name, fields)}")
            fields[name] = pa.field(name, pa.string())
    for name, kind in (config.schema_ or {}).items():
        fields[name] = pa.field(name, pa.type_for_alias(cast(Any, kind)))
    return pa.schema(list(fields.values()))


def _asked_columns(config: InputConfig) -> list[str]:
    ids = [] if config.id_column is None else [config.id_column]
    return [*ids, *(config.columns or [])]


def _carried(source_schema: pa.Schema, config: InputConfig) -> tuple[pa.Schema, tuple[str, ...]]:
    wanted = config.columns
    names = source_schema.names if wanted is None else list(dict.fromkeys(_asked_columns(config)))
    fields = [source_schema.field(name) for name in names]
    writable = [field for field in fields if _is_writable(field)]
    left_out = tuple(field.name for field in fields if field not in writable)
    if left_out and wanted is not None:
        raise InputError(
            f"input.columns: Parquet cannot hold the type of {', '.join(map(repr, left_out))}; leave it out"
        )
    return pa.schema(writable), left_out


def _is_writable(field: pa.Field[Any]) -> bool:
    try:
        pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
    except pa.ArrowNotImplementedError:
        return False
    return True


class PromptReader:
    """Reads ranges of a scanned input. Ranges in rising order are read in one pass over each file."""

    def __init__(
        self,
        scan: InputScan,
        config: InputConfig,
        columns: Collection[str] | None = None,
        *,
        check_carried: bool = False,
    ) -> None:
        """`columns` are those that the prompt needs; None: all.

        `check_carried`: a row is an error also where text of a column that is carried through is not UTF-8, since that
        column could not hold it as it is.
        """
        self._scan = scan
        self._max_row_bytes = config.max_row_bytes
        names = scan.source_schema.names
        self._needed = pa.schema(
            [scan.source_schema.field(name) for name in names if columns is None or name in columns]
        )
        self._declared = [scan.source_schema.field(name) for name in config.schema_ or {}]
        self._checked = [field for field in scan.schema if check_carried and holds_text(field.type)]
        self._cursors: dict[bool, tuple[int, RowCursor]] = {}
        self._accepted: dict[int, tuple[int, int]] = {}
        """Size and mtime of files that were only touched since the plan was made."""

    def read(self, rows: RowRange) -> Iterator[InputRow]:
        """The rows of a range in order; a row that cannot be read has its `error` set. Skipped rows are left out."""
        names = list(dict.fromkeys((*self._needed.names, *(field.name for field in self._declared))))
        fields = {field.name: field for field in (*self._needed, *self._declared, *self._checked)}
        cursor = self._cursor(rows.source, pa.schema(list(fields.values())), carried=False)
        for run in self._scan.files[rows.source].runs(rows.start, rows.stop):
            for row in cursor.rows(*run, names):
                row.error = row.error or self._misfit(row)
                row.values = {} if row.error else {name: row.values[name] for name in self._needed.names}
                yield row
        self._refuse_rewritten(rows.source)

    def read_columns(self, rows: RowRange) -> Iterator[pa.Table]:
        """The columns carried through for the same rows as `read`, with their declared types, a piece at a time.

        A value that cannot be read, or does not fit the type that `input.schema` declares, is null.
        """
        file = self._scan.files[rows.source]
        if not self._scan.schema.names:
            if num_rows := file.count_rows(rows.start, rows.stop):
                yield pa.table({"": pa.nulls(num_rows)}).select([])
            return
        cursor = self._cursor(rows.source, self._scan.schema, carried=True)
        pieces = (table for run in file.runs(rows.start, rows.stop) for table in cursor.tables(*run))
        yield from _joined(pieces)
        self._refuse_rewritten(rows.source)

    def close(self) -> None:
        """Close all files."""
        for _, cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()

    def _misfit(self, row: InputRow) -> RowError | None:
        for field in self._declared:
            if not fits(row.values.get(field.name), field):
                found = type_name(row.values[field.name])
                return RowError(
                    "type_mismatch", f"column {field.name!r} holds {found} that is no {field.type}, as declared"
                )
        return None

    def _refuse_rewritten(self, source: int) -> None:
        """InputError where the open file itself was changed while it was read, not another put in its place."""
        file = self._scan.files[source]
        try:
            now = os.stat(file.path)
        except OSError:
            return
        status = (now.st_size, now.st_mtime_ns)
        is_longer = file.is_appendable and now.st_size > file.size
        if now.st_ino != file.inode or is_longer or status == self._accepted.get(source, (file.size, file.mtime_ns)):
            return
        _refuse_changed(file, self._max_row_bytes)
        self._accepted[source] = status

    def _cursor(self, source: int, schema: pa.Schema, carried: bool) -> RowCursor:
        opened = self._cursors.get(carried)
        if opened is not None and opened[0] == source:
            return opened[1]
        if opened is not None:
            opened[1].close()
            del self._cursors[carried]
        file = self._scan.files[source]
        _refuse_changed(file, self._max_row_bytes)
        try:
            cursor = FORMATS[file.format].open(file, schema, self._max_row_bytes)
        except OSError as error:
            raise InputError(f"{file.path}: cannot be read: {error.strerror or error}") from error
        self._cursors[carried] = (source, cursor)
        return cursor


def _joined(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in fewer tables: scattered rows come one by one."""
    held: list[pa.Table] = []
    num_rows = num_bytes = 0
    for piece in pieces:
        if held and (num_rows + piece.num_rows > TABLE_ROWS or num_bytes + piece.nbytes > TABLE_BYTES):
            yield pa.concat_tables(held)
            held, num_rows, num_bytes = [], 0, 0
        held.append(piece)
        num_rows += piece.num_rows
        num_bytes += piece.nbytes
    if held:
        yield pa.concat_tables(held)


def _refuse_changed(file: ScannedFile, max_row_bytes: int) -> None:
    """InputError where the rows of the plan are not in the file any more; what was appended behind them is no harm."""
    path = Path(file.path)
    if file.is_current():
        return
    if not path.exists():
        raise InputError(f"{path}: is gone since the plan was made; put it back")
    if has_grown(file):
        return
    now = FORMATS[file.format].scan(InputFile(file.source, path, file.name, file.format), max_row_bytes)
    if now.sha256 != file.sha256:
        raise InputError(f"{path}: its content changed since the plan was made; put the old content back")
