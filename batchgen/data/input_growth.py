"""Input files to which something was appended: the rows that were there are there still."""

from __future__ import annotations

import hashlib
from pathlib import Path

from batchgen.data.input_rows import ScannedFile

_HASH_BYTES = 1 << 20


def has_grown(before: ScannedFile) -> bool:
    """Whether the file begins with the bytes that were scanned, and what follows them begins a new line.

    False for a file of a format that cannot grow. Raises OSError.
    """
    if not before.is_appendable:
        return False
    digest = hashlib.sha256()
    left = before.size
    with Path(before.path).open("rb") as file:
        last = b"\n"
        while left and (piece := file.read(min(left, _HASH_BYTES))):
            digest.update(piece)
            left -= len(piece)
            last = piece[-1:]
        behind = file.read(1)
    # A last line without its end may have been half a row: then the row itself has changed.
    is_new_line = last in b"\r\n" or behind in (b"\n", b"\r")
    return behind != b"" and is_new_line and digest.hexdigest() == before.sha256
