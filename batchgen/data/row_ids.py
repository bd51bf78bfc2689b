"""`input.id_column`: the user's own name of each row, and whether no two rows have one."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from batchgen.data.arrow_types import json_text
from batchgen.errors import InputError
from batchgen.printable import printable


class RowId(NamedTuple):
    """The id of a row and where it stands."""

    path: str
    row: int
    value: Any


def refuse_repeated_ids(column: str, read: Callable[[], Iterator[RowId]]) -> None:
    """InputError for an id that is null or that two rows have.

    `read` gives the ids anew at each call. Memory: 8 bytes a row; a second pass tells equal ids from equal hashes.
    """
    hashes = array("Q", (_hash(column, row_id) for row_id in read()))
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64)) if hashes else np.empty(0, np.uint64)
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    first: dict[str, RowId] = {}
    for row_id in read() if suspects else ():
        if _hash(column, row_id) not in suspects:
            continue
        other = first.setdefault(json_text(row_id.value), row_id)
        if other != row_id:
            shown = printable(json_text(row_id.value))
            raise InputError(
                f"input.id_column: {column!r} is {shown} in row {other.row} of {other.path} and again in row "
                f"{row_id.row} of {row_id.path}; make it unique, or set input.unique_ids to false"
            )


def _hash(column: str, row_id: RowId) -> int:
    if row_id.value is None:
        raise InputError(
            f"input.id_column: {column!r} is null in row {row_id.row} of {row_id.path}; give the row an id, or set "
            "input.unique_ids to false"
        )
    digest = hashlib.blake2b(json_text(row_id.value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
