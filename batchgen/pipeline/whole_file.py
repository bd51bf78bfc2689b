"""Files beside an output that stand under their names only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from batchgen.errors import OutputUnavailable


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write; it is synced and takes its name at the end, and leaves nothing where that fails.

    Raises OutputUnavailable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputUnavailable(f"{path}: cannot be written: {error.strerror}; choose another file") from error
    finally:
        temporary.unlink(missing_ok=True)
