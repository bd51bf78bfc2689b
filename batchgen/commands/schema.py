"""`batchgen schema`: the JSON schema of the job file."""

from __future__ import annotations

import json

from batchgen.config import job_schema


def schema_text() -> str:
    """The schema as the text that is printed and checked in, with a final newline."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


def schema() -> None:
    """Print the schema."""
    print(schema_text(), end="")
