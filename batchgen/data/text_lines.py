"""Files of lines: physical lines by number, found again through an index of byte offsets."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batchgen.data.compression import damage_named, open_text
from batchgen.data.input_rows import OFFSET_EVERY, Compression, ScannedFile
from batchgen.errors import InputError

_SKIP_BYTES = 2**20


class Line(NamedTuple):
    """One physical line, without its LF or CR LF. Other separators that Unicode knows are text."""

    number: int
    offset: int
    """Where it begins, in bytes of the decompressed file."""
    content: bytes | None
    """None where the line is longer than the limit."""


class LineReader:
    """Reads lines forward; `seek` goes to any row of a scanned file."""

    def __init__(self, path: Path, compression: Compression | None, max_row_bytes: int) -> None:
        self._path = path
        self._compression = compression
        self._max_row_bytes = max_row_bytes
        self._stream: BinaryIO | None = None
        self._offset = 0
        self._number = 0

    def __iter__(self) -> Iterator[Line]:
        """Lines from where the reader stands to the end of the file."""
        while (line := self._next()) is not None:
            yield line

    def seek(self, file: ScannedFile, row: int) -> None:
        """Go to a row: at most OFFSET_EVERY lines are read for it; compressed text is read from where it stands."""
        with damage_named(self._path):
            behind = row < self._number
            if self._stream is None or behind:
                self._open()
            at = min(row // OFFSET_EVERY, len(file.offsets) - 1)
            if at >= 0 and file.offsets[at] > self._offset:
                self._skip_to(file.offsets[at])
                self._number = at * OFFSET_EVERY
        while self._number < row and self._next() is not None:
            pass

    def close(self) -> None:
        """Close the file; a later read begins anew."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self) -> None:
        self.close()
        self._stream = open_text(self._path, self._compression)
        self._offset = self._number = 0

    def _skip_to(self, offset: int) -> None:
        assert self._stream is not None
        if self._compression is None:
            self._stream.seek(offset)
        else:
            while self._offset < offset and (skipped := self._stream.read(min(_SKIP_BYTES, offset - self._offset))):
                self._offset += len(skipped)
        self._offset = offset

    def _next(self) -> Line | None:
        with damage_named(self._path):
            if self._stream is None:
                self._open()
            assert self._stream is not None
            content = self._stream.readline(self._max_row_bytes + 2)
            if not content:
                return None
            line = Line(self._number, self._offset, _without_ending(content))
            length = len(content)
            if not content.endswith(b"\n") and length > self._max_row_bytes:
                length += self._drop_rest_of_line()
                line = line._replace(content=None)
        self._number += 1
        self._offset += length
        if line.number == 0 and line.content is not None:
            return self._without_byte_order_mark(line)
        return line

    def _drop_rest_of_line(self) -> int:
        assert self._stream is not None
        dropped = 0
        while rest := self._stream.readline(_SKIP_BYTES):
            dropped += len(rest)
            if rest.endswith(b"\n"):
                break
        return dropped

    def _without_byte_order_mark(self, line: Line) -> Line:
        assert line.content is not None
        if line.content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{self._path}: is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
        return line._replace(content=line.content.removeprefix(codecs.BOM_UTF8))


def _without_ending(content: bytes) -> bytes:
    return content.removesuffix(b"\n").removesuffix(b"\r")


class SkippedRows:
    """Collects numbers of blank lines, which come in order, as half-open ranges."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def add(self, row: int) -> None:
        """Add a row that comes after all before."""
        if self.ranges and self.ranges[-1][1] == row:
            self.ranges[-1] = (self.ranges[-1][0], row + 1)
        else:
            self.ranges.append((row, row + 1))
