"""The inputs as this process reads them: Parquet and Arrow by way of a child whose memory is bounded.

A few bytes of such a file may stand for gigabytes, and nothing in its footer need tell. Records of text are bounded as
they are read (`input.max_row_bytes`), so this process reads them itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa

from batchgen.config import InputConfig
from batchgen.data.input_rows import InputFile, InputRow, InputScan, ScannedFile
from batchgen.data.reader import DecodingHere, PromptReader
from batchgen.errors import InputError
from batchgen.pipeline.child import MEMORY_BYTES, BoundedChild, ChildDied, Limits, pieces
from batchgen.pipeline.choosing import choose_rows_in_child
from batchgen.pipeline.input_worker import InputSpec, NextTable, Plan, Rows, Tables, from_bytes
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.records import RowRange

_COLUMNAR = ("parquet", "arrow")
_ROWS = 64
"""Rows of one request."""
_ATTEMPTS = 2
"""How often a child is asked: once more, since something else may have killed it."""


class BoundedReader:
    """What PromptReader is, with InputError where a file takes more memory than `memory_bytes`."""

    def __init__(
        self,
        scan: InputScan,
        config: InputConfig,
        columns: Collection[str] | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`columns` are those of `read`; None: all."""
        self._scan = scan
        self._here = PromptReader(scan, config, columns)
        spec = InputSpec(scan.to_json(), config, None if columns is None else tuple(columns))
        self._child = InputChild(spec, memory_bytes)

    def read(self, rows: RowRange) -> Iterator[InputRow]:
        """The rows of a range in order; a row that cannot be read has its `error` set. Skipped rows are left out."""
        if not self._is_columnar(rows):
            yield from self._here.read(rows)
            return
        for piece in pieces(rows, _ROWS):
            try:
                yield from self._child.ask_once(Rows(piece))
            except ChildDied:
                for row in pieces(piece, 1):
                    yield from self._child.ask(Rows(row), self._where(row))

    def read_columns(self, rows: RowRange) -> Iterator[pa.Table]:
        """The columns carried through for the same rows, a piece at a time."""
        if not self._is_columnar(rows) or not self._scan.schema.names:
            yield from self._here.read_columns(rows)
            return
        num_given = 0
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                for table in self._tables(rows, num_given):
                    yield table
                    num_given += table.num_rows
                return
            except ChildDied as death:
                if attempt == _ATTEMPTS:
                    raise _too_much(self._where(rows)) from death

    def _tables(self, rows: RowRange, num_given: int) -> Iterator[pa.Table]:
        """The tables from the start, without the rows that were given before their child died."""
        data = self._child.ask_once(Tables(rows))
        while data is not None:
            table = from_bytes(data)
            rest = table.slice(min(num_given, table.num_rows))
            num_given -= table.num_rows - rest.num_rows
            if rest.num_rows:
                yield rest
            data = self._child.ask_once(NextTable())

    def close(self) -> None:
        """Close all files, and end the child."""
        self._here.close()
        self._child.close()

    def _is_columnar(self, rows: RowRange) -> bool:
        return self._scan.files[rows.source].format in _COLUMNAR

    def _where(self, rows: RowRange) -> str:
        return f"{self._scan.files[rows.source].path}: rows {rows.start} to {rows.stop - 1}"


class InputChild:
    """A child that decodes files; started when it is first asked."""

    def __init__(self, spec: InputSpec, memory_bytes: int = MEMORY_BYTES) -> None:
        self._spec = spec
        # It runs no code but ours: however long it takes, it comes back.
        self._limits = Limits(step_seconds=0, memory_bytes=memory_bytes)
        self._child: BoundedChild | None = None

    def ask(self, request: Any, where: str) -> Any:
        """The answer; InputError that begins with `where` where the child does not live to give it."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self.ask_once(request)
            except ChildDied as death:
                if attempt == _ATTEMPTS:
                    raise _too_much(where) from death
        raise AssertionError("unreachable")

    def ask_once(self, request: Any) -> Any:
        """The answer; ChildDied where the child ends before, and the next question goes to a new one."""
        try:
            with machine_errors():
                if self._child is None:
                    self._child = BoundedChild(self._spec, self._limits, worker="batchgen.pipeline.input_worker")
            return self._child.ask(request)
        except ChildDied:
            self.close()
            raise

    def close(self) -> None:
        """End the child; a second call does nothing."""
        if self._child is not None:
            self._child.close()
            self._child = None


def _too_much(where: str) -> InputError:
    return InputError(
        f"{where}: reading them ended its process; they may take too much memory: write the file again in smaller "
        "pieces, or leave it out"
    )


class DecodingInChildren:
    """The plan pass of a job: what may unfold, and the user's expression, in children of bounded memory."""

    def scan(self, file: InputFile, max_row_bytes: int) -> ScannedFile:
        """The plan pass over one file. Of Parquet it reads the footer alone, and of text a record at a time."""
        if file.format != "arrow":
            return DecodingHere().scan(file, max_row_bytes)
        config = InputConfig(path=str(file.path), max_row_bytes=max_row_bytes)
        with closing(InputChild(InputSpec(None, config))) as child:
            scanned: ScannedFile = child.ask(Plan(file), f"{file.path}: the record batches")
            return scanned

    def chosen(self, scan: InputScan, config: InputConfig) -> Iterable[Iterable[int]]:
        """The rows of each file that `input.where` keeps, in order."""
        return choose_rows_in_child(scan, config)

    def values(self, scan: InputScan, config: InputConfig, column: str) -> Iterator[InputRow]:
        """All rows, with one column."""
        with closing(BoundedReader(scan, config, [column])) as reader:
            for rows in scan.ranges:
                yield from reader.read(rows)
