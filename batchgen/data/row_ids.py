"""`input.id_column`: the user's own name of each row, and whether no two rows have one.

Two ids are one where the output's column cannot tell them apart: 1 and 1.0 in a column of numbers, objects whose keys
stand in another order. What the column holds as JSON text is told apart by that text, as any join on it would.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from batchgen.data.arrow_types import json_text, to_array
from batchgen.errors import InputError
from batchgen.printable import printable

_BATCH = 1024


class RowId(NamedTuple):
    """The id of a row and where it stands."""

    path: str
    row: int
    value: Any


def as_written(ids: Iterable[RowId], field: pa.Field[Any]) -> Iterator[RowId]:
    """The same ids as the column of the output holds them."""
    rest = iter(ids)
    while batch := list(islice(rest, _BATCH)):
        written = to_array([each.value for each in batch], field).to_pylist(maps_as_pydicts="lossy")
        for each, value in zip(batch, written, strict=True):
            # What only Arrow's own reader brings into the column, and Python's value does not, stands for itself.
            yield each if value is None else each._replace(value=value)


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
