"""`batchgen preview`: the first prompts of a job, to be read before the model is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from batchgen.commands.document import print_document
from batchgen.config import JobConfig
from batchgen.pipeline.preview import Preview, PreviewedRow, preview_job
from batchgen.printable import printable
from batchgen.tokenizer import TextPiece

OPEN, CLOSE = "⟦", "⟧"
"""Around a control token: text that only spells one stands without them."""


def preview(job: JobConfig, *, num_rows: int, as_json: bool = False) -> None:
    """Print the first `num_rows` prompts; what is wrong with the job raises its BatchgenError."""
    shown = preview_job(job, num_rows)
    if as_json:
        print_document(preview_document(shown))
        return
    for note in shown.notes:
        print(note, file=sys.stderr)
    for line in preview_lines(shown):
        print(line)


def preview_lines(preview: Preview) -> Iterator[str]:
    """A heading and the prompt for each row, then what the marks mean."""
    num_shown = 0
    has_control = False
    for row in preview.rows:
        num_shown += 1
        has_control = has_control or any(piece.is_control for piece in row.pieces or ())
        yield f"{printable(row.file)}, row {row.row}: {_heading(row, preview.context)}"
        if row.pieces is not None:
            yield from (f"  | {line}" for line in _visible(row.pieces))
        yield ""
    yield f"{num_shown:,} of {preview.num_rows:,} rows"
    if preview.typed:
        yield "columns of the schema in sampling.response_format:"
        yield from (f"  {printable(name)}: {kind}" for name, kind in preview.typed)
    if has_control:
        yield f"{OPEN}…{CLOSE} is one control token; the same characters without these marks are text"


def preview_document(preview: Preview) -> dict[str, Any]:
    """The same for `--json`: texts whole, a control token in a piece of its own."""
    return {
        "notes": preview.notes,
        "num_rows": preview.num_rows,
        "context": preview.context,
        "typed": dict(preview.typed),
        "rows": [_row_document(row) for row in preview.rows],
    }


def _row_document(row: PreviewedRow) -> dict[str, Any]:
    return {
        "file": row.file,
        "row": row.row,
        "num_tokens": row.num_tokens,
        "pieces": None if row.pieces is None else [piece._asdict() for piece in row.pieces],
        "error": None if row.error is None else row.error._asdict(),
    }


def _heading(row: PreviewedRow, context: int | None) -> str:
    if row.error is not None:
        return f"error {row.error.code}: {printable(row.error.message)}"
    return f"{row.num_tokens:,} tokens" + ("" if context is None else f" of {context:,}")


def _visible(pieces: Iterable[TextPiece]) -> Iterator[str]:
    """The lines of a prompt, without anything that a terminal would obey; spaces at the end of a line as dots."""
    text = "".join(f"{OPEN}{piece.text}{CLOSE}" if piece.is_control else _unmarked(piece.text) for piece in pieces)
    for line in text.split("\n"):
        kept = line.rstrip(" ")
        yield printable(kept) + "·" * (len(line) - len(kept))


def _unmarked(text: str) -> str:
    return text.replace(OPEN, f"\\u{ord(OPEN):04x}").replace(CLOSE, f"\\u{ord(CLOSE):04x}")
