"""Committed rows as files of OpenAI's batch API: answers in one, errors in another.

Both are made from the Parquet files, which stay what counts; the same output gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from batchgen.errors import JobError
from batchgen.pipeline.openai_answers import answer_lines, id_column
from batchgen.pipeline.stored import StoredOutput
from batchgen.pipeline.whole_file import whole_file

_ADVICE = "mend it and run again"


def export_requests(stored: StoredOutput, answers: Path, errors: Path) -> tuple[int, int]:
    """Write both files anew; returns (lines of answers, lines of errors). JobError where a row has no id."""
    if id_column(stored) is None:
        raise JobError(f"{stored.paths.root}: has no column custom_id; name the rows with input.id_column")
    counts = [0, 0]
    with whole_file(answers, _ADVICE) as answer_file, whole_file(errors, _ADVICE) as error_file:
        for line in answer_lines(stored):
            which = int(line["error"] is not None)
            (answer_file, error_file)[which].write(json.dumps(line, ensure_ascii=False) + "\n")
            counts[which] += 1
    return counts[0], counts[1]
