"""Files of lines: physical lines by number, found again through an index of byte offsets."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batchgen.data.compression import damage_named, open_text
from batchgen.data.input_rows import Compression
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
    """Reads lines forward; `jump` goes to a line whose offset is known."""

    def __init__(self, path: Path, compression: Compression | None, max_row_bytes: int) -> None:
        self.path = path
        self.max_row_bytes = max_row_bytes
        self._compression = compression
        self._stream: BinaryIO | None = None
        self.offset = 0
        """Where the next line begins, in bytes of the decompressed file."""
        self._number = 0

    def __iter__(self) -> Iterator[Line]:
        """Lines from where the reader stands to the end of the file."""
        while (line := self._next()) is not None:
            yield line

    def jump(self, offset: int, number: int) -> None:
        """Go to line `number`, which begins at `offset`; compressed text is read, from its start if need be."""
        with damage_named(self.path):
            stream = self._stream
            if stream is None or offset < self.offset:
                stream = self._open()
            if self._compression is None:
                stream.seek(offset)
            else:
                while self.offset < offset and (skipped := stream.read(min(_SKIP_BYTES, offset - self.offset))):
                    self.offset += len(skipped)
        self.offset, self._number = offset, number

    def close(self) -> None:
        """Close the file; a later read begins anew."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self) -> BinaryIO:
        self.close()
        self._stream = open_text(self.path, self._compression)
        self.offset = self._number = 0
        return self._stream

    def _next(self) -> Line | None:
        with damage_named(self.path):
            stream = self._stream or self._open()
            content = stream.readline(self.max_row_bytes + 2)
            if not content:
                return None
            line = Line(self._number, self.offset, content.removesuffix(b"\n").removesuffix(b"\r"))
            length = len(content)
            if not content.endswith(b"\n") and length > self.max_row_bytes:
                length += _drop_rest_of_line(stream)
                line = line._replace(content=None)
        self._number += 1
        self.offset += length
        if line.offset == 0 and line.content is not None:
            return self._without_byte_order_mark(line)
        return line

    def _without_byte_order_mark(self, line: Line) -> Line:
        assert line.content is not None
        if line.content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{self.path}: is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
        return line._replace(content=line.content.removeprefix(codecs.BOM_UTF8))


def _drop_rest_of_line(stream: BinaryIO) -> int:
    dropped = 0
    while rest := stream.readline(_SKIP_BYTES):
        dropped += len(rest)
        if rest.endswith(b"\n"):
            break
    return dropped
