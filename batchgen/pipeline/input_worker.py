"""Files decoded for a process that is not to take what they unfold to; runs in a child."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.config import InputConfig
from batchgen.data.formats.registry import FORMATS
from batchgen.data.input_rows import InputFile, InputRow, InputScan, ScannedFile
from batchgen.data.reader import PromptReader
from batchgen.pipeline.child import is_one, serve
from batchgen.pipeline.machine_errors import machine_errors, unfolding_named
from batchgen.records import RowRange

_SIGN_SECONDS = 60.0
"""A file may take long to plan; the parent must not take that for silence."""


@dataclass(frozen=True)
class InputSpec:
    """What travels to the child."""

    scan: dict[str, Any] | None
    """`InputScan.to_json`; None before the files are planned."""
    input: InputConfig
    columns: tuple[str, ...] | None = None
    """Those of `Rows`; None: all."""


class Plan(NamedTuple):
    """Asks for the plan pass over a file; the answer is a ScannedFile."""

    file: InputFile


class Rows(NamedTuple):
    """Asks for the rows of a range; the answer is a list of InputRow."""

    rows: RowRange


class Tables(NamedTuple):
    """Asks for the columns carried through for a range; the answer is the first table as bytes, None without one."""

    rows: RowRange


class NextTable(NamedTuple):
    """Asks for what comes after the last table."""


Request = Plan | Rows | Tables | NextTable


class InputWorker:
    """Answers what a parent asks of the inputs; InputError where an answer takes too much memory."""

    def __init__(self, spec: InputSpec) -> None:
        self._max_row_bytes = spec.input.max_row_bytes
        self._reader: PromptReader | None = None
        if spec.scan is not None:
            self._reader = PromptReader(InputScan.from_json(spec.scan), spec.input, spec.columns)
        self._tables: Iterator[pa.Table] = iter(())

    def answer(self, request: Request, alive: Callable[[], None]) -> ScannedFile | list[InputRow] | bytes | None:
        """The answer; `alive` is called now and then."""
        if isinstance(request, Plan):
            with machine_errors(), unfolding_named(), _signs(alive):
                return FORMATS[request.file.format].scan(request.file, self._max_row_bytes)
        assert self._reader is not None, "the files are not planned yet"
        if isinstance(request, Rows):
            # Rows that are too much together end this process, and the parent asks for one at a time.
            with machine_errors(), unfolding_named() if is_one(request.rows) else nullcontext():
                return list(self._reader.read(request.rows))
        with machine_errors(), unfolding_named():
            if isinstance(request, Tables):
                self._tables = self._reader.read_columns(request.rows)
            table = next(self._tables, None)
            return None if table is None else to_bytes(table)


def main() -> None:
    """What the child runs."""
    serve(InputWorker)


def to_bytes(table: pa.Table) -> bytes:
    """A table as an Arrow stream; `from_bytes` gives it back."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """Inverse of `to_bytes`."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


@contextmanager
def _signs(alive: Callable[[], None]) -> Iterator[None]:
    done = threading.Event()

    def give() -> None:
        while not done.wait(_SIGN_SECONDS):
            alive()

    thread = threading.Thread(target=give, name="signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
