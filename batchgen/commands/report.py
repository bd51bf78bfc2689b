"""`batchgen report`: one HTML page about an output, with charts, errors and rows to read."""

from __future__ import annotations

import secrets
from pathlib import Path

from batchgen.commands.document import print_document
from batchgen.data.files import OutputFiles
from batchgen.pipeline.stored import StoredOutput, read_output
from batchgen.pipeline.whole_file import whole_file
from batchgen.report.figures import read_figures
from batchgen.report.page import make_page, page_html


def report(output: Path, *, to: Path | None, as_json: bool) -> None:
    """Write the page and print where it lies; raises JobError where there is no output."""
    stored = read_output(OutputFiles(), output)
    if as_json:
        print_document(read_figures(stored).to_json())
        return
    print(write_report(stored, to))


def write_report(stored: StoredOutput, to: Path | None = None) -> Path:
    """Write the page to `to`, or beside the records of the output; returns where it lies."""
    content = page_html(make_page(stored))
    if to is None:
        path = stored.paths.report
        stored.files.replace(path, content.encode(), stored.paths.temporary / f"report-{secrets.token_hex(4)}.html")
        return path
    with whole_file(to) as file:
        file.write(content)
    return to
