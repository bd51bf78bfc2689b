"""Compressed text: recognised by its first bytes, read as a stream, and never believed to be whole before its end."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from batchgen.data.input_rows import Compression
from batchgen.errors import InputError

SUFFIXES: dict[str, Compression] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".bz2": "bz2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
}
"""Endings of compressed files; they are looked through to find the format, the content tells the compression."""

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {"bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)
_BUFFER_BYTES = 2**18


def detect_compression(path: Path) -> Compression | None:
    """The compression that the file's first bytes show; InputError for an empty file with a compressed file's name."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head and path.suffix.lower() in SUFFIXES:
        raise InputError(f"{path}: the archive is empty (0 bytes); write it again")
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def open_text(path: Path, compression: Compression | None) -> BinaryIO:
    """The file's bytes, decompressed while they are read; wrap what reads them in `damage_named`."""
    file: Any
    if compression is None:
        file = path.open("rb", buffering=_BUFFER_BYTES)
    elif compression == "gzip":
        file = gzip.open(path, "rb")  # noqa: SIM115
    elif compression in _DECOMPRESSORS:
        file = io.BufferedReader(_Streams(path, _DECOMPRESSORS[compression]), _BUFFER_BYTES)
    else:
        file = io.BufferedReader(_ZstdStream(path), _BUFFER_BYTES)
    return cast(BinaryIO, file)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn what a cut or damaged archive raises into an InputError that names it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # Raised by a decompressor, not by the system.
            raise _damaged(path, error) from error
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: the archive is cut or damaged ({error}); fetch or write it again")


class _Streams(io.RawIOBase):
    """bz2 or xz streams one behind another, to the last byte.

    Those of Python's own files end without a word at what is no stream, such as the damaged head of the next one.
    """

    def __init__(self, path: Path, begin: Callable[[], Any]) -> None:
        self._file = path.open("rb")
        self._begin = begin
        self._stream = begin()
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = b""
        while not data and not self._is_over():
            compressed = b""
            if self._stream.needs_input:
                compressed, self._waiting = self._waiting or self._file.read(_BUFFER_BYTES), b""
                if not compressed:
                    raise EOFError("it ends within a stream")
            data = self._stream.decompress(compressed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _is_over(self) -> bool:
        """Whether nothing follows; else a stream is open, the next one where the last has ended."""
        if not self._stream.eof:
            return False
        rest = self._stream.unused_data
        # Zeros may fill up what follows a stream, as in a file of whole blocks.
        while not (rest := rest.lstrip(b"\0")):
            rest = self._file.read(_BUFFER_BYTES)
            if not rest:
                return True
        self._stream, self._waiting = self._begin(), rest
        return False

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZstdStream(io.RawIOBase):
    """zstd through pyarrow, whose streams are no io objects; frames that follow one another are read as one."""

    def __init__(self, path: Path) -> None:
        self._stream = pa.CompressedInputStream(pa.OSFile(str(path), "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
