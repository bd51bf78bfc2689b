"""`batchgen status`: how far an output is, who works on it, and at which rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchgen.commands.document import print_document
from batchgen.data.files import OutputFiles
from batchgen.pipeline.status import Status
from batchgen.pipeline.status import status as look
from batchgen.pipeline.stored import read_output
from batchgen.units import duration, plural


def status(output: Path, *, as_json: bool) -> None:
    """Print where the output stands; raises JobError where there is none."""
    found = look(read_output(OutputFiles(), output))
    if as_json:
        print_document(found.to_json())
        return
    for line in status_lines(found):
        print(line)


def status_lines(found: Status) -> Iterator[str]:
    """The status in words."""
    codes = ", ".join(f"{count} {code}" for code, count in sorted(found.errors.items()))
    counts = f"{found.num_committed - found.num_errors:,} ok, {found.num_errors:,} error"
    state = "done" if found.is_done else "damaged" if found.problems else "not done"
    rows, files = plural(found.num_rows, "row"), plural(found.num_files, "file")
    yield f"{state}: {found.num_committed:,} of {rows} committed in {files}"
    yield f"  rows       {counts}{f' ({codes})' if codes else ''}"
    if found.num_journaled or found.num_begun:
        yield f"  journal    {found.num_journaled:,} rows finished and not committed yet, {found.num_begun:,} begun"
    if found.rows_per_second > 0:
        left = (found.num_rows - found.num_committed) / found.rows_per_second
        rest = f", about {duration(left)} left" if found.holder is not None and left > 0 else ""
        yield f"  rate       {found.rows_per_second:,.2f} rows/s{rest}"
    if found.holder is not None:
        yield f"  at work    {found.holder.describe()}"
    for problem in found.problems:
        yield f"  damage     {problem}"
