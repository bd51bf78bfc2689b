"""`batchgen verify`: records against files, every byte of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchgen.commands.document import print_document
from batchgen.data.files import OutputFiles
from batchgen.data.recovery import repair_hint
from batchgen.errors import OutputDamaged
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.verify import Verification
from batchgen.pipeline.verify import verify as check
from batchgen.units import plural


def verify(output: Path, *, as_json: bool = False, repair: dict[str, Any] | None = None) -> None:
    """Print what was found; raises OutputDamaged with a line for each problem, JobError where there is no output.

    `repair` is what a repair before it came to, for the JSON.
    """
    found = check(read_output(OutputFiles(), output))
    document = {**asdict(found), "intact": not found.problems, "repair": repair}
    for note in () if as_json else found.notes:
        print(note)
    if found.problems:
        damaged = OutputDamaged("\n".join([*found.problems, repair_hint(output)]))
        damaged.result = document
        raise damaged
    if as_json:
        print_document(document)
        return
    for line in verification_lines(output, found):
        print(line)


def verification_lines(output: Path, found: Verification) -> Iterator[str]:
    """What is said of an output that is intact."""
    num_errors = sum(found.errors.values())
    rows, files = plural(found.num_rows, "row"), plural(found.num_files, "file")
    yield (
        f"{output}: intact: {found.num_committed:,} of {rows} in {files}, "
        f"{found.num_committed - num_errors:,} ok, {num_errors:,} error; size, hash, schema and keys are as recorded"
    )
