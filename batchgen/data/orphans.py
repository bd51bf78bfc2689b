"""Files that batchgen did not expect are moved out of the way, never deleted."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from batchgen.data.files import OutputFiles
from batchgen.data.layout import OutputPaths


def set_aside(files: OutputFiles, paths: OutputPaths, path: Path, attempt: str) -> Path:
    """Move a file to orphans/ under a name that is free, durably; returns where it is now."""
    taken = set(files.list_directory(paths.orphans))
    names = (f"{path.name}.{attempt}" + (f".{number}" if number else "") for number in count())
    target = paths.orphans / next(name for name in names if name not in taken)
    files.rename(path, target)
    files.sync_directory(paths.orphans)
    files.sync_directory(path.parent)
    return target
