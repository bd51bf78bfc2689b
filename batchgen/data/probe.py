"""Whether the output's file system keeps what the ledger builds on, found before the first row is generated."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from batchgen.data.files import OutputFiles
from batchgen.errors import OutputUnavailable


def probe_file_system(files: OutputFiles, first: Path) -> None:
    """Try exclusive creation, hard links and syncing with small files beside `first`, an unused name.

    Raises OutputUnavailable with what is missing.
    """
    second = first.with_name(first.name + "-link")
    try:
        files.write_new(first, b"probe")
        try:
            files.write_new(first, b"again")
        except FileExistsError:
            pass
        else:
            raise _refusal(first, "creates a file a second time although it must not exist")
        _probe_links(files, first, second)
        files.sync_directory(first.parent)
    finally:
        for path in (second, first):
            with suppress(OutputUnavailable):
                files.unlink(path)


def _probe_links(files: OutputFiles, first: Path, second: Path) -> None:
    try:
        files.link(first, second)
    except OutputUnavailable as error:
        raise _refusal(first, f"has no hard links ({error.__cause__})") from error
    try:
        files.link(first, second)
    except FileExistsError:
        return
    raise _refusal(first, "lets a hard link overwrite a file")


def _refusal(path: Path, what: str) -> OutputUnavailable:
    return OutputUnavailable(
        f"{path.parent}: this file system {what}, so finished shards could not be published safely; "
        f"choose an output.path on another one"
    )
