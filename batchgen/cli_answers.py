"""What the `batchgen` program says when a command is over, on streams that perhaps take nothing any more."""

from __future__ import annotations

import json
import os
import sys
import traceback
from types import TracebackType
from typing import TextIO

from batchgen import __version__
from batchgen.errors import BatchgenError, JobFileError
from batchgen.printable import printable_lines


def deliver() -> None:
    """See to it that what was printed has arrived, wherever it goes; raises OSError."""
    try:
        print(end="", flush=True)
    except OSError:
        _discard(sys.stdout)
        raise


def report_error(error: BatchgenError, as_json: bool) -> None:
    """Its message on stderr; as JSON also on stdout, with what was found all the same."""
    if as_json:
        # In one line: some commands print lines.
        _print(json.dumps({**error.result, "error": error.to_json()}), sys.stdout)
    # A message may quote names and rows of others.
    message = printable_lines(str(error))
    _print(message if isinstance(error, JobFileError) else f"batchgen: {message}", sys.stderr)


def report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For `sys.excepthook`: any error but ours is a bug. The interpreter ends with code 1; this adds what to do."""
    traceback.print_exception(kind, error, trace)
    print(
        f"batchgen {__version__}: this is a bug. Please report it with the lines above and the job file; "
        "rows that were committed are safe.",
        file=sys.stderr,
    )


def _print(text: str, stream: TextIO) -> None:
    """Where the stream takes it; the exit code says the most important thing."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Drop what a stream cannot take: the interpreter would try again at its end, and exit with a code of its own."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())
