"""`batchgen convert`: an output in another form."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from batchgen.commands.document import print_document
from batchgen.data.files import OutputFiles
from batchgen.errors import JobError
from batchgen.pipeline.convert import Form, Line
from batchgen.pipeline.convert import convert as converted
from batchgen.pipeline.status import Status, status
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.whole_file import whole_file
from batchgen.units import plural


class Written(NamedTuple):
    """What was written where."""

    num_lines: int
    errors_file: Path | None
    """Where the rows with an error went; None where none did."""
    num_errors_apart: int


def convert(
    output: Path, file: Path, form: Form, *, errors: Path | None = None, overwrite: bool, as_json: bool = False
) -> None:
    """Write the file, whole or not at all, and say on stderr what is in it; `-` is stdout.

    Rows with an error of `openai-batch` go to `errors`, by default FILE with .errors before its suffix.
    """
    stored = read_output(OutputFiles(), output)
    found = status(stored)
    if not found.is_done:
        print(f"{output}: {found.num_committed:,} of {found.num_rows:,} rows are committed so far", file=sys.stderr)
    if str(file) == "-":
        num_left_out = 0
        for line in converted(stored, form):
            if line.is_error:
                num_left_out += 1
            else:
                _write(line, sys.stdout)
        if num_left_out:
            print(
                f"{plural(num_left_out, 'row')} with an error left out; name a file to have them too", file=sys.stderr
            )
        return
    apart = (errors or file.with_name(f"{file.stem}.errors{file.suffix}")) if form == "openai-batch" else None
    for path in () if overwrite else filter(None, (file, apart)):
        if path.exists():
            raise JobError(f"{path}: is there already; choose another file or add --overwrite")
    written = _write_files(converted(stored, form), file, apart)
    if as_json:
        print_document(_document(form, file, written, found))
        return
    print(f"{file}: {plural(written.num_lines, 'line')}", file=sys.stderr)
    if written.errors_file is not None:
        print(f"{written.errors_file}: {plural(written.num_errors_apart, 'row')} with an error", file=sys.stderr)
    elif form == "chat" and found.num_errors:
        print(f"{plural(found.num_errors, 'row')} with an error left out", file=sys.stderr)


def _write_files(lines: Iterator[Line], file: Path, apart: Path | None) -> Written:
    counts = [0, 0]
    with ExitStack() as stack:
        targets = [stack.enter_context(whole_file(path)) for path in filter(None, (file, apart))]
        for line in lines:
            counts[line.is_error] += 1
            _write(line, targets[line.is_error])
    if apart is not None and counts[1] == 0 and apart.is_file():
        apart.unlink()
    return Written(counts[0], apart if counts[1] else None, counts[1])


def _write(line: Line, target: TextIO) -> None:
    target.write(json.dumps(line.value, ensure_ascii=False, separators=(",", ":")) + "\n")


def _document(form: Form, file: Path, written: Written, found: Status) -> dict[str, Any]:
    return {
        "form": form,
        "file": str(file),
        "num_lines": written.num_lines,
        "errors_file": None if written.errors_file is None else str(written.errors_file),
        "num_errors_apart": written.num_errors_apart,
        "num_rows": found.num_rows,
        "num_committed": found.num_committed,
        "num_errors": found.num_errors,
    }
