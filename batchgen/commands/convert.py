"""`batchgen convert`: an output in another form."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from batchgen.commands.document import print_document
from batchgen.data.files import OutputFiles
from batchgen.errors import JobError
from batchgen.pipeline.convert import Form, Line
from batchgen.pipeline.convert import convert as converted
from batchgen.pipeline.status import status
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.whole_file import whole_file

_ADVICE = "choose another file"


def convert(output: Path, file: Path, form: Form, *, overwrite: bool, as_json: bool = False) -> None:
    """Write the file, whole or not at all, and say on stderr what is in it; `-` is stdout."""
    stored = read_output(OutputFiles(), output)
    found = status(stored)
    if not found.is_done:
        print(f"{output}: {found.num_committed:,} of {found.num_rows:,} rows are committed so far", file=sys.stderr)
    errors = file.with_name(f"{file.stem}.errors{file.suffix}")
    to_stdout = str(file) == "-"
    for path in () if to_stdout or overwrite else (file, errors):
        if path.exists():
            raise JobError(f"{path}: is there already; choose another file or add --overwrite")
    if to_stdout:
        _write((line for line in converted(stored, form) if not line.is_error), sys.stdout, None)
        return
    with whole_file(file, _ADVICE) as target, whole_file(errors, _ADVICE) as error_target:
        num_lines, num_errors = _write(converted(stored, form), target, error_target)
    if num_errors == 0:
        errors.unlink()
    if as_json:
        print_document(
            {
                "form": form,
                "file": str(file),
                "num_lines": num_lines,
                "errors_file": str(errors) if num_errors else None,
                "num_errors_apart": num_errors,
                "num_rows": found.num_rows,
                "num_committed": found.num_committed,
                "num_errors": found.num_errors,
            }
        )
        return
    print(f"{file}: {num_lines:,} lines", file=sys.stderr)
    if num_errors:
        print(f"{errors}: {num_errors:,} rows with an error", file=sys.stderr)
    elif form == "chat" and found.num_errors:
        print(f"{found.num_errors:,} rows with an error are left out", file=sys.stderr)


def _write(lines: Iterator[Line], target: TextIO, errors: TextIO | None) -> tuple[int, int]:
    """(lines written, of them errors apart)."""
    counts = [0, 0]
    for line in lines:
        counts[line.is_error] += 1
        to = errors if line.is_error else target
        assert to is not None
        to.write(json.dumps(line.value, ensure_ascii=False, separators=(",", ":")) + "\n")
    return counts[0], counts[1]
