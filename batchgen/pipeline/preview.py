"""The first prompts of a job as the model would get them: rows read, rendered and encoded, no weights loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from batchgen.config import JobConfig
from batchgen.data.input_notes import input_notes
from batchgen.data.inputs import find_inputs
from batchgen.data.layout import OutputPaths
from batchgen.data.reader import scan_inputs
from batchgen.data.schema import output_layout, typed_fields
from batchgen.pipeline.bounded_reader import DecodingInChildren
from batchgen.pipeline.feeder import PromptFeeder, preparer_spec
from batchgen.pipeline.grammar_check import check_grammar
from batchgen.pipeline.plan import RowIndex, limited
from batchgen.records import RowError
from batchgen.resources import context_length, locate_model
from batchgen.tokenizer import TextPiece, Tokenizer

_UNLIMITED = 1 << 20
_WAIT_SECONDS = 0.1


class PreviewedRow(NamedTuple):
    """One row, and the prompt that it becomes."""

    file: str
    row: int
    num_tokens: int | None
    """None where the row has no prompt."""
    pieces: list[TextPiece] | None
    """The prompt's text; None where there is none, or the model has no tokenizer."""
    error: RowError | None


class Preview(NamedTuple):
    """The first rows of a job."""

    notes: list[str]
    """What a user should know about the inputs."""
    num_rows: int
    """All rows of the job."""
    context: int | None
    """Tokens of prompt and completion that the model takes; None where its files do not say."""
    rows: Iterator[PreviewedRow]
    typed: list[tuple[str, str]]
    """Names and types of the columns that a JSON Schema in sampling.response_format declares."""


def preview_job(job: JobConfig, num_rows: int) -> Preview:
    """Plan the inputs and prepare the first rows; raises JobError for what is wrong with the job or with every row."""
    found = find_inputs(job.input, job.base_dir, own=OutputPaths(job.output_dir).data)
    scan = scan_inputs(found.files, job.input, decoding=DecodingInChildren())
    layout = output_layout(scan.schema, job.output, job.sampling)
    directory = locate_model(job.model_source, job.model.revision, weights=False)
    if job.sampling.response_format is not None:
        check_grammar(job.sampling.response_format, directory)
    index = RowIndex(scan.files)
    whole = limited(scan.ranges, job.input.limit, index)
    context = context_length(directory) if job.model.max_model_len == "auto" else job.model.max_model_len
    feeder = PromptFeeder(preparer_spec(job, scan, directory, context or _UNLIMITED), limited(whole, num_rows, index))
    tokenizer = Tokenizer.from_directory(directory)
    names = [file.name for file in scan.files]
    return Preview(
        notes=input_notes(found.passed_over, scan),
        num_rows=sum(index.count(rows) for rows in whole),
        context=context,
        rows=_rows(feeder, names, tokenizer),
        typed=[(field.name, str(field.type)) for field in typed_fields(layout)],
    )


def _rows(feeder: PromptFeeder, names: list[str], tokenizer: Tokenizer | None) -> Iterator[PreviewedRow]:
    with closing(feeder):
        while not feeder.is_over:
            prepared = feeder.get(_WAIT_SECONDS)
            if prepared is None:
                continue
            ids = prepared.prompt_token_ids
            yield PreviewedRow(
                file=names[prepared.row.source],
                row=prepared.row.row,
                num_tokens=None if ids is None else len(ids),
                pieces=None if ids is None or tokenizer is None else tokenizer.pieces(ids),
                error=prepared.error,
            )
