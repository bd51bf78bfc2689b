"""`batchgen export`: the rows of an output in the form of OpenAI's batch API."""

from __future__ import annotations

from pathlib import Path

from batchgen.data.files import OutputFiles
from batchgen.pipeline.export import export_requests
from batchgen.pipeline.stored import read_output


def export(output: Path, answers: Path, errors: Path) -> None:
    """Write both files and say how many lines each has."""
    num_answers, num_errors = export_requests(read_output(OutputFiles(), output), answers, errors)
    print(f"{answers}: {num_answers:,} answers\n{errors}: {num_errors:,} errors")
