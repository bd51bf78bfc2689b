"""What a user should know about the inputs of a run that goes on all the same."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.data.input_rows import InputScan
from batchgen.printable import printable

_SHOWN = 10


def input_notes(passed_over: Sequence[str], scan: InputScan) -> list[str]:
    """One line each: files that were passed over, columns that are left out, rows that cannot be read."""
    notes = []
    if passed_over:
        notes.append(f"passed over in the inputs: {_listed(passed_over)}")
    if scan.left_out:
        notes.append(f"columns left out, since Parquet cannot hold them: {_listed(scan.left_out)}")
    num_bad_rows = sum(file.num_bad_rows for file in scan.files)
    if num_bad_rows:
        first = next(file for file in scan.files if file.bad_rows)
        bad = first.bad_rows[0]
        rows = (
            "1 row that cannot be read is an error row"
            if num_bad_rows == 1
            else f"{num_bad_rows} rows that cannot be read are error rows"
        )
        notes.append(f"{rows}; the first: {printable(first.name)}, row {bad.row}: {bad.code}: {printable(bad.message)}")
    return notes


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more
